"""`memest diff`, `memest ci`, `memest compare`: two reports, or predictions and measured runs."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import click

from memest import plots
from memest.cli import options
from memest.cli.files import make_folder, only_one, print_or_write
from memest.cli.group import fail, main
from memest.cli.options import OUT, PATH
from memest.cli.run import with_project
from memest.cli.terminal import folded, progress_bar
from memest.estimator.search.many_plans import predict_all
from memest.estimator.versions import nearest_release, simulating
from memest.report import Prediction, SimulatedReport, read_measurements
from memest.report.difference import (
    Difference,
    comparison_json,
    differences,
    markdown,
    read_reports,
    render_comparison,
    render_comparison_markdown,
    sarif,
    unpaired,
)
from memest.run.base import repository, run_both
from memest.validate.compare import comparable, parse_tolerances, plan_of, summarise
from memest.validate.compare import compare as compare_reports
from memest.writing import write_output

GREW_EXIT_CODE = 4  # exit code if a peak grew


@main.command()
@click.argument("before", type=PATH)
@click.argument("after", type=PATH)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per script or plan.")
@click.option("--markdown", "as_markdown", is_flag=True, help="A comment for a pull request.")
@click.option("--sarif", "sarif_path", type=OUT, help="Write the lines that grew as SARIF.")
@click.option("--html", type=OUT, help="Write both reports as a page.")
@click.option("--check", is_flag=True, help=f"Exit with {GREW_EXIT_CODE} if a peak grew.")
def diff(
    before: Path, after: Path, as_json: bool, as_markdown: bool, sarif_path: Path | None,
    html: Path | None, check: bool,
) -> int:  # fmt: skip
    """Show which lines or kinds of memory grew between two reports.

    \b
    memest run --json before.json train.py
    memest run --json after.json train.py --bs 16
    memest diff before.json after.json --html diff.html
    """
    only_one({"--json": as_json, "--markdown": as_markdown})
    reports = read_reports(before), read_reports(after)
    changes = differences(*reports)
    for line in unpaired(*reports, changes):
        click.echo(f"note: {line}", err=True)
    if html is not None:
        from memest.report.page import render_difference

        write_output(html, render_difference(changes))
    if sarif_path is not None:
        _write_sarif(sarif_path, [(change.after, change) for change in changes])
    for change in changes:
        if as_json:
            click.echo(json.dumps(change.to_dict()))
        else:
            click.echo(markdown(change.after, change) if as_markdown else folded(str(change)))
    return GREW_EXIT_CODE if check and any(change.has_grown for change in changes) else 0


@main.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--base", default="", help="Branch to compare with. [none]")
@click.option("--markdown", "markdown_path", type=OUT, help="Write a comment for a pull request.")
@click.option("--sarif", "sarif_path", type=OUT, help="Write the lines as SARIF.")
@click.option(
    "--fail-on-increase", is_flag=True, help=f"Exit with {GREW_EXIT_CODE} if a peak grew."
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[RUN OPTIONS] [SCRIPT]...")
def ci(
    base: str, markdown_path: Path | None, sarif_path: Path | None, fail_on_increase: bool,
    arguments: tuple[str, ...],
) -> int:  # fmt: skip
    """Run `memest run --check` on a script, and compare it with the base branch.

    Options of `memest run`, the script and its arguments follow. Without them, `command` of
    `[tool.memest]` in pyproject.toml is run.

    \b
    memest ci --base main --markdown comment.md --sarif memest.sarif --gpu a100-40gb train.py
    """
    pair = run_both(with_project(arguments), base)
    for note in pair.notes:
        click.echo(f"note: {note}", err=True)
    if pair.now is None:
        return pair.exit_code
    difference = None if pair.base is None else Difference(before=pair.base, after=pair.now)
    if difference is not None:
        click.echo(f"\nnow and on `{base}`\n{difference}")
    if markdown_path is not None:
        write_output(markdown_path, markdown(pair.now, difference, base))
    if sarif_path is not None:
        _write_sarif(sarif_path, [(pair.now, difference)])
    if fail_on_increase and difference is not None and difference.has_grown and not pair.exit_code:
        fail("a peak grew", "the lines that grew are listed above", GREW_EXIT_CODE)
    return pair.exit_code


def _write_sarif(path: Path, pairs: Sequence[tuple[SimulatedReport, Difference | None]]) -> None:
    """Write `pairs` of a report and its difference (None: no earlier report) to `path` as SARIF."""
    write_output(path, json.dumps(sarif(pairs, repository()), indent=1) + "\n")


@main.command()
@click.argument("results", nargs=-1, required=True, type=PATH)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--markdown", "as_markdown", is_flag=True, help="A page for the documentation.")
@click.option("--charts", type=PATH, help="Folder for charts of every run.")
@click.option("--check", is_flag=True, help="Exit with 4 if a run is outside its tolerance.")
@click.option(
    "--tolerance", multiple=True, help="NAME=PERCENT of allocated, reserved, process, phase."
)
@click.option("-o", "--output", type=OUT, help="Write to a file.")
@options.jobs
def compare(
    results: tuple[Path, ...], as_json: bool, as_markdown: bool, charts: Path | None, check: bool,
    tolerance: tuple[str, ...], output: Path | None, jobs: int | None,
) -> int:  # fmt: skip
    """Compare predicted with measured memory of runs.

    \b
    memest compare validation/runs/lab-h200.jsonl
    memest compare validation/runs/*.jsonl --check --tolerance allocated=0.2
    """
    only_one({"--json": as_json, "--markdown": as_markdown})
    tolerances = parse_tolerances(tolerance)
    measured, left_out = comparable([m for path in results for m in read_measurements(path)])
    plans = [plan_of(m) for m in measured]
    releases = [nearest_release(str(m.versions.get("torch", ""))).name for m in measured]
    predicted: dict[int, Prediction] = {}
    with progress_bar():
        for release in dict.fromkeys(releases):  # each run with the release it was measured on
            indices = [i for i, name in enumerate(releases) if name == release]
            with simulating(release):
                predictions = predict_all([plans[i] for i in indices], jobs=jobs)
            predicted.update(zip(indices, predictions, strict=True))
        comparisons = compare_reports(measured, [predicted[i] for i in range(len(plans))])
    summary = summarise(comparisons, tolerances)
    if as_json:
        text = json.dumps(comparison_json(comparisons, summary))
    else:
        render = render_comparison_markdown if as_markdown else render_comparison
        text = render(comparisons, summary)
    for line in left_out:
        click.echo(f"not compared: {line}", err=True)
    print_or_write(text, output)
    if charts is not None:  # a scatter of all runs, and the phases of each run
        make_folder(charts)
        scatter = plots.plot_scatter([(c.predicted, c.measured) for c in comparisons])
        plots.save(scatter, charts / "scatter")
        for pair in comparisons:
            limit = pair.predicted.verdicts[pair.predicted.gpu].limit_bytes
            figure = plots.plot_phases(pair.predicted, pair.measured, gpu_limit_bytes=limit)
            plots.save(figure, charts / f"phases-{re.sub(r'[^A-Za-z0-9.=+-]+', '-', pair.name)}")
    if (check or tolerance) and summary.broken:
        fail(f"{len(summary.broken)} outside tolerance: {summary.broken[0]}", "", 4)
    return 0
