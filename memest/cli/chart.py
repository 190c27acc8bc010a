"""`memest chart`: the charts on the command line, each with its data beside it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memest.cli.files import given_only, make_folder, read_plans, write_text
from memest.cli.group import main
from memest.cli.options import VALUES, completes, plan_options, suite_names
from memest.cli.progress import shown
from memest.cli.sweep import grid_options, grid_points
from memest.errors import PlanError
from memest.estimator.hardware.gpus import find_gpu
from memest.plan import TrainingPlan
from memest.plan.files import read_suite
from memest.units import TIB

if TYPE_CHECKING:
    from memest.estimator.search.sweep import Grid
    from memest.estimator.trace.recording import Timeline
    from memest.report import Prediction

CHART_GPU = "a100-80gb"
"""The card of a chart where none is named: that of the lab."""

JSON_FILES = "memest.cli.chart.json"
"""Key of the context: whether the files are printed as JSON."""

_CHART_OPTIONS = [
    click.option(
        "--out", type=click.Path(path_type=Path), default=Path("charts"), show_default=True,
        help="Folder for the pictures and their data; made if it is not there.",
    ),
    click.option(
        "--format", "formats", default="png", show_default=True, help="Of png, svg, pdf: png,svg."
    ),
    click.option("--dark", is_flag=True, help="For dark slides."),
    click.option("--title", default="", help="In place of the chart's own."),
    click.option(
        "--json", "as_json", is_flag=True, expose_value=False, help="The files as a JSON object.",
        callback=lambda ctx, param, value: ctx.meta.__setitem__(JSON_FILES, value),
    ),
]  # fmt: skip


def chart_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of every chart."""
    for option in reversed(_CHART_OPTIONS):
        command = option(command)
    return command


@main.group()
def chart() -> None:
    """Draw charts for slides; the data lies beside each picture."""


@chart.command()
@click.option(
    "--suite",
    default="lab-a100",
    show_default=True,
    help="lab-a100, lab-h100, lab-multi, or a file of plans.",
    shell_complete=completes(suite_names),
)
@click.option(
    "--gpu",
    multiple=True,
    help="Card to draw a line for; the first decides the bars. By default the suite's own.",
)
@click.option("--jobs", type=click.IntRange(1), help="Processes; by default one per core.")
@click.option("--resume", is_flag=True, help="Go on where it was interrupted.")
@chart_options
def lab(
    suite: str,
    gpu: tuple[str, ...],
    jobs: int | None,
    resume: bool,
    out: Path,
    formats: str,
    dark: bool,
    title: str,
) -> None:
    """The ladder of the lab: every experiment a bar, against the lines of the cards.

    \b
    memest chart lab
    memest chart lab --suite lab-h100 --format png,svg,pdf --dark
    memest chart lab --suite experiments.yaml --gpu rtx-4090 --gpu a100-80gb
    """
    from memest.plots import card_label
    from memest.validate.suite_files import find_suite

    wanted = parse_wanted(formats)
    path = find_suite(suite)
    cards = list(gpu) or _own_cards(path)
    limits = {card_label(name): find_gpu(name).limit_bytes for name in cards}
    plans = read_suite(path, {"gpu": cards})
    make_folder(out)
    from memest.cli.kept import predict_kept
    from memest.estimator.search.suite import apart
    from memest.plots import plot_ladder

    with shown():
        found = predict_kept(plans, out / path.stem, is_resumed=resume, jobs=jobs)
    predicted, failed = apart(plans, found)
    with shown("what the others would need", with_results=False):
        unlimited = _needs(predicted, jobs)
    for plan, error in failed:
        click.echo(f"not drawn: {plan.label}: {error}", err=True)
    if not predicted:
        raise PlanError(f"`{suite}` has no plan that can be drawn", hint="name another suite")
    reports = [report for _, report in predicted]
    figure = plot_ladder(reports, limits=limits, dark=dark, unlimited=unlimited, suite=path.stem)
    save_chart(figure, out / path.stem, wanted, title, [report.to_dict() for report in reports])


