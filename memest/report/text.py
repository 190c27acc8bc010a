"""Reports of plans and scripts, advice, sweeps, and the catalogue of GPUs, as text and CSV."""

from __future__ import annotations

import csv
import io
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from memest import units
from memest.estimator.hardware.gpus import Gpu, mig_profiles
from memest.models_meta.registry import ModelEntry
from memest.report import Ending, HeldRow, Outcome, Prediction, RunReport, SimulatedReport, Verdict
from memest.report.answer import BAD, COLOURS, DIM, answer, failures, paint, place_in_words, plain
from memest.report.times import Training, seconds, time_cells, time_notes, time_words
from memest.units import GIB, MIB, Unit, counted, format_bytes, gib, gib_or_mib, gib_that_add_up

if TYPE_CHECKING:
    from memest.estimator.search.advise import Advice, Option
    from memest.estimator.search.largest import Largest, TechniqueRow

MAX_ROWS = 12  # modules and lines in the text; JSON has all
MAX_GUESSES = 12
COLUMNS = ("params", "grads", "optimizer", "activations")  # kinds with a column of modules
_ENDINGS = {
    Ending.FINISHED: "ran to its end",
    Ending.STOPPED: "stopped after the requested steps",
    Ending.OOM: "ran out of memory",
    Ending.CRASHED: "ended with an error of its own",
    Ending.UNSUPPORTED: "stopped at a call that cannot be simulated",
    Ending.INTERRUPTED: "was interrupted",
    Ending.RUNNING: "is running",
}
_HINT_BY_ERRORS = {
    "ModuleNotFoundError: ": "`--python PATH` runs it in an environment that has the module",
    "(EOFError: EOF when|.*lost sys.stdin)": "it reads stdin: `echo ANSWER | memest run train.py`",
    r"(\S*\.)?(URLError|gaierror|ConnectionError|Connect(Error|Timeout)|LocalEntryNotFoundError)\b"
    r"|OSError: .* couldn't connect|\S*CalledProcessError: Command '(\[')?(curl|wget|git)\b": (
        "a download failed: give the script a local file; `memest checkpoint` writes a dummy model"
    ),
}
_COMMAND = re.compile(r"^\s*(more:|check|train)\s|`memest ")
_NOUN_BY_KEY = {"batch_size": "batch size", "seq_len": "sequence length"}


def render_text(
    report: SimulatedReport, *, change: Option | None = None, training: Training | None = None,
    colour: bool = False, verbose: bool = False,
) -> str:  # fmt: skip
    """Return the report as text: answer, contents of the peak, verdicts, times, assumptions.
    `change` is the cheapest change with which a plan fits, or None if unknown. `training` adds
    hours and price of a whole training. `colour` adds terminal colours, and `verbose` all
    assumptions."""
    levels = level_rows(report) if isinstance(report, RunReport) else phase_rows(report)
    sections = [
        [paint(f"warning: {line}", BAD) for line in report.warnings],
        answer(report, change=change),
        heading(report),
        _term_lines(report),
        _total_lines(report),
        table(rank_rows(report), left=1, last_left=True) if report.ranks else [],
        table(module_rows(report, MAX_ROWS), left=1) if report.modules else [],
        _script_lines(report),
        table(levels, left=1) if len(levels) > 1 or not report.is_script else [],
        _closed_form_lines(report),
        verdict_table(report.verdicts),
        _time_lines(report, training),
        guesses_of(report),
        [paint(line, DIM) for line in _assumed(report, verbose=verbose)],
    ]
    text = "\n\n".join("\n".join(lines) for lines in sections if lines)
    return text if colour else plain(text)


def _time_lines(report: SimulatedReport, training: Training | None) -> list[str]:
    """Return lines on the estimated times of a step, and of `training` if given; [] if unknown."""
    if not report.times:
        return []
    rows = table(time_cells(report, training), left=1)
    suffix = f"; hours of {training.num_steps:,} steps" if training else ""
    return [f"estimated time{suffix}", *rows, *time_notes(report)]


