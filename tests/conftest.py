"""What every test gets: no network, torch's defaults back, and the versions in the header."""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import socket
import sys
from collections.abc import Callable, Generator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MEMEST_TORCH"] = "2.11"
"""The release of torch with which the stored figures were measured."""

collect_ignore = ["smoke"]
"""Scripts that `scripts/smoke.py` runs under memest; they need a GPU."""
if sys.platform != "linux":  # tests that fork, run shell scripts, or take names from Linux
    collect_ignore += [
        "unit/device/test_host_workers.py", "unit/run/test_other_python.py", "unit/test_ci.py",
        "unit/test_host.py", "unit/test_portable.py", "unit/test_ranks.py",
        "unit/test_reading.py", "unit/test_validate_runner.py",
    ]  # fmt: skip

os.environ.pop("VIRTUAL_ENV", None)  # `memest run` would run scripts in that environment

STATE = pytest.StashKey[tuple[str, dict[Any, dict[str, Any]]]]()
"""The folder and the names of torch before a test."""

DEPTHS = {"n_layer", "num_decoder_layers", "num_hidden_layers", "num_layers"}
"""What configs call the number of layers."""

WRAPPED_BY_OTHERS = {("torch", "manual_seed"), ("torch", "compile")}
"""What torch._dynamo and lightning put wrappers around when they are imported."""

settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("dev", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden files")
    parser.addoption(
        "--every-run",
        action="store_true",
        help="predict every measured run again, resolve every repository",
    )


def pytest_report_header() -> str:
    names = ("torch", "transformers", "peft", "accelerate")
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Do not look for garbage while a million permanent objects are imported."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


def names_of_torch() -> dict[Any, dict[str, Any]]:
    """Values of the names that a virtual GPU may replace, by owner; empty without torch."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda"):
        return {}
    owners = (torch, torch._C, torch.Tensor, torch.nn.Parameter, torch.UntypedStorage, torch.cuda)
    return {owner: dict(vars(owner)) for owner in owners}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    item.stash[STATE] = (os.getcwd(), names_of_torch())
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """A test leaves torch, and where the process stands, as they were."""
    done = yield
    folder, before = item.stash[STATE]
    assert os.getcwd() == folder
    changed = {
        (owner.__name__, name)
        for owner, names in before.items()
        for after in [vars(owner)]
        for name, value in names.items()
        if after.get(name) is not value
    }
    assert changed <= WRAPPED_BY_OTHERS
    return done


@pytest.fixture(scope="session")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """`shallow(name, layers)`: a bundled model of at most so many layers in each stack, as a path.

    For tests that ask whether two ways agree: what one layer does, the next does again.
    """
    bundled = Path(__file__).parents[1] / "memest" / "models_meta" / "configs"

    def cut(value: Any, layers: int) -> Any:
        if not isinstance(value, dict):
            return value
        made = {key: cut(inner, layers) for key, inner in value.items()}
        return made | {key: min(made[key], layers) for key in DEPTHS & made.keys()}

    def path(name: str, layers: int = 2) -> str:
        folder = tmp_path_factory.mktemp("models") / name
        folder.mkdir()
        config = json.loads((bundled / f"{name}.json").read_text(encoding="utf-8"))["config"]
        (folder / "config.json").write_text(json.dumps(cut(config, layers)), encoding="utf-8")
        return str(folder)

    return cache(path)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that opens a connection fails at that line."""
    connect = socket.socket.connect

    def refuse(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX:
            raise AssertionError(f"a test connects to {address}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(autouse=True)
def torch_defaults() -> Iterator[None]:
    """Leave torch's default dtype, the dispatcher, and TF32, as they were."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "set_default_dtype"):  # and not a test's stand-in
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("highest")  # LitGPT sets "high", which changes times
        assert torch._C._len_torch_dispatch_stack() == 0


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)` compares with `tests/golden/<name>`; `--update-golden` rewrites it."""
    folder = Path(__file__).with_name("golden")

    def check(name: str, text: str) -> None:
        path = folder / name
        if request.config.getoption("--update-golden"):
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"tests/golden/{name} is missing; run pytest with --update-golden"
        assert path.read_text(encoding="utf-8") == text

    return check
