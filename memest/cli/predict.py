"""`memest predict` and `memest advise`: parse, one library call, render, and write files."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memest.cli import options
from memest.cli.files import (
    given_only,
    only_one,
    print_or_write,
    read_plans,
    with_gpus,
    write_pages,
)
from memest.cli.group import main, print_error
from memest.cli.options import OUT, PATH, WholeTraining
from memest.cli.resume import forget, predict_resumably
from memest.cli.terminal import has_colour, progress_bar
from memest.errors import OOM_EXIT_CODE, PlanError
from memest.estimator.hardware.gpus import custom_gpu
from memest.estimator.predict import record_plan, target_gpus
from memest.estimator.search.many_plans import partition, with_label
from memest.models_meta.registry import check_name
from memest.plan import TrainingPlan
from memest.report import Prediction
from memest.report.answer import NAMES, resource_lines, summary_line
from memest.report.text import render_advice, render_suite, render_text

if TYPE_CHECKING:
    from memest.estimator.search.advise import Option


@main.command()
@options.plan
@options.config
@click.option("--suite", type=PATH, help="YAML, JSON or TOML of many plans.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per plan.")
@click.option("-o", "--output", type=OUT, help="Write the report to a file.")
@options.training(has_epochs=True)
@click.option("--check", is_flag=True, help=f"Exit with {OOM_EXIT_CODE} if a plan does not fit.")
@click.option("--summary", is_flag=True, help="Print one line per plan and requested GPU.")
@options.emit
@click.option("--resume", is_flag=True, help="Continue an interrupted suite, with -o.")
@click.option("-v", "--verbose", is_flag=True, help="List all assumptions.")
@options.jobs
@options.remote_code
@click.option("--html", type=OUT, help="Write a page with charts as well.")
@click.option("--snapshot", type=OUT, help="Write a memory snapshot, as torch does.")
@click.option("--chrome-trace", type=OUT, help="Write a trace for Perfetto, as JSON.")
def predict(
    config: Path | None, suite: Path | None, as_json: bool, output: Path | None, check: bool,
    summary: bool, emit: str | None, resume: bool, verbose: bool, whole: WholeTraining,
    **flags: Any,
) -> int:  # fmt: skip
    """Predict one plan, or a suite.

    \b
    memest predict --model blip2-flan-t5-xxl --optim adam_8bit --bs 2
    memest predict --model llama-3.1-8b --lora --seq-len 2048 --gpu a100-80gb --gpu rtx-4090
    memest predict --config lab.yaml --bs 8
    memest predict --suite experiments.yaml --json
    memest predict --model gpt2 --bs 8 --html report.html --snapshot step.pickle
    """
    files = {name: flags.pop(name) for name in ("html", "snapshot", "chrome_trace")}
    jobs = flags.pop("jobs")
    _check_output(as_json, summary, emit, suite, output, resume, whole)
    plans = read_plans(config, suite, given_only(flags))
    if (files["snapshot"] or files["chrome_trace"]) and len(plans) > 1:
        raise PlanError("a recording is of one plan", hint="leave `--suite` out")
    if emit:
        plans = [with_gpus(plan, *NAMES) for plan in plans]
    with progress_bar():
        results = predict_resumably(plans, output if suite else None, is_resumed=resume, jobs=jobs)
    predicted, failed = partition(plans, results)
    errors = [error for _, error in failed]
    if suite is None and errors:
        raise errors[0]
    reports = [report for _, report in predicted]
    if as_json:
        text = "\n".join(report.to_json() for report in reports)
    elif summary or emit:
        text = "\n".join(_summary_text(report, emit) for report in reports)
    elif suite is not None:
        text = render_suite(reports)
    else:
        change = _cheapest_fit(plans[0], reports[0])
        training = whole.of(reports[0].plan) if whole.is_given else None
        style = {"colour": output is None and has_colour(), "verbose": verbose}
        text = render_text(reports[0], change=change, training=training, **style)
    print_or_write(text, output, is_folded=not (as_json or summary or emit or suite))
    forget(output if suite else None)
    for plan, error in failed:
        labelled = with_label(plan, error)
        print_error(str(labelled), labelled.hint)
    write_files([plan for plan, _ in predicted], reports, **files)
    if errors:
        return errors[0].exit_code
    is_doubtful = any(report.verdict != "fits" or report.warnings for report in reports)
    return OOM_EXIT_CODE if check and is_doubtful else 0


def _check_output(
    as_json: bool, summary: bool, emit: str | None, suite: Path | None, output: Path | None,
    resume: bool, whole: WholeTraining,
) -> None:  # fmt: skip
    """Raise `PlanError` if options of `memest predict` exclude each other or have no effect. Only
    one of `as_json`, `summary` and `emit` (None: not given) is allowed. `resume` needs `suite`, a
    file of plans, and the file `output`. Steps or prices in `whole`, if given, need the text
    report of one plan."""
    form = only_one({"--json": as_json, "--summary": summary, "--emit": emit})
    if resume and (suite is None or output is None):
        raise PlanError("`--resume` needs `--suite` and `-o`", hint="results are stored next to it")
    if whole.is_given and (form or suite is not None):
        raise PlanError(
            f"hours and prices are not part of `{form or '--suite'}`",
            hint="leave it out, or use `memest cheapest --json`",
        )


def _summary_text(report: Prediction, emit: str | None) -> str:
    """Return one summary line per GPU. If `emit` names a scheduler, such as `slurm`, return the
    resource lines of a job script instead."""
    plan = report.plan
    if emit:
        nodes = {"num_gpus": plan["devices"], "num_nodes": plan["num_nodes"]}
        return resource_lines(report, emit, **nodes)
    is_named = plan.get("gpu") or plan.get("gpu_memory") is not None
    gpus = report.verdicts if is_named else [report.gpu]
    return "\n".join(summary_line(report, gpu) for gpu in gpus)


def _cheapest_fit(plan: TrainingPlan, report: Prediction) -> "Option | None":
    """Return the cheapest single change with which `plan` fits its GPU. None if the verdict of
    `report`, its prediction, is not `oom`, or if there is no such change."""
    verdict = report.verdicts.get(report.gpu)
    if verdict is None or verdict.verdict != "oom":
        return None
    from memest.estimator.search.advise import cheapest_change

    gpu = custom_gpu(plan.gpu_memory) if plan.gpu_memory and not plan.gpu else report.gpu
    with progress_bar("looking for what would fit"):
        return cheapest_change(plan, gpu, report)


def write_files(
    plans: Sequence[TrainingPlan], reports: Sequence[Prediction], **files: Path | None
) -> None:
    """Write each of `files` ({name: path}) whose path is not None, as `write_pages` does. `reports`
    are the predictions of `plans`. A snapshot or trace needs a single plan."""
    if not any(files.values()):
        return
    recording = None
    if len(plans) == 1:
        try:
            recording = record_plan(plans[0])
        except PlanError:  # the run is too long: the page has no timeline
            if files["snapshot"] or files["chrome_trace"]:
                raise
    write_pages(reports, recording, **files)


@main.command()
@options.plan
@options.config
@click.option(
    "--max-predictions", type=click.IntRange(1), default=40,
    help="Largest number of predictions of the search.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("-o", "--output", type=OUT, help="Write the advice to a file.")
@click.option("--check", is_flag=True, help=f"Exit with {OOM_EXIT_CODE} if nothing fits.")
@options.remote_code
def advise(
    config: Path | None, max_predictions: int, as_json: bool, output: Path | None, check: bool,
    **flags: Any,
) -> int:  # fmt: skip
    """Find changes that make a plan fit a GPU, cheapest first.

    \b
    memest advise --model blip2-opt-2.7b --precision 32-true --bs 64 --gpu a100-80gb
    memest advise --config lab.yaml --gpu rtx-4090 --json
    """
    plan_values = given_only(flags)
    (plan,) = read_plans(config, None, plan_values, tries_lora=True)
    num_gpus = len(plan.gpu)
    if plan.gpu_memory is not None:
        num_gpus += 1
    if num_gpus != 1:
        raise PlanError(
            f"advice is for one GPU, not {num_gpus}" if num_gpus else "advice is for one GPU",
            hint="add `--gpu a100-80gb`, or `--gpu-memory 24GiB`",
        )
    (gpu,) = target_gpus(plan)
    check_name(plan.model_name)
    from memest.estimator.search.advise import advise as find_advice

    with progress_bar():
        advice = find_advice(plan, gpu, max_predictions=max_predictions)
    text = json.dumps(advice.to_dict()) if as_json else render_advice(advice)
    print_or_write(text, output, is_folded=not as_json)
    return OOM_EXIT_CODE if check and not (advice.fits or advice.options) else 0
