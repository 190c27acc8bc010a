"""`memest doctor`: what is installed, which torch is simulated, which extras are missing."""

from __future__ import annotations

import os
import platform
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import click

from memest import __version__
from memest.cli.group import main
from memest.estimator.versions import (
    KERNELS,
    MEASURED,
    STACK,
    is_nightly,
    library_versions,
    other_kernels,
    simulated,
)

EXTRAS = {
    "plans": "transformers",
    "plots": "matplotlib",
    "validate": "nvidia-ml-py",
    "cudnn": "nvidia-cudnn-cu13",
    "litgpt": "jsonargparse",
}
"""A package of each extra of pyproject.toml that users install."""

SETTINGS = ("MEMEST_TORCH", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@main.command()
def doctor() -> int:
    """Show what is installed and what is missing.

    Exits with 1 if torch cannot be imported.
    """
    build, is_broken = _torch()
    found = library_versions(*STACK)
    libraries = [f"{name} {number}" for name, number in found.items() if name in STACK]
    missing = [name for name in STACK if name not in found]
    rows = {
        "memest": f"{__version__} in {Path(__file__).parents[1]}",
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "torch": build,
        "simulated": _release() if "torch" in found else "",
        "installed": ", ".join(libraries),
        "missing": ", ".join(missing),
        "extras": ", ".join(_extra(name, package) for name, package in EXTRAS.items()),
        "settings": ", ".join(f"{key}={os.environ[key]}" for key in SETTINGS if key in os.environ),
    }
    for name, text in rows.items():
        if text:
            click.echo(f"{name:<10} {text}")
    return int(is_broken)


def _torch() -> tuple[str, bool]:
    """Return the build of torch and its GPU, and whether it cannot be imported."""
    try:
        torch = import_module("torch")
    except Exception as error:
        return f"cannot be imported: {type(error).__name__}: {error}", True
    cuda, other = torch.version.cuda, other_kernels(torch)
    if other:
        return f"{torch.__version__}, built for {other}; CUDA kernels are simulated", False
    build = f"{torch.__version__}, {f'built for CUDA {cuda}' if cuda else 'a CPU build'}"
    build += ", a nightly" if is_nightly(torch.__version__) else ""
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU, none is needed"
    return f"{build}; {gpu}", False


def _release() -> str:
    """Return the simulated release of torch and its evidence."""
    release = simulated()
    how = "measured" if release.is_measured else f"read from its sources; measured is {MEASURED}"
    return f"{KERNELS} {release.name}, {how}"


def _extra(name: str, package: str) -> str:
    """Return whether an extra is installed, or how to install it."""
    try:
        version(package)
    except PackageNotFoundError:
        return f"{name} missing: pip install 'memest-gpu[{name}]'"
    return f"{name} installed"
