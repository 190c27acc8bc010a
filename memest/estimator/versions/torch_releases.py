"""Releases of torch: one row each, and the fields in which releases differ.

A field's docstring names its source. A value that was read but not measured is marked in its row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchRelease:
    """Behaviour of a torch release that changes the memory of a run."""

    version: tuple[int, int]

    is_measured: bool = False
    """Runs were measured with it; the rules of the others were read from sources."""

    cudnn_version: int = 91900
    """Return value of `torch.backends.cudnn.version()` in the wheel of PyPI, by the version of
    `nvidia-cudnn-cu13` that it requires: 9.19.0.56, 9.20.0.48 from 2.12, 9.24.0.43 from 2.14,
    9.26.0.51 from 2.15.
    """

    shares_cublas_workspace: bool = False
    """cuBLAS and cuBLASLt share one workspace (pytorch/pytorch#175879)."""

    frees_cublas_workspace: bool = False
    """Each call of cuBLAS or cuBLASLt allocates a workspace of its own and frees it
    (`getCurrentCUDABlasHandleWithWorkspace`, pytorch/pytorch#194311)."""

    large_blackwell_workspace: bool = False
    """Blackwell's cuBLAS workspace is 32 MiB, the same as Hopper's (pytorch/pytorch#175344)."""

    dropout_in_sixteenths: bool = False
    """cuDNN's attention refuses a dropout probability that is not a multiple of 1/16
    (pytorch/pytorch#174245)."""

    casts_rms_norm: bool = False
    """Autocast runs `rms_norm` in float32 (ATen/autocast_mode.h)."""

    fuses_rms_norm: bool = True
    """`rms_norm` on CUDA is one kernel (`rms_norm_symint` in native/layer_norm.cpp)."""

    @property
    def name(self) -> str:
        """Major and minor number, such as `2.11`."""
        return f"{self.version[0]}.{self.version[1]}"


TORCH_2_11 = TorchRelease(version=(2, 11), is_measured=True)
"""Measured: torch 2.11 for CUDA 13."""

TORCH_2_12 = replace(
    TORCH_2_11,
    version=(2, 12),
    is_measured=False,
    cudnn_version=92000,
    shares_cublas_workspace=True,
    large_blackwell_workspace=True,
    dropout_in_sixteenths=True,
    casts_rms_norm=True,
)
"""Read, not measured: source, header of autocast, strings of libtorch_cuda.so and libc10.so."""

TORCH_2_13 = replace(TORCH_2_12, version=(2, 13))
"""Read, not measured: the same files as for 2.12."""

TORCH_2_14 = replace(TORCH_2_13, version=(2, 14), cudnn_version=92400)
"""Read, not measured, in the wheel of 2.14.1. Its header of autocast is that of 2.13. The headers
of its allocator differ only in snapshots and handles, and libc10.so names the same settings.
"""

TORCH_2_15 = replace(TORCH_2_14, version=(2, 15), cudnn_version=92600, frees_cublas_workspace=True)
"""Read, not measured, in the wheel of 2.15.0: ATen/cuda/CUDAContextLight.h. Its header of autocast
is that of 2.14.
"""

TORCH_2_10 = replace(TORCH_2_11, version=(2, 10), is_measured=False, cudnn_version=91002)
"""The wheel, not measured, is for CUDA 12.8 and requires `nvidia-cudnn-cu12` 9.10.2.21. Since cuDNN
is not newer than 9.15, torch does not prefer its attention.
"""

TORCH_2_9 = replace(TORCH_2_10, version=(2, 9))
"""Read, not measured, in the wheel of 2.9.1: operators, header of autocast (the lists of 2.11)."""

TORCH_2_8 = replace(TORCH_2_9, version=(2, 8), fuses_rms_norm=False)
"""Requirements of the wheel were read, not measured. The fused norm has no gradient."""

TORCH_2_7 = replace(TORCH_2_8, version=(2, 7), cudnn_version=90501)
"""The wheel, not measured, requires `nvidia-cudnn-cu12` 9.5.1.17."""

TORCH_2_6 = replace(TORCH_2_7, version=(2, 6), cudnn_version=90100)
"""Read, not measured, in the wheel of 2.6.0, which requires `nvidia-cudnn-cu12` 9.1.0.70.
Operators, header of autocast (the lists of 2.11), order of attention (flash, efficient, math).
"""

RELEASES = (
    TORCH_2_6, TORCH_2_7, TORCH_2_8, TORCH_2_9, TORCH_2_10,
    TORCH_2_11, TORCH_2_12, TORCH_2_13, TORCH_2_14, TORCH_2_15,
)  # fmt: skip
"""Releases whose behaviour is known, oldest first."""

OPERATORS_SINCE = {
    "_fused_rms_norm": (2, 8),
    "_fused_rms_norm_backward": (2, 9),
    "_grouped_mm": (2, 8),
    "_scaled_mm_v2": (2, 10),
}
"""Operators of aten with rules that not every supported release has, and their first release."""
