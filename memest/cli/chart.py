"""`memest chart`: the charts on the command line, each with its data in a file next to it."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any

import click

from memest import plots
from memest.cli import options
from memest.cli.files import given_only, make_folder, read_plans, with_gpus
from memest.cli.group import main
from memest.cli.options import PATH, VALUES, combined, completes
from memest.cli.resume import forget, predict_resumably
from memest.cli.sweep import grid_options, grid_points
from memest.cli.terminal import progress_bar
from memest.errors import PlanError
from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.predict import predict, record_plan, target_gpus, usable_bytes
from memest.estimator.replay.recording import Timeline
from memest.estimator.replay.recording import timeline as timeline_of
from memest.estimator.search import many_plans
from memest.estimator.search.many_plans import partition, predict_all, predict_each
from memest.estimator.search.sweep import Grid, fits_table, parse_values, read_rows, sweep_grid
from memest.models_meta.registry import resolve_config
from memest.plan import TrainingPlan
from memest.plan.training_plan import read_config, read_suite
from memest.plots.words import setting_words
from memest.report import RunReport, read_measurements
from memest.report.difference import read_reports
from memest.units import TIB
from memest.validate.compare import comparable, plan_of
from memest.validate.results import find_suite, list_suites
from memest.writing import write_output

CHART_GPU = "a100-80gb"  # default GPU of a chart: that of the lab
_CHART_OPTIONS = combined(
    click.option(
        "--out", type=PATH, default=Path("charts"), show_default=True,
        help="Folder for the pictures and their data; made if it is not there.",
    ),
    click.option(
        "--format", "formats", default="png", show_default=True, help="Formats: png, svg, pdf."
    ),
    click.option("--dark", is_flag=True, help="Draw for dark slides."),
    click.option("--title", default="", help="Title of the chart."),
    click.option("--json", "as_json", is_flag=True, help="Print the files as JSON."),
)  # fmt: skip
# flags that do not change the points of a sweep
_FLAGS_OF_RUN = ("max_points", "trust_remote_code")
DEFAULT_GPU = "h100-80gb"  # default GPU of the chart
MAX_SETTINGS = 4  # largest number of lines in one chart


@dataclass(frozen=True, slots=True)
class Pictures:
    """Options of a chart command for the files that it writes; `save` writes them."""

    folder: Path
    formats: Sequence[str]  # such as png, svg, pdf
    dark: bool  # True for dark slides
    title: str  # title in place of the chart's own, or ""
    as_json: bool  # True to print the paths as JSON

    def save(self, figure: Any, name: str, data: Sequence[dict[str, Any]]) -> None:
        """Write the matplotlib `figure` in each of `formats`, such as to `name.png`, and its rows
        `data` to `name.jsonl`. Print the paths."""
        path = self.folder / name
        pictures = plots.save(plots.retitle(figure, self.title), path, self.formats)
        data_file = path.with_name(f"{name}.jsonl")
        write_output(data_file, "".join(json.dumps(row) + "\n" for row in data))
        if self.as_json:
            files = {"pictures": [str(p) for p in pictures], "data": str(data_file)}
            click.echo(json.dumps(files))
        else:
            click.echo("\n".join(map(str, (*pictures, data_file))))


def chart_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that all charts share to `command`; it gets them as `pictures: Pictures`."""

    @wraps(command)
    def run(*, out: Path, formats: str, dark: bool, title: str, as_json: bool, **flags: Any) -> Any:
        pictures = Pictures(out, plots.parse_formats(formats), dark, title, as_json)
        return command(pictures=pictures, **flags)

    return _CHART_OPTIONS(run)


@main.group()
def chart() -> None:
    """Draw charts for slides; each picture has its data next to it."""


