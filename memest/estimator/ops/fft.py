"""Fourier transforms: results, the copy that cuFFT overwrites, and its workspace.

`_fft_c2c`, `_fft_r2c` and `_fft_c2r` of ATen/native/cuda/SpectralOps.cpp (torch 2.11). Workspaces
of cuFFT were measured on an H100 and an H200 (CUDA 13.0), all of 12,291 exactly: one to three
dimensions, 2 to 1,048,576 points, batches of 1 to 65,536. The lengths of `SHARES` were measured one
by one. `tests/data/fft.json.gz` has 4,239 calls. Others are reported as not modelled. Shapes: n
points of `item` bytes in each of `batch` transforms.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import make_contiguous_strides_for

from memest.estimator.ops.registry import KernelCall, register, requests
from memest.estimator.ops.temporaries import Events, passing
from memest.plan.reading import read_table
from memest.units import ceil_div, round_up

LARGEST_PRIME = 127  # largest factor without Bluestein's convolution, above `SHARED_BYTES`
SHARED_BYTES = 32768  # largest transform that one block computes in shared memory, bytes
FEW_PRIMES = 31  # largest prime factor of a length without an extra pass, in float32
FEWER_PRIMES = 13  # the same in float64, and for each length of a 2-D transform
ONE_PASS = frozenset((480, 600, 640, 768, 800, 960, 1000, 1920))  # real transforms above 400
WIDE_DOUBLE = frozenset((6000, 22050))  # real float64 transforms with the last complex point
# largest that were measured, of transforms in one, two and three dimensions
MAX_LENGTHS, MAX_BATCHES = (1 << 30, 1024, 128), (65536, 9000, 1024)
DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)  # measured

SHARES: dict[str, dict[int, str]] = {
    name: dict(zip(map(int, lengths.split()), shares, strict=True))
    for name, (lengths, shares) in read_table(__file__, "fft_lengths.json").items()
}
"""Workspace by transform and length: none (-), half the points (h), one more (g) or all (a)."""


def _largest_prime(n: int) -> int:
    largest, factor = 1, 2
    while n > 1:
        if n % factor:
            factor += 1
        else:
            largest, n = factor, n // factor
    return largest


def _bluestein_length(n: int) -> int:
    """Return the length to which Bluestein's method pads `n` points, with prime factors up to 5."""
    length = 2 * n - 1
    while _largest_prime(length) > 5:
        length += 1
    return length


def _uses_bluestein(n: int, item: int) -> bool:
    return _largest_prime(n) > LARGEST_PRIME and n * item > SHARED_BYTES


def _needs_extra_pass(n: int, item: int = 16) -> bool:
    return (FEW_PRIMES if item == 8 else FEWER_PRIMES) < _largest_prime(n) < n


def complex_bytes(n: int, batch: int, item: int, kind: str = "fft") -> int:
    """Return the bytes of cuFFT's workspace for `batch` complex transforms of `n` points, `item`
    bytes each. `kind` is "fft", or "fft by strides" if their dimension is not contiguous."""
    if item == 8 and n in SHARES[kind]:
        return n * item * batch * (SHARES[kind][n] == "a")
    if _uses_bluestein(n, item):
        return 2 * round_up(_bluestein_length(n) * item * batch, 1024)
    if n == 32768 and batch >= 256:
        return 0
    is_long = n > 24576 or (n > 16384 and n % 7 == 0)
    return n * item * batch if is_long or _needs_extra_pass(n, item) else 0


