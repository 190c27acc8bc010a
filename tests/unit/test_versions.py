"""Which release of torch is simulated, what differs between releases, and what a report says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import memest
from memest import TrainingPlan, predict
from memest.cli import main
from memest.errors import PlanError
from memest.estimator import versions
from memest.estimator.ops.registry import overloads
from memest.estimator.versions import (
    ENVIRONMENT,
    KERNELS,
    OPERATORS_SINCE,
    RELEASES,
    nearest_release,
    simulated,
    simulating,
)
from memest.report.answer import kernels_line
from memest.report.text import render_text

MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[2]
INSTALLED = torch.__version__


@pytest.fixture
def no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT)


@pytest.mark.parametrize(
    ("installed", "name"),
    [
        ("2.5.1+cu124", "2.5"),
        ("2.6.0+cu124", "2.6"),
        ("2.9.1", "2.9"),
        ("2.11.0", "2.11"),
        ("2.12.1", "2.12"),
        ("2.13.0+cpu", "2.13"),
        ("2.14.1+cu130", "2.14"),
        ("2.15.0+cu132", "2.15"),
        ("2.99.0.dev20270101+cu130", RELEASES[-1].name),
    ],
)
def test_the_installed_release_or_the_nearest_known_one_is_simulated(
    installed: str, name: str, no_setting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "_installed", lambda: installed)
    assert simulated().name == name


def test_a_child_process_simulates_the_same_release() -> None:
    code = "from memest.estimator.versions import simulated; print(simulated().name)"
    with simulating("2.12"):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "2.12"
    assert os.environ[ENVIRONMENT] == "2.11"


def test_a_release_that_is_not_known_is_refused() -> None:
    with pytest.raises(
        PlanError, match=r"the kernels of torch `2\.4` cannot be simulated"
    ) as found:
        memest.virtual_gpu(torch_release="2.4")
    assert found.value.hint == f"known releases: {', '.join(f'`{r.name}`' for r in RELEASES)}"
    with pytest.raises(SystemExit) as ended:
        main(["predict", "--model", "gpt2", "--torch", "2.99"])
    assert ended.value.code == 2


def run(release: str | None) -> memest.run.session.Session:
    """A linear layer with a bias, and RMS norm under autocast, each forward and backward."""
    with memest.virtual_gpu("a100-80gb", torch_release=release) as gpu:
        x = torch.randn(64, 1024, device="cuda", requires_grad=True)
        nn.Linear(1024, 1024, device="cuda")(x).sum().backward()
        norm = nn.RMSNorm(1024, device="cuda", dtype=torch.bfloat16)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            gpu.of_norm = norm(x.bfloat16())  # type: ignore[attr-defined]
    return gpu


def test_what_differs_between_releases() -> None:
    old, new = run("2.11"), run("2.13")

    # the workspace of cuBLASLt, which is part of cuBLAS' own from 2.12
    assert new.peak_allocated_bytes == old.peak_allocated_bytes - MIB
    assert old.of_norm.dtype is torch.bfloat16
    assert new.of_norm.dtype is torch.float32


def test_workspaces_of_torch_2_15_live_for_one_call() -> None:
    def run_product(release: str) -> tuple[int, int]:
        with memest.virtual_gpu("h100-80gb", torch_release=release) as gpu:
            x = torch.ones(1024, 1024, device="cuda")
            x @ x
            return torch.cuda.memory_allocated(), gpu.peak_allocated_bytes

    kept = run_product("2.14")
    assert kept == (36 * MIB, 40 * MIB)
    assert run_product("2.15") == (4 * MIB, 40 * MIB)


def test_a_plan_is_simulated_once_for_each_release() -> None:
    plan = TrainingPlan(model_name="gpt2", batch_size=1, seq_len=64, gpu=("a100-80gb",))
    with simulating("2.13"):
        new = predict(plan)
    old = predict(plan)

    assert 0 < old.peak_allocated_bytes - new.peak_allocated_bytes <= 2 * MIB


def test_the_first_lines_name_the_release_where_it_is_not_the_installed_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    line = f"kernels: those of torch 2.11 are simulated; torch {INSTALLED} is installed"
    same = nearest_release(INSTALLED).name
    plan = TrainingPlan(model_name="gpt2", batch_size=1, seq_len=64, gpu=("a100-80gb",))

    assert line in render_text(predict(plan)).splitlines()[:4]
    assert line in render_text(run(None).report()).splitlines()[:4]
    if not INSTALLED.startswith(f"{same}."):
        pytest.skip("the rules of the installed torch are not known")
    assert "kernels: " not in render_text(run(same).report())


def test_a_release_older_than_the_bound_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(versions, "_installed", lambda: "2.4.1+cu124")
    oldest = RELEASES[0].name
    message = f"torch 2.4.1+cu124 is installed; memest needs {oldest} or newer"
    plan = TrainingPlan(model_name="gpt2", batch_size=1, seq_len=64)

    for call in (memest.virtual_gpu, lambda: predict(plan)):
        with pytest.raises(PlanError, match=re.escape(message)) as found:
            call()
        assert found.value.hint == f"pip install 'torch>={oldest}'"
    with pytest.raises(SystemExit) as ended:
        main(["run", __file__])
    assert ended.value.code == PlanError.exit_code
    assert message in capsys.readouterr().err


def test_every_minor_release_since_the_bound_has_a_row() -> None:
    assert [r.version for r in RELEASES] == [(2, n) for n in range(5, 5 + len(RELEASES))]
    bound = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"torch>={RELEASES[0].name}' in bound


def test_operators_that_may_be_absent_are_in_this_torch() -> None:
    assert all(hasattr(torch.ops.aten, name) for name in OPERATORS_SINCE)
    with pytest.raises(AttributeError):
        list(overloads("no_such_operator"))


def test_an_operator_of_a_newer_torch_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPERATORS_SINCE, "no_such_operator", (2, 99))
    assert list(overloads("no_such_operator mm")) == [torch.ops.aten.mm.default]


def test_a_compiler_without_a_private_name_runs_eagerly_and_is_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._inductor.fx_passes import joint_graph

    monkeypatch.delattr(joint_graph, "UniformValueConstantFolder")
    with memest.virtual_gpu("a100-80gb") as gpu:
        model = torch.compile(nn.Linear(64, 64, device="cuda"))
        model(torch.randn(8, 64, device="cuda")).sum().backward()
    (line,) = (w for w in gpu.report().warnings if "UniformValueConstantFolder" in w)
    assert "which keeps more temporaries" in line


def test_rms_norm_of_old_releases_runs_several_kernels() -> None:
    def peak(release: str) -> int:
        with memest.virtual_gpu("a100-80gb", torch_release=release) as gpu:
            norm = nn.RMSNorm(1024, device="cuda")
            norm(torch.randn(4096, 1024, device="cuda", requires_grad=True)).sum().backward()
        return gpu.peak_allocated_bytes

    assert peak("2.8") > peak("2.9") == peak("2.11")


def test_a_release_that_is_newer_than_all_known_ones_is_a_warning() -> None:
    newest = RELEASES[-1].name
    assert kernels_line({"torch": "2.99.0", KERNELS: newest}) == [
        f"warning: kernels: those of torch {newest} are simulated; torch 2.99.0 is installed,"
        " which has no rules of its own"
    ]
    nightly = "2.99.0.dev20270101+cu130"
    assert kernels_line({"torch": nightly, KERNELS: newest}) == [
        f"warning: kernels: those of torch {newest} are simulated; torch {nightly} (a nightly"
        " build) is installed, which has no rules of its own"
    ]
    assert not kernels_line({"torch": f"{newest}.1", KERNELS: newest})


@pytest.mark.parametrize(
    ("versions", "line"),
    [
        ({"torch": "2.11.0+rocm6.4", "torch built for": "ROCm 6.4"},
         "kernels: CUDA kernels of torch 2.11 are simulated; torch 2.11.0+rocm6.4 (built for ROCm"
         " 6.4) is installed"),
        ({"torch": "2.11.0", "torch built for": "MPS"},
         "kernels: CUDA kernels of torch 2.11 are simulated; torch 2.11.0 (built for MPS) is"
         " installed"),
        ({"torch": "2.11.0.dev20260101+cu130"},
         "kernels: those of torch 2.11 are simulated; torch 2.11.0.dev20260101+cu130 (a nightly"
         " build) is installed"),
    ],
)  # fmt: skip
def test_builds_other_than_releases_for_cuda_are_reported(
    versions: dict[str, str], line: str
) -> None:
    assert kernels_line({KERNELS: "2.11", **versions}) == [line]


PLATFORM = """
import torch
print(torch.version.hip, torch.version.cuda, torch.backends.mps.is_available())
torch.nn.Linear(8, 8).cuda()(torch.ones(1, 8, device="cuda")).sum().backward()
"""
COMMANDS = """
from contextlib import suppress
from memest.cli import main

with suppress(SystemExit):
    main(["doctor"])
print("\\nrun:")
main(["run", {!r}])
"""


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ("torch.version.hip = '6.4.43482'", "ROCm 6.4.43482"),
        ("torch.backends.mps.is_built = torch.backends.mps.is_available = lambda: True", "MPS"),
    ],
)
def test_builds_for_other_gpus_simulate_cuda(change: str, name: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PLATFORM, encoding="utf-8")
    code = f"import torch; {change}\n" + COMMANDS.format(str(script))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    doctor, _, run = done.stdout.partition("\nrun:\n")
    assert f"{INSTALLED}, built for {name}; CUDA kernels are simulated" in doctor
    assert run.splitlines()[0] == "None 13.0 False"
    assert f"CUDA kernels of torch 2.11 are simulated; torch {INSTALLED} (built for {name})" in (
        " ".join(run.split())
    )
