"""`memest run`: a script on a virtual GPU; `memest checkpoint`: a folder that it can load."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from shutil import get_terminal_size
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import click

from memest.child import signals_once
from memest.cli import options
from memest.cli.files import only_one, write_pages
from memest.cli.group import main, print_error
from memest.cli.options import OUT, PATH, VALUES, Size, WholeTraining, completes
from memest.cli.terminal import folded, has_colour, print_any_text
from memest.errors import OOM_EXIT_CODE, PlanError
from memest.estimator.allocator.settings import settings_from
from memest.estimator.hardware.gpus import DEFAULT_GPUS, Gpu, custom_gpu, find_gpu
from memest.estimator.predict import PRIMARY_GPU
from memest.estimator.versions import check_torch
from memest.project import FILE, find_project
from memest.report import Ending, Outcome, RunReport
from memest.report.answer import NAMES, resource_lines, summary_line
from memest.report.text import error_hint, render_text
from memest.run.target import (
    NoInput,
    Target,
    active_environment,
    check_single_process,
    find_module,
    find_script,
    run_elsewhere,
)
from memest.units import format_bytes
from memest.writing import write_output

if TYPE_CHECKING:
    from memest.estimator.gpu.worlds import Rank
    from memest.run.launch_command import Launch
    from memest.run.session import RunResult, Session

NOT_USED_EXIT_CODE = 2  # exit code of a script that ends without using the GPU
RULE = "-" * 80
_ARGUMENTS = "memest.run.arguments"
MAX_SECONDS_OF_RANK = 1800.0  # after which a rank is assumed to wait for an unsimulated rank


class _RunCommand(click.Command):
    """Command that passes everything after the script, or after `-m MODULE`, to the script."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        args, script = self.split(args)
        if not {"-h", "--help"}.intersection(args):
            args, script = self.with_project(args, script)
        ctx.meta[_ARGUMENTS] = [*args, *script]
        if script and script[0].startswith("-m"):  # `-m MODULE` or `-mMODULE`
            num_words = 2 if script[0] == "-m" else 1
            # click must not parse the arguments of the module
            script = [*script[:num_words], "--", *script[num_words:]]
        return super().parse_args(ctx, [*args, *script])

    def split(self, args: list[str]) -> tuple[list[str], list[str]]:
        """Split `args` into (memest's options, script or `-m MODULE` with its arguments)."""
        with_value = [p for p in self.params if isinstance(p, click.Option) and not p.is_flag]
        takes_value = {name for param in with_value for name in param.opts}
        position = 0
        while position < len(args) and args[position].startswith("-"):
            token = args[position]
            if token.startswith("-m") or token == "--":
                break
            position += 2 if token in takes_value else 1
        return args[:position], args[position:]

    def with_project(self, args: list[str], script: list[str]) -> tuple[list[str], list[str]]:
        """Complete `args`, memest's options, and `script`, the script with its arguments, from
        `[tool.memest]` of pyproject.toml; return both. If `args` names no GPU, add the project's
        `--gpu` and `--memory-limit`, and print them. If `script` is empty and the working folder is
        the project's, add the project's command: its options and its script."""
        project = find_project(Path.cwd())
        if not script and project.folder == Path.cwd():
            project_args, script = self.split(list(project.command))
            args = [*project_args, *args]
        names = {arg.partition("=")[0] for arg in args}
        defaults = []
        if not names & {"--gpu", "--gpu-memory"}:
            if project.gpu:
                defaults += ["--gpu", project.gpu]
            if project.limit and "--memory-limit" not in names:
                defaults += ["--memory-limit", project.limit]
        if defaults and project.folder is not None:
            click.echo(f"note: {project.folder / FILE}: {' '.join(defaults)}", err=True)
        return [*defaults, *args], script


