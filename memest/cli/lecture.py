"""`memest lecture`: slides, exercises and an explorer of a suite."""

from __future__ import annotations

from pathlib import Path

import click

from memest.cli.explore import LAB_GPUS
from memest.cli.files import make_folder
from memest.cli.group import main
from memest.cli.options import PATH, completes, gpus_option, jobs_option
from memest.cli.terminal import progress_bar
from memest.estimator.hardware.gpus import find_gpu
from memest.packages import require
from memest.report.explorer import explorer_page
from memest.report.lecture import Lecture
from memest.report.lecture_rows import predicted_rows, stored_rows
from memest.validate.results import find_suite, list_suites
from memest.writing import write_output


@main.command()
@click.argument("suite", shell_complete=completes(list_suites))
@gpus_option("GPU of the bars; repeat for others in the explorer. By default the suite's.")
@jobs_option
@click.option(
    "-o", "--output", type=PATH, default=Path("lecture"), show_default=True,
    help="Folder of the files.",
)  # fmt: skip
def lecture(suite: str, gpu: tuple[str, ...], jobs: int | None, output: Path) -> None:
    """Write slides, exercises and an explorer of a suite.

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
        word = "h100" if "h100" in path.stem else ""
        with progress_bar():
            rows = predicted_rows(path, gpus or LAB_GPUS[word], jobs)
    for name, why in rows.failed.items():
        click.echo(f"not in the slides: {name}: {why}", err=True)
    from memest.plots.slides import pdf_bytes
    from memest.report.slides import pptx_bytes

    made = Lecture(rows)
    slides = made.slides()
    files: dict[str, str | bytes] = {}
    for name, dark in (("light", False), ("dark", True)):
        files[f"slides-{name}.pptx"] = pptx_bytes(slides, dark=dark)
        files[f"slides-{name}.pdf"] = pdf_bytes(slides, dark=dark)
    files["exercises.md"] = made.exercises()
    files["explorer.html"] = explorer_page(dict(rows.explorer))
    for name, content in files.items():
        write_output(output / name, content)
    click.echo(f"{output}: {len(slides)} slides, {', '.join(files)}")
    versions = ", ".join(f"{name} {number}" for name, number in rows.versions.items())
    click.echo(f"predicted by {versions}")
