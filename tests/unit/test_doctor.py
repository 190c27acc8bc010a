"""`memest doctor` and `memest --version`."""

from __future__ import annotations

import platform
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import memest
from memest import packages
from memest.cli import doctor, main
from memest.estimator import versions

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def rows(capsys: pytest.CaptureFixture[str], *, code: int = 0) -> dict[str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["doctor"])
    assert ended.value.code == code
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 10
    return {name: text.strip() for name, _, text in (line.partition(" ") for line in lines)}


def test_doctor_shows_the_stack_and_the_simulated_release(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = rows(capsys)

    assert found["memest"] == f"{memest.__version__} in {ROOT / 'memest'}"
    assert found["torch"].startswith(f"{torch.__version__}, ")
    assert found["simulated"] == "kernels of torch 2.11, measured"
    assert found["settings"] == "MEMEST_TORCH=2.11"
    assert "transformers " in found["installed"]


def test_doctor_names_missing_libraries_and_extras(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "STACK", (*versions.STACK, "no-such-package"))
    monkeypatch.delitem(packages.EXTRAS, "pynvml")
    monkeypatch.setitem(packages.EXTRAS, "no_such_package", "validate")

    found = rows(capsys)

    assert found["missing"].endswith("no-such-package")
    assert "validate missing: pip install 'memest-gpu[validate]'" in found["extras"]


def test_a_torch_that_cannot_be_imported_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(name: str) -> None:
        raise OSError("libtorch.so: cannot open shared object file")

    monkeypatch.setattr(doctor, "import_module", broken)

    assert rows(capsys, code=1)["torch"].startswith("cannot be imported: OSError: libtorch.so")


def test_the_extras_are_those_of_the_distribution() -> None:
    assert PROJECT["project"]["name"] == "memest-gpu"
    optional = PROJECT["project"]["optional-dependencies"]
    assert {*doctor.EXTRAS} <= {*packages.EXTRAS.values()} <= {*optional}


def test_the_version_lists_the_stack_without_importing_it() -> None:
    code = (
        "import sys\nfrom memest.cli import main\ntry:\n    main(['--version'])\n"
        "finally:\n    assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == f"memest {memest.__version__}"
    assert f"torch {torch.__version__}" in lines
    assert "kernels of torch 2.11" in lines
    assert lines[-1] == f"Python {platform.python_version()} on {platform.platform()}"