@main.command(cls=_RunCommand, context_settings={"allow_interspersed_args": False})
@click.option(
    "--gpu", "gpu_names", multiple=True, shell_complete=completes(VALUES["gpu"]),
    help=f"GPU to simulate; by default {PRIMARY_GPU}. Repeat for verdicts on others.",
)  # fmt: skip
@click.option(
    "--python", type=PATH,
    help="Interpreter or environment of the script, without memest; by default VIRTUAL_ENV.",
)  # fmt: skip
@click.option("--gpu-memory", type=Size(), help="Memory of a GPU not in the catalogue: 24GiB.")
@click.option("--memory-limit", type=Size(), help="Cap on the allocator: 78.4GiB.")
@click.option("--beside", type=Size(), help="Memory that other processes hold: 24GiB.")
@click.option("--nproc-per-node", type=click.IntRange(1), help="GPUs per node, as in `torchrun`.")
@click.option("--nnodes", type=click.IntRange(1), default=1, help="Nodes, as in `torchrun`.")
@click.option(
    "--ranks", "numbers", metavar="LIST", default="",
    help="Ranks to run: 0,5 or `all`. [the first and the last; up to 8 if these differ]",
)  # fmt: skip
@click.option(
    "--time-limit", type=click.FloatRange(min=0, max=1e9, min_open=True),
    help="End the script after this time, seconds. [several GPUs: 1800]",
)  # fmt: skip
@options.torch
@click.option(
    "--max-steps", type=click.IntRange(1), help="End after this number of optimizer steps."
)
@click.option(
    "--batch-parts", type=click.IntRange(1), default=1,
    help="Divide DataLoaders' batches by this, to simulate smaller ones.",
)  # fmt: skip
@click.option(
    "--strict", is_flag=True,
    help="Stop where a script reads an unknown value, or compiled code falls back to eager.",
)  # fmt: skip
@click.option("--no-input", is_flag=True, help="Refuse a script that reads from stdin.")
@click.option("--json", "json_path", type=OUT, help="Write the report to a file as JSON.")
@click.option("--html", type=OUT, help="Write the report as a page.")
@click.option("--snapshot", type=OUT, help="Write a memory snapshot, as torch does.")
@click.option("--chrome-trace", type=OUT, help="Write a trace for Perfetto, as JSON.")
@click.option(
    "--check", is_flag=True, help=f"Exit with {OOM_EXIT_CODE} if the script does not fit."
)
@options.training(has_epochs=False)
@click.option("--summary", is_flag=True, help="Print one line in place of the report.")
@options.emit
@click.option("-v", "--verbose", is_flag=True, help="List all assumptions.")
@click.option("-m", "module", help="Run a module, as `python -m` does; ends memest's options.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGS]...")
@click.pass_context
def run(
    ctx: click.Context, /, gpu_names: tuple[str, ...], python: Path | None, gpu_memory: int | None,
    memory_limit: int | None, beside: int | None, nproc_per_node: int | None, nnodes: int,
    numbers: str, time_limit: float | None, max_steps: int | None, batch_parts: int, strict: bool,
    no_input: bool, check: bool, module: str | None, command: tuple[str, ...], **output: Any,
) -> int:  # fmt: skip
    """Run an unmodified script on a virtual GPU.

    The script runs from its first line to its last, and its output is unchanged. A report follows:
    the GPU memory that the script would take, by kind, module and line.

    \b
    memest run train.py --bs 8
    memest run --gpu a100-80gb --max-steps 3 train.py
    memest run --gpu rtx-4090 --check --json report.json -m package.train --lr 1e-4
    memest run --nproc-per-node 4 train.py
    memest run --python .venv/bin/python train.py
    """
    exit_code = _run_elsewhere(python, ctx.meta[_ARGUMENTS])
    if exit_code is not None:
        return exit_code
    form = only_one({f"--{name}": output[name] for name in ("summary", "emit")})
    if form and output["whole"].is_given:
        raise PlanError(f"hours and prices are not part of `{form}`", hint="leave one out")
    launch, target = _launch_and_target(module, command)
    nproc_per_node, nnodes = _world(launch, nproc_per_node, nnodes)
    os.environ.update(launch.environment)
    check_single_process(os.environ)
    settings_from(os.environ)  # raises now, and not at the first request, if they are invalid
    target_gpu, other_gpus = _chosen_gpus(gpu_names, gpu_memory, beside)
    files = _Files(*map(output.pop, ("json_path", "html", "snapshot", "chrome_trace"))).absolute()
    limits = {"memory_limit": memory_limit, "max_steps": max_steps}
    settings: dict[str, Any] = {**limits, "is_strict": strict, "batch_parts": batch_parts}
    check_torch()
    with _hidden_gpus():
        from memest.run.ranks import chosen_ranks
        from memest.run.session import Session

    ranks = chosen_ranks(nproc_per_node, nnodes, numbers)
    settings["others"] = tuple(NAMES) if output["emit"] else other_gpus
    make = partial(Session, target_gpu, name=target.label, roots=target.roots, **settings)
    stdout = sys.stdout
    if time_limit is None and ranks[0].world_size > 1:
        time_limit = MAX_SECONDS_OF_RANK
    streams: dict[str, Any] = {"has_input": not no_input, "has_stdout": not output["emit"]}
    run_one = partial(_run_one, target, make, limit_s=time_limit, **streams)
    result = _run_chosen(ranks, run_one, files, runs_others=not numbers)
    sys.stdout.flush()
    sys.stderr.write(result.error_text)
    if result.refusal is not None:
        print_error(str(result.refusal), result.refusal.hint)
    if result.report is None:
        return _explain_missing_report(result)
    _print_report(result.report, stdout, num_gpus=nproc_per_node or 1, num_nodes=nnodes, **output)
    return OOM_EXIT_CODE if check and result.report.verdict != "fits" else result.exit_code


