"""The wheel as a user gets it: whole, installable, with a description that renders."""

from __future__ import annotations

import email
import os
import re
import runpy
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

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
    assert not [
        name for name in inside if name.startswith(("tests/", "validation/", "scripts/", "docs/"))
    ]


def test_the_wheel_has_at_most_2_mb(wheel: Path) -> None:
    assert wheel.stat().st_size <= 2_000_000


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


release = runpy.run_path(str(ROOT / "scripts" / "release.py"))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A committed tree of version 1.2.3 that can be released."""
    (tmp_path / "memest").mkdir()
    for name, text in {
        "pyproject.toml": '[project]\nversion = "1.2.3"\n',
        "memest/__init__.py": '__version__ = "1.2.3"\n',
        "CHANGELOG.md": "# Changelog\n\n## 1.2.3, 2026-11-24\n\n## 1.2.2, 2026-01-01\n",
    }.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    for words in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-q", "-m", "one"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    return tmp_path


def test_a_clean_tree_with_one_version_can_be_released(tree: Path) -> None:
    assert release["faults"](tree) == []


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("memest/__init__.py", '__version__ = "1.2.2"', "`memest.__version__` is not 1.2.3"),
        ("CHANGELOG.md", "## 1.2.2, 2026-11-24", "begins with `1.2.2, 2026-11-24`, not with"),
        ("CHANGELOG.md", "## 1.2.3, unreleased", "not with `1.2.3, YYYY-MM-DD`"),
    ],
)
def test_a_tree_with_two_versions_cannot_be_released(
    name: str, text: str, fault: str, tree: Path
) -> None:
    (tree / name).write_text(text, encoding="utf-8")
    found = release["faults"](tree)
    assert len(found) == 2
    assert fault in found[0]
    assert found[1].startswith("the tree is not clean:")
    rehearsed = release["faults"](tree, is_rehearsal=True)
    assert len(rehearsed) == (1 if "unreleased" in text else 2)


def test_a_released_description_has_no_relative_links() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = release["with_absolute_links"](text, "https://example.org/blob/v1/")
    assert "](https://example.org/blob/v1/docs/run.md)" in found
    assert re.findall(r"\]\((?!https://)[^)]*\)", found) == []


def test_a_large_wheel_and_an_sdist_with_results_are_faults(tmp_path: Path) -> None:
    wheel, sdist = tmp_path / "a.whl", tmp_path / "a.tar.gz"
    wheel.write_bytes(bytes(2_000_001))
    with tarfile.open(sdist, "w:gz") as archive:
        for name in ("memest", "validation"):
            (tmp_path / name).mkdir()
            archive.add(tmp_path / name, f"a-1/{name}")
    assert release["faults_of_files"](wheel, sdist) == [
        "a.whl has 2000001 bytes, over 2000000", "a.tar.gz has `validation`",
    ]  # fmt: skip


def test_the_conda_recipe_has_the_dependencies_of_the_project() -> None:
    jinja2, yaml = pytest.importorskip("jinja2"), pytest.importorskip("yaml")

    def load_file_data(name: str, *, from_recipe_dir: bool) -> Any:
        assert from_recipe_dir
        return tomllib.loads((ROOT / "conda" / name).read_text(encoding="utf-8"))

    text = (ROOT / "conda" / "meta.yaml").read_text(encoding="utf-8")
    recipe = yaml.safe_load(
        jinja2.Template(text).render(load_file_data=load_file_data, PYTHON="python")
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [d.replace("torch", "pytorch") for d in project["dependencies"]]
    assert recipe["package"] == {"name": "memest-gpu", "version": memest.__version__}
    assert recipe["requirements"]["run"] == [f"python {project['requires-python']}", *needed]
    assert recipe["build"]["entry_points"] == ["memest = memest.__main__:command"]


def test_the_image_copies_what_its_build_needs() -> None:
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    copied = {name for line in lines if line.startswith("COPY") for name in line.split()[1:-1]}
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    assert copied == {line[1:] for line in ignored if line.startswith("!")}
    assert all((ROOT / name).exists() for name in copied)
    assert copied >= {project["readme"], *project["license-files"], "pyproject.toml", "memest"}
    assert 'ENTRYPOINT ["memest"]' in lines


def test_the_workflow_runs_the_quick_part_on_three_systems() -> None:
    yaml = pytest.importorskip("yaml")
    text = (ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8")
    job = yaml.safe_load(text)["jobs"]["quick"]
    matrix = job["strategy"]["matrix"]

    assert [*matrix["os"], *(row["os"] for row in matrix["include"])] == [
        "ubuntu-latest", "macos-latest", "windows-latest",
    ]  # fmt: skip
    assert matrix["python"] == ["3.11", "3.12", "3.13", "3.14"]
    assert any("not slow" in step.get("run", "") for step in job["steps"])