def render_suite(predictions: Sequence[Prediction]) -> str:
    """Return a table as text, a line per prediction: its peaks, and its verdict on each GPU."""
    gpus = list(dict.fromkeys(name for p in predictions for name in p.verdicts))
    header = ["experiment", "allocated", "reserved", "process", *gpus]
    rows = [header]
    for p in predictions:
        verdicts = (p.verdicts[g].word if g in p.verdicts else "" for g in gpus)
        rows.append([p.name, *map(gib_or_mib, p.levels.values()), *verdicts])
    return "\n".join(table(rows, left=1))


def render_models(entries: Iterable[ModelEntry]) -> str:
    """Return a table of the bundled models as text."""
    rows = [["model", "family", "modality", "parameters", "Hugging Face id"]]
    rows += [
        [e.name, e.family, e.modality, units.format_count(e.num_params), e.hub_id] for e in entries
    ]
    return "\n".join(table(rows, left=3, last_left=True))


def heading(report: SimulatedReport) -> list[str]:
    """Return lines on a plan's settings and model, or on a script's GPU, ending and error."""
    if isinstance(report, Prediction):
        return _heading_of_plan(report)
    steps = counted(report.num_steps, "optimizer step")
    so_far = " so far" if report.is_cut_short else ""
    verdict = f"{report.verdicts[report.gpu].word}{so_far}"
    lines = [f"{report.name}", f"{_ENDINGS[report.ending]}; {steps} on {report.gpu}: {verdict}"]
    if report.allocator:
        lines.append(f"allocator: {report.allocator}")
    if report.error:
        lines.append(report.error)
        lines += [f"hint: {hint}" for hint in error_hint(report.error)]
    return lines


def error_hint(text: str) -> list[str]:
    """Return [advice] on the error in `text`, a message or traceback; [] if memest has none."""
    for errors, hint in _HINT_BY_ERRORS.items():
        if re.search(f"^({errors})", text, re.M):
            return [hint]
    return []


def _heading_of_plan(prediction: Prediction) -> list[str]:
    plan, model = prediction.plan, prediction.model
    facts = [
        prediction.name,
        plan["precision"],
        plan["optim"] + (f" momentum {plan['momentum']}" if plan["momentum"] else ""),
        f"batch {plan['batch_size']}",
    ]
    if plan["accumulate_grad_batches"] > 1:
        facts.append(f"accumulation {plan['accumulate_grad_batches']}")
    facts.append(tokens_of(plan))
    if plan["strategy"] != "auto" or plan["devices"] > 1:
        name = "ddp" if plan["strategy"] == "auto" else plan["strategy"]
        sharding = f" {plan['sharding_strategy']}" if name.startswith("fsdp") else ""
        facts.append(f"{counted(plan['devices'], 'GPU')}, {name}{sharding}")
    if plan["act_ckpt"]:
        facts.append("activation checkpointing")
    if plan["use_qlora"] or plan["use_lora"]:
        facts.append(f"{'QLoRA' if plan['use_qlora'] else 'LoRA'} rank {plan['lora_r']}")
    if plan["use_qlora"] and plan["kbit_ckpt"] is not False and not plan["act_ckpt"]:
        facts.append("activation checkpointing by peft")
    lines = ["  ".join(facts)]
    if prediction.name != plan["model_name"]:
        lines.append(f"model {plan['model_name']}")
    counts = map(units.format_count, (model["num_params"], model["num_trainable_params"]))
    lines.append("{}: {} parameters, {} trained".format(model["class"], *counts))
    return lines


def term_cells(report: SimulatedReport) -> list[list[str]]:
    """Return a row of texts (kind of memory, size, share, note) per kind of memory at the peak.
    Sizes are in the unit `unit_in(report)`. Sizes and shares are rounded so that they add up."""
    terms: Sequence[Any] = report.terms
    sizes = [term.num_bytes for term in terms]
    shares = units.shares_that_add_up(sizes, report.peak_allocated_bytes)
    figures = zip(terms, unit_in(report).adding_up(sizes), shares, strict=True)
    return [[term.kind, size, share, term.note] for term, size, share in figures]


def unit_in(report: SimulatedReport) -> Unit:
    """Return the unit of all sizes in the report's tables: GiB, or MiB for a peak below 0.1 GiB."""
    return units.unit_of(report.peak_reserved_bytes)


