"""Packages that only some plans need."""

from __future__ import annotations

import importlib.util

from memest.errors import UnsupportedError

INSTALL = "pip install 'memest[validate]'"
_INSTALL_OTHERS = {
    "bitsandbytes": "pip install bitsandbytes",
    "datasets": "pip install datasets",
    "deepspeed": "pip install deepspeed",
    "flash_attn": "pip install flash-attn --no-build-isolation",
}


def require(*packages: str) -> None:
    """Check that optional packages are installed, without importing them.

    Raises:
        UnsupportedError: one is not.
    """
    for package in packages:
        if not is_installed(package):
            hint = how_to_install(package)
            raise UnsupportedError(f"this needs the package `{package}`", hint=hint)


def how_to_install(package: str) -> str:
    """Return the command that installs an optional package."""
    return _INSTALL_OTHERS.get(package, INSTALL)


def is_installed(package: str) -> bool:
    """Whether it can be imported, without doing so."""
    return importlib.util.find_spec(package) is not None