def _own_cards(path: Path) -> list[str]:
    """The cards that a suite's plans name, or the one that the lab's suite was run on."""
    named = dict.fromkeys(name for plan in read_suite(path, {}) for name in plan.gpu)
    return list(named) or ["h100-80gb" if "h100" in path.stem else CHART_GPU]


def _needs(
    predicted: Sequence[tuple[TrainingPlan, Prediction]], jobs: int | None
) -> dict[str, Prediction]:
    """The plans that do not fit, by name, on a card that holds them."""
    from memest.estimator.search.suite import apart, predict_each

    larger = [
        replace(plan, gpu=(), gpu_memory=TIB, memory_limit=None)
        for plan, report in predicted
        if report.verdict == "oom"
    ]
    if not larger:
        return {}
    found, _ = apart(larger, predict_each(larger, jobs=jobs))
    return {report.name: report for _, report in found}


def on_a_card(plan: TrainingPlan) -> TrainingPlan:
    """`plan` with the card of the chart, where it names none."""
    if plan.gpu or plan.gpu_memory is not None:
        return plan
    return replace(plan, gpu=(CHART_GPU,))


@chart.command()
@plan_options
@click.option(
    "--config", type=click.Path(path_type=Path), help="YAML of one plan; flags override it."
)
@click.option("--suite", type=click.Path(path_type=Path), help="A chart for each of many plans.")
@chart_options
def phases(
    config: Path | None,
    suite: Path | None,
    out: Path,
    formats: str,
    dark: bool,
    title: str,
    **flags: Any,
) -> None:
    """Params, grads, optimizer and activations at the four phases of a step.

    \b
    memest chart phases --model blip2-opt-2.7b --bs 16 --precision 32-true --gpu a100-80gb
    """
    wanted = parse_wanted(formats)
    plans = [on_a_card(plan) for plan in read_plans(config, suite, given_only(flags))]
    make_folder(out)
    from memest.estimator.search.suite import predict_all
    from memest.plots import plot_phases

    with shown():
        reports = predict_all(plans)
    for stem, report in zip(_stems("phases", plans), reports, strict=True):
        figure = plot_phases(report, None, gpu_limit_bytes=_limit_bytes(report), dark=dark)
        save_chart(figure, out / stem, wanted, title, [report.to_dict()])


@chart.command()
@plan_options
@click.option(
    "--config", type=click.Path(path_type=Path), help="YAML of one plan; flags override it."
)
@click.option("--suite", type=click.Path(path_type=Path), help="A chart for each of many plans.")
@click.option("--step", type=click.IntRange(1), help="Of the run; by default that of the peak.")
@chart_options
def timeline(
    config: Path | None,
    suite: Path | None,
    step: int | None,
    out: Path,
    formats: str,
    dark: bool,
    title: str,
    **flags: Any,
) -> None:
    """Memory over the events of one step, by what it is held for.

    \b
    memest chart timeline --model blip2-opt-2.7b --bs 16 --precision 32-true --gpu a100-80gb
    """
    wanted = parse_wanted(formats)
    plans = [on_a_card(plan) for plan in read_plans(config, suite, given_only(flags))]
    for plan in plans:
        if step is not None and step > plan.steps:
            raise PlanError(
                f"`--step {step}` is not among the {plan.steps} of `{plan.label}`",
                hint="the first is 1; `--steps` simulates more",
            )
    make_folder(out)
    from memest.estimator.predict import predict, record_plan
    from memest.estimator.trace.recording import timeline as timeline_of
    from memest.plots import plot_timeline

    for stem, plan in zip(_stems("timeline", plans), plans, strict=True):
        with shown(plan.label):
            recording, known = record_plan(plan), predict(plan).plan
        line = timeline_of(recording, None if step is None else step - 1)
        figure = plot_timeline(
            line,
            name=plan.label,
            gpu=recording.gpu,
            gpu_limit_bytes=recording.limit_bytes,
            dark=dark,
            plan=known,  # with the length that is the model's default
        )
        save_chart(figure, out / stem, wanted, title, _points(line))