def _term_lines(report: SimulatedReport) -> list[str]:
    unit = unit_in(report)
    note = "" if report.is_script else "arithmetic"
    rows = [["held at the peak", "", "share", note]]
    rows += [[name, f"{size} {unit.name}", *rest] for name, size, *rest in term_cells(report)]
    peak = f"{unit.of(report.peak_allocated_bytes)} {unit.name}"
    rows.append(["peak allocated", peak, "100.0 %", where(report)])
    return table(rows, left=1, last_left=True)


def where(report: SimulatedReport) -> str:
    """Return the place of the peak as text: step, phase, module, line of the script."""
    peak = report.peak
    return ", ".join(filter(None, (f"step {peak.step + 1}", peak.phase, *peak.places)))


def _total_lines(report: SimulatedReport) -> list[str]:
    slack = report.peak_reserved_bytes - report.peak_allocated_bytes
    context = report.process_bytes - report.peak_reserved_bytes
    overhead = "CUDA context and NCCL" if report.is_distributed else "CUDA context"
    notes = (
        "torch.cuda.max_memory_allocated",
        f"including {format_bytes(slack)} cached",
        f"nvidia-smi; {overhead} {format_bytes(context)}",
    )
    cells = []
    for (name, size), note in zip(report.levels.items(), notes, strict=True):
        bounds = report.intervals.get(name)
        if bounds is not None and bounds.low_bytes < bounds.high_bytes:
            note += f"; on a rank between {gib(bounds.low_bytes)} and {gib(bounds.high_bytes)}"
        cells.append([name, gib_or_mib(size), note])
    if report.host_bytes:
        cells.append(["host", gib_or_mib(report.host_bytes), _host_note(report)])
        host_sizes = gib_that_add_up([t.num_bytes for t in report.host_terms])
        cells += [
            ["", f"{size} GiB", f"{t.kind}: {t.arithmetic}, {t.why}"]
            for size, t in zip(host_sizes, report.host_terms, strict=True)
        ]
    return [f"peak on {report.gpu}", *table(cells, left=1, last_left=True)]


def tokens_of(plan: Mapping[str, Any]) -> str:
    """Return text on the tokens per sample, from `plan`, the settings of a plan by key.

    >>> tokens_of({"seq_len": 512}), tokens_of({"seq_len": None, "lengths": [96, 512]})
    ('512 tokens', '2 lengths from 96 to 512 tokens')
    """
    lengths = plan.get("lengths")
    if not lengths:
        return f"{plan['seq_len']} tokens"
    return f"{len(lengths)} lengths from {min(lengths)} to {max(lengths)} tokens"


def _host_note(report: SimulatedReport) -> str:
    if report.is_script:
        return "host memory of weights and other large CPU tensors"
    verdict = report.host_verdict
    note = "of all GPUs of the node" if report.host_terms else "paged optimizer state"
    if verdict is None:
        return note
    outcome = "OOM" if verdict.verdict is Outcome.OOM else "fits"
    margin = f"{verdict.margin_bytes / GIB:+.2f} GiB"
    return f"{note}; {gib_or_mib(verdict.limit_bytes)} there: {outcome}, {margin}"


def phase_rows(prediction: Prediction) -> list[list[str]]:
    """Return a header and a row per phase of the first two steps: GiB by kind of memory."""
    kinds_of_memory = ("params", "grads", "optimizer", "activations, rest")
    rows = [["GiB by phase", *kinds_of_memory, "all", "peak", "reserved"]]
    last_micro_batch = prediction.plan["accumulate_grad_batches"] - 1
    for row in prediction.phases:
        if row.step <= 1 and row.micro_batch in (0, last_micro_batch):
            step = f"{row.step + 1}"
            if last_micro_batch > 0:
                step += f".{row.micro_batch + 1}"
            levels = (row.allocated_bytes, row.peak_allocated_bytes, row.reserved_bytes)
            kinds = gib_that_add_up(list(row.kinds.values()))
            phase = row.phase.replace("_", " ").replace("optimizer ", "")
            rows.append([f"{step} {phase}", *kinds, *map(gib, levels)])
    return rows


