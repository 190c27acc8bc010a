"""`memest.preflight`: what it decides, when it keeps quiet, and what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import memest
from memest.errors import PlanError, UnsupportedError
from memest.estimator.allocator.settings import parse_settings
from memest.estimator.hardware.gpus import custom_gpu, find_gpu
from memest.report import Ending, RunReport
from memest.run import preflight as module
from memest.run.preflight import Command, DeviceAtHand, Outcome
from memest.run.session import Session
from memest.run.target import NoInput
from memest.units import parse_bytes

ROOT = Path(__file__).resolve().parents[3]
MIB, GIB = 1 << 20, 1 << 30
H100 = find_gpu("h100-80gb")


def card(room_bytes: int) -> DeviceAtHand:
    """An H100 on which the allocator can have `room_bytes`."""
    free_bytes = room_bytes + H100.context_bytes
    return DeviceAtHand(H100.label, H100.memory_bytes, H100.capability, free_bytes)


class Model(torch.nn.Module):
    """Keeps 32 MiB of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, num_samples: int) -> torch.Tensor:
        self.kept = [torch.empty(8 * MIB, device="cuda") for _ in range(num_samples)]
        return self.weight.sum()


def train(num_samples: int) -> None:
    model = Model().cuda()
    optimizer = torch.optim.SGD(model.parameters())
    model(num_samples).backward()
    optimizer.step()