@chart.command()
@click.option(
    "--model",
    "models",
    multiple=True,
    required=True,
    help="May be given again.",
    shell_complete=completes(VALUES["models"]),
)
@click.option(
    "--gpu",
    default=CHART_GPU,
    show_default=True,
    help="Card that has to hold them.",
    shell_complete=completes(VALUES["gpu"]),
)
@click.option("--seq-len", type=int, help="Tokens per sample, padding included.")
@click.option("--image-size", type=int, help="Pixels per side.")
@click.option("--jobs", type=click.IntRange(1), help="Processes; by default one per core.")
@chart_options
def batches(
    models: tuple[str, ...],
    gpu: str,
    jobs: int | None,
    out: Path,
    formats: str,
    dark: bool,
    title: str,
    **flags: Any,
) -> None:
    """The largest batch of every model under every technique of the lab, as a heat map.

    \b
    memest chart batches --model blip2-opt-2.7b --model blip2-flan-t5-xl --gpu a100-80gb
    """
    wanted, card = parse_wanted(formats), find_gpu(gpu)
    plans = [TrainingPlan.from_dict({"model_name": m, **given_only(flags)}) for m in models]
    make_folder(out)
    from memest.estimator.search.techniques import largest_of_all
    from memest.plots import plot_largest_batch

    table: dict[str, dict[str, int | None]] = {}
    data = []
    for plan in plans:
        with shown():
            found_rows = largest_of_all(plan, [card], jobs=jobs)
        for row in found_rows:
            found = row.largest
            cells = table.setdefault(row.technique, {})
            cells[plan.label] = None if found is None else found.value or 0
            data.append({"model_name": plan.model_name, **row.to_dict()})
    length = plans[0].seq_len
    said = [f"{length} tokens" if length else "each model's default tokens"]
    figure = plot_largest_batch(table, gpu=card.name, dark=dark, said=said)
    save_chart(figure, out / "batches", wanted, title, data)


@chart.command("sweep")
@click.argument("file", required=False, type=click.Path(path_type=Path))
@grid_options
@click.option("--across", default="", metavar="KEY", help="Columns; by default the longest key.")
@chart_options
def sweep_chart(
    file: Path | None,
    across: str,
    jobs: int | None,
    trust_remote_code: bool,
    out: Path,
    formats: str,
    dark: bool,
    title: str,
    **flags: Any,
) -> None:
    """What fits of a sweep: of one that is made here, or that `memest sweep -o` wrote to FILE.

    \b
    memest chart sweep --model gpt2 --bs 1:64 --precision 32-true,bf16-true --gpu rtx-4090
    memest chart sweep sweep.csv --across batch_size
    """
    wanted = parse_wanted(formats)
    from memest.estimator.search.sweep import sweep_grid
    from memest.estimator.search.sweep_table import fits_table, read_rows

    if file is not None and any(flags[key] for key in flags if key != "max_points"):
        raise PlanError(
            f"`{file}` holds a sweep, and flags ask for another",
            hint="give either a file or the flags of `memest sweep`",
        )
    if not flags["gpu"] and flags["gpu_memory"] is None and flags["config"] is None:
        flags["gpu"] = (CHART_GPU,)
    points = grid_points(**flags) if file is None else []
    rows = [] if file is None else read_rows(file)
    make_folder(out)
    with shown():
        rows = rows or sweep_grid(points, jobs=jobs, trust_remote_code=trust_remote_code)
    from memest.plots.heatmap import plot_fits

    table = fits_table(rows, across)
    figure = plot_fits(
        table.verdicts,
        across=table.across,
        gpu=", ".join(table.gpus),
        dark=dark,
        said=_in_common(rows, points),
    )
    save_chart(figure, out / "sweep", wanted, title, rows)


