"""`memest run`: a training script on a GPU that is not there, and the report of it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from memest.cli.files import check_writable, write_text
from memest.cli.group import OOM_EXIT_CODE, main, tell
from memest.cli.options import VALUES, completes
from memest.cli.terminal import folded, has_colour
from memest.errors import PlanError
from memest.estimator.allocator.settings import settings_from
from memest.estimator.hardware.gpus import Gpu, custom_gpu, find_gpu
from memest.estimator.predict import PRIMARY_GPU
from memest.run.no_input import NoInput
from memest.run.target import Target, check_single_process, find_module, find_script
from memest.units import parse_bytes

if TYPE_CHECKING:
    from memest.estimator.device.ranks import Ranks
    from memest.report import RunReport
    from memest.run.launcher import Ran
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

MAX_SECONDS_OF_RANK = 1800.0
"""After which a rank is taken to wait for one that is not there."""


@main.command(cls=_RunCommand, context_settings={"allow_interspersed_args": False})
@click.option(
    "--gpu",
    "gpu_name",
    help=f"The card; by default {PRIMARY_GPU}.",
    shell_complete=completes(VALUES["gpu"]),
)
@click.option("--gpu-memory", type=_Bytes(), help="Memory of a card not in the catalogue: 24GiB.")
@click.option("--memory-limit", type=_Bytes(), help="Cap on the allocator: 78.4GiB.")
@click.option("--nproc-per-node", type=click.IntRange(1), help="GPUs per node, as of `torchrun`.")
@click.option("--nnodes", type=click.IntRange(1), default=1, help="Nodes, likewise.")
@click.option(
    "--time-limit",
    type=click.FloatRange(min=0, min_open=True),
    help="End a script after so many seconds. [several GPUs: 1800]",
)
@click.option("--max-steps", type=click.IntRange(1), help="End after so many optimizer steps.")
@click.option(
    "--batch-parts",
    type=click.IntRange(1),
    default=1,
    help="Take one of so many parts of DataLoaders' batches: what if they were smaller?",
)
@click.option(
    "--strict",
    is_flag=True,
    help="Refuse to guess values that the script reads, and to run compiled code eagerly.",
)
@click.option("--no-input", is_flag=True, help="Refuse a script that reads from stdin.")
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
    nproc_per_node: int | None,
    nnodes: int,
    time_limit: float | None,
    max_steps: int | None,
    batch_parts: int,
    strict: bool,
    no_input: bool,
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
    memest run --nproc-per-node 4 train.py
    """
    target = _target(module, command)
    check_single_process(os.environ)
    settings_from(os.environ)  # which the allocator reads at its first request
    card = _card(gpu_name, gpu_memory)
    files = _Files(json_path, html, snapshot, chrome_trace)
    with _no_real_card():
        from memest.run.ranks import chosen_ranks
        from memest.run.session import Session

    chosen = chosen_ranks(nproc_per_node, nnodes)
    options: dict[str, Any] = {
        "memory_limit": memory_limit,
        "max_steps": max_steps,
        "is_strict": strict,
        "batch_parts": batch_parts,
    }
    make = partial(Session, card, name=target.label, roots=target.roots, **options)
    out = sys.stdout
    if no_input:
        sys.stdin = NoInput()
    limit_s = time_limit or (MAX_SECONDS_OF_RANK if len(chosen) > 1 else None)
    ran = _run_ranks(chosen, partial(_run_one, target, make, limit_s=limit_s), files)
    _tell_errors(ran)
    if ran.report is None:
        return _not_used(ran)
    _print(ran.report, out, verbose=verbose)
    return OOM_EXIT_CODE if check and ran.report.verdict != "fits" else ran.exit_code


def _tell_errors(ran: Ran) -> None:
    """What the script said last, after all that it printed."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if ran.error_text:
        sys.stderr.write(ran.error_text)
    if ran.refusal is not None:
        tell(str(ran.refusal), ran.refusal.hint)


def _run_one(
    target: Target,
    make: Callable[..., Session],
    files: _Files | None,
    ranks: Ranks,
    *,
    limit_s: float | None,
    is_prompt: bool = False,
) -> Ran:
    """One rank, in this process."""
    from memest.run.launcher import run_target
    from memest.run.ranks import rows_of

    session = make(ranks=ranks, is_prompt=is_prompt)
    ran = run_target(target, session, limit_s=limit_s)
    if ran.report is not None and ranks.is_launched and ranks.world_size == 1:
        rows = tuple(rows_of([(ranks, ran.report)]))
        ran = replace(ran, report=replace(ran.report, ranks=rows))
    if ran.report is not None and files is not None:
        files.write(ran.report, session)
    return ran


def _run_ranks(chosen: Sequence[Ranks], run_one: Callable[..., Ran], files: _Files) -> Ran:
    """The ranks one after another, until one fails; the files are those of the worst."""
    from memest.report import Outcome
    from memest.run.ranks import environment, open_verdict, run_rank, together

    if len(chosen) == 1:
        if chosen[0].is_launched:
            os.environ.update(environment(chosen[0]))
        return run_one(files, chosen[0])
    reports: list[tuple[Ranks, RunReport]] = []
    for ranks in chosen:
        ran = run_rank(ranks, partial(run_one, files.of_rank(ranks.rank)))
        report = ran.report
        if report is not None:
            if report.verdict is Outcome.OOM and ran.what_decides:
                again = run_rank(ranks, partial(run_one, None, is_prompt=True), is_silent=True)
                if again.report is not None and again.report.fits:
                    report = open_verdict(report, ran.what_decides)
            reports.append((ranks, report))
        if ran.exit_code:
            break
    if not reports:
        return ran
    report = together(reports)
    files.keep_of(report, [ranks.rank for ranks, _ in reports])
    return replace(ran, report=report)


def _not_used(ran: Ran) -> int:
    """Report in one line that there is no report; a refusal has been reported already."""
    if ran.exit_code == 0:
        tell(
            "the script has not used the GPU, so there is nothing to report",
            "does it ask `torch.cuda.is_available()`, and move its model to `cuda`?",
        )
        return NOT_USED_EXIT_CODE
    if ran.refusal is None:
        tell("the script ended before it used the GPU, so there is nothing to report", "")
    return ran.exit_code


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

    def of_rank(self, rank: int) -> _Files:
        """Files beside these, for one rank of several."""
        paths = (self.json, self.html, self.snapshot, self.chrome)
        return _Files(*(p and _beside(p, rank) for p in paths))

    def keep_of(self, report: RunReport, ranks: Sequence[int]) -> None:
        """Let those of the report's rank be the files, of `ranks` that have written some."""
        paths = (self.json, self.html, self.snapshot, self.chrome)
        for path in filter(None, paths):
            for rank in ranks:
                if rank == report.rank:
                    _beside(path, rank).replace(path)
                else:
                    _beside(path, rank).unlink()
        if self.json is not None:
            write_text(self.json, report.to_json() + "\n")
        if self.html is not None:
            from memest.render.run_html import with_all_ranks

            rendered = self.html.read_text(encoding="utf-8")
            write_text(self.html, with_all_ranks(rendered, report))

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


def _beside(path: Path, rank: int) -> Path:
    return path.with_name(f".{path.name}.rank{rank}")


def _print(report: RunReport, out: TextIO, *, verbose: bool) -> None:
    from memest.render.run import render_run

    text = render_run(report, colour=out is sys.stdout and has_colour(), verbose=verbose)
    click.echo(f"\n{RULE}\n{folded(text, out)}", file=out)