def _closed_form_lines(report: SimulatedReport) -> list[str]:
    """Return lines that compare the MiB which a layer saves for its backward with a textbook's
    formula. The first row has the MiB by the formula. Each row in the middle has one difference
    between simulation and formula, with its reason. The last row has the simulated MiB, a mean over
    layers: the sum of the rows before. `report.closed_form` has the formula; if None, return []."""
    form = report.closed_form
    if form is None:
        return []
    letters = ", ".join(f"{k} = {v}" for k, v in form.letters.items())
    sizes = [form.textbook_bytes, *(t.num_bytes for t in form.differences)]
    textbook, *deltas = units.rounded_to_sum([size / MIB for size in sizes], 2)
    rows = [["textbook", f"{textbook:.2f}", f"{form.formula}, {letters}"]]
    rows += [
        [t.kind, f"{size:+.2f}", f"{t.arithmetic}: {t.why}"]
        for size, t in zip(deltas, form.differences, strict=True)
    ]
    rows.append(
        ["simulated", f"{form.traced_bytes / MIB:.2f}", f"mean of {form.num_layers} layers"]
    )
    title = "MiB that a layer saves for its backward; textbook: Korthikanti et al. 2022, 16 bit"
    return [title, *table(rows, left=1, last_left=True)]


def rank_rows(report: SimulatedReport) -> list[list[str]]:
    """Return a header and a row per simulated rank: number, peaks, steps and how it ended."""
    unit = unit_in(report)
    rows = [[f"by rank, {unit.name}", "allocated", "reserved", "process", "steps", ""]]
    for row in report.ranks:
        cells = []
        for name, size in row.levels.items():
            bounds = row.intervals.get(name)
            if bounds is not None and bounds.low_bytes < bounds.high_bytes:
                cells.append(f"{unit.of(bounds.low_bytes)} to {unit.of(bounds.high_bytes)}")
            else:
                cells.append(unit.of(size))
        rows.append([f"rank {row.rank}", *cells, str(row.num_steps), _ENDINGS[row.ending]])
    return rows


def module_rows(report: SimulatedReport, limit: int | None = None) -> list[list[str]]:
    """Return a header and a row per module: memory at the peak by kind. Modules after the first
    `limit` share a row; None is no limit."""
    unit = unit_in(report)
    shown = list(report.modules[:limit])
    rows = [[f"by module, {unit.name} at the peak", *COLUMNS, "other", "all"]]
    rows += [_module_cells(row.name, [row], unit) for row in shown]
    hidden = report.modules[len(shown) :]
    if hidden:
        rows.append(_module_cells(counted(len(hidden), "other"), hidden, unit))
    return rows


def _module_cells(name: str, rows: Sequence[HeldRow], unit: Unit) -> list[str]:
    sizes = [sum(row.kinds.get(kind, 0) for row in rows) for kind in COLUMNS]
    total = sum(row.num_bytes for row in rows)
    return [name, *unit.adding_up([*sizes, total - sum(sizes)]), unit.of(total)]


def _script_lines(report: SimulatedReport) -> list[str]:
    rows, unit = report.lines, unit_in(report)
    if not rows:
        return []
    threshold = unit.num_bytes // 2000  # smaller ones would be printed as 0.000
    num_shown = min(MAX_ROWS, sum(row.num_bytes >= threshold for row in rows) or 1)
    shown, hidden = rows[:num_shown], rows[num_shown:]
    sizes = [row.num_bytes for row in shown]
    names = [(row.name, row.source) for row in shown]
    if hidden:
        sizes.append(sum(row.num_bytes for row in hidden))
        names.append((counted(len(hidden), "other"), ""))
    figures = zip(unit.adding_up(sizes), units.shares_that_add_up(sizes, sum(sizes)), strict=True)
    cells = [["by line of the script", "", "share", ""]]
    for (name, source), (size, share) in zip(names, figures, strict=True):
        cells.append([name, f"{size} {unit.name}", share, source])
    return table(cells, left=1, last_left=True)


def level_rows(report: RunReport) -> list[list[str]]:
    """Return a header, then rows by phase and rows by step: peaks allocated and reserved."""
    unit = unit_in(report)
    rows = [[unit.name, "allocated after", "peak allocated", "peak reserved"]]
    for phase in report.phases:
        sizes = (phase.peak_allocated_bytes, phase.peak_reserved_bytes)
        rows.append([phase.name, "", *map(unit.of, sizes)])
    for step in report.steps:
        levels = (step.allocated_bytes, step.peak_allocated_bytes, step.peak_reserved_bytes)
        rows.append([f"step {step.step + 1}", *map(unit.of, levels)])
    return rows


