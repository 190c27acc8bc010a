"""`memest cheapest`: GPUs on which a plan or a script fits, by the estimated cost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import click

from memest.cli.files import given_only, read_plans
from memest.cli.group import main
from memest.cli.options import WholeTraining, plan_options, training_options
from memest.cli.terminal import folded, progress_bar
from memest.errors import PlanError
from memest.estimator.hardware.gpus import find_gpu, list_gpus
from memest.report import RunReport, SimulatedReport
from memest.report.text import table
from memest.report.times import Training, time_cells, time_notes
from memest.run.target import find_script


@main.command(context_settings={"allow_interspersed_args": False})
@plan_options
@training_options(has_epochs=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per GPU.")
@click.argument("script", nargs=-1, type=click.UNPROCESSED, metavar="[SCRIPT [ARGS]...]")
def cheapest(as_json: bool, script: tuple[str, ...], whole: WholeTraining, **flags: Any) -> int:
    """List the GPUs on which a training fits, by its estimated cost.

    Without prices they are listed by time. Without a number of steps, figures are of 1,000 steps.

    \b
    memest cheapest --model gpt2 --bs 8 --train-steps 10000 --price prices.yaml
    memest cheapest --gpu a100-80gb --gpu l40s --price 1.20 train.py --bs 8
    """
    from memest.estimator.predict import predict

    given = given_only(flags)
    if given.get("gpu_memory") is not None:
        raise PlanError("a GPU with `--gpu-memory` has no speed", hint="name GPUs by `--gpu`")
    names = tuple(given.get("gpu") or (g.name for g in list_gpus()))
    with progress_bar("simulating"):
        if script:
            report: SimulatedReport = _of_script(script, names, given)
        else:
            report = predict(replace(read_plans(None, None, given)[0], gpu=names))
    training = whole.of(report.plan)
    found = _ranked(report, training)
    if as_json:
        _print_json(report, training, found)
    else:
        click.echo(folded(_text(report, training, found)))
    return 0


def _of_script(script: Sequence[str], names: Sequence[str], given: dict[str, Any]) -> RunReport:
    """Run the script on the largest GPU, and replay it on the others; refuse options of plans."""
    from memest.run.launcher import run_target
    from memest.run.session import Session

    if unknown := sorted(set(given) - {"gpu"}):
        raise PlanError(
            f"`--{unknown[0].replace('_', '-')}` is an option of plans, and a script is given",
            hint="leave one of the two out",
        )
    largest = max(map(find_gpu, names), key=lambda gpu: gpu.memory_bytes)
    target = find_script(script[0], tuple(script[1:]))
    ran = run_target(target, Session(largest, name=target.label, roots=target.roots, others=names))
    if ran.report is None:
        raise PlanError("the script has not used the GPU", hint="try it with `memest run`")
    return ran.report


def _ranked(report: SimulatedReport, training: Training) -> list[str]:
    """Return names of GPUs on which the training fits: by price, those without one by time."""

    def cost(gpu: str) -> tuple[float, float]:
        hours = training.hours(report.times[gpu])[0]
        price = training.price_of(gpu)
        return (float("inf") if price is None else price * hours), hours

    fitting = [g for g, v in report.verdicts.items() if v.verdict == "fits" and g in report.times]
    return sorted(fitting, key=cost)


def _text(report: SimulatedReport, training: Training, found: Sequence[str]) -> str:
    too_small = [g for g, v in report.verdicts.items() if v.verdict != "fits"]
    warnings = [f"warning: {line}" for line in report.warnings]
    lines = [*warnings, f"{report.name}: {training.num_steps:,} steps", ""]
    if found:
        lines += table(time_cells(report, training, found), left=1)
    if not report.times:
        lines.append("no whole optimizer step ran, so there is no estimate")
    if too_small:
        lines.append(f"does not fit, or may not: {', '.join(too_small)}")
    return "\n".join([*lines, *time_notes(report)])


def _print_json(report: SimulatedReport, training: Training, found: Sequence[str]) -> None:
    for gpu in found:
        time, price = report.times[gpu], training.price_of(gpu)
        hours, low, high = training.hours(time)
        row = {"gpu": gpu, "num_steps": training.num_steps, "step": asdict(time), "hours": hours}
        row |= {"low_hours": low, "high_hours": high}
        row["price"] = None if price is None else price * hours
        click.echo(json.dumps(row))