@chart.command()
@click.option(
    "--suite", default="lab-a100", show_default=True,
    help="lab-a100, lab-h100, lab-multi, or a file of plans.",
    shell_complete=completes(list_suites),
)  # fmt: skip
@options.gpus("GPU of a line; the bars are of the first. By default the suite's own.")
@options.jobs
@click.option("--resume", is_flag=True, help="Continue after an interruption.")
@click.option(
    "--time", "has_time", is_flag=True, help="Draw the memory left and the time of a step."
)
@chart_options
def lab(
    suite: str, gpu: tuple[str, ...], jobs: int | None, resume: bool, has_time: bool,
    pictures: Pictures,
) -> None:  # fmt: skip
    """Draw the predicted memory of a suite's plans, and the GPUs' limits.

    \b
    memest chart lab
    memest chart lab --suite lab-h100 --format png,svg,pdf --dark
    memest chart lab --suite experiments.yaml --gpu rtx-4090 --gpu a100-80gb
    """
    path = find_suite(suite)
    suite_gpus = dict.fromkeys(name for plan in read_suite(path, {}) for name in plan.gpu)
    names = list(gpu or suite_gpus) or ["h100-80gb" if "h100" in path.stem else CHART_GPU]
    limits = {plots.gpu_label(name): find_gpu(name).limit_bytes for name in names}
    plans = read_suite(path, {"gpu": names})
    make_folder(pictures.folder)
    with progress_bar():
        results = predict_resumably(
            plans, pictures.folder / path.stem, is_resumed=resume, jobs=jobs
        )
    predicted, failed = partition(plans, results)
    for plan, error in failed:
        click.echo(f"not drawn: {plan.label}: {error}", err=True)
    if not predicted:
        raise PlanError(f"`{suite}` has no plan that can be drawn", hint="name another suite")
    reports = [report for _, report in predicted]
    name = path.stem
    if has_time:
        name = f"{name}-time"
        figure = plots.plot_trade_off(reports, gpu=names[0], dark=pictures.dark)
    else:
        larger = [  # plans that do not fit, on a GPU that is large enough
            replace(plan, gpu=(), gpu_memory=TIB, memory_limit=None, beside=None)
            for plan, report in predicted
            if report.verdict == "oom"
        ]
        with progress_bar("what the others would need", with_results=False):
            pairs, _ = partition(larger, predict_each(larger, jobs=jobs) if larger else [])
        unlimited = {report.name: report for _, report in pairs}
        figure = plots.plot_ladder(
            reports, limits=limits, dark=pictures.dark, unlimited=unlimited, suite=name
        )
    pictures.save(figure, name, [report.to_dict() for report in reports])
    forget(pictures.folder / path.stem)


@chart.command()
@options.plan
@options.config
@click.option("--suite", type=PATH, help="A chart for each of many plans.")
@chart_options
def phases(config: Path | None, suite: Path | None, pictures: Pictures, **flags: Any) -> None:
    """Draw memory by kind, such as gradients, at the four phases of a step.

    \b
    memest chart phases --model blip2-opt-2.7b --bs 16 --precision 32-true --gpu a100-80gb
    """
    plans = [with_gpus(plan, CHART_GPU) for plan in read_plans(config, suite, given_only(flags))]
    make_folder(pictures.folder)
    from memest.report.page import limit_of

    with progress_bar():
        reports = predict_all(plans)
    for stem, report in zip(_file_stems("phases", plans), reports, strict=True):
        limit = limit_of(report)
        figure = plots.plot_phases(report, None, gpu_limit_bytes=limit, dark=pictures.dark)
        pictures.save(figure, stem, [report.to_dict()])


