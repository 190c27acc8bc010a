"""`memest validate`: parse, one library call, and a table of its results."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from memest.cli import options
from memest.cli.files import given_only, read_plans
from memest.cli.group import main
from memest.cli.options import OUT, PATH
from memest.engines import Event, watched
from memest.errors import PlanError
from memest.plan import TrainingPlan
from memest.plan.training_plan import read_suite
from memest.units import GIB
from memest.validate.results import find_suite, suite_for_device

MAX_PACE_SECONDS = 290.0


@main.command()
@options.plan
@options.config
@click.option("--suite", help="lab-a100, lab-h100, or a YAML or JSON of many plans.")
@click.option("--results", type=PATH, help="JSON Lines to append to.")
@click.option("--resume", is_flag=True, help="Skip experiments that are in the results.")
@click.option(
    "--timeout", type=click.FloatRange(1), default=600.0,
    help="Time limit of an experiment, seconds.",
)  # fmt: skip
@click.option(
    "--weights", type=click.Choice(["random", "pretrained"]), default="random", help="Weights."
)
@click.option("--data", type=PATH, help="`datasets` folder with image and text columns.")
@click.option("--snapshots", type=PATH, help="Folder for recordings of the allocator.")
@click.option(
    "--pace",
    type=OUT,
    help="Measure times of kernels and host instead, into this JSON file: five minutes.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per experiment on stdout.")
@options.remote_code
@click.option("--workers", type=click.IntRange(1), help="Experiments at a time; one per GPU.")
@options.engine
def validate(
    config: Path | None, suite: str | None, results: Path | None, resume: bool, timeout: float,
    weights: str, data: Path | None, snapshots: Path | None, as_json: bool, trust_remote_code: bool,
    engine: str, workers: int | None, **flags: Any,
) -> int:  # fmt: skip
    """Run plans on the installed GPU and measure their memory.

    Without a plan, the suite of the GPU runs. The table goes to stderr, `--json` to stdout.
    Pretrained weights are from the Hub or a local folder. Without `--data`, data are synthetic.

    \b
    memest validate
    memest validate --suite lab-a100 --memory-limit 78.66GiB --resume
    memest validate --model blip2-opt-2.7b --bs 16 --precision 32-true
    """
    if pace := flags.pop("pace"):
        return _measure_pace(pace)
    plan_values = given_only(flags)
    for key in {"gpu", "gpu_memory", "beside"} & set(plan_values):
        raise PlanError(
            f"`--{key.replace('_', '-')}` does not apply: the GPU at hand is measured",
            hint="cap it with `--memory-limit 78.66GiB`",
        )
    if suite is not None:
        find_suite(suite)
    from memest.validate.runner import detect_on

    device = detect_on(engine)
    plans, label = _plans_to_run(config, suite, plan_values, device)
    plans = [replace(plan, trust_remote_code=trust_remote_code) for plan in plans]
    limit = plan_values.get("memory_limit")
    if results is None:
        suffix = f"-capped-{limit / GIB:.2f}GiB" if limit else ""
        gpu = device.catalogue_name.replace(" ", "-")
        results = Path("results", f"{gpu}-{label}{suffix}.jsonl")
    from memest.loops.job import RunOptions
    from memest.validate.runner import header
    from memest.validate.runner import validate as run_all

    run_options = RunOptions(weights=weights, data=data, snapshots=snapshots)
    click.echo(header(), err=True)
    with watched(_print_progress):
        measured = run_all(
            plans, results=results, device=device, resume=resume, timeout_s=timeout,
            options=run_options, engine=engine, workers=workers,
        )  # fmt: skip
    click.echo(f"results: {results}", err=True)
    if as_json:
        click.echo("\n".join(m.to_json() for m in measured))
    return 0


def _measure_pace(path: Path) -> int:
    """Measure times of kernels on the installed GPU, write them to `path`, and return 0."""
    from memest.validate.pace import measure, write
    from memest.validate.runner import detect_device

    device = detect_device()
    pace = measure(MAX_PACE_SECONDS, partial(write, path))
    num_rows = sum(len(rows) for rows in pace["kernels"].values())
    click.echo(
        f"{device.name}: {num_rows} calls of {len(pace['kernels'])} kinds -> {path}", err=True
    )
    click.echo(f"estimates take these times with MEMEST_PACE={path}", err=True)
    for failure in pace.get("failed", ()):
        click.echo(f"note: not measured: {failure}", err=True)
    return 0


def _plans_to_run(
    config: Path | None, suite: str | None, plan_values: dict[str, Any], device: Any
) -> tuple[Sequence[TrainingPlan], str]:
    """Return (plans to run, name for the results file). The plans are those of `config`, `suite` or
    the options `plan_values`, {plan key: value}. Without `config`, `suite` and a model in
    `plan_values`, the plans are those of the shipped suite for the installed GPU, such as
    `lab-h100`. `device` is the `Device` of that GPU."""
    from memest.validate.experiment import file_stem

    if config is None and (suite is not None or "model_name" not in plan_values):
        suite = suite or suite_for_device(device.name, device.memory_bytes)
        path = find_suite(suite)
        return read_suite(path, plan_values), path.stem
    (plan,) = read_plans(config, None if suite is None else Path(suite), plan_values)
    return [plan], file_stem(plan.label)


def _print_progress(event: Event) -> None:
    """Print the row of an experiment that has ended; a terminal also shows the running one."""
    from memest.validate.runner import table_row

    clear = "\r\x1b[K" if sys.stderr.isatty() else ""
    if event.is_done:
        click.echo(clear + table_row(event.result), err=True)
    elif clear:
        click.echo(f"{clear}{event.label}  is running", nl=False, err=True)
