"""`memest explore` and `memest lecture`: an interactive page, and slides with exercises."""

import json
from pathlib import Path
from statistics import mode

import click

from memest.cli import options
from memest.cli.files import make_folder, only_one
from memest.cli.group import main
from memest.cli.options import OUT, PATH, completes
from memest.cli.terminal import progress_bar
from memest.errors import PlanError
from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.search.sweep import SETTINGS, parse_values
from memest.estimator.search.sweep import explore as explore_grid
from memest.packages import require
from memest.plan import TrainingPlan
from memest.plan.training_plan import read_suite
from memest.report.explorer import MAX_PAGE_BYTES, explorer_data, explorer_page
from memest.report.lecture import Lecture, predicted_rows, stored_rows
from memest.units import counted
from memest.validate.results import find_suite, list_suites
from memest.writing import write_output


def lab_gpus(name: str) -> tuple[str, str]:
    """Return the default GPUs of the suite `name`: its own, and one of the same chip."""
    return ("h100-80gb", "h200") if "h100" in name else ("a100-80gb", "a100-40gb")


@main.command()
@click.option(
    "--suite", shell_complete=completes(list_suites),
    help="Models and tokens of a suite: lab-a100, or a file of plans.",
)  # fmt: skip
@options.models("Model; repeat for more. By default the lab's.")
@options.gpus("GPU to choose; repeat for more. By default the suite's.")
@click.option(
    "--seq-len", type=click.IntRange(1), help="Tokens per sample; by default the suite's."
)
@click.option("--bs", "batches", default="1,2,4,8,16,32,64", show_default=True, help="Batch sizes.")
@click.option("--acc", "counts", default="1,2,4", show_default=True, help="Micro-batches per step.")
@options.jobs
@options.engine
@click.option("--json", "as_json", is_flag=True, help="Print path and number of plans as JSON.")
@click.option(
    "-o", "--output", type=OUT, default=Path("explorer.html"), show_default=True, help="The page."
)
def explore(
    suite: str | None, models: tuple[str, ...], gpu: tuple[str, ...], seq_len: int | None,
    batches: str, counts: str, jobs: int | None, engine: str, as_json: bool, output: Path,
) -> None:  # fmt: skip
    """Write an interactive page of predictions.

    The page has choices of model, batch, precision, optimizer, technique and GPU. It shows the
    predicted peak, the phases of a step and the verdict. It is one file, without a server.

    \b
    memest explore --suite lab-a100 -o explorer.html
    memest explore --model gpt2 --model opt-125m --seq-len 512 --gpu rtx-4090
    """
    only_one({"--suite": suite, "--model": models})
    if output.suffix not in ("", ".html", ".htm"):
        raise PlanError(f"`{output}` is no .html file", hint="the page is HTML: `explorer.html`")
    sizes = parse_values("batch_size", batches)
    micro_batches = parse_values("accumulate_grad_batches", counts)
    names, length = list(models), seq_len
    presets: list[TrainingPlan] = []
    if suite is not None or not models:
        presets = read_suite(find_suite(suite or "lab-a100"), {})
        names = list(dict.fromkeys(plan.model_name for plan in presets))
        length = seq_len or mode(plan.seq_len for plan in presets)
    gpus = [find_gpu(name) for name in gpu or lab_gpus(suite or "")]
    num_plans = len(names) * len(SETTINGS) * len(sizes) * len(micro_batches)
    amount = f"{num_plans:,} plans of {counted(len(names), 'model')}"
    click.echo(f"predicting {amount}; `--model`, `--bs` and `--acc` make it fewer", err=True)
    with progress_bar():
        points = explore_grid(
            names, [gpu.name for gpu in gpus], batches=sizes, micro_batches=micro_batches,
            seq_len=length, jobs=jobs, engine=engine,
        )  # fmt: skip
    limits = {gpu.name: gpu.limit_bytes for gpu in gpus}
    tokens = f"{length} tokens" if length else "each model's default tokens"
    page = explorer_page(explorer_data(points, limits, tokens=tokens, presets=presets))
    if len(page.encode()) > MAX_PAGE_BYTES:
        raise PlanError(
            f"the page has {len(page) / 2**20:.1f} MiB, more than 3",
            hint="name fewer models, batch sizes or GPUs",
        )
    write_output(output, page)
    summary = {"page": str(output), "plans": len(points), "bytes": len(page.encode())}
    click.echo(json.dumps(summary) if as_json else f"{output}: {len(points)} plans")


@main.command()
@click.argument("suite", shell_complete=completes(list_suites))
@options.gpus("GPU of the bars; repeat for others in the explorer. By default the suite's.")
@options.jobs
@click.option(
    "-o", "--output", type=PATH, default=Path("lecture"), show_default=True,
    help="Folder of the files.",
)  # fmt: skip
def lecture(suite: str, gpu: tuple[str, ...], jobs: int | None, output: Path) -> None:
    """Write slides, exercises and an interactive page of a suite's plans.

    The slides are PPTX with native charts and PDF, light and dark. Titles state the finding, and
    speaker notes have the arithmetic. Predictions of lab-a100 are stored; other suites are
    predicted now.

    \b
    memest lecture lab-a100 -o lecture
    memest lecture experiments.yaml --gpu rtx-4090
    """
    path = find_suite(suite)
    gpus = [find_gpu(name).name for name in gpu]
    require("pptx", "matplotlib")
    make_folder(output)
    rows = None if gpus else stored_rows(path)
    if rows is None:
        with progress_bar():
            rows = predicted_rows(path, gpus or lab_gpus(path.stem), jobs)
    for name, reason in rows.failed.items():
        click.echo(f"not in the slides: {name}: {reason}", err=True)
    from memest.plots.slides import pdf_bytes
    from memest.report.slides import pptx_bytes

    deck = Lecture(rows)
    slides = deck.slides()
    files: dict[str, str | bytes] = {}
    for name, dark in (("light", False), ("dark", True)):
        files[f"slides-{name}.pptx"] = pptx_bytes(slides, dark=dark)
        files[f"slides-{name}.pdf"] = pdf_bytes(slides, dark=dark)
    files["exercises.md"] = deck.exercises()
    files["explorer.html"] = explorer_page(dict(rows.explorer))
    for name, content in files.items():
        write_output(output / name, content)
    click.echo(f"{output}: {len(slides)} slides, {', '.join(files)}")
    versions = ", ".join(f"{name} {number}" for name, number in rows.versions.items())
    click.echo(f"predicted by {versions}")
