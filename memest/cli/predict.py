"""`memest predict`: parse, one library call, render, and the files beside the report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memest.cli.files import check_writable, given_only, read_plans, write_text
from memest.cli.group import OOM_EXIT_CODE, main, tell
from memest.cli.options import plan_options
from memest.cli.progress import shown
from memest.cli.terminal import folded, has_colour
from memest.errors import PlanError
from memest.estimator.hardware.gpus import custom_gpu
from memest.plan import TrainingPlan

if TYPE_CHECKING:
    from memest.estimator.search.advise import Option
    from memest.report import Prediction


@main.command()
@plan_options
@click.option(
    "--config", type=click.Path(path_type=Path), help="YAML of one plan; flags override it."
)
@click.option("--suite", type=click.Path(path_type=Path), help="YAML or JSON of many plans.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per plan.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the report to a file.")
@click.option("--check", is_flag=True, help=f"Exit with {OOM_EXIT_CODE} if a plan does not fit.")
@click.option("--resume", is_flag=True, help="Of a suite with -o: go on where it was interrupted.")
@click.option("-v", "--verbose", is_flag=True, help="With all that is assumed.")
@click.option(
    "--jobs", type=click.IntRange(1), help="Processes for a suite; by default one per core."
)
@click.option(
    "--trust-remote-code", is_flag=True, help="Run model code that a config brings along."
)
@click.option("--html", type=click.Path(path_type=Path), help="Write a page with charts as well.")
@click.option(
    "--snapshot", type=click.Path(path_type=Path), help="Write the run as PyTorch's snapshot."
)
@click.option(
    "--chrome-trace", type=click.Path(path_type=Path), help="Write the run for Perfetto, as JSON."
)
def predict(
    config: Path | None,
    suite: Path | None,
    as_json: bool,
    output: Path | None,
    check: bool,
    resume: bool,
    verbose: bool,
    **flags: Any,
) -> int:
    """Predict one plan, or a suite of them.

    \b
    memest predict --model blip2-flan-t5-xxl --optim adam_8bit --bs 2
    memest predict --model llama-3.1-8b --lora --seq-len 2048 --gpu a100-80gb --gpu rtx-4090
    memest predict --config lab.yaml --bs 8
    memest predict --suite experiments.yaml --json
    memest predict --model gpt2 --bs 8 --html report.html --snapshot step.pickle
    """
    files = {name: flags.pop(name) for name in ("html", "snapshot", "chrome_trace")}
    how = {name: flags.pop(name) for name in ("jobs", "trust_remote_code")}
    plans = read_plans(config, suite, given_only(flags))
    for path in (output, *files.values()):
        if path is not None:
            check_writable(path)
    if (files["snapshot"] or files["chrome_trace"]) and len(plans) > 1:
        raise PlanError("a recording is of one plan", hint="leave `--suite` out")
    from memest.cli.kept import predict_kept
    from memest.estimator.search.suite import apart, named

    with shown():
        found = predict_kept(plans, output if suite else None, is_resumed=resume, **how)
    predicted, failed = apart(plans, found)
    if suite is None and failed:
        raise failed[0][1]
    reports = [report for _, report in predicted]
    write_files([plan for plan, _ in predicted], reports, **files)
    if as_json:
        text = "\n".join(report.to_json() for report in reports)
    elif suite is not None:
        from memest.render.text import render_suite

        text = render_suite(reports)
    else:
        looks = {"is_shown": output is None, "verbose": verbose}
        text = _one(plans[0], reports[0], how["trust_remote_code"], **looks)
    if output is None:
        click.echo(text)
    else:
        write_text(output, text + "\n")
    for error in (named(*each) for each in failed):
        tell(str(error), error.hint)
    if failed:
        return failed[0][1].exit_code
    return OOM_EXIT_CODE if check and any(r.verdict != "fits" for r in reports) else 0


def _one(
    plan: TrainingPlan,
    report: Prediction,
    trust_remote_code: bool,
    *,
    is_shown: bool,
    verbose: bool,
) -> str:
    from memest.render.text import render_text

    with shown("looking for what would fit"):
        change = _cheapest(plan, report, trust_remote_code=trust_remote_code)
    colour = is_shown and has_colour()
    text = render_text(report, change=change, colour=colour, verbose=verbose)
    return folded(text) if is_shown else text


def _cheapest(plan: TrainingPlan, report: Prediction, *, trust_remote_code: bool) -> Option | None:
    """Of a plan that does not fit: the cheapest change with which it does, if it is soon found."""
    verdict = report.verdicts.get(report.gpu)
    if verdict is None or verdict.verdict != "oom":
        return None
    from memest.estimator.search.advise import cheapest_change

    card = custom_gpu(plan.gpu_memory) if plan.gpu_memory and not plan.gpu else report.gpu
    return cheapest_change(plan, card, report, trust_remote_code=trust_remote_code)


def write_files(
    plans: Sequence[TrainingPlan],
    reports: Sequence[Prediction],
    *,
    html: Path | None,
    snapshot: Path | None,
    chrome_trace: Path | None,
) -> None:
    """What `predict` writes beside its report: a page, PyTorch's snapshot, Chrome's trace."""
    if not (html or snapshot or chrome_trace):
        return
    recording = None
    if len(plans) == 1:
        from memest.estimator.predict import record_plan

        try:
            recording = record_plan(plans[0])
        except PlanError:  # too long a run: a page does without its timeline
            if snapshot or chrome_trace:
                raise
    if html is not None:
        from memest.render.html import render_page

        write_text(html, render_page(reports, recording=recording))
    if recording is not None:
        from memest.estimator.trace.snapshot import write_chrome_trace, write_snapshot

        if snapshot is not None:
            write_snapshot(recording, snapshot)
        if chrome_trace is not None:
            write_chrome_trace(recording, chrome_trace)
