"""`%%memest a100-40gb`: run a notebook cell on a virtual GPU, with its report below the cell."""

import ast
import dis
import inspect
import shlex
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any
from unittest import mock

import torch

from memest.errors import MemestError, PlanError, UnsupportedError, shown
from memest.estimator.predict import PRIMARY_GPU
from memest.estimator.tensors.placement import is_on_real_gpu
from memest.estimator.virtual_gpu import StepLimit
from memest.project import find_project
from memest.report import RunReport
from memest.report.answer import answer, plain
from memest.report.page import render_page
from memest.run.session import Session, virtual_gpu
from memest.run.summary import record_run_of

__all__ = ["CellReport", "load_ipython_extension"]
_TYPE_BY_OPTION = {
    "--gpu": str, "--gpu-memory": str, "--memory-limit": str, "--beside": str, "--max-steps": int,
}  # fmt: skip


def load_ipython_extension(shell: Any) -> None:
    """Register the cell magic `%%memest` in IPython's `shell`; `%load_ext memest` calls this."""
    shell.register_magic_function(_Magic(shell), "cell", "memest")


class CellReport:
    """Report of a notebook cell: the HTML `page` in a notebook, text in a terminal."""

    def __init__(self, report: RunReport, page: str) -> None:
        self.report = report
        self._page = page

    def __repr__(self) -> str:
        warnings = [f"warning: {line}" for line in self.report.warnings]
        return plain("\n".join([*warnings, *answer(self.report)]))

    def _repr_html_(self) -> str:
        style = "width:100%;height:44rem;border:0"
        return f'<iframe srcdoc="{escape(self._page)}" style="{style}"></iframe>'


class _Magic:
    """The cell magic `%%memest` of one IPython shell."""

    __name__ = "memest"

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.stale: dict[str, Any] = {}  # variables on GPUs of earlier cells, which are gone

    def __call__(self, line: str, cell: str) -> CellReport | None:
        """Run `cell` on a virtual GPU and return its report. `line` is such as `a100-40gb
        --max-steps 3`. Return None, after a message, if the cell is refused or uses no GPU."""
        try:
            session = _session(line)
            self._check(cell)
            self._run(session, cell)
        except MemestError as error:
            self.shell.show_usage_error(f"{error}\nhint: {error.hint}" if error.hint else error)
            return None
        if not (session.peak_allocated_bytes or session.virtual.mode.memory.num_ooms):
            self.shell.show_usage_error("the cell has not used the GPU, so there is no report")
            return None
        report = session.report()
        recording = record_run_of(session.virtual, report)
        return CellReport(report, render_page([report], recording=recording))

    def _run(self, session: Session, cell: str) -> None:
        try:
            with session, _step_limit_hidden(self.shell):
                self.shell.run_cell(cell, store_history=False).raise_error()
        except MemestError:
            pass  # printed with its traceback
        except (Exception, SystemExit, KeyboardInterrupt):
            pass  # the report shows this end
        namespace = self.shell.user_ns
        live = session.virtual.mode.memory.live
        for name, value in namespace.items():
            if any(_storage_key(tensor) in live for tensor in _tensors_of(value)):
                self.stale[name] = value

    def _check(self, cell: str) -> None:
        """Raise an `UnsupportedError` if `cell` has a top-level `await`, or uses tensors of the
        real GPU or of an earlier cell's virtual GPU."""
        namespace, source = self.shell.user_ns, self.shell.transform_cell(cell)
        if _has_top_level_await(source):
            raise UnsupportedError(
                "the cell has `await` outside of a function, whose event loop is the notebook's",
                hint="leave `await` to another cell, which has no `%%memest`",
            )
        for name in sorted(_names_read(source, namespace)):
            value = namespace[name]
            if any(is_on_real_gpu(tensor) for tensor in _tensors_of(value)):
                raise UnsupportedError(
                    f"the cell uses {shown(name)}, which is on the real GPU",
                    hint="create it in this cell, or move it to the CPU before",
                )
            if self.stale.get(name) is value and value is not None:
                raise UnsupportedError(
                    f"the cell uses {shown(name)} of an earlier cell, whose virtual GPU is gone",
                    hint="put both cells into one",
                )


