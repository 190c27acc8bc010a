"""Data flows one way: no room imports one above it; and what is light stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "memest"
MODULES = sorted(set(PACKAGE.rglob("*.py")) - {PACKAGE / "__init__.py"})
"""All but the front door, which imports what it offers."""

FLOORS = [
    {"errors", "units", "child", "engines", "packages", "project", "writing"},
    {"plan"},
    {"report"},
    {"models_meta"},
    {"loops"},
    {"estimator"},
    {"run", "validate"},
    {"plots", "report_writers"},
    {"cli", "__main__", "lightning", "notebook", "pytest_plugin", "transformers"},
]
"""The rooms of the package, lowest first."""

ESTIMATOR_FLOORS = [
    {"versions"},
    {"allocator"},
    {"tensors"},
    {"hardware"},
    {"ops"},
    {"gpu"},
    {"integrations", "torch_api"},
    {"virtual_gpu"},
    {"replay"},
    {"predict", "summary"},
    {"search"},
]
"""The packages within the estimator, lowest first."""

ALLOWED = {
    ("report", "report_writers"),  # `print(prediction)` imports the writer when it is printed
}

HEAVY = ("torch", "transformers", "matplotlib", "peft", "accelerate", "lightning", "numpy")


def parts_of(path: Path) -> list[str]:
    """`memest/estimator/replay/replay.py` -> estimator, replay, replay."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return [part for part in parts if part != "__init__"]


def room_of(parts: list[str]) -> str:
    """Room of a module: its first part, or `report_writers`, which are above the estimator."""
    writes = parts[0] == "report" and len(parts) > 1 and (PACKAGE / "report" / f"{parts[1]}.py")
    return "report_writers" if writes and writes.exists() else parts[0]


def floors_of(parts: list[str]) -> list[int]:
    """Floor of a module, and within the estimator the floor there."""
    found = [next(index for index, rooms in enumerate(FLOORS) if room_of(parts) in rooms)]
    if parts[0] == "estimator" and len(parts) > 1:
        found += [index for index, rooms in enumerate(ESTIMATOR_FLOORS) if parts[1] in rooms]
    return found


def imported_parts(nodes: Iterable[ast.AST]) -> Iterator[list[str]]:
    """The modules of memest, or names in them, that import statements ask for."""
    for node in nodes:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "memest":
                yield parts[1:]


def violations(parts: list[str], source: str) -> list[str]:
    """What a module imports from above, anywhere: functions and type checking included."""
    found = []
    floors = floors_of(parts)
    for other in imported_parts(ast.walk(ast.parse(source))):
        if not other or other[0] not in set().union(*FLOORS):
            continue  # a name of the front door
        pairs = zip(floors, floors_of(other), strict=False)
        own, others = next(((a, b) for a, b in pairs if a != b), (0, 0))
        if others > own and (room_of(parts), room_of(other)) not in ALLOWED:
            found.append(f"{'.'.join(parts)} imports {'.'.join(other)}")
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_room_imports_one_above_it(path: Path) -> None:
    assert violations(parts_of(path), path.read_text(encoding="utf-8")) == []


def test_every_module_has_a_floor() -> None:
    parts = [parts_of(path) for path in MODULES]

    assert {p[0] for p in parts} <= set().union(*FLOORS)
    assert {p[1] for p in parts if p[0] == "estimator" and len(p) > 1} <= set().union(
        *ESTIMATOR_FLOORS
    )


@pytest.mark.parametrize(
    "source",
    [
        "from memest.cli import main",
        "import memest.cli",
        "from memest import cli",
        "def f():\n    from memest.estimator.gpu.mode import CudaSimMode",
        "if TYPE_CHECKING:\n    from memest.validate import compare",
    ],
)
def test_the_check_of_directions_can_fail(source: str) -> None:
    assert len(violations(["models_meta", "build"], source)) == 1


