"""Names that only Unix has: never at import, and only where memest has another way."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "memest").rglob("*.py"))
MODULES = frozenset("fcntl grp posix pty pwd resource syslog termios tty".split())
NAMES = frozenset(
    "os.fork os.forkpty os.getpgid os.getpgrp os.getuid os.killpg os.mkfifo os.O_NONBLOCK"
    " os.register_at_fork os.sched_getaffinity os.setpgid os.setsid os.sysconf os.uname os.wait"
    " os.WNOHANG select.poll select.epoll signal.alarm signal.pause signal.setitimer"
    " signal.SIGALRM signal.SIGHUP signal.SIGKILL signal.SIGUSR1 socket.AF_UNIX".split()
)
GUARDED = {
    "child.py": {"os.fork", "os.killpg", "os.setsid", "os.WNOHANG", "signal.SIGKILL"},
    "estimator/virtual_gpu.py": {"os.register_at_fork"},
    "run/session.py": {"signal.setitimer"},
    "validate/runner.py": {"os.sysconf"},
}
"""Uses behind `CAN_FORK` or `hasattr`; tests/unit/test_portable.py runs without these names."""


def unix_names(source: str) -> tuple[set[str], set[str]]:
    """Modules of Unix that are imported at import time, and names of Unix that are used."""
    tree = ast.parse(source)
    late = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        for inner in ast.walk(node)
    }
    modules: set[str] = set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and id(node) not in late:
            modules |= {alias.name for alias in node.names} & MODULES
        elif isinstance(node, ast.ImportFrom):
            modules |= {str(node.module)} & MODULES
            names |= {f"{node.module}.{alias.name}" for alias in node.names} & NAMES
        elif isinstance(node, ast.Attribute):
            names |= {ast.unparse(node)} & NAMES
    return modules, names


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_unix_is_used_only_behind_guards(path: Path) -> None:
    place = path.relative_to(ROOT / "memest").as_posix()
    assert unix_names(path.read_text(encoding="utf-8")) == (set(), GUARDED.get(place, set()))


def test_the_check_can_fail() -> None:
    source = "import resource\nfrom signal import SIGALRM\nimport os\npid = os.fork()"
    assert unix_names(source) == ({"resource"}, {"signal.SIGALRM", "os.fork"})
    assert unix_names("def f():\n    import resource") == (set(), set())
