"""`memest run`: a training script on a GPU that is not there, and the report of it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from memest.cli.files import check_writable, write_text
from memest.cli.group import OOM_EXIT_CODE, main, tell
from memest.cli.options import VALUES, completes
from memest.cli.terminal import has_colour
from memest.errors import PlanError
from memest.estimator.hardware.gpus import Gpu, custom_gpu, find_gpu
from memest.estimator.predict import PRIMARY_GPU
from memest.run.target import Target, check_single_process, find_module, find_script
from memest.units import parse_bytes

if TYPE_CHECKING:
    from memest.report import RunReport
    from memest.run.session import Session

NOT_USED_EXIT_CODE = 2
"""Of a script that goes through without the GPU."""

RULE = "-" * 80


class _Bytes(click.ParamType):  # type: ignore[type-arg]
    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        return parse_bytes(value)


class _RunCommand(click.Command):
    """What comes after the script, or after `-m MODULE`, is the script's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        takes_value = {
            name
            for param in self.params
            if isinstance(param, click.Option) and not param.is_flag
            for name in param.opts
        }
        position = 0
        while position < len(args) and args[position].startswith("-"):
            token = args[position]
            position += 2 if token in takes_value else 1
            if token.startswith("-m"):
                args = [*args[:position], "--", *args[position:]]
                break
            if token == "--":
                break
        return super().parse_args(ctx, args)


_FILE = click.Path(path_type=Path)


@main.command(cls=_RunCommand, context_settings={"allow_interspersed_args": False})
@click.option(
    "--gpu",
    "gpu_name",
    help=f"The card; by default {PRIMARY_GPU}.",
    shell_complete=completes(VALUES["gpu"]),
)
@click.option("--gpu-memory", type=_Bytes(), help="Memory of a card not in the catalogue: 24GiB.")
@click.option("--memory-limit", type=_Bytes(), help="Cap on the allocator: 78.4GiB.")
@click.option("--max-steps", type=click.IntRange(1), help="End after so many optimizer steps.")
@click.option("--strict", is_flag=True, help="Refuse to guess values that the script reads.")
@click.option("--json", "json_path", type=_FILE, help="Write the report to a file as JSON.")
@click.option("--html", type=_FILE, help="Write the report as a page.")
@click.option("--snapshot", type=_FILE, help="Write the run as PyTorch's snapshot.")
@click.option("--chrome-trace", type=_FILE, help="Write the run for Perfetto, as JSON.")
@click.option("--check", is_flag=True, help=f"Exit with {OOM_EXIT_CODE} if it does not fit.")
@click.option("-v", "--verbose", is_flag=True, help="With all that is assumed.")
@click.option("-m", "module", help="Run a module, as `python -m` does; ends memest's options.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGS]...")
def run(
    gpu_name: str | None,
    gpu_memory: int | None,
    memory_limit: int | None,
    max_steps: int | None,
    strict: bool,
    json_path: Path | None,
    html: Path | None,
    snapshot: Path | None,
    chrome_trace: Path | None,
    check: bool,
    verbose: bool,
    module: str | None,
    command: tuple[str, ...],
) -> int:
    """Run a script, unmodified, on a GPU that is not there.

    The script runs from its first line to its last, its output untouched. After it comes a report
    of the GPU memory that it would have taken, by kind, module and line.

    \b
    memest run train.py --bs 8
    memest run --gpu a100-80gb --max-steps 3 train.py
    memest run --gpu rtx-4090 --check --json report.json -m package.train --lr 1e-4
    """
    target = _target(module, command)
    check_single_process(os.environ)
    card = _card(gpu_name, gpu_memory)
    files = _Files(json_path, html, snapshot, chrome_trace)
    with _no_real_card():
        from memest.run.launcher import run_target
        from memest.run.session import Session

    session = Session(
        card,
        memory_limit=memory_limit,
        max_steps=max_steps,
        is_strict=strict,
        name=target.label,
        roots=target.roots,
    )
    out = sys.stdout
    ran = run_target(target, session)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if ran.error_text:
        sys.stderr.write(ran.error_text)
    if ran.refusal is not None:
        tell(str(ran.refusal), ran.refusal.hint)
    if ran.report is None:
        if not ran.exit_code:
            tell(
                "the script has not used the GPU, so there is nothing to report",
                "does it ask `torch.cuda.is_available()`, and move its model to `cuda`?",
            )
        return ran.exit_code or NOT_USED_EXIT_CODE
    _print(ran.report, out, verbose=verbose)
    files.write(ran.report, session)
    return OOM_EXIT_CODE if check and not ran.report.fits else ran.exit_code


@contextlib.contextmanager
def _no_real_card() -> Iterator[None]:
    """Within it a build of torch for CUDA finds no card; the script finds what was there."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        yield
    finally:
        del os.environ["CUDA_VISIBLE_DEVICES"]
        if visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible


def _target(module: str | None, command: tuple[str, ...]) -> Target:
    if module is not None:
        return find_module(module, command)
    if not command:
        raise PlanError("no script is named", hint="`memest run train.py`, or `-m MODULE`")
    return find_script(command[0], command[1:])


def _card(name: str | None, memory_bytes: int | None) -> Gpu:
    gpu = find_gpu(name or PRIMARY_GPU)
    return gpu if memory_bytes is None else custom_gpu(memory_bytes, gpu if name else None)


class _Files:
    """What is written beside the text; the paths are those of where the command was typed."""

    def __init__(
        self, json: Path | None, html: Path | None, snapshot: Path | None, chrome: Path | None
    ) -> None:
        paths = [p and Path(os.path.abspath(p)) for p in (json, html, snapshot, chrome)]
        for path in paths:
            if path is not None:
                check_writable(path)
        self.json, self.html, self.snapshot, self.chrome = paths

    def write(self, report: RunReport, session: Session) -> None:
        """Write all that was asked for."""
        if self.json is not None:
            write_text(self.json, report.to_json() + "\n")
        if not (self.html or self.snapshot or self.chrome):
            return
        from memest.estimator.trace.snapshot import write_chrome_trace, write_snapshot
        from memest.render.run_html import render_run_page
        from memest.run.replays import record_run_of

        recording = record_run_of(session.virtual, report)
        if self.html is not None:
            write_text(self.html, render_run_page(report, recording=recording))
        if self.snapshot is not None:
            write_snapshot(recording, self.snapshot)
        if self.chrome is not None:
            write_chrome_trace(recording, self.chrome)


def _print(report: RunReport, out: TextIO, *, verbose: bool) -> None:
    from memest.render.run import render_run

    text = render_run(report, colour=out is sys.stdout and has_colour(), verbose=verbose)
    click.echo(f"\n{RULE}\n{text}", file=out)
