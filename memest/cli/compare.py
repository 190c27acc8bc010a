"""`memest compare`: parse, one library call, render."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from memest.report import Prediction
    from memest.validate.compare import Comparison
from memest.cli.files import check_writable, make_folder, print_or_write
from memest.cli.group import fail, main
from memest.cli.options import jobs_option
from memest.cli.terminal import shown


@main.command()
@click.argument("results", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--markdown", is_flag=True, help="A page for the documentation.")
@click.option("--charts", type=click.Path(path_type=Path), help="Folder for charts of every run.")
@click.option("--check", is_flag=True, help="Exit with 4 if a run is outside its tolerance.")
@click.option(
    "--tolerance", multiple=True, help="NAME=PERCENT of allocated, reserved, process, phase."
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write to a file.")
@jobs_option
def compare(
    results: tuple[Path, ...],
    as_json: bool,
    markdown: bool,
    charts: Path | None,
    check: bool,
    tolerance: tuple[str, ...],
    output: Path | None,
    jobs: int | None,
) -> int:
    """Compare predictions with measured runs.

    \b
    memest compare validation/runs/lab-h200.jsonl
    memest compare validation/runs/*.jsonl --check --tolerance allocated=0.2
    """
    from memest.report import read_measurements
    from memest.validate.compare import comparable, parse_tolerances, plan_of, summarise
    from memest.validate.compare import compare as compare_reports

    tolerances = parse_tolerances(tolerance)
    measured, left_out = comparable([m for path in results for m in read_measurements(path)])
    plans = [plan_of(m) for m in measured]
    if output is not None:
        check_writable(output)
    from memest.estimator.search.suite import predict_all
    from memest.estimator.versions import nearest, simulating
    from memest.report.compare import comparison_json, render_comparison, render_comparison_markdown

    releases = [nearest(str(m.versions.get("torch", ""))).name for m in measured]
    predicted: dict[int, Prediction] = {}
    with shown():
        for release in dict.fromkeys(releases):  # each run with the release it was measured on
            of_release = [i for i, name in enumerate(releases) if name == release]
            with simulating(release):
                found = predict_all([plans[i] for i in of_release], jobs=jobs)
            predicted.update(zip(of_release, found, strict=True))
        comparisons = compare_reports(measured, [predicted[i] for i in range(len(plans))])
    summary = summarise(comparisons, tolerances)
    if as_json:
        text = json.dumps(comparison_json(comparisons, summary))
    else:
        text = (render_comparison_markdown if markdown else render_comparison)(comparisons, summary)
    for line in left_out:
        click.echo(f"not compared: {line}", err=True)
    print_or_write(text, output)
    if charts is not None:
        _draw(comparisons, charts)
    if (check or tolerance) and summary.broken:
        fail(f"{len(summary.broken)} outside tolerance: {summary.broken[0]}", "", 4)
    return 0


def _draw(comparisons: Sequence[Comparison], folder: Path) -> None:
    """The scatter of all runs, and the phases of each."""
    from memest.plots import plot_phases, plot_scatter, save

    make_folder(folder)
    pairs = [(c.predicted, c.measured) for c in comparisons]
    save(plot_scatter(pairs), folder / "scatter")
    for comparison in comparisons:
        predicted, measured = comparison.predicted, comparison.measured
        limit = predicted.verdicts[predicted.gpu].limit_bytes
        name = re.sub(r"[^A-Za-z0-9.=+-]+", "-", comparison.name)
        save(plot_phases(predicted, measured, gpu_limit_bytes=limit), folder / f"phases-{name}")
