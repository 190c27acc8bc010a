"""`memest max-batch`, `memest sweep` and `memest cheapest`: many predictions, few simulations."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from memest.cli import options
from memest.cli.files import given_only, print_or_write, read_plans
from memest.cli.group import main
from memest.cli.options import OUT, VALUES, WholeTraining, combined, completes
from memest.cli.resume import forget, sweep_resumably
from memest.cli.terminal import folded, progress_bar
from memest.errors import OOM_EXIT_CODE, PlanError
from memest.estimator.hardware.gpus import find_gpu, list_gpus
from memest.estimator.predict import predict, target_gpus
from memest.estimator.search.sweep import Grid, make_grid, parse_values
from memest.models_meta.registry import check_name
from memest.plan import TrainingPlan
from memest.plan.training_plan import PLAN_KEYS, read_config
from memest.report import RunReport, SimulatedReport
from memest.report.text import render_largest, render_techniques, table, to_csv
from memest.report.times import Training, time_cells, time_notes
from memest.run.target import find_script


@main.command("max-batch")
@options.plan
@options.config
@click.option("--max-seq-len", is_flag=True, help="Find the longest sequence, with --bs samples.")
@click.option("--all-techniques", is_flag=True, help="Try every technique of the lab, as a table.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per GPU.")
@click.option("-o", "--output", type=OUT, help="Write to a file.")
@click.option("--check", is_flag=True, help=f"Exit with {OOM_EXIT_CODE} if nothing fits a GPU.")
@options.jobs
@options.remote_code
def max_batch(
    config: Path | None, max_seq_len: bool, all_techniques: bool, as_json: bool,
    output: Path | None, check: bool, jobs: int | None, **flags: Any,
) -> int:  # fmt: skip
    """Find the largest batch (or sequence) that fits a GPU.

    \b
    memest max-batch --model llama-3.1-8b --lora --seq-len 2048 --gpu a100-80gb
    memest max-batch --model gpt2 --bs 8 --max-seq-len --gpu rtx-4090
    memest max-batch --model blip2-flan-t5-xxl --all-techniques --gpu a100-40gb --gpu a100-80gb
    """
    key = "seq_len" if max_seq_len else "batch_size"
    plan_values = given_only(flags)
    if key in plan_values:
        raise PlanError(
            f"`{key}` is given, but the command searches for it",
            hint="leave `--seq-len` out" if max_seq_len else "leave `--bs` out",
        )
    (plan,) = read_plans(config, None, plan_values, tries_lora=all_techniques)
    gpus = target_gpus(plan)
    check_name(plan.model_name)
    from memest.estimator.search.largest import largest, largest_of_all

    rows: Any
    if all_techniques:
        with progress_bar():
            rows = largest_of_all(plan, gpus, key, jobs=jobs)
        text = render_techniques(rows, key)
        is_oom = all(row.largest is None or row.largest.value is None for row in rows)
    else:
        with progress_bar(f"{plan.label}: looking for the largest"):
            rows = largest(plan, gpus, key)
        text = render_largest(rows)
        is_oom = any(row.value is None for row in rows)
    if as_json:
        text = "\n".join(json.dumps(row.to_dict()) for row in rows)
    print_or_write(text, output, is_folded=not as_json)
    return OOM_EXIT_CODE if check and is_oom else 0


grid_options = combined(
    *(
        click.option(
            row.flags[0], name, help=row.sweep,
            shell_complete=completes(VALUES[name], is_list=True) if name in VALUES else None,
        )
        for name, row in PLAN_KEYS.items()
        if row.sweep
    ),
    options.gpus("GPU to judge; a list, or repeat for more."),
    click.option("--gpu-memory", help="Memory of a GPU not in the catalogue: 24GiB."),
    click.option("--vary", multiple=True, metavar="KEY=VALUES", help="Any other key of a plan."),
    options.config,
    click.option(
        "--max-points", type=click.IntRange(1), default=1000, show_default=True,
        help="Refuse a sweep of more plans than this.",
    ),
    options.jobs,
    options.remote_code,
)  # fmt: skip
"""Options of a grid of plans, for `grid_points` and for the run."""


def grid_points(
    *, gpu: tuple[str, ...], gpu_memory: str | None, vary: tuple[str, ...], config: Path | None,
    max_points: int, trust_remote_code: bool, **flags: str | None,
) -> Grid:  # fmt: skip
    """Return ({varied key: value}, plan or its error) for each combination of the keys' values.
    `flags` ({key: text such as `1,2,4`}) and `vary` (texts `KEY=VALUES`) have these values. The
    file `config` has the other keys. `gpu` has the names of every plan's GPUs. `gpu_memory` adds a
    GPU of this memory, such as `24GiB`; None adds none. More than `max_points` combinations are an
    error."""
    varied = _values_by_key(flags, vary)
    base: dict[str, Any] = {}
    if config is not None:
        first_values = {key: values[0] for key, values in varied.items()}
        base = read_config(config, first_values).to_dict()
    if gpu:
        base["gpu"] = list(gpu)
    if gpu_memory is not None:
        base["gpu_memory"] = gpu_memory
    grid = make_grid(base, varied, max_points=max_points)
    with_trust = partial(replace, trust_remote_code=trust_remote_code)
    return [
        (values, with_trust(plan) if isinstance(plan, TrainingPlan) else plan)
        for values, plan in grid
    ]


@main.command("sweep")
@grid_options
@click.option("--json", "as_json", is_flag=True, help="JSON Lines instead of CSV.")
@click.option("-o", "--output", type=OUT, help="A .csv or .jsonl file.")
@click.option("--check", is_flag=True, help=f"Exit with {OOM_EXIT_CODE} if nothing fits.")
@click.option("--resume", is_flag=True, help="Continue an interrupted sweep, with -o.")
@options.engine
def sweep(
    as_json: bool, output: Path | None, check: bool, resume: bool, engine: str, jobs: int | None,
    **flags: Any,
) -> int:  # fmt: skip
    """Predict every combination of values of a plan's keys.

    \b
    memest sweep --model gpt2,opt-125m --bs 1:64 --gpu a100-40gb -o sweep.csv
    memest sweep --model llama-3.1-8b --lora true,false --seq-len 512:4096:512 --json
    memest sweep --config lab.yaml --precision bf16-true,32-true --vary freeze=none,vision_model.*
    """
    as_json = _is_json(output, as_json)
    if resume and output is None:
        raise PlanError("`--resume` needs `-o`", hint="results are stored next to that file")
    points = grid_points(**flags)
    with progress_bar():
        rows = sweep_resumably(points, output, is_resumed=resume, jobs=jobs, engine=engine)
    text = "\n".join(map(json.dumps, rows)) if as_json else to_csv(rows)
    print_or_write(text, output)
    forget(output)
    return OOM_EXIT_CODE if check and not any(row["verdict"] == "fits" for row in rows) else 0


def _values_by_key(flags: Mapping[str, str | None], vary: Sequence[str]) -> dict[str, list[Any]]:
    """Return {key: values to try}. `flags` has {key: text of the values, None if not given}; `vary`
    has texts `KEY=VALUES`."""
    texts = {key: text for key, text in flags.items() if text is not None}
    for item in vary:
        key, equals, text = item.partition("=")
        if not equals or key in texts:
            problem = "is given twice" if equals else "has no `=`"
            raise PlanError(f"`--vary {item}` {problem}", hint="write it as `--vary lora_r=8,16`")
        texts[key] = text
    return {key: parse_values(key, text) for key, text in texts.items()}


def _is_json(output: Path | None, as_json: bool) -> bool:
    """Return True for JSON Lines, False for CSV: by the suffix of `output`; if None, `as_json`."""
    if output is None:
        return as_json
    suffixes = [".jsonl"] if as_json else [".csv", ".jsonl"]
    if output.suffix not in suffixes:
        raise PlanError(
            f"`{output}` is no {' or '.join(suffixes)} file",
            hint="the format goes by the ending: `sweep.csv` or `sweep.jsonl`",
        )
    return output.suffix == ".jsonl"


@main.command(context_settings={"allow_interspersed_args": False})
@options.plan
@options.training(has_epochs=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per GPU.")
@click.argument("script", nargs=-1, type=click.UNPROCESSED, metavar="[SCRIPT [ARGS]...]")
def cheapest(as_json: bool, script: tuple[str, ...], whole: WholeTraining, **flags: Any) -> int:
    """List the GPUs on which a training fits, by its estimated cost.

    Without prices they are listed by time. Without a number of steps, figures are of 1,000 steps.

    \b
    memest cheapest --model gpt2 --bs 8 --train-steps 10000 --price prices.yaml
    memest cheapest --gpu a100-80gb --gpu l40s --price 1.20 train.py --bs 8
    """
    plan_values = given_only(flags)
    if plan_values.get("gpu_memory") is not None:
        raise PlanError("a GPU with `--gpu-memory` has no speed", hint="name GPUs by `--gpu`")
    names = tuple(plan_values.get("gpu") or (g.name for g in list_gpus()))
    with progress_bar("simulating"):
        if script:
            report: SimulatedReport = _run_script(script, names, plan_values)
        else:
            (plan,) = read_plans(None, None, plan_values)
            report = predict(replace(plan, gpu=names), jobs=os.cpu_count() or 1)
    training = whole.of(report.plan)

    def cost(gpu: str) -> tuple[float, float]:
        hours, _, _ = training.hours(report.times[gpu])
        price = training.price_of(gpu)
        return (float("inf") if price is None else price * hours), hours

    fitting = [g for g, v in report.verdicts.items() if v.verdict == "fits" and g in report.times]
    gpus = sorted(fitting, key=cost)  # by price, GPUs without one by time
    if not as_json:
        click.echo(folded(_cheapest_text(report, training, gpus)))
        return 0
    for gpu in gpus:
        time, price = report.times[gpu], training.price_of(gpu)
        hours, low, high = training.hours(time)
        row = {"gpu": gpu, "num_steps": training.num_steps, "step": asdict(time), "hours": hours}
        row |= {"low_hours": low, "high_hours": high}
        row["price"] = None if price is None else price * hours
        click.echo(json.dumps(row))
    return 0


def _run_script(script: Sequence[str], names: Sequence[str], flags: dict[str, Any]) -> RunReport:
    """Simulate `script`, a path and arguments, on that GPU of `names` which has most memory. Return
    its report, with verdicts and times for all `names`. `flags` has the command's options; any
    except `gpu` is an error."""
    from memest.run.session import Session, run_target

    if unknown := sorted(set(flags) - {"gpu"}):
        raise PlanError(
            f"`--{unknown[0].replace('_', '-')}` is an option of plans, and a script is given",
            hint="leave one of the two out",
        )
    largest = max(map(find_gpu, names), key=lambda gpu: gpu.memory_bytes)
    target = find_script(script[0], tuple(script[1:]))
    run = run_target(target, Session(largest, name=target.label, roots=target.roots, others=names))
    if run.report is None:
        raise PlanError("the script has not used the GPU", hint="try it with `memest run`")
    return run.report


def _cheapest_text(report: SimulatedReport, training: Training, gpus: Sequence[str]) -> str:
    """Return the text of `memest cheapest`. It has a table with a row for each of `gpus`, in this
    order. A further line names the GPUs in `report` on which the training does not fit. `training`
    has the number of steps and the prices, for the columns of hours and price."""
    too_small = [g for g, v in report.verdicts.items() if v.verdict != "fits"]
    warnings = [f"warning: {line}" for line in report.warnings]
    lines = [*warnings, f"{report.name}: {training.num_steps:,} steps", ""]
    if gpus:
        lines += table(time_cells(report, training, gpus), left=1)
    if not report.times:
        lines.append("no whole optimizer step ran, so there is no estimate")
    if too_small:
        lines.append(f"does not fit, or may not: {', '.join(too_small)}")
    return "\n".join([*lines, *time_notes(report)])
