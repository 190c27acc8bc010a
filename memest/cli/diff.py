"""`memest diff` and `memest ci`: two reports, and a script now and on the base branch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from memest.cli.files import check_writable
from memest.cli.group import fail, main
from memest.cli.options import PATH
from memest.cli.run import with_project
from memest.writing import write_output

if TYPE_CHECKING:
    from memest.report import Prediction, RunReport
    from memest.report.difference import Difference

GREW_EXIT_CODE = 4
"""Exit code of a peak that grew."""


@main.command()
@click.argument("before", type=PATH)
@click.argument("after", type=PATH)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per script or plan.")
@click.option("--markdown", "as_markdown", is_flag=True, help="A comment for a pull request.")
@click.option("--sarif", "sarif_path", type=PATH, help="Write the lines that grew as SARIF.")
@click.option("--html", type=PATH, help="Write both reports as a page.")
@click.option("--check", is_flag=True, help=f"Exit with {GREW_EXIT_CODE} if a peak grew.")
def diff(
    before: Path,
    after: Path,
    as_json: bool,
    as_markdown: bool,
    sarif_path: Path | None,
    html: Path | None,
    check: bool,
) -> int:
    """Show which lines or kinds grew between two reports.

    \b
    memest run --json before.json train.py
    memest run --json after.json train.py --bs 16
    memest diff before.json after.json --html diff.html
    """
    from memest.report.difference import differences, markdown, read_reports

    if html is not None:
        check_writable(html)
    found = differences(read_reports(before), read_reports(after))
    if html is not None:
        from memest.report.page import render_difference

        write_output(html, render_difference(found))
    if sarif_path is not None:
        _write_sarif(sarif_path, found[0].after, found[0])
    for each in found:
        if as_json:
            click.echo(json.dumps(each.to_dict()))
        else:
            click.echo(markdown(each.after, each) if as_markdown else str(each))
    return GREW_EXIT_CODE if check and any(each.has_grown for each in found) else 0


@main.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--base", default="", help="Branch to compare with. [none]")
@click.option("--markdown", "markdown_path", type=PATH, help="Write a comment for a pull request.")
@click.option("--sarif", "sarif_path", type=PATH, help="Write the lines as SARIF.")
@click.option(
    "--fail-on-increase", is_flag=True, help=f"Exit with {GREW_EXIT_CODE} if a peak grew."
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[RUN OPTIONS] [SCRIPT]...")
def ci(
    base: str,
    markdown_path: Path | None,
    sarif_path: Path | None,
    fail_on_increase: bool,
    arguments: tuple[str, ...],
) -> int:
    """Run `memest run --check` on a script, and compare it with the base branch.

    Options of `memest run`, the script and its arguments follow. Without them, `command` of
    `[tool.memest]` in pyproject.toml is run.

    \b
    memest ci --base main --markdown comment.md --sarif memest.sarif --gpu a100-40gb train.py
    """
    for path in (markdown_path, sarif_path):
        if path is not None:
            check_writable(path)
    from memest.report.difference import Difference, markdown
    from memest.run.base import run_both

    pair = run_both(with_project(arguments), base)
    for note in pair.notes:
        click.echo(f"note: {note}", err=True)
    if pair.now is None:
        return pair.exit_code
    found = None if pair.base is None else Difference(before=pair.base, after=pair.now)
    if found is not None:
        click.echo(f"\nnow and on `{base}`\n{found}")
    if markdown_path is not None:
        write_output(markdown_path, markdown(pair.now, found, base))
    if sarif_path is not None:
        _write_sarif(sarif_path, pair.now, found)
    if fail_on_increase and found is not None and found.has_grown and not pair.exit_code:
        fail("a peak grew", "the lines that grew are listed above", GREW_EXIT_CODE)
    return pair.exit_code


def _write_sarif(path: Path, report: RunReport | Prediction, found: Difference | None) -> None:
    from memest.report.sarif import sarif
    from memest.run.base import repository

    write_output(path, json.dumps(sarif(report, found, repository()), indent=1) + "\n")
