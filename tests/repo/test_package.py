"""Promises of the repository as a whole."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import json
import pkgutil
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import memest
from memest.packages import EXTRAS, how_to_install

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "memest"
SOURCES = sorted(PACKAGE.rglob("*.py"))
TEXTS = sorted(
    path
    for pattern in (
        "*.md",
        "*.toml",
        "*.txt",
        "memest/**/*",
        "tests/**/*",
        "docs/**/*",
        "scripts/*",
    )
    for path in ROOT.glob(pattern)
    if path.is_file() and path.suffix in {".py", ".md", ".toml", ".txt", ".json", ".yaml", ".html"}
)
CONFIGS = sorted((PACKAGE / "models_meta" / "configs").glob("*.json"))
# spelled so that this file does not hold what it looks for
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:" + "|".join(("work", "tmp", "root", "home")) + r")/\w")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())


def names(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_bundled_config_says_where_it_is_from(path: Path) -> None:
    entry = json.loads(path.read_text(encoding="utf-8"))

    assert entry["hub_id"].count("/") == 1
    assert set(entry["source"]) >= {"config", "count"}
    assert all(isinstance(text, str) and text.strip() for text in entry["source"].values())
    assert entry["num_params"] > 0
    assert entry["config"]["model_type"]


def test_there_are_configs() -> None:
    assert len(CONFIGS) >= 70


def test_every_gpu_says_where_its_figures_are_from() -> None:
    gpus = json.loads(
        (PACKAGE / "estimator" / "hardware" / "gpus.json").read_text(encoding="utf-8")
    )

    assert gpus
    assert all(gpu["source"].strip() for gpu in gpus)


@pytest.mark.parametrize("path", TEXTS, ids=names)
def test_no_text_names_a_folder_of_some_machine(path: Path) -> None:
    text = path.read_text(encoding="utf-8")

    assert MACHINE_PATH.findall(text) == []


def test_the_check_of_folders_can_fail() -> None:
    assert MACHINE_PATH.search("see " + "/".join(("", "tmp", "notes.txt")))
    assert not MACHINE_PATH.search("https://github.com/tmp/x")


def called_and_imported(path: Path) -> tuple[set[str], set[str]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    called = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    imported: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported.add(node.module.split(".")[0])
    return called, imported


@pytest.mark.parametrize("path", SOURCES, ids=names)
def test_printing_parsing_and_drawing_stay_in_their_rooms(path: Path) -> None:
    called, imported = called_and_imported(path)
    room = path.relative_to(PACKAGE).parts[0]

    if not room.startswith("cli"):
        assert "print" not in called
        assert "click" not in imported
    if room != "plots":
        assert "matplotlib" not in imported
    assert not {"breakpoint", "exec", "eval"} & called


def modules() -> list[str]:
    found = pkgutil.walk_packages(memest.__path__, prefix="memest.")
    return ["memest", *(m.name for m in found if not m.name.endswith("__main__"))]


@pytest.mark.parametrize("name", modules())
def test_every_exported_name_exists(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        pytest.skip(how_to_install(error.name))

    for exported in getattr(module, "__all__", ()):
        assert getattr(module, exported) is not None
    assert sorted(getattr(module, "__all__", ())) == list(getattr(module, "__all__", ()))


def test_an_unknown_name_of_the_package_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute `nothing`"):
        memest.nothing  # noqa: B018


@pytest.fixture
def installed() -> None:
    """CI installs the package; a checkout on the path alone has no metadata."""
    try:
        importlib.metadata.version("memest-gpu")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("memest-gpu is not installed: pip install -e .")


@pytest.mark.usefixtures("installed")
def test_the_version_is_the_same_everywhere() -> None:
    assert memest.__version__ == PROJECT["project"]["version"]
    assert importlib.metadata.version("memest-gpu") == memest.__version__


@pytest.mark.usefixtures("installed")
def test_the_command_is_installed() -> None:
    (command,) = importlib.metadata.entry_points(group="console_scripts", name="memest")

    assert command.value == PROJECT["project"]["scripts"]["memest"]
    assert callable(command.load())


def test_what_is_tested_is_what_is_pinned() -> None:
    """Accuracy is claimed for these versions; others are worth a look before a failure is."""
    pinned = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    )
    for name in ("torch", "transformers", "peft", "accelerate"):
        assert importlib.metadata.version(name).partition("+")[0] == pinned[name]


PINNED_BY_TORCH = {"nvidia-cudnn-cu13"}
"""A pin would contradict the one of torch's CUDA build."""


def test_every_dependency_is_pinned() -> None:
    pinned = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    folded = {name.lower().replace("_", "-") for name in pinned}
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [
        *PROJECT["project"]["dependencies"],
        *(r for name in ("dev", "plans", "plots") for r in extras[name]),
    ]

    for requirement in wanted:
        name = re.match(r"[\w.-]+", requirement)
        assert name is not None
        assert name[0].lower().replace("_", "-") in folded | PINNED_BY_TORCH | {
            PROJECT["project"]["name"]
        }
