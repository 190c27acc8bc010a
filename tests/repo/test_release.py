"""The wheel as a user gets it: whole, installable, with a description that renders."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import memest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "-w",
        str(folder),
        str(ROOT),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (made,) = folder.glob("*.whl")
    return made


def test_the_wheel_has_the_data_of_every_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    data = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "memest").rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    ]

    assert len(data) > 80
    assert set(data) <= inside
    assert not [name for name in inside if name.startswith(("tests/", "results/", "docs/"))]


def test_the_wheel_runs_from_where_it_is_unpacked(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    for words, said in (
        (["--version"], memest.__version__),
        (["models"], "blip2-flan-t5-xxl"),
        (["gpus", "--json"], "a100-80gb"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "memest", *words], cwd=tmp_path, env=env, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        assert said in done.stdout, done.stderr


def test_the_description_is_the_readme_and_renders_by_itself(wheel: Path) -> None:
    """An index shows it without the repository: an image beside it would be missing."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
    text = metadata.get_payload()

    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata["Version"] == memest.__version__
    assert isinstance(text, str)
    assert text.strip() == (ROOT / "README.md").read_text(encoding="utf-8").strip()
    assert re.findall(r"!\[[^\]]*\]\((?!https?://)", text) == []
    assert text.count("```") % 2 == 0