@chart.command()
@options.plan
@options.config
@click.option("--suite", type=PATH, help="A chart for each of many plans.")
@click.option("--step", type=click.IntRange(1), help="Of the run; by default that of the peak.")
@chart_options
def timeline(
    config: Path | None, suite: Path | None, step: int | None, pictures: Pictures, **flags: Any
) -> None:
    """Draw memory over the events of one step, by kind.

    Without `--step`, the step with the peak is drawn. With `--suite`, each plan of the suite has a
    chart of its own.

    \b
    memest chart timeline --model blip2-opt-2.7b --bs 16 --precision 32-true --gpu a100-80gb
    """
    plans = [with_gpus(plan, CHART_GPU) for plan in read_plans(config, suite, given_only(flags))]
    for plan in plans:
        if step is not None and step > plan.steps:
            raise PlanError(
                f"`--step {step}` is not among the {plan.steps} of `{plan.label}`",
                hint="the first is 1; `--steps` simulates more",
            )
    make_folder(pictures.folder)
    for stem, plan in zip(_file_stems("timeline", plans), plans, strict=True):
        with progress_bar(plan.label):
            recording, full_plan = record_plan(plan), predict(plan).plan
        line = timeline_of(recording, None if step is None else step - 1)
        figure = plots.plot_timeline(  # `full_plan` has the length that is the model's default
            line, name=plan.label, gpu=recording.gpu, gpu_limit_bytes=recording.limit_bytes,
            dark=pictures.dark, plan=full_plan,
        )  # fmt: skip
        pictures.save(figure, stem, _timeline_rows(line))


@chart.command()
@options.models("Model; repeat for more.", required=True)
@click.option(
    "--gpu", default=CHART_GPU, show_default=True, help="GPU that the plans must fit.",
    shell_complete=completes(VALUES["gpu"]),
)  # fmt: skip
@click.option("--seq-len", type=int, help="Tokens per sample, padding included.")
@click.option("--image-size", type=int, help="Pixels per side.")
@options.jobs
@chart_options
def batches(
    models: tuple[str, ...], gpu: str, jobs: int | None, pictures: Pictures, **flags: Any
) -> None:
    """Draw the largest batch that fits a GPU, by model and technique.

    \b
    memest chart batches --model blip2-opt-2.7b --model blip2-flan-t5-xl --gpu a100-80gb
    """
    target = find_gpu(gpu)
    plans = [TrainingPlan.from_dict({"model_name": m, **given_only(flags)}) for m in models]
    make_folder(pictures.folder)
    from memest.estimator.search.largest import largest_of_all

    table: dict[str, dict[str, int | None]] = {}
    data = []
    for plan in plans:
        with progress_bar():
            rows = largest_of_all(plan, [target], jobs=jobs)
        for row in rows:
            largest = row.largest
            cells = table.setdefault(row.technique, {})
            cells[plan.label] = None if largest is None else largest.value or 0
            data.append({"model_name": plan.model_name, **row.to_dict()})
    length = plans[0].seq_len
    remarks = [f"{length} tokens" if length else "each model's default tokens"]
    figure = plots.plot_largest_batch(table, gpu=target.name, dark=pictures.dark, remarks=remarks)
    pictures.save(figure, "batches", data)


@chart.command("sweep")
@click.argument("file", required=False, type=PATH)
@grid_options
@click.option(
    "--across", default="", metavar="KEY",
    help="Key of the columns; by default the one with most values.",
)  # fmt: skip
@chart_options
def sweep_chart(
    file: Path | None, across: str, jobs: int | None, pictures: Pictures, **flags: Any
) -> None:
    """Draw which plans of a sweep fit a GPU.

    FILE is the output of `memest sweep -o`. Without it, a new sweep runs.

    \b
    memest chart sweep --model gpt2 --bs 1:64 --precision 32-true,bf16-true --gpu rtx-4090
    memest chart sweep sweep.csv --across batch_size
    """
    if file is not None and any(flags[key] for key in flags if key not in _FLAGS_OF_RUN):
        raise PlanError(
            f"`{file}` holds a sweep, and flags define another",
            hint="give either a file or the flags of `memest sweep`",
        )
    if not flags["gpu"] and flags["gpu_memory"] is None and flags["config"] is None:
        flags["gpu"] = (CHART_GPU,)
    points = grid_points(**flags) if file is None else []
    rows = [] if file is None else read_rows(file)
    make_folder(pictures.folder)
    with progress_bar():
        rows = rows or sweep_grid(points, jobs=jobs)
    table = fits_table(rows, across)
    figure = plots.plot_fits(
        table.verdicts, across=table.across, gpu=", ".join(table.gpus), dark=pictures.dark,
        remarks=_shared_settings(rows, points),
    )  # fmt: skip
    pictures.save(figure, "sweep", rows)