def guesses_of(report: SimulatedReport, limit: int | None = MAX_GUESSES) -> list[str]:
    """Return a line for each guess: a value, such as a loss, that is unknown in a simulation. The
    line has the script line that read the value, what it is, and the number of reads. Guesses after
    the first `limit` share one line; None is no limit."""
    lines = [
        f"guessed: {guess.line} reads {guess.what}, {times(guess.count)}"
        for guess in report.guesses[:limit]
    ]
    if hidden := report.guesses[len(lines) :]:
        count = times(sum(guess.count for guess in hidden))
        lines.append(f"guessed: {len(hidden)} other reads, {count}")
    return lines


def times(count: int) -> str:
    """Return `count` in words, such as `once` or `3 times`."""
    return "once" if count == 1 else f"{count} times"


def verdict_table(verdicts: Mapping[str, Verdict]) -> list[str]:
    """Return a header and a line per GPU in `verdicts`: memory usable, needed and used; verdict."""
    rows = [["gpu", "usable", "needs", "uses", "verdict", "margin", ""]]
    for name, verdict in verdicts.items():
        sizes = map(gib_or_mib, (verdict.limit_bytes, verdict.needs_bytes, verdict.reserved_bytes))
        place = f"at {place_in_words(verdict.at)}" if verdict.at else ""
        rows.append([name, *sizes, verdict.word, f"{verdict.margin_bytes / GIB:+.2f} GiB", place])
    header, *lines = table(rows, left=1, last_left=True)
    words = [verdict.word for verdict in verdicts.values()]
    painted = [
        line.replace(f" {word} ", f" {paint(word, COLOURS[word])} ", 1)
        for line, word in zip(lines, words, strict=True)
    ]
    return [header, *painted]


def _assumed(report: SimulatedReport, *, verbose: bool) -> list[str]:
    """Return the last lines of a report: notes, assumptions, and operators without a workspace
    model. Failed operators, library versions and the elapsed time follow. Unless `verbose`, only
    the first assumption is shown, with the number of the other ones."""
    lines = [f"note: {line}" for line in report.notes]
    lines += [f"assumed: {line}" for line in report.assumptions[: None if verbose else 1]]
    if not verbose and len(report.assumptions) > 1:
        lines[-1] += f"; {len(report.assumptions) - 1} more with --verbose"
    lines += covered(report.coverage)
    if report.peak.op:
        lines.append(f"peak allocated in {report.peak.op}")
    lines += failures(report.verdicts)
    versions = ", ".join(f"{k} {v}" for k, v in report.versions.items())
    lines.append(f"versions: {versions}; {report.elapsed_s:.1f} s")
    return lines


def covered(coverage: Mapping[str, Any]) -> list[str]:
    """Return lines on the number of operator calls whose workspace memest simulates (modelled
    calls). `coverage` is the field of a report: `num_ops` calls, of which `num_modelled` are
    modelled. Each operator in `unmodelled` has a line with its number of calls."""
    num_modelled, num_calls = coverage["num_modelled"], coverage["num_ops"]
    return [
        f"coverage: {num_modelled} of {num_calls} operator calls modelled",
        *(
            f"not modelled: workspace of {op} ({counted(count, 'call')})"
            for op, count in coverage["unmodelled"].items()
        ),
    ]


