"""The pytest plugin, in sessions of pytest of their own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from memest.pytest_plugin import _stored_peaks
from tests import forked

ROOT = Path(__file__).resolve().parents[2]
QUICK = ("-q", "-rN", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "--assert=plain")
"""Options that save 2 s a session: pytest rewrites the modules of a plugin without this cache."""

TEST = """
import pytest, torch

SIZE = {size}

@pytest.fixture(scope="session")
def session_fixture():
    return torch.ones(2).device.type

@pytest.fixture
def model():
    return torch.nn.Linear(1024, 1024, device="cuda")

@pytest.mark.gpu_memory("{limit}", gpu="a100-40gb")
def test_step(model, session_fixture):
    assert torch.cuda.get_device_name() == "NVIDIA A100-SXM4-40GB"
    hidden = torch.ones(SIZE, 1024, device="cuda")
    model(hidden).sum().backward()

def test_fixture(virtual_gpu):
    torch.empty(1 << 20, device="cuda")
    assert virtual_gpu.peak_allocated_bytes == 4 << 20

def test_without():
    assert not torch.cuda.is_available()
"""


def pytest_in(
    folder: Path, *args: str, start: Callable[..., Any] = forked.run
) -> subprocess.CompletedProcess[str]:
    done: subprocess.CompletedProcess[str] = start(
        [sys.executable, "-m", "pytest", *QUICK, *args],
        cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    return done


def write(
    folder: Path, *, size: int = 256, limit: str = "1GiB", name: str = "test_train.py"
) -> None:
    (folder / name).write_text(TEST.format(size=size, limit=limit))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text('[tool.memest]\ngpu = "t4"\n')
    write(tmp_path)
    return tmp_path


UNUSED = """
import pytest

@pytest.mark.gpu_memory("1GiB")
def test_nothing(): ...

@pytest.mark.gpu_memory("1GiB", gpuu="t4")
def test_misspelt(): ...

@pytest.mark.gpu_memory("20G")
def test_without_unit(): ...
"""
LARGE = """
import torch

def test_large(virtual_gpu):
    kept = torch.empty(14 << 30, dtype=torch.uint8, device="cuda")
    kept.clone()
"""


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Output of a session: one test is above its limit, one out of memory, one without the GPU.

    Two have a wrong mark.
    """
    folder = tmp_path_factory.mktemp("failures")
    (folder / "pyproject.toml").write_text('[tool.memest]\ngpu = "t4"\n')
    write(folder, limit="8MiB")
    (folder / "test_unused.py").write_text(UNUSED)
    (folder / "test_large.py").write_text(LARGE)
    return pytest_in(folder).stdout


def test_a_test_fails_above_the_limit_of_its_mark(failures: str) -> None:
    assert "3 failed, 2 passed, 2 errors" in failures
    assert re.search(r"needs \d+\.\d\d MiB on a100-40gb, \d+\.\d\d MiB more than 8MiB", failures)
    assert "test_train.py:18  model(hidden).sum().backward()" in failures


def test_a_marked_test_that_never_uses_the_gpu_fails(failures: str) -> None:
    assert "the test has not used the GPU" in failures
    assert "gpu_memory('1GiB', gpuu): write gpu_memory(" in failures


def test_a_test_out_of_memory_has_the_lines_of_the_peak(failures: str) -> None:
    assert "torch.OutOfMemoryError" in failures
    assert "14.00 GiB  test_large.py:5  kept = torch.empty" in failures
    assert "memest/estimator" not in failures


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """What `--memest-update` prints, and the file that it writes."""
    folder = tmp_path_factory.mktemp("stored")
    (folder / "pyproject.toml").write_text('[tool.memest]\ngpu = "t4"\n')
    write(folder)
    done = pytest_in(folder, "--memest-update")
    return done.stdout, (folder / "memest-peaks.json").read_text()


def test_peaks_are_stored_by_test(stored: tuple[str, str]) -> None:
    output, content = stored

    assert {name: peak["gpu"] for name, peak in json.loads(content)["peaks"].items()} == {
        "test_train.py::test_fixture": "t4",
        "test_train.py::test_step": "a100-40gb",
    }
    assert "memest: 2 tests: stored in memest-peaks.json" in output