def _shared_settings(rows: Sequence[dict[str, Any]], points: Grid) -> list[str]:
    """Return descriptions of the settings that all plans of a sweep share, such as `512 tokens`.
    The plans are in `points`. If the sweep was read from a file, `points` is empty; then the
    settings are compared in `rows`, the sweep's table."""
    plans = [plan for _, plan in points if isinstance(plan, TrainingPlan)]
    settings = [plan.to_dict() for plan in plans] or rows
    shared = {k: v for k, v in settings[0].items() if all(row.get(k) == v for row in settings)}
    model = [str(shared["model_name"])] if shared.get("model_name") else []
    length = [f"{shared['seq_len']} tokens"] if shared.get("seq_len") else []
    if plans and model and "seq_len" not in rows[0] and not length:
        from memest.models_meta.assemble import sequence_length

        length = [f"{sequence_length(plans[0], resolve_config(model[0]))} tokens"]
    named = {k: v for k, v in shared.items() if k in ("precision", "batch_size", "optim")}
    return [*model, *setting_words(named), *length]


@chart.command("ranks")
@click.argument("report", type=PATH)
@chart_options
def ranks_chart(report: Path, pictures: Pictures) -> None:
    """Draw the memory of each simulated rank of a script.

    REPORT is a file of `memest run --json`.

    \b
    memest run --nproc-per-node 8 --nnodes 8 --json run.json train.py
    memest chart ranks run.json
    """
    runs = [run for run in read_reports(report) if run.ranks and isinstance(run, RunReport)]
    if not runs:
        raise PlanError(
            f"`{report}` has no ranks", hint="write it by `memest run --nproc-per-node N --json`"
        )
    make_folder(pictures.folder)
    limit = find_gpu(runs[0].gpu).memory_bytes
    figure = plots.plot_ranks(runs[0], limit_bytes=limit, dark=pictures.dark)
    pictures.save(figure, "ranks", [asdict(row) for row in runs[0].ranks])


@chart.command("validate")
@click.argument("results", nargs=-1, required=True, type=PATH)
@options.jobs
@chart_options
def validate_chart(results: tuple[Path, ...], jobs: int | None, pictures: Pictures) -> None:
    """Draw predictions and errors of measured runs.

    RESULTS are files of `memest validate`.

    \b
    memest chart validate validation/runs/lab-h200.jsonl
    """
    measured, left_out = comparable([m for path in results for m in read_measurements(path)])
    for line in left_out:
        click.echo(f"not compared: {line}", err=True)
    plans = [plan_of(m) for m in measured]
    make_folder(pictures.folder)
    with progress_bar():
        pairs = list(zip(predict_all(plans, jobs=jobs), measured, strict=True))
    figure = plots.plot_scatter(pairs, dark=pictures.dark)
    data = [report.to_dict() for pair in pairs for report in pair]
    pictures.save(figure, "validate", data)


def _file_stems(chart_name: str, plans: Sequence[TrainingPlan]) -> list[str]:
    """Return a unique file name, without suffix, for the chart `chart_name` of each of `plans`."""
    from memest.validate.experiment import file_stem

    if len(plans) == 1:
        return [chart_name]
    stems: list[str] = []
    for plan in plans:
        stem = f"{chart_name}-{file_stem(plan.label)}"
        stems.append(stem if stem not in stems else f"{stem}-{len(stems)}")
    return stems


def _timeline_rows(line: Timeline) -> list[dict[str, Any]]:
    """Return a row for each point of `line`: the start of a step, and each allocation and free
    after it. A row has the phase, the reserved bytes, and the allocated bytes by kind."""
    phases = {i: s.name for s in line.spans for i in range(s.start, s.stop + 1)}
    return [
        {"event": i, "phase": phases.get(i, ""), "reserved_bytes": reserved}
        | {f"{kind}_bytes": values[i] for kind, values in line.kinds.items()}
        for i, reserved in enumerate(line.reserved)
    ]


