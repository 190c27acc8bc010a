"""Commands on a system without fork, signals of Unix and `/proc`, as on Windows.

macOS and Windows are not at hand: a shim takes the names of Unix away from Linux. Libraries that
need them for Linux itself still get their modules.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.command import memest_here

ROOT = Path(__file__).resolve().parents[2]
SHIM = '''
import builtins, io, os, signal

for module, names in {os: "fork forkpty", signal: "SIGALRM alarm setitimer pause"}.items():
    for name in names.split():
        delattr(module, name)

class OfMemest:
    """A module without the names that libraries of Linux need."""

    __slots__ = ("module", "names")

    def __init__(self, module, names):
        object.__setattr__(self, "module", module)
        object.__setattr__(self, "names", names.split())

    @property
    def __dict__(self):
        return vars(self.module)

    def __getattr__(self, name):
        if name in self.names:
            raise AttributeError(name)
        return getattr(self.module, name)

    def __setattr__(self, name, value):
        setattr(self.module, name, value)

MODULES = {
    "os": OfMemest(os, "register_at_fork killpg getpgid setsid sysconf getuid O_NONBLOCK mkfifo "
                   "uname sched_getaffinity waitpid WNOHANG"),
    "signal": OfMemest(signal, "SIGKILL SIGHUP SIGUSR1"),
}
UNIX = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "termios", "tty"}
real_import, real_open, real_os_open = builtins.__import__, io.open, os.open

def import_(name, globals=None, *rest, **more):
    if str((globals or {}).get("__name__")).startswith("memest"):
        if name in UNIX:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        if name in MODULES:
            return MODULES[name]
    return real_import(name, globals, *rest, **more)

def hidden(path):
    if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith("/proc"):
        raise FileNotFoundError(2, "No such file or directory", path)
    return path

builtins.__import__ = import_
builtins.open = io.open = lambda path, *rest, **more: real_open(hidden(path), *rest, **more)
os.open = lambda path, *rest, **more: real_os_open(hidden(path), *rest, **more)
'''

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("nccl")
rank = dist.get_rank()
print("rank", rank, "of", dist.get_world_size())
torch.cuda.set_device(rank)
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(256, 256).cuda(), device_ids=[rank])
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    model(torch.randn(64, 256, device="cuda")).sum().backward()
    optimizer.step()
    if rank == 0:
        dist.send(torch.ones(4, device="cuda"), 1)
    else:
        dist.recv(torch.empty(4, device="cuda"), 0)
"""
CONFIG = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 1, "n_embd": 64,
    "n_head": 2,
}  # fmt: skip


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with the shim, a script of two ranks and a model."""
    (tmp_path / "sitecustomize.py").write_text(SHIM, encoding="utf-8")
    (tmp_path / "ranks.py").write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "tiny.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return tmp_path


def ended(files: Path, *words: str, has_unix: bool = False) -> subprocess.CompletedProcess[str]:
    path = [str(ROOT)] if has_unix else [str(files), str(ROOT)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    start = forked.run if has_unix else subprocess.run
    return start(
        [sys.executable, *words], env=environment, cwd=files, text=True, capture_output=True
    )


def without_times(value: Any) -> Any:
    """Leave out what depends on how fast this machine is."""
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if k != "times" and not k.startswith("elapsed")}
        return {k: without_times(v) for k, v in kept.items()}
    return value


def test_the_shim_takes_fork_and_modules_away_from_memest(files: Path) -> None:
    code = "import memest.child as c; print(c.CAN_FORK, hasattr(c.os, 'killpg'))"
    assert ended(files, "-c", code, has_unix=True).stdout == "True True\n"
    assert ended(files, "-c", code).stdout == "False False\n"
    done = ended(files, "-c", "__name__ = 'memest.x'; import resource")
    assert "No module named 'resource'" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "predict --model tiny.json --gpu t4 --gpu h200 --jobs 2 --json",
        "predict --model tiny.json --strategy fsdp --devices 2 --json",
        "sweep --model tiny.json --bs 1:20 --jobs 2 --gpu t4 --json",
        "run --nproc-per-node 2 --gpu t4 --json report.json ranks.py",
    ],
)
def test_a_command_has_the_same_figures_without_unix(
    words: str, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)

    def result(*, has_unix: bool) -> Any:
        if has_unix and not words.startswith("run "):  # ranks print to the stream of the process
            done = memest_here(*words.split())
        else:
            done = ended(files, "-m", "memest", *words.split(), has_unix=has_unix)
        assert done.returncode == 0, done.stderr
        report = files / "report.json"
        text = report.read_text(encoding="utf-8") if report.is_file() else done.stdout
        report.unlink(missing_ok=True)
        said = sorted(line for line in done.stdout.splitlines() if line.startswith("rank "))
        return said, [without_times(json.loads(line)) for line in text.splitlines()]

    assert result(has_unix=False) == result(has_unix=True)


def test_a_script_is_ended_at_its_time_limit_without_alarms(files: Path) -> None:
    (files / "waits.py").write_text(
        "import time, torch\ntorch.ones(4, device='cuda')\nwhile True:\n    time.sleep(0.01)\n",
        encoding="utf-8",
    )
    done = ended(files, "-m", "memest", "run", "--time-limit", "0.5", "waits.py")
    assert "Error: the script has run for 0.5 s, and is at " in done.stderr
    assert done.returncode == 3


def test_measuring_without_unix_reads_what_there_is(files: Path) -> None:
    assert ended(files, "-m", "memest", "validate", "--help").returncode == 0
    code = (
        "from memest.validate import experiment, runner; "
        "print(runner.host_memory_bytes() > 0, experiment.sample_host('start'))"
    )
    done = ended(files, "-c", code)
    assert done.stdout == "True {'moment': 'start'}\n", done.stderr