@pytest.fixture(scope="module")
def increased(tmp_path_factory: pytest.TempPathFactory, stored: tuple[str, str]) -> str:
    """Output of a session that compares with stored peaks.

    Tests of two files have grown. Peaks of two files are of other versions. One file has none.
    """
    folder = tmp_path_factory.mktemp("increased")
    (folder / "pyproject.toml").write_text('[tool.memest]\ngpu = "t4"\n')
    write(folder, size=1024)
    write(folder, name="test_older.py")
    write(folder, name="test_older_grown.py", size=1024)
    write(folder, name="test_new.py")
    peaks = json.loads(stored[1])
    for name in ("test_older.py", "test_older_grown.py"):
        older = json.loads(stored[1].replace("test_train.py", name))["peaks"]
        for peak in older.values():
            peak["versions"] = {"memest": "0.1.0", "torch": "2.9.0"}
        peaks["peaks"] |= older
    (folder / "memest-peaks.json").write_text(json.dumps(peaks))
    return pytest_in(folder, "--memest-fail-on-increase").stdout


def test_a_peak_that_grows_fails_with_the_lines_that_grew(increased: str) -> None:
    assert "2 failed, 10 passed" in increased
    assert increased.count("the peak grew: allocated 27.25 MiB -> ") == 2
    for name in ("test_train.py", "test_older_grown.py"):
        assert f"+3.00 MiB  {name}:17  hidden = torch.ones(" in increased
    assert increased.count("(1.00 MiB before)") == 2


def test_a_stored_peak_of_other_versions_is_named(increased: str) -> None:
    """In the failure of the test that grew, and for all of them at the end."""
    assert "memest: 4 tests: the stored peak is of memest 0.1.0, torch 2.9.0" in increased
    assert increased.count("the stored peak is of") == 2


def test_a_test_without_a_stored_peak_is_counted(increased: str) -> None:
    assert "memest: 2 tests: no stored peak; `--memest-update` stores one" in increased


def test_another_schema_of_the_file_is_an_error(folder: Path) -> None:
    (folder / "memest-peaks.json").write_text('{"schema": "memest.peaks/9"}')

    done = pytest_in(folder, "-k", "test_step")

    assert done.returncode != 0
    assert "has the schema memest.peaks/9, not memest.peaks/1" in done.stdout


def test_peaks_are_the_same_under_xdist(folder: Path, stored: tuple[str, str]) -> None:
    pytest.importorskip("xdist")

    pytest_in(folder, "--memest-update", "-n", "1")

    assert (folder / "memest-peaks.json").read_text() == stored[1]


def test_the_plugin_imports_nothing_heavy(folder: Path) -> None:
    (folder / "test_train.py").write_text(
        "import sys\ndef test_light():\n    ours = {m for m in sys.modules if 'memest' in m}\n"
        "    assert ours == {'memest', 'memest.pytest_plugin'}\n"
        "    assert 'torch' not in sys.modules\n"
    )

    assert "1 passed" in pytest_in(folder, start=subprocess.run).stdout


def test_a_test_without_the_plugin_pays_at_most_5_ms_for_it(folder: Path) -> None:
    (folder / "test_train.py").write_text(
        "import pytest\n@pytest.mark.parametrize('n', range(200))\ndef test_none(n): ...\n"
    )

    def seconds(*args: str) -> float:
        """Return the processor's time of a session; the shorter of two."""
        found = []
        for _ in range(2):
            before = os.times().children_user
            assert "200 passed" in pytest_in(folder, *args, start=subprocess.run).stdout
            found.append(os.times().children_user - before)
        return min(found)

    assert seconds() - seconds("-p", "no:memest") < 200 * 0.005


def test_a_mark_with_a_wrong_limit_fails_before_the_test_in_two_lines(failures: str) -> None:
    assert "`20G` is not a memory size\nhint: write it as `78.4GiB` or `80GB`" in failures
    assert "pytest_plugin.py" not in failures


@pytest.mark.parametrize("content", ["[]", '{"schema": "memest.peaks/1"}'])
def test_a_file_without_peaks_is_an_error(content: str, folder: Path) -> None:
    (folder / "memest-peaks.json").write_text(content)
    config: Any = SimpleNamespace(rootpath=folder, stash=pytest.Stash())

    with pytest.raises(pytest.UsageError, match="or no peaks"):
        _stored_peaks(config)
