"""Differences between releases of torch, and the release that is simulated.

The installed release is simulated if `RELEASES` has a row for it, else the nearest older
one. The environment variable `MEMEST_TORCH` overrides the choice, also in child processes.
"""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

from memest.errors import PlanError, shown
from memest.plan.reading import read_table


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchRelease:
    """Properties of one torch release that affect memory: a row of `releases.json`."""

    version: tuple[int, int]

    is_measured: bool = False
    """True if runs with this release were measured; other releases' rules are from sources."""

    cudnn_version: int = 91900
    """Return value of `torch.backends.cudnn.version()` in the wheel of PyPI, by the version of
    `nvidia-cudnn-cu13` that it requires: 9.19.0.56, 9.20.0.48 from 2.12, 9.24.0.43 from 2.14,
    9.26.0.51 from 2.15."""

    shares_cublas_workspace: bool = False
    """cuBLAS and cuBLASLt share one workspace (pytorch/pytorch#175879)."""

    frees_cublas_workspace: bool = False
    """Each call of cuBLAS or cuBLASLt allocates and frees a workspace (pytorch/pytorch#194311)."""

    large_blackwell_workspace: bool = False
    """Blackwell's cuBLAS workspace is 32 MiB, the same as Hopper's (pytorch/pytorch#175344)."""

    dropout_in_sixteenths: bool = False
    """cuDNN's attention needs a dropout in multiples of 1/16 (pytorch/pytorch#174245)."""

    casts_rms_norm: bool = False  # autocast runs `rms_norm` in float32 (ATen/autocast_mode.h)
    fuses_rms_norm: bool = True
    """`rms_norm` on CUDA is one kernel (`rms_norm_symint` in native/layer_norm.cpp)."""

    source: str  # files of the release that were read, or runs that were measured

    @property
    def name(self) -> str:
        """Major and minor version, such as `2.11`."""
        return f"{self.version[0]}.{self.version[1]}"


RELEASES = tuple(
    TorchRelease(**row | {"version": tuple(row["version"])})
    for row in read_table(__file__, "releases.json")
)
"""Releases whose behaviour is known, oldest first."""

OPERATORS_SINCE = {
    "_fused_rms_norm": (2, 8),
    "_fused_rms_norm_backward": (2, 9),
    "_grouped_mm": (2, 8),
    "_scaled_mm_v2": (2, 10),
}
"""First release of torch that has the operator, for operators newer than the oldest release."""

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
    """Return the torch release to simulate: that of the variable `MEMEST_TORCH`, or else the one
    nearest to the installed torch. `PlanError` if the variable has an unknown release."""
    requested = os.environ.get(ENVIRONMENT)
    return find_release(requested) if requested else nearest_release(_installed())


@contextmanager
def simulating(release: str | None) -> Iterator[None]:
    """Simulate torch `release`, such as `2.11`, in the `with` block and in processes started there.
    None changes nothing. `PlanError` if the release is unknown."""
    if release is None:
        yield
        return
    previous = os.environ.get(ENVIRONMENT)
    os.environ[ENVIRONMENT] = find_release(release).name
    try:
        yield
    finally:
        del os.environ[ENVIRONMENT]
        if previous is not None:
            os.environ[ENVIRONMENT] = previous


@cache
def find_release(text: str) -> TorchRelease:
    """Return the release of torch version `text` (`2.11.0+cu130`); `PlanError` if it is unknown."""
    for release in RELEASES:
        if release.version == _numbers(text):
            return release
    names = ", ".join(f"`{release.name}`" for release in RELEASES)
    raise PlanError(
        f"the kernels of torch {shown(text)} cannot be simulated", hint=f"known releases: {names}"
    )


@cache
def nearest_release(text: str) -> TorchRelease:
    """Return the newest known release up to torch version `text`, or the oldest if all are newer.

    >>> [nearest_release(text).name for text in ("2.14.1+cu130", "3.0", "2.9")]
    ['2.14', '2.15', '2.9']
    """
    version = _version(text)
    return next((r for r in reversed(RELEASES) if r.version <= version), RELEASES[0])


