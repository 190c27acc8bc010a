"""`memest chart scaling`: memory per GPU over the number of GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memest.cli.chart import chart, chart_options, parse_wanted, save_chart
from memest.cli.files import given_only, make_folder
from memest.cli.options import plan_options
from memest.cli.progress import shown
from memest.errors import PlanError
from memest.plan.files import read_config

if TYPE_CHECKING:
    from memest.estimator.search.scaling import ScalingLine

DEFAULT_GPU = "h100-80gb"
"""The card of the chart where none is named."""


def _options_of_one_gpu(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a plan but those that this command varies."""
    options: list[click.Parameter] = []
    varied = ("strategy", "devices")

    def taken(values: Any) -> None:
        """Stands for a command, to see which options a plan has."""

    plan_options(taken)
    options = [o for o in vars(taken)["__click_params__"] if o.name not in varied]
    vars(command).setdefault("__click_params__", []).extend(options)
    return command


@chart.command()
@click.option("--devices", default="1,2,4,8,16,32,64", show_default=True, help="Numbers of GPUs.")
@click.option(
    "--strategies",
    default="ddp,deepspeed_stage_2,deepspeed_stage_3,fsdp,fsdp2",
    show_default=True,
    help="A line for each; *_offload among them takes deepspeed_cpu.",
)
@click.option("--bars", metavar="STRATEGY", help="Drawn as bars too; by default fsdp, or the last.")
@click.option(
    "--config", type=click.Path(path_type=Path), help="YAML of one plan; flags override it."
)
@click.option("--jobs", type=click.IntRange(1), help="Processes; by default one per core.")
@chart_options
@_options_of_one_gpu
def scaling(
    devices: str,
    strategies: str,
    bars: str | None,
    config: Path | None,
    jobs: int | None,
    out: Path,
    formats: str,
    dark: bool,
    title: str,
    **flags: Any,
) -> None:
    """Memory per GPU over the number of GPUs, and what of it does not shrink.

    A line for each strategy in one picture, the bars of one strategy in another.

    \b
    memest chart scaling --model llama-3.1-8b
    memest chart scaling --model blip2-opt-6.7b --bs 16 --strategies ddp,fsdp --devices 1,4,16
    memest chart scaling --model gpt2 --strategies deepspeed_stage_3_offload,fsdp --gpu rtx-4090
    """
    wanted, given = parse_wanted(formats), given_only(flags)
    values = _values(config, given)
    from memest.estimator.search.scaling import scale
    from memest.estimator.search.sweep import parse_values

    numbers = parse_values("devices", devices)
    names = parse_values("strategy", strategies)
    chosen = bars or ("fsdp" if "fsdp" in names else names[-1])
    if chosen not in names:
        raise PlanError(
            f"`--bars {chosen}` is not among the strategies",
            hint=f"name one of {', '.join(f'`{name}`' for name in names)}",
        )
    make_folder(out)
    with shown():
        lines = scale(values, strategies=names, devices=numbers, jobs=jobs)
    for line in lines:
        for note in line.notes:
            click.echo(f"{line.strategy}: {note}", err=True)
    _draw(lines, chosen, out, wanted, dark=dark, title=title)


def _values(config: Path | None, given: dict[str, Any]) -> dict[str, Any]:
    """The keys of the plan, on one card."""
    if config is not None:
        given = read_config(config, given).to_dict()
    if not given.get("gpu") and given.get("gpu_memory") is None:
        given = given | {"gpu": [DEFAULT_GPU]}
    cards = [*given.get("gpu", ()), *([""] if given.get("gpu_memory") is not None else [])]
    if len(cards) > 1:
        raise PlanError(f"{len(cards)} GPUs are named", hint="the chart has the line of one")
    return given


def _draw(
    lines: list[ScalingLine], chosen: str, out: Path, formats: list[str], *, dark: bool, title: str
) -> None:
    from memest.plots import plot_scaling, plot_scaling_bars

    rows = [row for line in lines for row in line.to_dicts()]
    save_chart(plot_scaling(lines, dark=dark), out / "scaling", formats, title, rows)
    line = next(line for line in lines if line.strategy == chosen)
    if line.reports:
        figure = plot_scaling_bars(line, dark=dark)
        save_chart(figure, out / f"scaling-{chosen}", formats, title, line.to_dicts())
