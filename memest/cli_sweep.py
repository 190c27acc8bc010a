"""`memest max-batch` and `memest sweep`: many predictions from few traces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from memest.cli import OOM_EXIT_CODE, _check_writable, _plan_options, _plans, _write, main
from memest.errors import PlanError


@main.command("max-batch")
@_plan_options
@click.option(
    "--config", type=click.Path(path_type=Path), help="YAML of one plan; flags override it."
)
@click.option("--max-seq-len", is_flag=True, help="The longest sequence instead, with --bs samples.")
@click.option("--all-techniques", is_flag=True, help="Every technique of the lab, as a table.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per card.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write to a file.")
@click.option("--check", is_flag=True, help=f"Exit with {OOM_EXIT_CODE} if nothing fits a card.")
@click.option("--jobs", type=click.IntRange(1), help="Processes; by default one per core.")
@click.option(
    "--trust-remote-code", is_flag=True, help="Run model code that a config brings along."
)
def max_batch(
    config: Path | None,
    max_seq_len: bool,
    all_techniques: bool,
    as_json: bool,
    output: Path | None,
    check: bool,
    jobs: int | None,
    trust_remote_code: bool,
    **flags: Any,
) -> int:
    """Find the largest batch (or sequence) that fits a card.

    \b
    memest max-batch --model llama-3.1-8b --lora --seq-len 2048 --gpu a100-80gb
    memest max-batch --model gpt2 --bs 8 --max-seq-len --gpu rtx-4090
    memest max-batch --model blip2-flan-t5-xxl --all-techniques --gpu a100-40gb --gpu a100-80gb
    """
    key = "seq_len" if max_seq_len else "batch_size"
    given = {k: v for k, v in flags.items() if v is not None and v != ()}
    if key in given:
        raise PlanError(
            f"`{key}` is given, and is what is looked for",
            hint="leave `--seq-len` out" if max_seq_len else "leave `--bs` out",
        )
    plan = _plans(config, None, given)[0]
    if output is not None:
        _check_writable(output)
    from memest.estimator.predict import judged_gpus
    from memest.models_meta.registry import check_name
    from memest.render_sweep import json_lines, render_largest, render_techniques

    gpus = judged_gpus(plan)
    check_name(plan.model_name)
    if all_techniques:
        from memest.estimator.techniques import largest_of_all

        rows = largest_of_all(plan, gpus, key, jobs=jobs, trust_remote_code=trust_remote_code)
        nothing_fits = all(r.largest is None or r.largest.value is None for r in rows)
        as_rows = [r.to_dict() for r in rows]
        text = json_lines(as_rows) if as_json else render_techniques(rows, key)
    else:
        from memest.estimator.largest import largest

        found = largest(plan, gpus, key, trust_remote_code=trust_remote_code)
        nothing_fits = any(row.value is None for row in found)
        as_rows = [row.to_dict() for row in found]
        text = json_lines(as_rows) if as_json else render_largest(found)
    if output is None:
        click.echo(text)
    else:
        _write(output, text + "\n")
    return OOM_EXIT_CODE if check and nothing_fits else 0
