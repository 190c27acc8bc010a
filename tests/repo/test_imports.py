"""Data flows one way: no room imports one above it; and what is light stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "memest"
MODULES = sorted(set(PACKAGE.rglob("*.py")) - {PACKAGE / "__init__.py"})
"""All but the front door, which imports what it offers."""

FLOORS = [
    {"errors", "units", "plan", "plan_checks", "plan_files", "plan_values", "report"},
    {"models_meta"},
    {"estimator"},
    {"validate"},
    {"plots", "render", "render_advice", "render_compare", "render_sweep", "html_report"},
    {"cli", "cli_advise", "cli_chart", "cli_scaling", "cli_sweep", "__main__"},
]
"""The rooms of the package, lowest first."""

ALLOWED = {
    ("report", "render"),  # `print(prediction)` writes the text report; imported when it is printed
}

HEAVY = ("torch", "transformers", "matplotlib", "peft", "accelerate", "lightning", "numpy")


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def floor_of(room: str) -> int:
    return next(index for index, rooms in enumerate(FLOORS) if room in rooms)


def imported_rooms(source: str) -> Iterator[str]:
    """The rooms of memest that a module imports anywhere, functions and type checking included."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "memest" and len(parts) > 1:
                yield parts[1]


def violations(room: str, source: str) -> list[str]:
    return [
        f"{room} imports {other}"
        for other in imported_rooms(source)
        if other in set().union(*FLOORS)
        and floor_of(other) > floor_of(room)
        and (room, other) not in ALLOWED
    ]


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_room_imports_one_above_it(path: Path) -> None:
    assert violations(room_of(path), path.read_text(encoding="utf-8")) == []


def test_every_module_has_a_floor() -> None:
    rooms = {room_of(path) for path in MODULES}

    assert rooms <= set().union(*FLOORS)


@pytest.mark.parametrize(
    "source",
    [
        "from memest.cli import main",
        "import memest.cli",
        "from memest import cli",
        "def f():\n    from memest.estimator.device.dispatch import Recorder",
        "if TYPE_CHECKING:\n    from memest.validate import compare",
    ],
)
def test_the_check_of_directions_can_fail(source: str) -> None:
    assert len(violations("models_meta", source)) == 1


def loaded_by(code: str) -> set[str]:
    """Which of the heavy libraries a fresh interpreter holds after running `code`."""
    script = f"{code}\nimport sys\nprint(*[m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return set(done.stdout.splitlines()[-1].split())


RUN_CLI = "from memest.cli import main\ntry:\n    main({args})\nexcept SystemExit:\n    pass"


@pytest.mark.parametrize(
    "code",
    [
        "import memest",
        "import memest; memest.TrainingPlan(model_name='gpt2')",
        "import memest.report, memest.render, memest.plan_files, memest.estimator.hardware.gpus",
        RUN_CLI.format(args=["--help"]),
        RUN_CLI.format(args=["predict", "--help"]),
        RUN_CLI.format(args=["models"]),
        RUN_CLI.format(args=["gpus"]),
        RUN_CLI.format(args=["predict", "--model", "gpt2", "--optim", "adamv"]),
    ],
    ids=["import", "plan", "modules", "help", "predict-help", "models", "gpus", "bad-flag"],
)
def test_what_needs_no_model_loads_no_heavy_library(code: str) -> None:
    assert loaded_by(code) == set()


def test_the_check_of_loading_can_fail() -> None:
    assert loaded_by("import numpy") == {"numpy"}
    assert "torch" in loaded_by("import memest.estimator.device.dispatch")