class Runs:
    """Stands for the process of a virtual run: `train` here, with the options it was given."""

    def __init__(self, *, has_loader: bool = True) -> None:
        self.options: list[dict[str, str]] = []
        self.environments: list[dict[str, str]] = []
        self.has_loader = has_loader

    def __call__(
        self,
        typed: Command,
        options: list[str],
        environment: dict[str, str],
        folder: Path,
        seconds: float,
    ) -> Any:
        words = [word for word in options if word != "--no-input"]
        given = dict(zip(words[::2], words[1::2], strict=True))
        self.options.append(given)
        self.environments.append(environment)
        gpu = find_gpu(given["--gpu"])
        if "--gpu-memory" in given:
            gpu = custom_gpu(parse_bytes(given["--gpu-memory"]), gpu)
        limit = given.get("--memory-limit")
        session = Session(gpu, memory_limit=None if limit is None else int(limit))
        settings = environment.get("PYTORCH_ALLOC_CONF", "")
        session.virtual.allocator.use_late(lambda: parse_settings(settings))
        try:
            with session:
                self.train(8 // int(given.get("--batch-parts", "1")) if self.has_loader else 8)
        except torch.OutOfMemoryError:
            pass
        return session.report(), ""

    def train(self, num_samples: int) -> None:
        train(num_samples)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A process that runs `train.py --bs 8` and has checked nothing yet."""
    for name in (module.VARIABLE, module._DONE, "WORLD_SIZE", *module._RANK_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    script = tmp_path / "train.py"
    script.write_text("")
    main = ModuleType("__main__")
    main.__file__ = str(script)
    main.__spec__ = None
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", ["train.py", "--bs", "8"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", "--bs", "8"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "_done", None)
    yield
    os.environ.pop(module._DONE, None)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    made = Runs()
    monkeypatch.setattr(module, "_run_script", made)
    return made


def on(monkeypatch: pytest.MonkeyPatch, device: DeviceAtHand | None) -> None:
    monkeypatch.setattr(module, "device_at_hand", lambda: device)


def test_a_script_that_fits_passes_in_silence(
    monkeypatch: pytest.MonkeyPatch, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    on(monkeypatch, card(60 * GIB))

    result = memest.preflight(max_steps=2)

    assert result.outcome is Outcome.FITS
    assert result.report is not None
    assert capsys.readouterr() == ("", "")
    assert runs.options == [
        {"--gpu": "h100-80gb", "--memory-limit": str(60 * GIB), "--max-steps": "2"}
    ]


def test_a_script_that_will_not_fit_is_stopped_with_the_report_and_a_change_that_was_simulated(
    monkeypatch: pytest.MonkeyPatch, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    on(monkeypatch, card(140 * MIB))

    with pytest.raises(memest.PreflightStop) as stopped:
        memest.preflight()

    said = capsys.readouterr().err
    assert stopped.value.code == 5
    assert stopped.value.result.outcome is Outcome.OOM
    assert "`train.py --bs 8` will not fit h100-80gb (0.14 GiB for its allocator" in said
    assert "OutOfMemoryError: CUDA out of memory. Tried to allocate 32.00 MiB." in said
    assert "needs 0.25 GiB: 0.12 GiB more than there is" in said
    assert "fits: a100-40gb, a100-80gb, h100-80gb, h200" in said
    assert "best change, simulated: 1/2 of the micro-batch" in said
    assert [given.get("--batch-parts") for given in runs.options] == [None, None, "2"]


def test_a_change_that_cannot_be_simulated_is_estimated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on(monkeypatch, card(140 * MIB))
    monkeypatch.setattr(module, "_run_script", Runs(has_loader=False))

    with pytest.raises(memest.PreflightStop):
        memest.preflight()

    said = capsys.readouterr().err
    assert "best change: 1/2 of the micro-batch" in said
    assert "estimated from the contents of the peak" in said


class Growing(Runs):
    """A run whose batches become longer, so that its cached segments serve no more."""

    def train(self, num_samples: int) -> None:
        parameter = torch.nn.Parameter(torch.ones(4, device="cuda"))
        optimizer = torch.optim.SGD([parameter])
        self.walls: list[torch.Tensor] = []  # each stays in the segment of what was freed
        for num_mib in range(20, 100, 8):
            torch.empty(num_mib * MIB, dtype=torch.uint8, device="cuda")
            self.walls.append(torch.empty(20 * MIB, dtype=torch.uint8, device="cuda"))
        parameter.sum().backward()
        optimizer.step()
        self.walls.clear()


def test_a_setting_of_the_allocator_is_tried_beside_those_that_are_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on(monkeypatch, card(320 * MIB))
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "roundup_power2_divisions:16")
    made = Growing()
    monkeypatch.setattr(module, "_run_script", made)

    with pytest.raises(memest.PreflightStop):
        memest.preflight()

    said = capsys.readouterr().err
    assert "best change, simulated: `PYTORCH_ALLOC_CONF=expandable_segments:True`" in said
    wanted = "roundup_power2_divisions:16,expandable_segments:True"
    assert made.environments[-1]["PYTORCH_ALLOC_CONF"] == wanted


def test_a_tight_script_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    on(monkeypatch, card(300 * MIB))

    assert memest.preflight(margin="100MiB").outcome is Outcome.TIGHT
    said = capsys.readouterr().err
    assert "fits h100-80gb (0.29 GiB for its allocator; other processes hold" in said
    assert (
        "but it is tight: needs 0.25 GiB of 0.29 GiB usable, 42.00 MiB to spare after 1 steps"
        in said
    )


def test_a_margin_that_is_no_size_is_refused_at_once() -> None:
    with pytest.raises(PlanError, match="`much` is not a memory size"):
        memest.preflight(margin="much")


def test_steps_that_are_none_are_refused_at_once() -> None:
    with pytest.raises(PlanError, match="`max_steps` is `0`"):
        memest.preflight(max_steps=0)


def test_it_checks_once(monkeypatch: pytest.MonkeyPatch, runs: Runs) -> None:
    on(monkeypatch, card(60 * GIB))

    first = memest.preflight()

    assert memest.preflight() is first
    assert len(runs.options) == 1


def test_a_process_that_the_script_starts_with_the_same_command_does_not_check(
    monkeypatch: pytest.MonkeyPatch, runs: Runs
) -> None:
    on(monkeypatch, card(60 * GIB))
    memest.preflight()
    monkeypatch.setattr(module, "_done", None)  # as in a new process
    monkeypatch.setattr(os, "getpid", lambda: -1)

    assert memest.preflight().outcome is Outcome.OFF

    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", "--bs", "4"])
    assert memest.preflight().outcome is Outcome.FITS


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MEMEST_PREFLIGHT", "off"),
        ("MEMEST_PREFLIGHT", "0"),
        ("MEMEST_PREFLIGHT", "inside"),
        ("RANK", "1"),
        ("LOCAL_RANK", "3"),
        ("SLURM_PROCID", "2"),
    ],
)
def test_it_is_off(
    name: str,
    value: str,
    monkeypatch: pytest.MonkeyPatch,
    runs: Runs,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(name, value)

    assert memest.preflight().outcome is Outcome.OFF
    assert capsys.readouterr() == ("", "")
    assert runs.options == []


def test_it_does_nothing_on_a_virtual_gpu(runs: Runs) -> None:
    with memest.virtual_gpu("a100-40gb"):
        assert memest.preflight().outcome is Outcome.OFF


def test_rank_0_of_several_says_that_it_cannot_tell(
    monkeypatch: pytest.MonkeyPatch, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")

    assert memest.preflight().outcome is Outcome.UNKNOWN
    assert capsys.readouterr().err == (
        "memest preflight: not checked: several GPUs are not simulated yet (`WORLD_SIZE` is 4)\n"
    )


def test_without_a_gpu_it_says_so_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    on(monkeypatch, None)

    assert memest.preflight().outcome is Outcome.UNKNOWN
    assert capsys.readouterr().err == ("memest preflight: not checked: there is no CUDA GPU here\n")


def test_in_a_notebook_it_says_what_does_the_same(
    monkeypatch: pytest.MonkeyPatch, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "typed_command", lambda frame: None)

    assert memest.preflight().outcome is Outcome.UNKNOWN
    assert "no script to run, as in a notebook; the code within" in capsys.readouterr().err


@pytest.mark.parametrize("ending", [Ending.CRASHED, Ending.UNSUPPORTED])
def test_a_virtual_run_that_ends_early_proves_nothing(
    ending: Ending, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def crash(typed: Command, *args: Any) -> Any:
        report, _ = Runs()(typed, ["--gpu", "h200"], {}, Path(), 1.0)
        return replace(report, ending=ending, error="ValueError: no such file"), ""

    on(monkeypatch, card(60 * GIB))
    monkeypatch.setattr(module, "_run_script", crash)

    assert memest.preflight().outcome is Outcome.UNKNOWN
    assert "not checked: the virtual run ended early: ValueError: no" in capsys.readouterr().err


def test_a_gpu_that_the_catalogue_lacks_is_simulated_with_its_memory(
    monkeypatch: pytest.MonkeyPatch, runs: Runs
) -> None:
    total = 16 * GIB
    on(monkeypatch, DeviceAtHand("NVIDIA GeForce RTX 4080", total, (8, 9), total))

    assert memest.preflight().outcome is Outcome.FITS
    assert runs.options[0]["--gpu"] == "l4"
    assert runs.options[0]["--gpu-memory"] == str(total)


def test_a_report_is_read_back_from_its_json(runs: Runs) -> None:
    report, _ = runs(Command(("train.py",), "."), ["--gpu", "h200"], {}, Path(), 1.0)

    assert RunReport.from_dict(json.loads(report.to_json())) == report


SCRIPT = """
import sys, time
import memest
from memest.run import preflight
from memest.run.preflight import DeviceAtHand

card = DeviceAtHand("NVIDIA H100 80GB HBM3", 85017493504, (9, 0), 2 << 30)
preflight.device_at_hand = lambda: card
result = memest.preflight(max_steps=1, time_limit=float(sys.argv[2]))
{body}
print("went on:", result.outcome, "torch" in sys.modules)
"""

BODY = """
import os
if os.environ.get("MEMEST_PREFLIGHT") == "inside":
    assert memest.preflight().outcome == "off"
    import torch
    torch.empty(int(sys.argv[1]) << 20, device="cuda", dtype=torch.uint8)
    sys.exit()
"""


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(*args: str, body: str = BODY) -> subprocess.CompletedProcess[str]:
        (tmp_path / "real.py").write_text(SCRIPT.format(body=body))
        return subprocess.run(
            [sys.executable, "real.py", *args],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            input="42\n",
            check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    return run


@pytest.mark.slow
def test_a_real_script_runs_itself_once_more(script: Callable[..., Any]) -> None:
    done = script("100", "60")

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "went on: fits False\n"


@pytest.mark.slow
def test_a_real_script_is_stopped(script: Callable[..., Any]) -> None:
    done = script("2000", "60")

    assert (done.returncode, done.stdout) == (5, "")
    assert "`real.py 2000 60` will not fit h100-80gb" in done.stderr
    assert "needs 1.95 GiB: 0.70 GiB more than there is" in done.stderr


def test_it_steps_aside_when_its_time_is_over(script: Callable[..., Any]) -> None:
    body = "import os, time\nif os.environ.get('MEMEST_PREFLIGHT'): time.sleep(60)"
    done = script("100", "1", body=body)

    assert done.stdout == "went on: unknown False\n"
    assert "not checked: the virtual run did not end within 1 s" in done.stderr


@pytest.mark.slow
def test_a_script_that_reads_from_stdin_goes_on_and_still_can(script: Callable[..., Any]) -> None:
    done = script("100", "60", body="print(input())")

    assert done.stdout == "42\nwent on: unknown False\n"
    assert "not checked: the script reads from stdin" in done.stderr


@pytest.mark.parametrize("read", [lambda: input(), lambda: sys.stdin.read(), lambda: [*sys.stdin]])
def test_no_input_can_be_read(read: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", NoInput())

    with pytest.raises(UnsupportedError, match="the script reads from stdin"):
        read()
