"""`memest chart fragmentation`: what the allocator keeps over the steps, by its settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from memest.cli.chart import chart, chart_options, on_a_card, parse_wanted, save_chart
from memest.cli.files import given_only, make_folder, read_plans
from memest.cli.options import plan_options
from memest.cli.progress import shown
from memest.errors import PlanError

MAX_SETTINGS = 4
"""Lines of one chart."""


@chart.command()
@plan_options
@click.option(
    "--config", type=click.Path(path_type=Path), help="YAML of one plan; flags override it."
)
@click.option(
    "--setting", "settings", multiple=True, metavar="TEXT",
    help="A line for each; default stands for none. [default: the allocator's own,"
    " expandable_segments:True, max_split_size_mb:64]",
)  # fmt: skip
@chart_options
def fragmentation(
    config: Path | None,
    settings: tuple[str, ...],
    out: Path,
    formats: str,
    dark: bool,
    title: str,
    **flags: Any,
) -> None:
    """What is reserved over the steps of a run whose lengths change, by settings of the allocator.

    \b
    memest chart fragmentation --model gpt2 --loop plain --bs 4 --lengths lengths.txt
    memest chart fragmentation --model gpt2 --lengths 512,96,700 --setting expandable_segments:True
    """
    wanted = parse_wanted(formats)
    if len(settings) > MAX_SETTINGS:
        raise PlanError(
            f"{len(settings)} settings are too many for a chart", hint=f"name {MAX_SETTINGS}"
        )
    plan = on_a_card(read_plans(config, None, given_only(flags))[0])
    make_folder(out)
    from memest.estimator.predict import target_gpus, usable_bytes
    from memest.estimator.search.growth import SETTINGS, growths
    from memest.plots import plot_fragmentation

    chosen = tuple("" if text == "default" else text for text in settings) or SETTINGS
    with shown(plan.label):
        report, runs = growths(plan, chosen)
    limit = usable_bytes(plan, target_gpus(plan)[0])
    figure = plot_fragmentation(report, runs, gpu_limit_bytes=limit, dark=dark)
    rows = [row for run in runs for row in run.rows()]
    save_chart(figure, out / "fragmentation", wanted, title, rows)
