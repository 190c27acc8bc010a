"""Padded matrix products: what Inductor decides by timing on a GPU.

`pad_mm.py` of Inductor pads matrices whose sides are no multiples of 8 (16-bit) or 4 (32-bit) if
the padded product is faster. The timing runs on the virtual GPU, so its memory is counted;
`is_faster_padded` estimates its result.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from memest.estimator.gpu.mode import CudaSimMode
from memest.estimator.hardware.gpus import Gpu
from memest.estimator.hardware.speed import speed_of
from memest.estimator.tensors.patches import Patches
from memest.estimator.versions import allows_tf32

# Measured on an H100 80GB (torch 2.11): 368 products in tests/data/padded-products-h100.json.
# They are shares of the peak rate for 16-bit types and of the memory bandwidth (data sheet).
_ALIGNED = 0.7
_EVEN = 0.25  # share of the peak rate where a leading dimension is even, and no multiple of 8
_ODD_INPUT = 0.145
_ODD_OUTPUT = 0.1
_ROWS_APPENDED = 0.8
_COLUMNS_APPENDED = 0.6
_TRANSPOSED = 0.15  # share of the bandwidth of `torch.cat` of a transposed matrix with zeros
_LAUNCH_S = 3e-6
_MARGIN = 1.1  # factor by which padding has to be faster (`is_padded_faster` in pad_mm.py)


def is_estimated() -> bool:
    """Return whether the installed torch has the `pad_mm` of torch 2.11 or later."""
    from torch._inductor.fx_passes import pad_mm

    return hasattr(pad_mm, "_should_pad")


def install(patches: Patches, mode: CudaSimMode) -> None:
    """Time products on the virtual GPU, and pad those that are estimated to be faster."""
    from torch._inductor import utils
    from torch._inductor.fx_passes import pad_mm
    from torch.fx.experimental.proxy_tensor import unset_fake_temporarily  # type: ignore[attr-defined]

    if not is_estimated():
        return
    should_pad = inspect.unwrap(vars(pad_mm)["_should_pad"])
    gpu = mode.gpu
    decisions: list[bool] = []

    def decide(match: Any, mat1: Any, mat2: Any, op: Any, input: Any = None) -> bool:
        is_free = [pad_mm.should_exclude_padding_time(match, name) for name in ("mat1", "mat2")]
        decisions.append(is_faster_padded(gpu, mat1, mat2, is_free))
        try:
            return bool(should_pad(match, mat1, mat2, op, input))
        finally:
            decisions.pop()

    @contextmanager
    def on_gpu() -> Iterator[None]:
        with unset_fake_temporarily(), mode:
            yield

    def faster(key: str, *times: float) -> bool:
        timed[key] = decisions[-1]
        return decisions[-1]

    # in place of Inductor's cache on disk: a run is simulated as the first one of its machine
    timed: dict[str, bool] = {}
    cache = SimpleNamespace(
        lookup=timed.get, set_value=lambda key, *, value: timed.update({key: value})
    )
    patches.set(pad_mm, "_should_pad", decide)
    patches.set(pad_mm, "is_padded_faster", faster)
    patches.set(pad_mm, "no_dispatch", on_gpu)
    patches.set(pad_mm, "get_pad_cache", lambda: cache)
    patches.set(utils, "get_device_tflops", lambda dtype: _peak_flops(gpu, dtype) / 1e12)
    patches.set(utils, "get_gpu_dram_gbps", lambda: gpu.memory_gb_s)


def is_faster_padded(gpu: Gpu, mat1: Any, mat2: Any, is_free: Sequence[bool]) -> bool:
    """Return whether a padded product is faster by the margin that Inductor requires.

    `time = operations / (share * peak rate)` of a product, where the share depends on how leading
    dimensions are aligned, and `bytes read and written / (share * bandwidth)` of each padded copy.
    `is_free` is True for a matrix whose copy Inductor does not time. Kernels for float32
    without TF32 need no alignment, so padding them only adds copies.
    """
    dtype = mat1.dtype
    if dtype is torch.float32 and not allows_tf32("matmul"):
        return False
    align = 16 // dtype.itemsize
    num_products = _hint(mat1.shape[0]) if mat1.dim() == 3 else 1
    m, k = (_hint(side) for side in mat1.shape[-2:])
    n = _hint(mat2.shape[-1])
    padded_m, padded_k, padded_n = (_padded(side, align) for side in (m, k, n))

    def product_s(flops: float, share: float) -> float:
        return _LAUNCH_S + num_products * flops / (share * _peak_flops(gpu, dtype))

    def copy_s(matrix: Any, rows: int, columns: int) -> float:
        old_rows, old_columns = (_hint(side) for side in matrix.shape[-2:])
        if (rows, columns) == (old_rows, old_columns):
            return 0.0
        share = _COLUMNS_APPENDED if columns > old_columns else _ROWS_APPENDED
        if _hint(matrix.stride(-1)) != 1:
            share = _TRANSPOSED
        moved: int = 2 * num_products * old_rows * old_columns * dtype.itemsize
        return _LAUNCH_S + moved / (share * gpu.memory_gb_s * 1e9)

    inputs = min(_alignment(_leading(matrix), align) for matrix in (mat1, mat2))
    share = _share(inputs, _alignment(n, align), align)
    padded_s = product_s(2 * padded_m * padded_k * padded_n, _ALIGNED)
    if not is_free[0]:
        padded_s += copy_s(mat1, padded_m, padded_k)
    if not is_free[1]:
        padded_s += copy_s(mat2, padded_k, padded_n)
    return product_s(2 * m * k * n, share) > _MARGIN * padded_s


def _share(inputs: int, output: int, align: int) -> float:
    """Return the share of the peak rate for the alignments of inputs and output, in elements."""
    if inputs == 1:
        return _ODD_INPUT
    if output == 1:
        return _ODD_OUTPUT
    return _ALIGNED if min(inputs, output) == align else _EVEN


def _peak_flops(gpu: Gpu, dtype: torch.dtype) -> float:
    speed = speed_of(gpu)
    if dtype is not torch.float32:
        return speed.tflops_16bit * 1e12
    if allows_tf32("matmul"):
        return speed.tflops_16bit / 2 * 1e12
    return speed.tflops_32bit * 1e12


def _hint(size: Any) -> int:
    return size if isinstance(size, int) else int(size.node.hint)


def _leading(matrix: Any) -> int:
    """Return the leading dimension: the stride of rows, or of columns if it is transposed."""
    rows, columns = (_hint(stride) for stride in matrix.stride()[-2:])
    return rows if columns == 1 else columns


def _alignment(size: int, align: int) -> int:
    """Return the largest power of 2 that divides `size`, at most `align`.

    >>> _alignment(50257, 8), _alignment(30522, 8), _alignment(768, 8)
    (1, 2, 8)
    """
    return min(size & -size, align)


def _padded(side: int, align: int) -> int:
    """Return a padded side; Inductor leaves sides of 1 alone.

    >>> _padded(50257, 8), _padded(1, 8)
    (50264, 1)
    """
    return side if side == 1 else -(-side // align) * align