def test_the_check_of_directions_can_fail_within_the_estimator() -> None:
    above = "from memest.estimator.predict import predict"

    assert len(violations(["estimator", "replay", "replay"], above)) == 1
    assert violations(["estimator", "search", "suite"], above) == []
    assert len(violations(["estimator", "ops", "cub"], "import memest.estimator.replay")) == 1
    above = "from memest.estimator.torch_api.cuda import memory"
    assert len(violations(["estimator", "gpu", "mode"], above)) == 1
    assert violations(["estimator", "virtual_gpu"], above) == []


def run_at_import(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """The statements that run when a file is imported: no functions, nothing for type checking."""
    for node in body:
        yield node
        is_typing = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        yield from run_at_import(node.orelse if is_typing else ast.iter_child_nodes(node))


def imports_among(sources: dict[str, str]) -> dict[str, set[str]]:
    """Of each module the modules that it imports when it is imported itself."""
    found: dict[str, set[str]] = {}
    for name, source in sources.items():
        wanted = imported_parts(run_at_import(ast.parse(source).body))
        whole = [".".join(["memest", *parts]) for parts in wanted]
        found[name] = {n if n in sources else n.rpartition(".")[0] for n in whole} & set(sources)
    return found


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """The paths that come back to where they began; empty where there are none."""
    found: list[list[str]] = []
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> None:
        if name in path:
            found.append([*path[path.index(name) :], name])
        elif name not in done:
            for other in sorted(imports[name]):
                visit(other, [*path, name])
            done.add(name)

    for name in sorted(imports):
        visit(name, [])
    return found


def test_no_files_import_each_other_in_a_circle() -> None:
    sources = {
        ".".join(["memest", *parts_of(path)]): path.read_text(encoding="utf-8")
        for path in PACKAGE.rglob("*.py")
    }

    assert circles(imports_among(sources)) == []


def test_the_check_of_circles_can_fail() -> None:
    sources = {
        "memest.a": "from memest.b import f",
        "memest.b": "try:\n    from memest import c\nexcept ImportError:\n    pass",
        "memest.c": "import memest.a",
    }
    circle = ["memest.a", "memest.b", "memest.c", "memest.a"]

    assert circles(imports_among(sources)) == [circle]
    late = "def f():\n    import memest.a\nif TYPE_CHECKING:\n    import memest.a"
    assert circles(imports_among(sources | {"memest.c": late})) == []


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
        "import memest, os; os.environ['CUDA_VISIBLE_DEVICES'] = ''; memest.preflight()",
        "import memest.report, memest.report.text, memest.plan.training_plan\n"
        "import memest.estimator.hardware.gpus",
        RUN_CLI.format(args=["--help"]),
        RUN_CLI.format(args=["predict", "--help"]),
        RUN_CLI.format(args=["run", "--help"]),
        RUN_CLI.format(args=["run", "no-such-script.py"]),
        RUN_CLI.format(args=["models"]),
        RUN_CLI.format(args=["gpus"]),
        RUN_CLI.format(args=["predict", "--model", "gpt2", "--optim", "adamv"]),
    ],
    ids=[
        "import",
        "plan",
        "preflight",
        "modules",
        "help",
        "predict-help",
        "run-help",
        "run-nothing",
        "models",
        "gpus",
        "bad-flag",
    ],
)
def test_what_needs_no_model_loads_no_heavy_library(code: str) -> None:
    assert loaded_by(code) == set()


def test_the_check_of_loading_can_fail() -> None:
    assert loaded_by("import numpy") == {"numpy"}
    assert "torch" in loaded_by("import memest.estimator.gpu.mode")


@pytest.mark.parametrize(
    "path", sorted((PACKAGE / "estimator").rglob("*.py")), ids=lambda path: path.stem
)
def test_the_estimator_names_the_device_of_its_own_tensors(path: Path) -> None:
    """Without a name they are where the script's `torch.set_default_device` puts them."""
    from torch.utils._device import _device_constructors

    factories = {function.__name__ for function in _device_constructors()}
    unnamed = [
        ast.unparse(node)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func) == f"torch.{node.func.attr}"
        and node.func.attr in factories
        and not {"device", None} & {keyword.arg for keyword in node.keywords}
    ]

    assert not unnamed
