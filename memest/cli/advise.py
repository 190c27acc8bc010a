"""`memest advise`: parse, one library call, render."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from memest.cli.files import check_writable, given_only, print_or_write, read_plans
from memest.cli.group import OOM_EXIT_CODE, main
from memest.cli.options import config_option, plan_options, remote_code_option
from memest.cli.terminal import folded, shown
from memest.errors import PlanError


@main.command()
@plan_options
@config_option
@click.option(
    "--max-predictions",
    type=click.IntRange(1),
    default=40,
    help="Largest number of predictions of the search.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the advice to a file.")
@click.option("--check", is_flag=True, help=f"Exit with {OOM_EXIT_CODE} if nothing fits.")
@remote_code_option
def advise(
    config: Path | None,
    max_predictions: int,
    as_json: bool,
    output: Path | None,
    check: bool,
    trust_remote_code: bool,
    **flags: Any,
) -> int:
    """Find changes that make a plan fit a GPU, cheapest first.

    \b
    memest advise --model blip2-opt-2.7b --precision 32-true --bs 64 --gpu a100-80gb
    memest advise --config lab.yaml --gpu rtx-4090 --json
    """
    given = given_only(flags)
    plan = read_plans(config, None, given)[0]
    if len(plan.gpu) + (plan.gpu_memory is not None) != 1:
        raise PlanError(
            "advice is for one GPU" + (f", not {len(plan.gpu)}" if plan.gpu else ""),
            hint="add `--gpu a100-80gb`, or `--gpu-memory 24GiB`",
        )
    from memest.estimator.predict import target_gpus
    from memest.models_meta.registry import check_name

    (gpu,) = target_gpus(plan)
    check_name(plan.model_name)
    if output is not None:
        check_writable(output)
    from memest.estimator.search.advise import advise as find_advice
    from memest.report.advice import render_advice

    with shown():
        advice = find_advice(
            plan, gpu, max_predictions=max_predictions, trust_remote_code=trust_remote_code
        )
    text = json.dumps(advice.to_dict()) if as_json else render_advice(advice)
    print_or_write(text if as_json or output is not None else folded(text), output)
    return OOM_EXIT_CODE if check and not (advice.fits or advice.options) else 0
