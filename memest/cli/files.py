"""Reading of plans and writing of answers, for all commands."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memest.cli.terminal import folded
from memest.errors import PlanError
from memest.plan import TrainingPlan
from memest.plan.keys import NEEDS
from memest.plan.training_plan import read_config, read_suite
from memest.report import SimulatedReport
from memest.writing import why_not_writable, write_output

if TYPE_CHECKING:
    from memest.estimator.replay.recording import Recording

_ADAPTER_KEYS = ("lora_r", "lora_alpha", "lora_dropout")
"""LoRA keys. A suite may set them for all its plans; as command-line options they need LoRA."""


def only_one(options: Mapping[str, Any]) -> str:
    """Return the name of the option in `options` ({name: value}) whose value is true; "" if none
    is. Raise `PlanError` if several are."""
    names = [name for name, value in options.items() if value]
    if len(names) > 1:
        raise PlanError(f"`{names[0]}` and `{names[1]}` are given together", hint="choose one")
    return "".join(names)


def given_only(flags: dict[str, Any]) -> dict[str, Any]:
    """Return the options of `flags` ({name: value}) that the user gave: neither None nor ()."""
    return {k: v for k, v in flags.items() if v is not None and v != ()}


def read_plans(
    config: Path | None, suite: Path | None, given: dict[str, Any], *, tries_lora: bool = False
) -> list[TrainingPlan]:
    """Return the plans of a command: that of the file `config`, or those of the file `suite`. If
    both are None, return one plan of the options `given`: {plan key: value}. Otherwise `given`
    overrides the file. LoRA options are an error if no plan has adapters, unless the command itself
    tries LoRA (`tries_lora`)."""
    only_one({"--config": config, "--suite": suite})
    trust_remote_code = given.pop("trust_remote_code", False)
    if suite is not None:
        plans = read_suite(suite, given)
    else:
        plans = [TrainingPlan.from_dict(given) if config is None else read_config(config, given)]
    needs = [] if tries_lora else [key for key in _ADAPTER_KEYS if key in given]
    if needs and not any(plan.uses_adapters for plan in plans):
        need = NEEDS["adapters"]
        raise PlanError(need.error.format(key=needs[0]), hint=need.hint)
    return [replace(plan, trust_remote_code=trust_remote_code) for plan in plans]


def with_gpus(plan: TrainingPlan, *names: str) -> TrainingPlan:
    """Return `plan` with the GPUs `names`, unless the plan names GPUs itself."""
    return plan if plan.gpu or plan.gpu_memory is not None else replace(plan, gpu=names)


def print_or_write(text: str, output: Path | None, *, is_folded: bool = False) -> None:
    """Write `text` to the file `output`; None prints it, wrapped to the terminal if `is_folded`."""
    if output is None:
        click.echo(folded(text) if is_folded else text)
    else:
        write_output(output, text + "\n")


def write_pages(
    reports: Sequence[SimulatedReport], recording: "Recording | None", *, html: Path | None,
    snapshot: Path | None, chrome_trace: Path | None,
) -> None:  # fmt: skip
    """Write each file whose path is not None. `html` is a page of `reports`. `snapshot` is a memory
    snapshot as torch writes it, and `chrome_trace` a trace for Perfetto. These two show the
    allocator's actions in `recording`; if that is None, they are not written."""
    if html is not None:
        from memest.report.page import render_page

        write_output(html, render_page(reports, recording=recording))
    if recording is not None:
        from memest.estimator.replay.recording import write_chrome_trace, write_snapshot

        if snapshot is not None:
            write_snapshot(recording, snapshot)
        if chrome_trace is not None:
            write_chrome_trace(recording, chrome_trace)


def make_folder(folder: Path) -> None:
    """Make `folder` if it is missing; raise `PlanError` if no files can be written to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlanError(
            f"`{folder}` cannot be made: {error.strerror}", hint="name another folder"
        ) from error
    if why := why_not_writable(folder / "picture"):
        raise PlanError(f"`{folder}` cannot be written: {why}", hint="name another folder")