def _world(launch: Launch, num_local: int | None, num_nodes: int) -> tuple[int | None, int]:
    """Return (GPUs per node, nodes). If a launcher such as `torchrun` starts the script, both
    numbers are from `launch`. Otherwise they are memest's options `num_local` (None: not given) and
    `num_nodes`. Raise `PlanError` if a launcher and an option of memest both give a number."""
    if launch.num_local is None:
        return num_local, num_nodes
    if num_local is not None or num_nodes > 1:
        raise PlanError(
            "a launcher and `memest run` both have a number of GPUs",
            hint="leave `--nproc-per-node` and `--nnodes` of `memest run` out",
        )
    return launch.num_local, launch.num_nodes


def with_project(arguments: Sequence[str]) -> list[str]:
    """Return `arguments` of `memest run`, completed by options and script of pyproject.toml."""
    assert isinstance(run, _RunCommand)
    args, script = run.with_project(*run.split(list(arguments)))
    return [*args, *script]


def _run_elsewhere(python: Path | None, arguments: Sequence[str]) -> int | None:
    """Run `memest run` with `arguments` under the interpreter `python`, and return its exit code.

    `python` can also be the folder of a virtual environment, which has the interpreter. If `python`
    is None, the interpreter is that of the virtual environment in the variable VIRTUAL_ENV.

    Return None if the script has to run in this process. This is so if the interpreter belongs to
    the environment that runs memest. If `python` is None, it is also so if VIRTUAL_ENV is not set
    or its environment cannot be used.
    """
    if python is not None:
        return run_elsewhere(python, arguments)
    environment = active_environment()
    if environment is None:
        return None
    try:
        return run_elsewhere(environment, arguments)
    except PlanError as error:
        click.echo(f"note: VIRTUAL_ENV is not used: {error}", err=True)
        return None