def is_newer(text: str) -> bool:
    """Return whether version `text` of torch is newer than all known releases.

    >>> is_newer("2.15.0"), is_newer("2.16.0")
    (False, True)
    """
    return _version(text) > RELEASES[-1].version


def check_torch() -> None:
    """Raise a `PlanError` if the installed torch is older than the oldest supported release."""
    if _version(_installed()) < RELEASES[0].version:
        raise PlanError(
            f"torch {_installed()} is installed; memest needs {OLDEST} or newer",
            hint=f"pip install 'torch>={OLDEST}'",
        )


def returns_large_numbers() -> bool:
    """Return whether a dispatch mode can return integers of 2**63 and more in the installed torch.

    Before torch 2.9 C++ converts the number to `int64_t` (pytorch/pytorch#160102).
    """
    return _version(_installed()) >= (2, 9)


def makes_subclasses_under_modes() -> bool:
    """Return whether `Tensor.as_subclass` works under a dispatch mode in the installed torch.

    Before torch 2.6 `as_subclass` refuses a tensor that a mode returns (`THPVariable_NewWithVar`,
    torch/csrc/autograd/python_variable.cpp).
    """
    return _version(_installed()) >= (2, 6)


def allows_tf32(operation: str) -> bool:
    """Return whether `torch.backends` allows TF32 for `operation`: `matmul`, `conv` or `rnn`.

    Before torch 2.9 the setting `allow_tf32` decides. From torch 2.9 the setting `fp32_precision`
    decides, and only `fp32_precision` is read. Reading `allow_tf32` would raise an error in a
    script that has set both (`Context::allowTF32CuBLAS`, `allowTF32CuDNN`, ATen/Context.cpp).
    """
    from torch import backends

    backend: Any = backends.cuda.matmul if operation == "matmul" else backends.cudnn
    if not hasattr(backends.cuda.matmul, "fp32_precision"):
        return bool(backend.allow_tf32)
    if operation != "matmul":
        backend = getattr(backend, operation)
    return bool(backend.fp32_precision == "tf32")


def other_kernels(torch: ModuleType) -> str:
    """Return the platform that `torch` was built for, such as `MPS`; "" for CUDA or the CPU."""
    if hip := getattr(torch.version, "hip", None):
        return f"ROCm {hip}"
    return "MPS" if torch.backends.mps.is_built() else ""


def is_nightly(text: str) -> bool:
    """Return whether `text` is the version of a nightly build, a prerelease or a build from source.

    >>> is_nightly("2.15.0.dev20261101+cu130"), is_nightly("2.14.0a0+git1b2c3d"), is_nightly("2.14")
    (True, True, False)
    """
    return re.search(r"\.dev\d|\d(?:a|b|rc)\d|\+git", text) is not None


def library_versions(*packages: str) -> dict[str, str]:
    """Return {package: version} of memest, and of torch and `packages` if installed. With torch,
    the key `kernels of torch` has the simulated release. The key `torch built for` has the platform
    of an imported torch, if that is neither CUDA nor CPU."""
    versions = installed_versions("torch")
    if "torch" in versions:
        versions[KERNELS] = simulated().name
        if "torch" in sys.modules and (platform := other_kernels(sys.modules["torch"])):
            versions[BUILT_FOR] = platform
    return versions | installed_versions(*packages)


def installed_versions(*packages: str) -> dict[str, str]:
    """Return {package: version} of memest, and of each of `packages` that is installed."""
    from importlib import metadata

    from memest import __version__

    versions = {"memest": __version__}
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


@cache
def _installed() -> str:
    from importlib import metadata

    return metadata.version("torch")


def _numbers(text: str) -> tuple[int, int] | None:
    match = re.match(r"(?P<major>\d+)\.(?P<minor>\d+)", text)
    return None if match is None else (int(match["major"]), int(match["minor"]))


def _version(text: str) -> tuple[int, int]:
    """Return (major, minor) of torch version `text`; of the newest release if it has no numbers."""
    return _numbers(text) or RELEASES[-1].version
