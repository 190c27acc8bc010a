"""Reading of tensors from Python without an operator: NumPy arrays, lists and text."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from memest.estimator.gpu.guesses import NUMBER
from memest.estimator.gpu.memory import Memory
from memest.estimator.gpu.mode import CudaSimMode
from memest.estimator.ops.sparse_rows import is_compressed, matrix_of_parts, parts_of
from memest.estimator.tensors.patches import Patches
from memest.estimator.tensors.placement import CPU, GPU, INSIDE, PLAIN, Place, is_meta
from memest.estimator.tensors.storages import MemKind
from memest.estimator.versions import returns_large_numbers

_MODES = torch._C.DispatchKey.Python, torch._C.DispatchKey.PythonTLSSnapshot  # keys of modes
OnHost = Callable[[Tensor], Tensor]


def install(patches: Patches, mode: CudaSimMode) -> None:
    """Make reads of tensors without data return known values, which are computed on the CPU. Else
    the reads return guesses, which are counted."""

    def on_host(tensor: Tensor) -> Tensor:
        """Return a tensor with data: the known or guessed values of `tensor`."""
        guess = mode.guessed.value_of(tensor)
        value = mode.values.value_of(tensor) if guess is None else None
        if value is not None:
            return value.clone()
        mode.guesses.note(f"values of {str(tensor.dtype).removeprefix('torch.')}")
        if guess is not None:
            return guess.clone()
        number = 0 if tensor.dtype is torch.bool else NUMBER
        return torch.full((), number, dtype=tensor.dtype, device=CPU).expand(tensor.shape)

    _install_arrays(patches, mode, on_host)
    _install_text(patches, mode, on_host)
    _install_items(patches, mode)
    if not returns_large_numbers():
        _install_numbers(patches)
    for name in ("__float__", "__index__", "__bool__"):
        patches.wrap(Tensor, name)(_read_under_modes)


def _read_under_modes(read: Callable[[Tensor], Any], tensor: Tensor) -> Any:
    """Call `read(tensor)` with dispatch modes turned on. C++ of torch turns the modes off while it
    makes a tensor from a list (`internal_new_from_data`). Meanwhile it reads tensors in the list. A
    meta tensor in the list has values only under the modes."""
    if not torch._C._dispatch_tls_is_dispatch_key_excluded(_MODES[0]) or not is_meta(tensor):
        return read(tensor)
    for key in _MODES:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        return read(tensor)
    finally:
        for key in _MODES:
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, True)


def _install_numbers(patches: Patches) -> None:
    """Make `item()` and `float()` of a `uint64` tensor return the unsigned number. Before torch 2.9
    a dispatch mode returns `int64_t`, so the bits are read as `int64`."""

    @patches.wrap(Tensor, "item")
    def item(item_: Any, tensor: Tensor) -> Any:
        if tensor.dtype is not torch.uint64:
            return item_(tensor)
        return item_(tensor.view(torch.int64)) % 2**64

    @patches.wrap(Tensor, "__float__")
    def to_float(float_: Any, tensor: Tensor) -> float:
        return float(tensor.item() if tensor.dtype is torch.uint64 else float_(tensor))


def _install_items(patches: Patches, mode: CudaSimMode) -> None:
    """Replace `tensor[index]` and `tensor[index] = number`, so that they allocate as on a GPU. If
    `tensor` is on a GPU, torch puts the number into a host tensor. A simulated GPU tensor is a meta
    tensor, for which torch would put the number into another meta tensor. So the number is put into
    a host tensor here. An index that is a list becomes a tensor (`THPVariable_getitem` and
    `THPVariable_setitem` of python_variable_indexing.cpp, torch 2.11)."""
    get_item, set_item = Tensor.__getitem__, Tensor.__setitem__

    def is_simulated(tensor: Tensor) -> bool:
        return type(tensor) in PLAIN and is_meta(tensor) and mode.host.place(tensor) is Place.GPU

    def get(tensor: Tensor, index: Any) -> Any:
        if isinstance(index, tuple | list | np.ndarray) and is_simulated(tensor):
            index = _with_positions(index, tensor.device, mode.memory)
        return get_item(tensor, index)

    def set_(tensor: Tensor, index: Any, value: Any) -> None:
        if is_simulated(tensor):
            index = _with_positions(index, tensor.device, mode.memory)
            if isinstance(value, bool | int | float | complex):
                with _disable_current_modes():
                    value = torch.tensor(value, dtype=tensor.dtype, device=CPU)
        set_item(tensor, index, value)

    patches.set(Tensor, "__getitem__", get)
    patches.set(Tensor, "__setitem__", set_)


def _with_positions(index: Any, device: torch.device, memory: Memory) -> Any:
    """Return `index`, as in `tensor[index]`, with tensors on `device` in place of lists of integers
    and NumPy arrays. `memory` labels these tensors as activations."""
    if isinstance(index, tuple):
        return tuple(_with_positions(item, device, memory) for item in index)
    is_list = isinstance(index, list) and bool(index) and all(isinstance(i, int) for i in index)
    is_array = isinstance(index, np.ndarray) and index.ndim > 0 and index.dtype.kind in "bi"
    if not is_list and not is_array:
        return index
    with _disable_current_modes():
        host_tensor = torch.tensor(index, device=CPU)
        if host_tensor.dtype is not torch.bool:
            host_tensor = host_tensor.long()
    positions = host_tensor.to(device)
    memory.label(positions, MemKind.ACTIVATIONS)  # no input, as other copies to the GPU are
    return positions


def _install_arrays(patches: Patches, mode: CudaSimMode, on_host: OnHost) -> None:
    @patches.wrap(Tensor, "numpy")
    def numpy(numpy_: Any, tensor: Tensor, *, force: bool = False) -> Any:
        if not is_meta(tensor):
            return numpy_(tensor, force=force)
        if mode.host.place(tensor) is Place.GPU and not force:
            raise TypeError(
                f"can't convert {GPU.device} device type tensor to numpy. Use Tensor.cpu() to "
                "copy the tensor to host memory first."
            )
        if tensor.requires_grad and not force:
            raise RuntimeError(
                "Can't call numpy() on Tensor that requires grad. Use "
                "tensor.detach().numpy() instead."
            )
        with _disable_current_modes():
            return np.array(numpy_(on_host(tensor.detach())))

    @patches.wrap(Tensor, "tolist")
    def tolist(tolist_: Any, tensor: Tensor) -> Any:
        if not is_meta(tensor) or mode.host.place(tensor) is Place.META:
            return tolist_(tensor)
        with _disable_current_modes():
            return tolist_(on_host(tensor.detach()))


def _install_text(patches: Patches, mode: CudaSimMode, on_host: OnHost) -> None:
    def to_host(tensor: Tensor) -> Tensor:
        if tensor.layout is torch.strided or not is_meta(tensor):
            return on_host(tensor)
        if is_compressed(tensor):
            offsets, indices, values = map(on_host, parts_of(tensor))
            return matrix_of_parts((offsets, indices, values), tensor)
        parts = on_host(tensor._indices()), on_host(tensor._values())
        is_coalesced = tensor.is_coalesced()
        return torch.sparse_coo_tensor(
            *parts, tensor.shape, is_coalesced=is_coalesced, check_invariants=False, device=CPU
        )

    @patches.wrap(Tensor, "__repr__")
    def text(repr_: Any, tensor: Tensor, *, tensor_contents: Any = None) -> str:
        is_fake = INSIDE.compiles or not is_meta(tensor)
        place = Place.META if is_fake else mode.host.place(tensor)
        if place is Place.META:
            return repr_(tensor, tensor_contents=tensor_contents)
        with _disable_current_modes():
            string = repr_(to_host(tensor.detach()), tensor_contents=tensor_contents)
        return f"{string[:-1]}, device='{GPU.device}')" if place is Place.GPU else string