def _run_one(
    target: Target, make: Callable[..., Session], files: _Files | None, rank: Rank, *,
    limit_s: float | None, has_input: bool, has_stdout: bool, is_immediate: bool = False,
    folder: str = "",
) -> RunResult:  # fmt: skip
    """Run `target` as `rank`, for at most `limit_s` seconds, in the `Session` that `make(rank=rank,
    is_immediate=is_immediate)` returns. Without `has_input`, the script cannot read stdin; without
    `has_stdout`, it prints to stderr. After the run, write the output files to the paths in
    `files`; None writes none. If `folder` is not "", write the output files to `folder` instead,
    under the names of `_Files.of_rank`, such as `3.html` for rank 3. `is_immediate` makes blocks
    return to their pools at once, even if other streams use them."""
    from memest.run.ranks import rows_of
    from memest.run.session import run_target

    if not has_input:
        sys.stdin = NoInput()
    if not has_stdout:  # the script's output is not part of the file
        sys.stdout = sys.stderr
    session = make(rank=rank, is_immediate=is_immediate)
    result = run_target(target.of_rank(rank.local_rank), session, limit_s=limit_s)
    if result.report is not None and rank.is_launched and rank.world_size == 1:
        rows = tuple(rows_of([(rank, result.report)]))
        result = replace(result, report=replace(result.report, ranks=rows))
    if result.report is None or files is None:
        return result
    if folder:
        files = files.of_rank(folder, rank.rank)
    return _write_after(result, partial(files.write, result.report, session))


def _write_after(result: RunResult, write: Callable[[], None]) -> RunResult:
    """Call `write`, which writes files of a run, and return `result`, the run's result. If a file
    cannot be written, the result gets the error, so that the report is still printed."""
    try:
        write()
    except PlanError as error:
        code = result.exit_code or error.exit_code
        return replace(result, exit_code=code, refusal=result.refusal or error)
    return result


@signals_once(signal.SIGTERM)
def _run_chosen(
    ranks: Sequence[Rank], run_one: Callable[..., RunResult], files: _Files, *, runs_others: bool
) -> RunResult:
    """Call `run_one(files, rank)` for each of `ranks`; return one result, with the report of
    the worst rank. A rank out of memory is the worst, else the rank that reserved most. If the
    script has one rank only, it runs in this process; several ranks run in child processes. If the
    peaks of the chosen ranks differ, `runs_others` also runs ranks that are not chosen."""
    from memest.run.ranks import environment

    if ranks[0].world_size == 1:
        if ranks[0].is_launched:
            os.environ.update(environment(ranks[0]))
        return run_one(files, ranks[0])
    with TemporaryDirectory(prefix="memest-files-") as folder:
        return _run_ranks(ranks, run_one, files, folder, runs_others)


def _run_ranks(
    ranks: Sequence[Rank], run_one: Callable[..., RunResult], files: _Files, folder: str,
    runs_others: bool,
) -> RunResult:  # fmt: skip
    """Call `run_one(files, rank)` for each of `ranks` at the same time; return one result, with
    the report of the worst rank. Ranks write to `folder`; the worst rank's are copied to `files`.
    `runs_others` is as in `_run_chosen`."""
    from memest.estimator.gpu.worlds import PeerEnded
    from memest.run.kept_files import kept_files
    from memest.run.ranks import merge_ranks, open_verdict, other_ranks, run_rank, run_together

    reports: list[tuple[Rank, RunReport]] = []
    interrupted = []
    with kept_files():
        outcomes = run_together(ranks, partial(run_one, files, folder=folder))
        for pair in other_ranks(outcomes) if runs_others else ():
            later_outcomes = run_together(pair, partial(run_one, files, folder=folder))
            # an unmodified script may fail if its first rank has ended
            outcomes += [(rank, result) for rank, result in later_outcomes if _has_verdict(result)]
        for rank, result in outcomes:
            report = result.report
            if report is None:
                continue
            if report.verdict is Outcome.OOM and result.decides:
                retry = run_rank(rank, partial(run_one, None, is_immediate=True), is_silent=True)
                if retry.report is not None and retry.report.ending is Ending.INTERRUPTED:
                    interrupted = [retry]
                elif retry.report is not None and retry.report.fits:
                    report = open_verdict(report, result.decides)
            reports.append((rank, report))
    # report the rank that failed by itself, else one that waited for it, else the first
    results = [*interrupted, *(result for _, result in outcomes)]
    failed = [result for result in results if result.exit_code]
    failed.sort(key=lambda result: isinstance(result.refusal, PeerEnded))
    result = (failed or results)[0]
    if not reports:
        return result
    report = merge_ranks(reports)
    return _write_after(replace(result, report=report), partial(files.merge, report, folder))


