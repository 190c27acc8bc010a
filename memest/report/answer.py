"""Two-line answer: whether the run fits and with what margin, and what fills the peak."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from memest.errors import OOM_EXIT_CODE, MemestError
from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.search.commands import predict_command
from memest.estimator.versions import BUILT_FOR, KERNELS, is_newer, is_nightly
from memest.plan import TrainingPlan
from memest.plan.reading import read_table
from memest.report import OPERATOR, Outcome, SimulatedReport, Verdict
from memest.units import GIB, format_size, gib_or_mib

if TYPE_CHECKING:
    from memest.estimator.search.advise import Option

_PHASE_WORDS = {
    "setup": "while the model is built", "forward": "in the forward",
    "backward": "in the backward", "optimizer": "while the optimizer steps",
    "evaluation": "in an evaluation", "generation": "while text is generated",
}  # fmt: skip
_STEP = re.compile(r"\bstep (\d+)")
_NAMED_PERCENT = 4.5  # smallest named share of the peak; smaller ones are part of the rest
GOOD, TIGHT, BAD, OPEN, DIM, BOLD = "32;1", "35;1", "31;1", "33;1", "2", "1"
"""Colours of a terminal (ECMA-48, select graphic rendition)."""

COLOURS = {"fits": GOOD, "tight": TIGHT, "may": OPEN, "OOM": BAD}  # colours by `Verdict.word`
SCHEDULERS = ("sky", "slurm", "dstack")
NAMES: Mapping[str, tuple[str, str]] = read_table(__file__, "schedulers.json")
"""GPU of the catalogue -> name for SkyPilot (`sky show-gpus -a`), name and memory for dstack
(https://dstack.ai/docs/concepts/tasks, resources). GPUs without a name in both are left out.
"""


def paint(text: str, code: str) -> str:
    """Return `text` between the escape codes of the terminal's colour `code`, such as `GOOD`."""
    return f"\x1b[{code}m{text}\x1b[0m"


def plain(text: str) -> str:
    """Return `text` without the colours of `paint`.

    >>> plain(paint("fits", GOOD))
    'fits'
    """
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def verdict_line(verdict: Verdict, gpu: str, *, so_far: bool = False) -> str:
    """Return a coloured line on whether a run fits the GPU named `gpu`: needed memory and margin.
    `so_far` is True for a script that has not ended: the line then has "fits so far"."""
    needs, usable = gib_or_mib(verdict.needs_bytes), gib_or_mib(verdict.limit_bytes)
    colour = COLOURS[verdict.word]
    if verdict.verdict is Outcome.OOM:
        head = paint("does not fit", colour)
        lacking = gib_or_mib(-verdict.margin_bytes)
        return f"{head} {gpu}: needs {needs}, {lacking} more than the {usable} usable"
    if verdict.verdict is Outcome.MAY:
        head = paint("may or may not fit", colour)
        return (
            f"{head} {gpu}: needs up to {needs} of {usable} usable, and fits where blocks come"
            " back in time"
        )
    word = "fits so far on" if so_far else "fits"
    tight = ", but tight" if verdict.is_tight else ""
    line = (
        f"{paint(f'{word} {gpu}{tight}', colour)}: needs {needs} of {usable} usable,"
        f" {gib_or_mib(verdict.margin_bytes)} to spare"
    )
    return line + (f"; drivers of it differ by {gib_or_mib(verdict.spread_bytes)}" if tight else "")


def summary_line(
    report: SimulatedReport, gpu: str = "", *, measured_bytes: int | None = None
) -> str:
    """Return one line: memory, the verdict on `gpu`, and the place of the peak or failure. If `gpu`
    is empty, it is the report's GPU. If the run fits, the memory is the peak reserved. Otherwise it
    is the need: the least limit under which the run fits. With `measured_bytes`, the peak reserved
    of a real run, the line has both the predicted and the measured memory."""
    gpu = gpu or report.gpu
    verdict = report.verdicts[gpu]
    outcome = verdict.verdict
    size = format_size(verdict.reserved_bytes if outcome is Outcome.FITS else verdict.needs_bytes)
    if measured_bytes is not None:
        size = f"predicted {size}, measured {format_size(measured_bytes)}"
    elif outcome is Outcome.MAY:
        size = f"up to {size}"
    elif outcome is Outcome.OOM and report.is_script:  # later requests of a script are unknown
        size = f"at least {size}"
    usable = f"{verdict.limit_bytes / GIB:.1f} GiB"
    so_far = " so far" if report.is_cut_short else ""
    head = f"memest: {size} of {usable} ({verdict.word}{so_far}) on {gpu}"
    return (
        f"{head}, {'out of memory' if verdict.at else 'peak'} in {_when_and_where(report, verdict)}"
    )


def _when_and_where(report: SimulatedReport, verdict: Verdict) -> str:
    """Return as text step, phase and place of the failed request, or of the peak if none failed."""
    peak = report.peak
    peak_place = f"step {peak.step + 1}, {peak.phase}, {peak.places[-1]}"
    place = place_in_words(verdict.at) if verdict.at else peak_place
    step, *remaining = [part for part in place.split(", ") if part]
    phase, *places = remaining or [""]
    when = "setup" if phase == "setup" else f"{step} {phase}".strip()
    return f"{when} at {places[-1].removeprefix('backward of ')}" if places else when


def moment(step: int, phase: str) -> str:
    """Return words for a time of a run: `step`, counted from 0, and `phase`, empty if unknown.

    >>> moment(1, "optimizer"), moment(0, "setup")
    ('while the optimizer steps, in step 2', 'while the model is built')
    """
    if phase == "setup":
        return _PHASE_WORDS[phase]
    if not phase:
        return f"in step {step + 1}"
    words = _PHASE_WORDS.get(phase, f"in {phase}")
    joint = ", in" if phase == "optimizer" else " of"
    return f"{words}{joint} step {step + 1}"


def shares(kinds: Iterable[tuple[str, int]]) -> str:
    """Return text on the share of each kind of memory in `kinds`, pairs (name, bytes).

    >>> shares([("params", 32), ("grads", 32), ("batch", 4), ("optimizer", 32)])
    '32 % each for params, grads and optimizer, 4 % for the rest'
    """
    sizes: Counter[str] = Counter()
    for kind, num_bytes in kinds:
        sizes[kind] += num_bytes
    total_bytes = max(1, sum(sizes.values()))
    by_percent: dict[int, list[str]] = {}
    for kind, num_bytes in sizes.most_common():
        percent = 100 * num_bytes / total_bytes
        if percent >= _NAMED_PERCENT:
            by_percent.setdefault(round(percent), []).append(kind)
    parts = []
    for rounded, (*others, last) in by_percent.items():
        share = f"{rounded} % each for {', '.join(others)} and" if others else f"{rounded} % for"
        parts.append(f"{share} {last}")
    rest_percent = 100 - sum(rounded * len(names) for rounded, names in by_percent.items())
    if rest_percent > 0:
        parts.append(f"{rest_percent} % for the rest")
    return ", ".join(parts)


def answer(report: SimulatedReport, *, change: "Option | None" = None) -> list[str]:
    """Return coloured lines: the verdict on the report's GPU, and what fills the peak. If the
    report is of a plan that is out of memory, a line has `change`. `change` is the cheapest change
    with which the plan fits. If `change` is None, or the report is of a script, there is no such
    line. The result is [] if the report has no verdict on its GPU."""
    verdict, peak = report.verdicts.get(report.gpu), report.peak
    if verdict is None:
        return []
    is_oom = verdict.verdict is Outcome.OOM
    is_oom_of_plan = is_oom and not report.is_script
    kinds = [(term.kind, term.num_bytes) for term in report.terms]
    headline = verdict_line(verdict, report.gpu, so_far=report.is_cut_short)
    if is_oom and report.is_script:  # later requests of the script are unknown
        reserved, limit = gib_or_mib(verdict.reserved_bytes), gib_or_mib(verdict.limit_bytes)
        headline = (
            f"{paint('does not fit', BAD)} {report.gpu}: {reserved} of {limit} usable are reserved,"
            f" and the next request needs {gib_or_mib(-verdict.margin_bytes)} more than is left"
        )
    lead = "runs out" if is_oom_of_plan else "the peak is"
    lines = [headline, f"{lead} {moment(peak.step, peak.phase)}: {shares(kinds)}"]
    lines += [] if report.is_script else _other_gpus(report)
    if verdict.decides:
        lines.append(f"what decides: {verdict.decides}")
    if is_oom_of_plan and change is not None:
        outcome = change.verdict
        lines.append(
            f"would fit with {paint(change.title, BOLD)}: needs {gib_or_mib(outcome.needs_bytes)},"
            f" {gib_or_mib(outcome.margin_bytes)} to spare{', tight' if outcome.is_tight else ''}"
            f" ({change.cost.words})"
        )
    if is_oom_of_plan:
        lines.append(f"more: {advise_command(report)}")
    host = report.host_verdict
    if host is not None and host.verdict is Outcome.OOM:
        needs, host_limit = gib_or_mib(host.reserved_bytes), gib_or_mib(host.limit_bytes)
        lines.append(f"{paint('the host does not hold it', BAD)}: {needs} of {host_limit} there")
    return lines + kernels_line(report.versions)


def kernels_line(versions: Mapping[str, str]) -> list[str]:
    """Return [a line] if the simulated kernels are of another torch than the installed one, else
    []. `versions` is a report's dict of library versions, such as {"torch": "2.11.0"}. The torch
    release whose kernels are simulated has the key `KERNELS`."""
    torch, simulated = versions.get("torch", ""), versions.get(KERNELS, "")
    target = versions.get(BUILT_FOR, "")
    build = " (a nightly build)" if is_nightly(torch) else ""
    if target:
        build = f" (built for {target})"
    if not simulated or (torch.startswith(f"{simulated}.") and not build):
        return []
    kind = "CUDA kernels of torch" if target else "those of torch"
    line = f"kernels: {kind} {simulated} are simulated; torch {torch}{build} is installed"
    return [f"warning: {line}, which has no rules of its own" if is_newer(torch) else line]


def _other_gpus(report: SimulatedReport) -> list[str]:
    by_word: dict[str, list[str]] = {word: [] for word in COLOURS}
    for name, verdict in report.verdicts.items():
        if name != report.gpu:
            by_word[verdict.word].append(name)
    groups = [f"{word} {', '.join(names)}" for word, names in by_word.items() if names]
    return [f"other GPUs: {'; '.join(groups)}"] if groups else []


def advise_command(prediction: SimulatedReport) -> str:
    """Return the command `memest advise ...` for the plan of `prediction`, on the report's GPU."""
    values = {k: v for k, v in prediction.plan.items() if k not in ("padded", "name")}
    gpus = values.get("gpu") or ()
    if len(gpus) != 1 and values.get("gpu_memory") is None:  # advice is for one GPU
        values["gpu"] = [prediction.gpu]
    plan = TrainingPlan.from_dict(values)
    return predict_command(plan).replace("memest predict", "memest advise", 1)


def place_in_words(at: str) -> str:
    """Return `at`, the place of a failed request, with steps counted from 1 and no operator.

    >>> place_in_words("step 0, forward, encoder.layers.1, aten.addmm")
    'step 1, forward, encoder.layers.1'
    """
    text = _STEP.sub(lambda match: f"step {int(match[1]) + 1}", at)
    return ", ".join(part for part in text.split(", ") if not OPERATOR.match(part))


def operator_of(at: str) -> str:
    """Return the operator named in `at`, the place of a failed request; empty if none is named.

    >>> operator_of("step 0, forward, aten.addmm"), operator_of("host memory")
    ('aten.addmm', '')
    """
    return next((part for part in at.split(", ") if OPERATOR.match(part)), "")


def failures(verdicts: Mapping[str, Verdict]) -> list[str]:
    """Return a line per operator whose request fails, with the names of the GPUs on which it fails.
    `verdicts` has verdicts by GPU name. An example is "out of memory in aten.mm: l4, a10"."""
    gpus: dict[str, list[str]] = {}
    for name, verdict in verdicts.items():
        if operator := operator_of(verdict.at):
            gpus.setdefault(operator, []).append(name)
    return [f"out of memory in {op}: {', '.join(names)}" for op, names in gpus.items()]


class DoesNotFitError(MemestError):
    """Raised if the run fits no GPU of the report."""

    exit_code = OOM_EXIT_CODE


def resource_lines(
    report: SimulatedReport, scheduler: str, *, num_gpus: int = 1, num_nodes: int = 1
) -> str:
    """Return lines of a job file that request the smallest GPU of the report on which the run fits.

    `scheduler` is `sky`, `slurm` or `dstack`. Each of `num_nodes` nodes gets `num_gpus` GPUs. A GPU
    with a tight verdict, which another driver may turn into out of memory, does not count.

    Raises:
        DoesNotFitError: the run fits no GPU of the report.
    """
    candidates = [
        (verdict.limit_bytes, name)
        for name, verdict in report.verdicts.items()
        if verdict.verdict is Outcome.FITS and not verdict.is_tight and name in NAMES
    ]
    if not candidates:
        needs = max(verdict.needs_bytes for verdict in report.verdicts.values())
        raise DoesNotFitError(
            f"needs {gib_or_mib(needs)}, which fits none of {', '.join(report.verdicts)}",
            hint="`memest advise` finds changes with which a plan fits",
        )
    _, name = min(candidates)
    sky, dstack = NAMES[name]
    lines = [f"# {summary_line(report, name)}"]
    if scheduler == "slurm":
        gpu_type = find_gpu(name).label.lower().replace(" ", "_")
        lines += [
            "# the type is NVML's name; the cluster's gres.conf may have a shorter one",
            f"#SBATCH --nodes={num_nodes}",
            f"#SBATCH --gpus-per-node={gpu_type}:{num_gpus}",
        ]
    elif scheduler == "sky":
        lines += [f"num_nodes: {num_nodes}"] if num_nodes > 1 else []
        lines += ["resources:", f"  accelerators: {sky}:{num_gpus}"]
    else:
        lines += [f"nodes: {num_nodes}"] if num_nodes > 1 else []
        lines += ["resources:", f"  gpu: {dstack}:{num_gpus}"]
    return "\n".join(lines)
