"""Server that runs Python's commands in copies of itself; `tests/forked.py` starts it.

A new process imports torch and Dynamo for about 4 s; the server imports them once, and the modules
that its arguments name. It reads a
request from each line of stdin, and writes the exit status of the command in a line on stdout.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import runpy
import signal
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch._dynamo

import memest.cli.run
import memest.run.ranks
from memest.run import kept_files


def serve() -> None:
    """Answer requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries print when they are imported
    with memest.virtual_gpu() as gpu:  # fills tables of operators, of Dynamo and of speeds
        torch.ones(1, device="cuda")
    gpu.report()
    for name in sys.argv[1:]:
        importlib.import_module(name)
    given = folders_of(os.environ)
    installed = [folder for folder in sys.path[1:] if folder not in given]
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if not pid:
            become(request, installed)
        _, status = os.waitpid(pid, 0)
        answers.write(f"{os.waitstatus_to_exitcode(status)}\n")
        answers.flush()


def folders_of(environment: Any) -> list[str]:
    """Return the folders of `PYTHONPATH`."""
    return [each for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each]


def become(request: dict[str, Any], installed: list[str]) -> None:
    """Run a command in this copy of the server, and end."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have ignored it
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        for number, path in enumerate(request["streams"]):
            opened = os.open(path, os.O_RDWR)
            os.dup2(opened, number)
            os.close(opened)
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
        kind, command, *rest = request["arguments"]
        sys.argv = [kind, *rest]
        sys.path[:] = [request["folder"], *folders_of(os.environ), *installed]
        forget_replaced()
        tempfile.tempdir = None  # this and the next were found in the server's environment
        kept_files.OWN_FILES = os.path.join(tempfile.gettempdir(), "memest-")
        code = run(kind, command)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def forget_replaced() -> None:
    """Forget imported modules that a file in a folder of `PYTHONPATH` replaces."""
    importlib.invalidate_caches()
    files = [path for folder in folders_of(os.environ) for path in Path(folder).glob("*.py")]
    for name in {path.stem for path in files} & sys.modules.keys():
        for module in [each for each in sys.modules if f"{each}.".startswith(f"{name}.")]:
            del sys.modules[module]


def run(kind: str, command: str) -> int:
    """Run a module or code, and what Python does at its end; return the exit status."""
    code = 0
    try:
        if kind == "-m":
            runpy.run_module(command, run_name="__main__", alter_sys=True)
        else:
            sys.modules["__main__"] = ModuleType("__main__")
            exec(command, vars(sys.modules["__main__"]))
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    serve()
