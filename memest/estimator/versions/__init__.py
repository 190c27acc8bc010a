"""Differences between releases of torch, and the release that is simulated.

The installed release is simulated if `torch_releases.py` has a row for it, else the nearest older
one. The environment variable `MEMEST_TORCH` overrides the choice, also in child processes.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from types import ModuleType
from typing import Any

from memest.errors import PlanError, shown
from memest.estimator.versions.torch_releases import RELEASES, TorchRelease

ENVIRONMENT = "MEMEST_TORCH"
OLDEST = RELEASES[0].name  # bound of torch in pyproject.toml
MEASURED = "2.11"  # release with which the runs of validation/ were measured
STACK = (
    "torchvision", "triton", "numpy", "transformers", "lightning", "accelerate", "peft",
    "bitsandbytes", "deepspeed", "trl", "flash-attn", "nvidia-ml-py",
)  # fmt: skip
"""Distributions whose versions a bug report needs."""

KERNELS = "kernels of torch"  # key of the simulated release among the versions of a report
BUILT_FOR = "torch built for"  # platform of torch in a report, if neither CUDA nor a CPU


def simulated() -> TorchRelease:
    """Return the release whose kernels are simulated; `PlanError` if it has no row."""
    requested = os.environ.get(ENVIRONMENT)
    return known(requested) if requested else nearest(_installed())


@contextmanager
def simulating(release: str | None) -> Iterator[None]:
    """Simulate `release` within the block, also in child processes; None changes nothing.

    Raises:
        PlanError: `release` has no row.
    """
    if release is None:
        yield
        return
    before = os.environ.get(ENVIRONMENT)
    os.environ[ENVIRONMENT] = known(release).name
    try:
        yield
    finally:
        del os.environ[ENVIRONMENT]
        if before is not None:
            os.environ[ENVIRONMENT] = before


@cache
def known(text: str) -> TorchRelease:
    """Return the release that `text` names, as `2.11.0+cu130`; `PlanError` if it has no row."""
    for release in RELEASES:
        if release.version == _numbers(text):
            return release
    names = ", ".join(f"`{release.name}`" for release in RELEASES)
    raise PlanError(
        f"the kernels of torch {shown(text)} cannot be simulated", hint=f"known releases: {names}"
    )


@cache
def nearest(text: str) -> TorchRelease:
    """Return the newest known release that is not newer than `text`, or the oldest known one.

    >>> nearest("2.14.1+cu130").name, nearest("3.0").name, nearest("2.9").name
    ('2.14', '2.15', '2.9')
    """
    numbers = _numbers(text) or RELEASES[-1].version
    return next((r for r in reversed(RELEASES) if r.version <= numbers), RELEASES[0])


def is_newer(text: str) -> bool:
    """Return whether a release is newer than all known ones.

    >>> is_newer("2.15.0"), is_newer("2.16.0")
    (False, True)
    """
    return (_numbers(text) or (0, 0)) > RELEASES[-1].version


def is_older(text: str) -> bool:
    """Return whether a release is older than all known ones.

    >>> is_older("2.5.1"), is_older("2.6.0")
    (True, False)
    """
    return (_numbers(text) or RELEASES[0].version) < RELEASES[0].version


def check_torch() -> None:
    """Raise a `PlanError` if the installed torch is older than the oldest supported release."""
    if is_older(_installed()):
        raise PlanError(
            f"torch {_installed()} is installed; memest needs {OLDEST} or newer",
            hint=f"pip install 'torch>={OLDEST}'",
        )


def returns_large_numbers() -> bool:
    """Return whether a dispatch mode may return numbers of 2**63 and more (pytorch/pytorch#160102).

    Before torch 2.9 C++ converts the number that a mode returns to `int64_t`.
    """
    return (_numbers(_installed()) or RELEASES[-1].version) >= (2, 9)


def allows_tf32(operation: str) -> bool:
    """Return whether float32 products of a `matmul`, `conv` or `rnn` may use TF32.

    From torch 2.9 `fp32_precision` is what the kernels read. There `allow_tf32` raises an error
    after a script has set both (`Context::allowTF32CuBLAS`, `allowTF32CuDNN`, ATen/Context.cpp).
    """
    from torch import backends

    backend: Any = backends.cuda.matmul if operation == "matmul" else backends.cudnn
    if not hasattr(backends.cuda.matmul, "fp32_precision"):
        return bool(backend.allow_tf32)
    if operation != "matmul":
        backend = getattr(backend, operation)
    return bool(backend.fp32_precision == "tf32")


def other_kernels(torch: ModuleType) -> str:
    """Return the platform other than CUDA that a build of torch is for, or an empty text."""
    if hip := getattr(torch.version, "hip", None):
        return f"ROCm {hip}"
    return "MPS" if torch.backends.mps.is_built() else ""


def is_nightly(text: str) -> bool:
    """Return whether a version is of a nightly build, or of one that a user has made.

    >>> is_nightly("2.15.0.dev20261101+cu130"), is_nightly("2.14.0a0+git1b2c3d"), is_nightly("2.14")
    (True, True, False)
    """
    return re.search(r"\.dev\d|\d(?:a|b|rc)\d|\+git", text) is not None


def library_versions(*packages: str) -> dict[str, str]:
    """Return the installed versions of memest, torch and `packages`, and the simulated release."""
    found = installed_versions("torch")
    if "torch" in found:
        found[KERNELS] = simulated().name
        if "torch" in sys.modules and (other := other_kernels(sys.modules["torch"])):
            found[BUILT_FOR] = other
    return found | installed_versions(*packages)


def installed_versions(*packages: str) -> dict[str, str]:
    """Return the versions of memest and of those of `packages` that are installed."""
    from importlib import metadata

    from memest import __version__

    found = {"memest": __version__}
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


@cache
def _installed() -> str:
    from importlib import metadata

    return metadata.version("torch")


def _numbers(text: str) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", text)
    return None if match is None else (int(match[1]), int(match[2]))