@chart.command()
@click.option("--devices", default="1,2,4,8,16,32,64", show_default=True, help="Numbers of GPUs.")
@click.option(
    "--strategies", default="ddp,deepspeed_stage_2,deepspeed_stage_3,fsdp,fsdp2", show_default=True,
    help="Strategies to compare; *_offload ones take deepspeed_cpu.",
)  # fmt: skip
@click.option(
    "--bars", metavar="STRATEGY", help="Strategy of the bars; by default fsdp, or the last."
)
@options.config
@options.jobs
@chart_options
@options.plan_without("strategy", "devices")
def scaling(
    devices: str, strategies: str, bars: str | None, config: Path | None, jobs: int | None,
    pictures: Pictures, **flags: Any,
) -> None:  # fmt: skip
    """Draw memory per GPU over the number of GPUs.

    One picture has a line for each strategy. The other has the bars of one strategy, by kind of
    memory.

    \b
    memest chart scaling --model llama-3.1-8b
    memest chart scaling --model blip2-opt-6.7b --bs 16 --strategies ddp,fsdp --devices 1,4,16
    memest chart scaling --model gpt2 --strategies deepspeed_stage_3_offload,fsdp --gpu rtx-4090
    """
    values = given_only(flags)
    if config is not None:
        values = read_config(config, values).to_dict()
    if not values.get("gpu") and values.get("gpu_memory") is None:
        values = values | {"gpu": [DEFAULT_GPU]}
    num_gpus = len(values.get("gpu", ()))
    if values.get("gpu_memory") is not None:
        num_gpus += 1
    if num_gpus > 1:
        raise PlanError(f"{num_gpus} GPUs are named", hint="the chart has the line of one")
    numbers = parse_values("devices", devices)
    names = parse_values("strategy", strategies)
    strategy = bars or ("fsdp" if "fsdp" in names else names[-1])
    if strategy not in names:
        raise PlanError(
            f"`--bars {strategy}` is not among the strategies",
            hint=f"name one of {', '.join(f'`{name}`' for name in names)}",
        )
    make_folder(pictures.folder)
    with progress_bar():
        lines = many_plans.scale(values, strategies=names, devices=numbers, jobs=jobs)
    for line in lines:
        for note in line.notes:
            click.echo(f"{line.strategy}: {note}", err=True)
    rows = [row for line in lines for row in line.to_dicts()]
    pictures.save(plots.plot_scaling(lines, dark=pictures.dark), "scaling", rows)
    line = next(line for line in lines if line.strategy == strategy)
    if line.reports:
        figure = plots.plot_scaling_bars(line, dark=pictures.dark)
        pictures.save(figure, f"scaling-{strategy}", line.to_dicts())


@chart.command()
@options.plan
@options.config
@click.option(
    "--setting", "settings", multiple=True, metavar="TEXT",
    help="Allocator setting of a line; `default` for none. [default: the allocator's own,"
    " expandable_segments:True, max_split_size_mb:64]",
)  # fmt: skip
@chart_options
def fragmentation(
    config: Path | None, settings: tuple[str, ...], pictures: Pictures, **flags: Any
) -> None:
    """Draw reserved memory over steps of changing sequence length.

    Each line is a setting of the allocator.

    \b
    memest chart fragmentation --model gpt2 --loop plain --bs 4 --lengths lengths.txt
    memest chart fragmentation --model gpt2 --lengths 512,96,700 --setting expandable_segments:True
    """
    if len(settings) > MAX_SETTINGS:
        raise PlanError(
            f"{len(settings)} settings are too many for a chart", hint=f"name {MAX_SETTINGS}"
        )
    plan = with_gpus(read_plans(config, None, given_only(flags))[0], CHART_GPU)
    make_folder(pictures.folder)
    setting_texts = tuple("" if text == "default" else text for text in settings)
    with progress_bar(plan.label):
        report, runs = many_plans.growths(plan, setting_texts or many_plans.SETTINGS)
    limit = usable_bytes(plan, target_gpus(plan)[0])
    figure = plots.plot_fragmentation(report, runs, gpu_limit_bytes=limit, dark=pictures.dark)
    rows = [row for run in runs for row in run.rows()]
    pictures.save(figure, "fragmentation", rows)
