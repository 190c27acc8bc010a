"""Messages for a script: out of memory in torch's C++ wording, and unsupported calls."""

import re
from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor

from memest.errors import UnsupportedError
from memest.estimator.allocator.caching import CachingAllocator
from memest.estimator.hardware.gpus import Gpu
from memest.estimator.ops.registry import Args, arguments_by_name, op_of
from memest.estimator.tensors.known_values import ValueUnknown
from memest.estimator.tensors.placement import GPU, tensors_in

_FILE = "packaged/ATen/native/native_functions.yaml"
_OF_CUDA = re.compile(r"^    [\w, ]*\bCUDA\b[\w, ]*:|^  structured", re.MULTILINE)
_UNCHECKED = "device_check: NoCheck"
_BROADCAST = re.compile(
    r"Attempting to broadcast a dimension of length (\d+) at (-\d+)!.* \[(.*)\]"
)


@cache
def comparing_methods() -> Mapping[str, str]:
    """Return {operator: C++ method} of the operators that require all their tensors on one device.

    Other operators accept a 0-d host tensor as a number. torch generates the check for CUDA kernels
    without `NoCheck` (torchgen/dest/register_dispatch_key.py). The result is empty if the wheel has
    no torchgen.

    >>> comparing_methods()["aten.clamp.Tensor"]
    'wrapper_CUDA_clamp_Tensor'
    """
    spec = find_spec("torchgen")
    file = Path(spec.origin).parent / _FILE if spec is not None and spec.origin else None
    if file is None or not file.exists():
        return {}
    methods = {}
    for block in file.read_text(encoding="utf-8").split("\n- func: ")[1:]:
        if _OF_CUDA.search(block) and _UNCHECKED not in block:
            name = block.partition("(")[0]
            base, _, overload = name.partition(".")
            is_structured = "\n  structured" in block
            method = name.replace(".", "_") if is_structured else f"{overload}_{base}"
            methods[f"aten.{name}"] = f"wrapper_CUDA_{method}"
    return methods


BENCHMARK = (
    "`torch.backends.cudnn.benchmark` is on: at the first call with each shape cuDNN tries its "
    "kernels in the largest workspace that the GPU has room for, which counts in the peaks. "
    "The fastest kernel is not known; the kernel that cuDNN chooses without the benchmark is "
    "assumed"
)

INDICES_ELSEWHERE = (
    "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
)
"""torch's message for a host tensor indexed with a GPU tensor."""


def out_of_memory(gpu: Gpu, allocator: CachingAllocator, num_bytes: int) -> str:
    """Return torch's message for a failed request of `num_bytes` (`CUDACachingAllocator.cpp`)."""
    in_use_bytes = allocator.reserved_bytes + gpu.context_bytes
    cached_bytes = allocator.reserved_bytes - allocator.allocated_bytes
    limit_bytes = gpu.limit_bytes if allocator.limit_bytes is None else allocator.limit_bytes
    limit_text = f"{_size(limit_bytes)} allowed; " if limit_bytes < gpu.limit_bytes else ""
    return (
        f"CUDA out of memory. Tried to allocate {_size(num_bytes)}. "
        f"GPU {GPU.device.index} has a total capacity of {_size(gpu.memory_bytes)} "
        f"of which {_size(max(0, gpu.limit_bytes - allocator.reserved_bytes))} is "
        f"free. Including non-PyTorch memory, this process has {_size(in_use_bytes)} memory in "
        f"use. {limit_text}Of the allocated memory {_size(allocator.allocated_bytes)} is allocated "
        f"by PyTorch, and {_size(cached_bytes)} is reserved by PyTorch but unallocated. If "
        "reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF="
        "expandable_segments:True to avoid fragmentation.  See documentation for Memory "
        "Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
    )


def _size(num_bytes: int) -> str:
    for unit_bytes, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes > unit_bytes:
            return f"{num_bytes / unit_bytes:.2f} {unit}"
    return f"{num_bytes} bytes"


def two_devices(func: Any, args: Args, kwargs: Any, is_on_gpu: Callable[[Tensor], bool]) -> str:
    """Return torch's message for a call of `func` with tensors both on the host and on the GPU."""
    text = "Expected all tensors to be on the same device, but"
    method = comparing_methods().get(str(func).removesuffix(".default"))
    arguments = arguments_by_name(func, args, kwargs).items()
    places = [(name, is_on_gpu(t)) for name, value in arguments for t in tensors_in((value,))]
    if method is None:
        return f"{text} found at least two devices, {GPU.device} and cpu!"
    is_first_on_gpu = places[0][1]
    other_name = next(name for name, is_on in places if is_on is not is_first_on_gpu)
    here, there = (GPU.device, "cpu") if is_first_on_gpu else ("cpu", GPU.device)
    return (
        f"{text} got {other_name} is on {there}, different from other tensors on {here} (when "
        f"checking argument in method {method})"
    )


def refusal(func: Any, error: Exception, where: str) -> Exception:
    """Return the exception to raise for `error`, which operator `func` raised at the script's line
    `where`. It is an `UnsupportedError` if only the simulation fails: the result's shape depends on
    unknown values, or there is no meta kernel. Otherwise it is `error`, as on a real GPU."""
    name = str(func).removesuffix(".default")
    if isinstance(error, ValueUnknown) or op_of(func).shaped_by:
        return UnsupportedError(
            f"{where}: `{name}` gives a result whose shape depends on values that are not "
            "known without a GPU",
            hint="guard it, or give it values that the script makes itself",
        )
    if "meta" in str(error).casefold() or isinstance(error, NotImplementedError):
        return UnsupportedError(
            f"{where}: `{name}` cannot be simulated: {str(error).splitlines()[0][:200]}",
            hint="the operator has no meta kernel; see docs/run.md for what is supported",
        )
    mismatch = _BROADCAST.match(str(error))  # of torch/_refs; CUDA has `infer_size` in its place
    if mismatch is not None:
        length, place, sizes = mismatch[1], int(mismatch[2]), mismatch[3].split(", ")
        return RuntimeError(
            f"The size of tensor a ({sizes[place]}) must match the size of tensor b ({length}) "
            f"at non-singleton dimension {len(sizes) + place}"
        )
    return error