def real_bytes(n: int, batch: int, item: int, kind: str = "rfft") -> int:
    """Return the bytes of cuFFT's workspace for `batch` transforms between real and complex
    numbers. A transform has `n` real points and n // 2 + 1 complex points. `item` is the bytes of a
    complex number, 8 or 16. `kind` is "rfft" (from real) or "irfft" (to real). It ends in
    " by strides" if the transformed dimension is not contiguous."""
    share = SHARES[kind].get(n, "") if item == 8 else ""
    if share in ("-", "h", "g"):
        return {"-": 0, "h": n // 2, "g": n // 2 + 1}[share] * item * batch
    if share or n % 2 or _largest_prime(n) > 7:  # two of them make a complex one
        pairs = ceil_div(batch, 2)
        whole = n * item * pairs
        if _uses_bluestein(n, item):
            return whole + 2 * (_bluestein_length(n) * item * pairs // 1024 + 1) * 1024
        if _needs_extra_pass(n, item):
            return whole + round_up(max(whole, (n // 2 + 1) * item * 2 * pairs), 1024)
        needs_workspace = share or (n > 128 and _largest_prime(n) > 7)
        return whole + round_up(whole, 1024) if needs_workspace else 0
    if n in (32768, 65536) and batch >= 256 and item == 8:
        return 0
    if complex_bytes(n // 2, batch, item) or (item == 16 and n in WIDE_DOUBLE):
        return (n // 2 + 1) * item * batch
    is_power = n & (n - 1) == 0 and n <= (16384 if item == 8 else 4096)
    is_one_pass = n <= 400 or n in ONE_PASS or is_power
    return 0 if is_one_pass else n * item // 2 * batch


def _sizes_and_batch(tensor: Tensor, dims: Any) -> tuple[list[int], int]:
    """Return (sizes of `tensor` in the transformed `dims`, number of transforms)."""
    sizes = [tensor.shape[dim] for dim in dims]
    return sizes, tensor.numel() // max(1, prod(sizes))


def _workspace(tensor: Tensor, dims: Any, kind: str) -> int:
    sizes, batch = _sizes_and_batch(tensor, dims)
    item = tensor.itemsize * (1 if tensor.is_complex() else 2)
    is_real = kind.startswith(("rfft", "irfft"))
    if len(sizes) == 1:
        return (real_bytes if is_real else complex_bytes)(sizes[0], batch, item, kind)
    if len(sizes) != 2:
        return 0
    m, n = sizes
    if is_real:
        if not (_needs_extra_pass(n) or (n > 128 and _largest_prime(n) > 7)):
            return 0
        whole = m * n * item * ceil_div(batch, 2)
        is_halved = kind.startswith("irfft") and (_needs_extra_pass(m) or _needs_extra_pass(n))
        half = m * (n // 2 + 1) * item * batch if is_halved else 0
        return whole + round_up(max(whole, half), 1024)
    return m * n * item * batch if any(_needs_extra_pass(k) for k in sizes) else 0


def _copy_bytes(tensor: Tensor, strides: Sequence[int], dims: Any) -> int:
    """Return the bytes of a contiguous copy of `tensor` for transforms of `dims`; 0 if a view is
    enough. `strides` are those of `tensor`, or of its contiguous clone if cuFFT gets the clone.
    `_exec_fft` sorts the dimensions outside `dims` by these strides, and merges them into one. A
    view is enough if one stride fits the merged dimension."""
    transformed = {dim % tensor.dim() for dim in dims}
    others = [i for i, size in enumerate(tensor.shape) if i not in transformed and size != 1]
    by_stride = sorted(others, key=lambda dim: -strides[dim])
    is_view = all(strides[a] == strides[b] * tensor.shape[b] for a, b in pairwise(by_stride))
    return 0 if is_view else tensor.nbytes


def _is_measured(c: KernelCall) -> bool:
    lengths, batch = _sizes_and_batch(c.self, c.dim)
    index = len(lengths) - 1
    if c.gpu.capability != (9, 0) or not 0 <= index < 3 or c.self.dtype not in DTYPES:
        return False
    is_split = index == 2 and any(_needs_extra_pass(n) for n in lengths)
    return max(lengths) <= MAX_LENGTHS[index] and batch <= MAX_BATCHES[index] and not is_split


register(
    "_fft_c2c _fft_r2c _fft_c2r",
    when="similar transforms were measured: one dimension, or two or three of few points",
    modelled=_is_measured,
)


@requests("_fft_c2c _fft_r2c")
def fft_forward(c: KernelCall) -> Events:
    """Allocations of `_fft_c2c` and `_fft_r2c`: result, copy of the input, workspace."""
    copy_bytes = _copy_bytes(c.self, c.self.stride(), c.dim)
    kind = "fft" if c.self.is_complex() else "rfft"
    if not copy_bytes and c.self.stride(c.dim[-1]) != 1:
        kind += " by strides"
    return c.outputs() + passing(copy_bytes, _workspace(c.self, c.dim, kind))


@requests("_fft_c2r")
def fft_to_real(c: KernelCall) -> Events:
    """Allocations of `_fft_c2r`: result, clone of the input, contiguous copy, workspace. cuFFT
    overwrites its input, so it gets the clone. A contiguous copy of the clone is made if
    `_copy_bytes` is not 0."""
    strides = make_contiguous_strides_for(c.self.shape)  # those of the copy
    copy_bytes = _copy_bytes(c.self, strides, c.dim)
    kind = "irfft by strides" if not copy_bytes and strides[c.dim[-1]] != 1 else "irfft"
    return c.outputs() + passing(c.self.nbytes, copy_bytes, _workspace(c.out, c.dim, kind))
