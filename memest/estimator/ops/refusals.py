"""Messages of CUDA's kernels for calls that meta accepts: mixed dtypes, numbers that do not fit.

Each family registers the checks of its kernels (torch 2.11) with `refuse`, in torch's words;
`tests/data/mistakes.json` holds a GPU's messages.
"""

from collections.abc import Callable
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from memest.estimator.ops.registry import KernelCall

RefuseRule = Callable[[KernelCall], str]  # returns why a call is refused; empty where it is not
_CPP_TYPES = {
    torch.float32: "float", torch.float64: "double", torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16", torch.int64: "long int", torch.int32: "int",
    torch.int16: "short int", torch.int8: "signed char", torch.uint8: "unsigned char",
    torch.bool: "bool", torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>", torch.complex32: "c10::complex<c10::Half>",
}  # fmt: skip
_C_NAMES = {torch.uint8: "uint8_t", torch.int8: "int8_t", torch.int16: "int16_t"}
"""Names of types in `Scalar::to`, if different from the C++ type."""


def type_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in torch's messages, such as `Float`."""
    name = torch.empty(0, dtype=dtype, device="meta").type()  # such as torch.meta.FloatTensor
    return name.removeprefix("torch.meta.").removesuffix("Tensor")


def cpp_type(dtype: torch.dtype) -> str:
    """Return the C++ type of a dtype, such as `float`."""
    return _CPP_TYPES.get(dtype, str(dtype))


def tensor_type(dtype: torch.dtype) -> str:
    """Return the type name of a CUDA tensor in torch's messages (`DeprecatedTypeProperties`)."""
    if dtype in (torch.bfloat16, torch.bool):
        return f"CUDA{type_name(dtype)}Type"
    return f"torch.cuda.{type_name(dtype)}Tensor"


def expects(first: int, second: int, kernel: str) -> RefuseRule:
    """Return a check of calls by the dtypes of arguments `first` and `second` (positions). It
    returns torch's error text on `kernel` if the first is an integer or they differ, else ""."""

    def rule(call: KernelCall) -> str:
        dtype = call.args[first].dtype
        operand = call.args[second] if len(call.args) > second else None
        if not dtype.is_floating_point and not dtype.is_complex:
            return f"\"{kernel}\" not implemented for '{type_name(dtype)}'"
        if operand is None or operand.dtype == dtype:
            return ""
        return f"expected scalar type {type_name(dtype)} but found {type_name(operand.dtype)}"

    return rule


def accepts(number: int, dtypes: tuple[torch.dtype, ...], message: str) -> RefuseRule:
    """Return a check of calls: `message`, with the dtype in its field {}, if the argument at
    position `number` has none of the `dtypes`; else ""."""

    def rule(call: KernelCall) -> str:
        dtype = call.args[number].dtype
        return "" if dtype in dtypes else message.format(type_name(dtype))

    return rule


def same_type(
    first: int, second: int, message: str, name_of: Callable[[torch.dtype], str] = type_name
) -> RefuseRule:
    """Return a check of calls: `message` if the arguments at positions `first` and `second` differ
    in dtype, else "". `name_of` returns a dtype's name, for the two fields {} of `message`."""

    def rule(call: KernelCall) -> str:
        left, right = call.args[first].dtype, call.args[second].dtype
        return "" if left == right else message.format(name_of(left), name_of(right))

    return rule


def fits(call: KernelCall) -> str:
    """Return torch's error text if the call's `value` is out of range for its `self`, else ""."""
    return overflow(call.value, call.self.dtype)


def overflow(value: Any, dtype: torch.dtype) -> str:
    """Return torch's error text if `value` is out of the range of `dtype` (Scalar.h), else "".
    Infinity is in range. A tensor or a bool is not checked."""
    if isinstance(value, bool | Tensor) or not isinstance(value, int | float):
        return ""
    if dtype is torch.bool or dtype.is_complex or not isfinite(value):
        return ""
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    if limits.min <= value <= limits.max:
        return ""
    if isinstance(limits, torch.iinfo) and limits.min == 0 and value < 0:
        return ""  # an unsigned number wraps
    cpp_name = _C_NAMES.get(dtype, cpp_type(dtype))
    return f"value cannot be converted to type {cpp_name} without overflow"


def refuse_generator(generator: torch.Generator | None, device: Any) -> None:
    """Raise torch's `RuntimeError` for a `generator` that is not of `device` (`check_generator`).
    Without a `device`, it has to be of the CPU."""
    expected = torch.device(device or "cpu").type
    if generator is not None and (found := generator.device.type) != expected:
        raise RuntimeError(f"Expected a '{expected}' device type for generator but found '{found}'")