def _session(line: str) -> Session:
    try:
        arguments = shlex.split(line, comments=True)
    except ValueError as error:
        raise PlanError(f"{shown(line)}: {error}", hint="`%%memest a100-40gb`") from error
    gpu = arguments.pop(0) if arguments and not arguments[0].startswith("-") else ""
    options = {}
    while arguments:
        option = arguments.pop(0)
        if option not in _TYPE_BY_OPTION:
            names = ", ".join(f"`{name} VALUE`" for name in _TYPE_BY_OPTION)
            raise PlanError(f"{shown(option)} is no option of `%%memest`", hint=f"it has {names}")
        if not arguments:
            raise PlanError(f"`{option}` has no value", hint=f"write `{option} VALUE`")
        value = arguments.pop(0)
        name = option.removeprefix("--").replace("-", "_")
        try:
            options[name] = _TYPE_BY_OPTION[option](value)
        except ValueError as error:
            raise PlanError(f"`{option}` is {shown(value)}", hint="write a number") from error
    gpu = options.pop("gpu", gpu)
    return virtual_gpu(gpu or find_project(Path.cwd()).gpu or PRIMARY_GPU, **options)


def _has_top_level_await(source: str) -> bool:
    """Return whether the cell `source` has `await` outside of a function, as IPython allows."""
    try:
        code = compile(source, "<cell>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    except SyntaxError:  # the shell prints it
        return False
    return bool(code.co_flags & inspect.CO_COROUTINE)


def _names_read(source: str, namespace: dict[str, Any]) -> set[str]:
    """Return the names in `namespace` that cell `source` reads, itself or in functions it calls."""
    try:
        cell = compile(source, "<cell>", "exec")
    except SyntaxError:  # the shell prints it
        return set()
    stored: set[str] = set()
    used: set[str] = set()
    for instruction in dis.get_instructions(cell):
        if instruction.opname in ("STORE_NAME", "STORE_GLOBAL", "IMPORT_NAME"):
            stored.add(instruction.argval)
        elif instruction.opname.startswith("LOAD_") and instruction.argval in namespace:
            used |= {instruction.argval} - stored
    pending = _codes_reached(cell, used, namespace)
    seen = set()
    while pending:
        code = pending.pop()
        seen.add(code)
        names = {name for name in code.co_names if name in namespace} - stored - used
        used |= names
        pending += [new for new in _codes_reached(code, names, namespace) if new not in seen]
    return used


def _codes_reached(code: CodeType, names: set[str], namespace: dict[str, Any]) -> list[CodeType]:
    """Return the code nested in `code`, and that of the functions `names` of `namespace`."""
    nested = [const for const in code.co_consts if isinstance(const, CodeType)]
    functions = [f for f in map(namespace.get, names) if isinstance(f, FunctionType)]
    return nested + [function.__code__ for function in functions]


def _tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield tensors of `value`: a tensor, module, optimizer, or container of the first two."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, torch.nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    elif isinstance(value, torch.optim.Optimizer):
        for group in value.param_groups:
            yield from group["params"]
    elif isinstance(value, dict | list | tuple):
        items = value.values() if isinstance(value, dict) else value
        for item in items:
            if isinstance(item, torch.Tensor | torch.nn.Module):
                yield from _tensors_of(item)


def _storage_key(tensor: torch.Tensor) -> int | None:
    """Return a number that identifies the storage of a tensor; None if there is no storage."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None


@contextmanager
def _step_limit_hidden(shell: Any) -> Iterator[None]:
    """Suppress, in a `with` block, the traceback of a cell that `--max-steps` ends."""
    show = shell.showtraceback

    def showtraceback(*args: Any, **kwargs: Any) -> None:
        if not isinstance(sys.exc_info()[1], StepLimit):
            show(*args, **kwargs)

    with mock.patch.object(shell, "showtraceback", showtraceback), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="To exit")
        yield
