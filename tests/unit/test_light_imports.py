"""Modules that each command imports; counted, since times differ between machines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from memest.cli import main
from memest.errors import UnsupportedError
from memest.packages import is_in_packages, require
from memest.run.target import find_script

LIBRARIES = ("accelerate", "bitsandbytes", "lightning", "matplotlib", "peft", "transformers")

LEFT_OUT = f"""
import sys
print(*(name for name in {(*LIBRARIES, "numpy", "torch")!r} if name in sys.modules))
"""


def imported(code: str) -> list[str]:
    """Return the libraries that a fresh process has imported after `code`."""
    run = subprocess.run(
        [sys.executable, "-c", code + LEFT_OUT], capture_output=True, text=True, check=True
    )
    return run.stdout.splitlines()[-1].split() if run.stdout else []


COMMAND = """
import sys
from memest.cli import main
try:
    main({})
except SystemExit as end:
    assert not end.code, end.code
"""


def test_the_package_imports_no_library() -> None:
    assert imported("import memest; memest.TrainingPlan, memest.Prediction") == []


@pytest.mark.parametrize("args", [["--help"], ["gpus"], ["models"]], ids=" ".join)
def test_a_command_that_predicts_nothing_imports_no_library(args: list[str]) -> None:
    assert imported(COMMAND.format(args)) == []


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("caches")


def processor_seconds(*arguments: str) -> float:
    """Return the time of the processor: other processes make the time of a clock longer."""
    before = os.times()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    return sum(os.times()[2:4]) - sum(before[2:4])


@pytest.mark.parametrize("name", main.list_commands(click.Context(main)))
def test_the_help_of_a_command_takes_at_most_300_ms_and_imports_no_library(
    name: str, caches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or four times as long as an import of click, on a machine where that takes over 75 ms."""
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(caches))
    assert imported(COMMAND.format([name, "--help"])) == []
    seconds = []
    for _ in range(4):  # the first run compiles
        limit = max(0.3, 4 * processor_seconds("-c", "import click"))
        seconds.append(processor_seconds("-m", "memest", name, "--help"))
        if seconds[-1] <= limit:
            return
    pytest.fail(f"`memest {name} --help` took {seconds} s, over {limit} s")


SCRIPT = """
import torch
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(4, 8, device="cuda")).sum().backward()
optimizer.step()
"""


def test_a_script_that_uses_torch_alone_runs_without_other_libraries(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    assert imported(COMMAND.format(["run", str(script)])) == ["numpy", "torch"]


PLAN = """
import memest, sys
memest.predict(memest.TrainingPlan(model_name="tiny.json", optim="adam_8bit", batch_size=1))
assert "torch._inductor.compile_fx" not in sys.modules
"""


def test_a_plan_with_8_bit_adam_does_not_import_inductor(tmp_path: Path) -> None:
    """bitsandbytes compiles functions while it is imported."""
    config = tmp_path / "tiny.json"
    config.write_text(
        '{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 1, "n_embd": 64,'
        ' "n_head": 2}',
        encoding="utf-8",
    )
    assert "bitsandbytes" in imported(PLAN.replace("tiny.json", str(config)))


WITHOUT = f"""
import sys
for name in {(*LIBRARIES, "deepspeed", "huggingface_hub", "yaml")!r}:
    sys.modules[name] = None
"""
"""Makes an import of these packages fail, as in an install without extras."""


def ended(args: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command of memest without the packages of its extras."""
    code = f"{WITHOUT}\nfrom memest.cli import main\nmain({args!r})"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_a_checkpoint_needs_transformers_alone(tmp_path: Path) -> None:
    code = f"""
import importlib.util
find = importlib.util.find_spec
absent = ("accelerate", "lightning", "peft")
importlib.util.find_spec = lambda name, *rest: None if name in absent else find(name, *rest)
from memest.cli import main
main(["checkpoint", "SmolLM2-135M", {str(tmp_path / "model")!r}, "--format", "hf"])
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert run.returncode == 0, run.stderr
    assert (tmp_path / "model" / "pytorch_model.bin").is_file()


def test_a_script_runs_without_the_packages_of_extras(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    run = ended(["run", str(script)])
    assert run.returncode == 0, run.stderr
    assert "1 optimizer step on h200: fits" in run.stdout


@pytest.mark.parametrize(
    ("args", "package", "extra"),
    [
        (["predict", "--model", "gpt2"], "transformers", "plans"),
        (["advise", "--model", "gpt2", "--gpu", "h200"], "transformers", "plans"),
        (["predict", "--config", "plan.yaml"], "yaml", "plans"),
        (["chart", "lab"], "matplotlib", "plots"),
    ],
)
def test_a_missing_package_is_an_error_with_its_install_line(
    args: list[str], package: str, extra: str, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("model: gpt2", encoding="utf-8")
    run = ended([str(plan) if arg == plan.name else arg for arg in args])
    assert run.returncode == 3
    assert run.stderr.splitlines()[-2:] == [
        f"Error: this needs the package `{package}`",
        f"hint: pip install 'memest-gpu[{extra}]'",
    ]


def run_beside(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run memest with the packages of `folder` first on the path."""
    code = f"import sys; sys.path.insert(0, {str(folder)!r}); sys.argv[1:] = {list(words)!r}"
    code += "\nfrom memest.cli import main\nmain()"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("package", "source", "args", "fault"),
    [
        ("transformers", "from .gone import x", "predict --model gpt2", "cannot be imported: No"),
        ("torch", "raise OSError('libtorch.so: not found')", "run train.py", "cannot be imported:"),
    ],
)
def test_a_half_installed_package_is_an_error_with_its_remedy(
    package: str, source: str, args: str, fault: str, tmp_path: Path
) -> None:
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text(source, encoding="utf-8")
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    run = run_beside(tmp_path, *args.replace("train.py", str(tmp_path / "train.py")).split())
    assert run.returncode == 3, run.stderr
    error, hint = run.stderr.splitlines()[-2:]
    assert error.startswith(f"Error: the package `{package}` {fault}")
    assert hint.startswith(f"hint: pip install --force-reinstall {package}")


def test_a_package_of_which_a_folder_is_left_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_package").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnsupportedError, match="only parts of the package `half_package`"):
        require("half_package")


def test_the_import_of_the_package_takes_at_most_150_ms() -> None:
    """The shortest of three: other processes can only make it longer."""
    command = [sys.executable, "-X", "importtime", "-c", "import memest"]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(3)]
    times = [int(run.stderr.splitlines()[-1].split("|")[1]) for run in runs]

    assert all(run.stderr.splitlines()[-1].endswith("| memest") for run in runs)
    assert min(times) <= 150_000  # microseconds


@pytest.mark.parametrize("name", ["site-packages", "dist-packages"])
def test_code_of_installed_packages_is_not_the_users(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name / "library"
    folder.mkdir(parents=True)
    script = folder / "train.py"
    script.write_text("", encoding="utf-8")

    assert is_in_packages(script)
    assert not is_in_packages(tmp_path)
    assert find_script(str(script), ()).roots == (folder,)


def test_code_below_the_target_of_pip_is_not_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "library-1.0.dist-info").mkdir()

    assert not is_in_packages(tmp_path / "library" / "model.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert is_in_packages(tmp_path / "library" / "model.py")
    assert is_in_packages(tmp_path)
