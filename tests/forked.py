"""Python's commands in copies of a process that has imported torch, in place of new processes."""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from memest.child import CAN_FORK

SERVER = Path(__file__).with_name("fork_server.py")
HANDLED = {"cwd", "env", "input", "capture_output", "stdout", "stderr", "text", "check", "timeout"}
"""Options of `subprocess.run` that `run` reads."""

AT_START = ("HF_HOME", "HF_HUB_OFFLINE", "OMP_NUM_THREADS", "PYTHONIOENCODING")
"""Settings that Python and libraries read when they start."""

_ENVIRONMENT = {**os.environ, "PYTHONPATH": str(SERVER.parents[1])}
_new_process = subprocess.run


def run(
    command: Sequence[str], *, imports: Sequence[str] = (), **options: Any
) -> subprocess.CompletedProcess[Any]:
    """Run a command as `subprocess.run` does: `python -m` or `python -c` in a copy of a server.

    The server has imported `imports`; each combination has a server of its own.
    """
    environment = dict(options.get("env") or os.environ)
    streams = {options.get("stdout"), options.get("stderr")}
    if (
        not CAN_FORK
        or command[0] != sys.executable
        or command[1] not in ("-m", "-c")
        or options.keys() - HANDLED
        or streams - {subprocess.PIPE, subprocess.DEVNULL, None}
        or any(environment.get(name) != _ENVIRONMENT.get(name) for name in AT_START)
    ):
        return _new_process(command, **options)
    with TemporaryDirectory() as files:
        request = {
            "arguments": command[1:], "environment": environment,
            "folder": str(options.get("cwd") or Path.cwd()),
            "streams": _streams(Path(files), options.get("input") or ""),
        }  # fmt: skip
        code = _answer(tuple(imports), json.dumps(request), options.get("timeout"))
        out, err = (Path(path).read_bytes() for path in request["streams"][1:])
    given = [each.decode() if options.get("text") else each for each in (out, err)]
    done = subprocess.CompletedProcess(command, code, *given)
    if options.get("check"):
        done.check_returncode()
    return done


def _streams(folder: Path, given: str) -> list[str]:
    """Return the files of stdin, stdout and stderr."""
    paths = [folder / name for name in ("in", "out", "err")]
    for path in paths:
        path.write_text("", encoding="utf-8")
    paths[0].write_text(given, encoding="utf-8")
    return list(map(str, paths))


@cache
def _server(imports: tuple[str, ...]) -> subprocess.Popen[str]:
    """Start a server of this process, which ends with it."""
    server = subprocess.Popen(
        [sys.executable, str(SERVER), *imports],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=_ENVIRONMENT,
    )
    atexit.register(server.communicate)
    return server


def _answer(imports: tuple[str, ...], request: str, timeout_s: float | None) -> int:
    """Send a request to a server; return the exit status of its command."""
    server = _server(imports)
    assert server.stdin is not None
    assert server.stdout is not None
    print(request, file=server.stdin, flush=True)
    if not select.select([server.stdout], [], [], timeout_s)[0]:
        server.kill()
        _server.cache_clear()
        raise subprocess.TimeoutExpired(request, timeout_s or 0)
    return int(server.stdout.readline())
