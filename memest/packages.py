"""Packages that only some commands need, and the command that installs each."""

import importlib.util
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from memest.errors import UnsupportedError

T = TypeVar("T")
EXTRAS = {
    "transformers": "plans", "accelerate": "plans", "huggingface_hub": "plans",
    "lightning": "plans", "peft": "plans", "yaml": "plans", "matplotlib": "plots",
    "pynvml": "validate", "nvidia.cudnn": "cudnn", "jsonargparse": "litgpt", "mcp": "mcp",
    "pptx": "lecture", "ray": "ray", "submitit": "slurm",
}  # fmt: skip
"""Extra of pyproject.toml that brings a package; `memest doctor` looks for the first of each."""

PLANS = ("transformers", "accelerate", "lightning", "peft")  # imported by the run of a plan
_COMMAND_BY_PACKAGE = {
    "bitsandbytes": "pip install bitsandbytes",
    "deepspeed": "pip install deepspeed",
    "flash_attn": "pip install flash-attn --no-build-isolation",
}
_PACKAGE_FOLDERS = frozenset(("site-packages", "dist-packages"))
_NO_PACKAGES = ("memest", "importlib", "runpy", "__main__")  # modules of an import's other frames


def require(*packages: str) -> None:
    """Raise an `UnsupportedError` unless all `packages` are installed; import none of them."""
    for package in packages:
        if not is_installed(package):
            hint = how_to_install(package)
            raise UnsupportedError(f"this needs the package `{package}`", hint=hint)
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is None:  # a folder without `__init__.py`
            raise UnsupportedError(
                f"only parts of the package `{package}` are installed", hint=_reinstall(package)
            )


def is_in_packages(path: str | Path) -> bool:
    """Return whether `path` is inside a folder of installed packages: `site-packages`,
    `dist-packages` of Debian's Python, or a folder on `sys.path` made by `pip install --target`."""
    folders = (Path(path), *Path(path).parents)
    return any(
        f.name in _PACKAGE_FOLDERS or (str(f) in sys.path and _has_metadata(f)) for f in folders
    )


@cache
def _has_metadata(folder: Path) -> bool:
    return any(folder.glob("*.dist-info"))


def broken_package(error: BaseException) -> tuple[str, str] | None:
    """Return (message, hint) for an `error` raised while an installed package was imported; None if
    it was raised outside of such an import."""
    modules = [
        str(frame.f_globals.get("__name__"))
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_name == "<module>"
    ]
    module = next((module for module in modules if not module.startswith(_NO_PACKAGES)), None)
    if module is None:
        return None
    name, _, _ = module.partition(".")
    return f"the package `{name}` cannot be imported: {error}", _reinstall(name)


def _reinstall(package: str) -> str:
    return f"pip install --force-reinstall {package}; `memest doctor` prints what is installed"


def how_to_install(package: str) -> str:
    """Return the command that installs the optional `package`."""
    extra = EXTRAS.get(package, "validate")
    return _COMMAND_BY_PACKAGE.get(package, f"pip install 'memest-gpu[{extra}]'")


def with_nvml(read: Callable[[Any], T]) -> T | None:
    """Return `read(pynvml)`, called with NVML initialised; None if NVML is missing or fails."""
    try:
        import pynvml
    except ImportError:
        return None
    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        try:
            return read(pynvml)
        finally:
            pynvml.nvmlShutdown()
    return None


def is_installed(package: str) -> bool:
    """Return whether `package` is installed, without importing it."""
    with suppress(ModuleNotFoundError):  # the package of a submodule
        return importlib.util.find_spec(package) is not None
    return False