def _in_common(rows: Sequence[dict[str, Any]], points: Grid) -> list[str]:
    """What all plans of a sweep are, as far as its rows or its plans say."""
    from memest.plots.words import setting_words

    plans = [plan.to_dict() for _, plan in points if isinstance(plan, TrainingPlan)] or rows
    same = {k: v for k, v in plans[0].items() if all(plan.get(k) == v for plan in plans)}
    model = [str(same["model_name"])] if same.get("model_name") else []
    length = [f"{same['seq_len']} tokens"] if same.get("seq_len") else []
    plan = next((plan for _, plan in points if isinstance(plan, TrainingPlan)), None)
    if plan is not None and model and "seq_len" not in rows[0] and not length:
        from memest.models_meta.assemble import sequence_length
        from memest.models_meta.registry import resolve_config

        length = [f"{sequence_length(plan, resolve_config(plan.model_name))} tokens"]
    kept = {k: v for k, v in same.items() if k in ("precision", "batch_size", "optim")}
    return [*model, *setting_words(kept), *length]


@chart.command("validate")
@click.argument("results", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--jobs", type=click.IntRange(1), help="Processes; by default one per core.")
@chart_options
def validate_chart(
    results: tuple[Path, ...], jobs: int | None, out: Path, formats: str, dark: bool, title: str
) -> None:
    """Predicted over measured, and the errors: the runs of `memest validate`.

    \b
    memest chart validate results/lab-h200.jsonl
    """
    from memest.report import read_measurements

    wanted = parse_wanted(formats)
    found = [m for path in results for m in read_measurements(path)]
    from memest.validate.compare import comparable, plan_of

    measured, left_out = comparable(found)
    for line in left_out:
        click.echo(f"not compared: {line}", err=True)
    plans = [plan_of(m) for m in measured]
    make_folder(out)
    from memest.estimator.search.suite import predict_all
    from memest.plots import plot_scatter

    with shown():
        pairs = list(zip(predict_all(plans, jobs=jobs), measured, strict=True))
    figure = plot_scatter(pairs, dark=dark)
    data = [report.to_dict() for pair in pairs for report in pair]
    save_chart(figure, out / "validate", wanted, title, data)


def parse_wanted(text: str) -> list[str]:
    """The formats asked for, refused before anything is computed."""
    from memest.plots import parse_formats

    return parse_formats(text)


def _stems(chart_name: str, plans: Sequence[TrainingPlan]) -> list[str]:
    """A file name for the chart of each plan, no two alike."""
    from memest.validate.snapshot import file_stem

    if len(plans) == 1:
        return [chart_name]
    stems: list[str] = []
    for plan in plans:
        stem = f"{chart_name}-{file_stem(plan.label)}"
        stems.append(stem if stem not in stems else f"{stem}-{len(stems)}")
    return stems


def _limit_bytes(report: Prediction) -> int:
    return (
        report.verdicts[report.gpu].limit_bytes
        if report.gpu in report.verdicts
        else (find_gpu(report.gpu).limit_bytes)
    )


def _points(line: Timeline) -> list[dict[str, Any]]:
    """One row per point of a timeline."""
    phases = {i: s.name for s in line.spans for i in range(s.start, s.stop + 1)}
    return [
        {"event": i, "phase": phases.get(i, ""), "reserved_bytes": reserved}
        | {f"{kind}_bytes": values[i] for kind, values in line.kinds.items()}
        for i, reserved in enumerate(line.reserved)
    ]


def save_chart(
    figure: Any, path: Path, formats: Sequence[str], title: str, data: Sequence[dict[str, Any]]
) -> None:
    """The pictures, then their data as JSON Lines; says what was written."""
    from memest.plots import retitle, save

    pictures = save(retitle(figure, title), path, formats)
    data_file = path.with_name(f"{path.name}.jsonl")
    write_text(data_file, "".join(json.dumps(row) + "\n" for row in data))
    if click.get_current_context().meta.get(JSON_FILES):
        files = {"pictures": [str(p) for p in pictures], "data": str(data_file)}
        click.echo(json.dumps(files))
        return
    for written in (*pictures, data_file):
        click.echo(written)