def table(rows: Sequence[Sequence[str]], *, left: int, last_left: bool = False) -> list[str]:
    """Return `rows` as lines of aligned columns. The first `left` columns align left, and so does
    the last one with `last_left`; all others align right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left_columns = set(range(left))
    if last_left:
        left_columns.add(len(widths) - 1)
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column in left_columns else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def fold(text: str, width: int) -> str:
    """Return `text` with each line folded between words to at most `width` characters. The folded
    part begins below the last column that starts in the left 60 % of `width`, else after 2 spaces.
    Two or more spaces separate columns. A line with a command, such as "more: memest advise", stays
    whole."""
    return "\n".join(_folded_line(line, width) for line in text.split("\n"))


def _folded_line(line: str, width: int) -> str:
    bare = plain(line)
    if len(bare) <= width or _COMMAND.search(bare):
        return line
    gaps = [match.end() for match in re.finditer(r"(?<=\S)  +", bare)]
    indent = next((end for end in reversed(gaps) if end <= 0.6 * width), 2)
    return textwrap.fill(
        line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )


def evidence(gpu: Gpu) -> str:
    """Return a word for the origin of a GPU's figures: "measured" (by memest) or "sources"
    (public). It is "sources, context of the H200" if the CUDA context is taken to be that of the
    H200."""
    if "not measured on this GPU" in gpu.source:
        return "sources, context of the H200"
    is_own = "`memest validate`" in gpu.source or "validation/" in gpu.source
    return "measured" if is_own else "sources"


def render_gpus(gpus: Iterable[Gpu], *, verbose: bool) -> str:
    """Return the catalogue of GPUs as text; `verbose` adds the source of each figure."""
    gpus = list(gpus)
    rows = [["gpu", "memory", "context", "usable", "compute", "SMs", "figures", "name"]]
    for g in gpus:
        sizes = gib_or_mib(g.memory_bytes), format_bytes(g.context_bytes), gib_or_mib(g.limit_bytes)
        capability = ".".join(map(str, g.capability))
        rows.append([g.name, *sizes, capability, str(g.num_sms), evidence(g), g.label])
    lines = table(rows, left=1, last_left=True)
    lines += [
        "",
        "measured: with memest on the GPU; sources: from public threads and data sheets, which"
        " --verbose names",
        "",
        "MIG: the name of an instance is that of the GPU with its profile, such as"
        " a100-80gb-mig-3g.40gb",
        *(f"  {name}: {', '.join(profiles)}" for name, profiles in mig_profiles().items()),
    ]
    if verbose:
        lines += ["", *(f"{g.name}: {g.source}" for g in gpus)]
    return "\n".join(lines)


def render_advice(advice: Advice) -> str:
    """Return the advice as text: verdict, then changes that fit, do not fit, and were not tried."""
    sections = [_advice_heading(advice)]
    if not advice.fits and not advice.options:
        sections.append(_smallest_found(advice))
    sections += [_option_lines(number, option) for number, option in enumerate(advice.options, 1)]
    if advice.not_enough:
        sections.append(_not_enough_table(advice.not_enough))
    last = [f"refused: {change.title}: {change.reason}" for change in advice.refused]
    if not advice.fits:
        last += [f"not tried: {title}" for title in advice.not_tried]
    last.append(counted(advice.num_predictions, "prediction"))
    if not advice.is_complete:
        last[-1] += ", all that were allowed: there may be more (`--max-predictions`)"
    sections.append(last)
    return "\n\n".join("\n".join(lines) for lines in sections)


def _not_enough_table(options: Sequence[Option]) -> list[str]:
    rows = [["not enough alone", "needs", "margin", "a step"]]
    for option in options:
        sizes = (option.verdict.needs_bytes, option.verdict.margin_bytes)
        time = seconds(option.time.seconds) if option.time else ""
        rows.append([option.title, *map(gib_or_mib, sizes), time])
    return table(rows, left=1)


def _advice_heading(advice: Advice) -> list[str]:
    current = advice.current
    plan = current.plan
    facts = [plan.label, plan.precision, plan.optim, f"batch {plan.batch_size}"]
    if plan.accumulate_grad_batches > 1:
        facts.append(f"accumulation {plan.accumulate_grad_batches}")
    if plan.is_distributed:
        facts.append(f"{plan.strategy} on {plan.world_size} GPUs")
    facts.append(f"on {advice.gpu}")
    verdict = current.verdict
    figures = f"needs {gib_or_mib(verdict.needs_bytes)} of {gib_or_mib(verdict.limit_bytes)} usable"
    if advice.fits:
        return ["  ".join(facts), f"fits as it is: {figures}, {_to_spare(verdict)}"]
    lines = [f"does not fit: {figures}, {gib_or_mib(-verdict.margin_bytes)} too much"]
    if current.time:
        lines.append(f"with enough memory: about {time_words(current.time)}")
    return ["  ".join(facts), *lines]


def _to_spare(verdict: Verdict) -> str:
    tight = "; tight: a driver may leave less" if verdict.is_tight else ""
    return f"{gib_or_mib(verdict.margin_bytes)} to spare{tight}"


def _smallest_found(advice: Advice) -> list[str]:
    smallest = advice.smallest
    searched = "" if advice.is_complete else " among what was tried"
    return [
        f"nothing on this GPU{searched}: the smallest found needs"
        f" {gib_or_mib(smallest.verdict.needs_bytes)},"
        f" {gib_or_mib(-smallest.verdict.margin_bytes)} too much",
        f"   {smallest.title}",
        f"   check  {smallest.command}",
    ]


def _option_lines(number: int, option: Option) -> list[str]:
    rows = [("needs", f"{gib_or_mib(option.verdict.needs_bytes)}, {_to_spare(option.verdict)}")]
    if option.time:
        rows.append(("time", f"about {time_words(option.time)}"))
    rows.append(("kind", option.cost.words))
    rows += [("cost", change.price) for change in option.changes]
    if option.host_bytes:
        rows.append(("host", f"{gib_or_mib(option.host_bytes)} of paged optimizer state"))
    rows.append(("check", option.command))
    rows += [("train", line) for line in option.training_lines]
    return [f"{number}. {option.title}", *(f"   {word:<5}  {text}" for word, text in rows)]


def render_largest(rows: Sequence[Largest]) -> str:
    """Return a table as text: the largest batch size or sequence length per GPU, and its memory."""
    plan = rows[0].plan
    noun = _NOUN_BY_KEY[rows[0].key]
    lines = [f"{plan.label}: the largest {noun} that fits"]
    cells = [["gpu", "usable", noun, "needs", "uses", "margin", "the next needs"]]
    cells += [[row.gpu, gib_or_mib(row.verdict.limit_bytes), *_largest_cells(row)] for row in rows]
    lines += ["", *table(cells, left=1), ""]
    for row in rows:
        if row.value is None:
            size = getattr(row.plan, row.key)
            lines.append(f"{row.gpu}: {noun} {size} is out of memory at {place_in_words(row.at)}")
        elif row.ceiling:
            lines.append(f"{row.gpu}: memory is left; {row.ceiling}")
        elif row.verdict.is_tight:
            spread = gib_or_mib(row.verdict.spread_bytes)
            lines.append(
                f"{row.gpu}: {noun} {row.value} is tight: a driver may leave {spread} less"
            )
    num_traces = sum(row.num_traces for row in rows)
    elapsed_s = sum(row.elapsed_s for row in rows)
    lines.append(f"found by replay under each GPU's limit, {num_traces} traces, {elapsed_s:.1f} s")
    return "\n".join(lines)


def render_techniques(rows: Sequence[TechniqueRow], key: str) -> str:
    """Return a table of the largest `key` (`batch_size`, `seq_len`) by technique (LoRA) and GPU."""
    gpus = list(dict.fromkeys(row.gpu for row in rows))
    names = list(dict.fromkeys(row.technique for row in rows))
    by_cell = {(row.technique, row.gpu): row for row in rows}
    header = [f"largest {_NOUN_BY_KEY[key]}"]
    for gpu in gpus:
        header += [gpu, "margin"]
    cells = [header]
    for name in names:
        line = [name]
        for gpu in gpus:
            best = by_cell[name, gpu].largest
            if best is None:
                line += ["n/a", ""]
                continue
            value = "OOM" if best.value is None else f"{best.value}{'+' if best.ceiling else ''}"
            line += [value, f"{best.verdict.margin_bytes / GIB:+.2f} GiB"]
        cells.append(line)
    lines = table(cells, left=1)
    errors = {row.technique: row.error for row in rows if row.error}
    lines += [f"{name}: {error}" for name, error in errors.items()]
    return "\n".join(lines)


def _largest_cells(row: Largest) -> list[str]:
    verdict = row.verdict
    next_need = "-" if row.next_needs_bytes is None else gib_or_mib(row.next_needs_bytes)
    figures = [f"{verdict.margin_bytes / GIB:+.2f} GiB", next_need]
    if row.value is None:
        return ["none", "-", "-", *figures]
    needs, uses = gib_or_mib(verdict.needs_bytes), gib_or_mib(verdict.reserved_bytes)
    return [str(row.value), needs, uses, *figures]


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return `rows` as CSV text: a header, then a line per row; a list is joined by spaces."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(
            {k: " ".join(v) if isinstance(v, tuple | list) else v for k, v in row.items()}
        )
    return text.getvalue().rstrip("\n")