def _has_verdict(result: RunResult) -> bool:
    """Return whether the script ended normally, or because the GPU's memory was full."""
    is_out_of_memory = result.report is not None and result.report.verdict is Outcome.OOM
    return not result.exit_code or is_out_of_memory


def _explain_missing_report(result: RunResult) -> int:
    """Print why a run has no report; return the exit code. If a memest error (`result.refusal`)
    ended the run, print nothing: the caller has printed that error."""
    if result.exit_code == 0:
        print_error(
            "the script has not used the GPU, so there is nothing to report",
            "does it check `torch.cuda.is_available()`, and move its model to `cuda`?",
        )
        return NOT_USED_EXIT_CODE
    if result.refusal is None:
        code = "" if result.error_text else f" with exit code {result.exit_code}"
        hint = "".join(error_hint(result.error_text))
        if not result.error_text and result.exit_code == 2:  # code of `argparse`
            hint = "arguments of the script come after it: `memest run train.py --data FOLDER`"
        print_error(f"the script ended{code} before it used the GPU: nothing to report", hint)
    return result.exit_code


@contextlib.contextmanager
def _hidden_gpus() -> Iterator[None]:
    """Hide real GPUs from torch in the block, by an empty `CUDA_VISIBLE_DEVICES`."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        yield
    finally:
        del os.environ["CUDA_VISIBLE_DEVICES"]
        if visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible


def _launch_and_target(module: str | None, command: tuple[str, ...]) -> tuple[Launch, Target]:
    """Return (launch, target to run) of a command line: of `module` with arguments `command`, or if
    `module` is None, of the script or launcher, such as `torchrun`, in `command`. The launch has
    the number of ranks if a launcher starts them."""
    from memest.run.launch_command import Launch, read_launch

    if module is None and not command:
        raise PlanError("no script is named", hint="`memest run train.py`, or `-m MODULE`")
    with _hidden_gpus():
        launch = read_launch(module, command)
    if launch is None:
        script, *args = command if module is None else (module, *command)
        launch = Launch(script, tuple(args), module is not None)
    find = find_module if launch.is_module else find_script
    target = find(launch.script, launch.args)
    return launch, replace(target, local_rank=launch.local_rank)


def _chosen_gpus(
    texts: Sequence[str], memory_bytes: int | None, beside_bytes: int | None
) -> tuple[Gpu, tuple[str, ...]]:
    """Return (GPU to simulate, names of the GPUs for verdicts). The GPU is the first of `texts`,
    the values of `--gpu`, else `PRIMARY_GPU`. `memory_bytes` replaces its memory, unless None.
    Other processes hold `beside_bytes` of it; None is 0."""
    names = [find_gpu(name).name for text in texts for name in text.split(",")]
    gpu = find_gpu(names[0] if names else PRIMARY_GPU)
    if memory_bytes is not None:
        gpu = custom_gpu(memory_bytes, gpu if names else None)
    return gpu.beside(beside_bytes), tuple(names) if len(names) > 1 else DEFAULT_GPUS


class _Files(NamedTuple):
    """Paths of the files to write; None: not written."""

    json: Path | None
    html: Path | None
    snapshot: Path | None
    chrome_trace: Path | None

    def absolute(self) -> _Files:
        """Return the same paths for a script that changes the working folder."""
        return _Files(*(path and Path(os.path.abspath(path)) for path in self))

    def of_rank(self, folder: str, rank: int) -> _Files:
        """Return paths in `folder` for the same kinds of files, of rank number `rank`."""
        named = self._asdict().items()
        return _Files(*(path and Path(folder, f"{rank}.{name}") for name, path in named))

    def merge(self, report: RunReport, folder: str) -> None:
        """Copy the files that the rank of `report` wrote to `folder` to these paths. Two files are
        changed, to show all ranks: the JSON is that of `report`, and the page gets a table of the
        ranks."""
        from memest.report.page import with_all_ranks

        rank_files = self.of_rank(folder, report.rank)
        if self.json is not None:
            write_output(self.json, report.to_json() + "\n")
        if self.html is not None and rank_files.html is not None:
            rendered = rank_files.html.read_text(encoding="utf-8")
            write_output(self.html, with_all_ranks(rendered, report))
        recordings = (rank_files.snapshot, rank_files.chrome_trace)
        for path, source in zip((self.snapshot, self.chrome_trace), recordings, strict=True):
            if path is not None and source is not None:
                write_output(path, source.read_bytes())

    def write(self, report: RunReport, session: Session) -> None:
        """Write the requested files of `report`, with timelines from the run in `session`."""
        if self.json is not None:
            write_output(self.json, report.to_json() + "\n")
        files = self._asdict()
        del files["json"]
        if any(files.values()):
            from memest.run.summary import record_run_of

            write_pages([report], record_run_of(session.virtual, report), **files)


def _print_report(
    report: RunReport, out: TextIO, *, verbose: bool, summary: bool, emit: str | None,
    whole: WholeTraining, **nodes: int,
) -> None:  # fmt: skip
    """Print `report` to `out`. `summary` prints one line instead, `emit` the lines for a scheduler.
    `verbose` adds all assumptions to the report. `whole` adds hours and price of the training, if
    the command line has steps or a price. `nodes` has `num_gpus` (per node) and `num_nodes`."""
    print_any_text(out)
    if emit or summary:
        line = resource_lines(report, emit, **nodes) if emit else summary_line(report)
        click.echo(line, file=out)
        return
    world = {"devices": nodes["num_gpus"], "num_nodes": nodes["num_nodes"]}
    training = whole.of(world) if whole.is_given else None
    has_colours = out is sys.stdout and has_colour()
    text = render_text(report, training=training, colour=has_colours, verbose=verbose)
    rule = RULE[: get_terminal_size().columns] if out.isatty() else RULE
    click.echo(f"\n{rule}\n{folded(text, out)}", file=out)


@main.command()
@click.argument("model")
@click.argument("folder", type=PATH)
@click.option(
    "--format", "layout", type=click.Choice(["litgpt", "hf"]), required=True,
    help="Layout: of `litgpt download`, or of transformers' `save_pretrained`.",
)  # fmt: skip
@click.option("--tokenizer", type=PATH, help="Copy the tokenizer of this folder.")
def checkpoint(model: str, folder: Path, layout: str, tokenizer: Path | None) -> None:
    """Write a dummy checkpoint of MODEL to FOLDER.

    It has names, shapes and dtypes, but no values: a few hundred kilobytes for any model.
    Scripts load it under `memest run`. Only another dummy checkpoint is overwritten.

    \b
    memest checkpoint open-llama-7b --format litgpt checkpoints/openlm-research/open_llama_7b
    memest checkpoint blip2-opt-2.7b --format hf Salesforce/blip2-opt-2.7b
    """
    from memest.run.dummy_checkpoints import write_checkpoint

    dummy = write_checkpoint(model, folder, layout=layout, tokenizer=tokenizer)
    click.echo(
        f"{dummy.folder}: a dummy checkpoint of {dummy.model}, {dummy.num_tensors} tensors, "
        f"{format_bytes(dummy.num_bytes)} for {format_bytes(dummy.stands_for_bytes)} of weights"
    )
