"""What CUDA's kernels refuse and meta's take: operands of several types, numbers that do not fit.

A script that mixes types would run here and end at its first step on a card. Each rule says what
the kernel named with it checks (torch 2.11), in its words; `tests/data/mistakes.json` holds what a
GPU said to each.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

Args = tuple[Any, ...]
Rule = Callable[[Args, dict[str, Any]], str]
"""Why a call is refused; empty where it is not."""

_SCALAR_TYPES = {
    torch.float32: "Float", torch.float64: "Double", torch.float16: "Half",
    torch.bfloat16: "BFloat16", torch.int64: "Long", torch.int32: "Int", torch.int16: "Short",
    torch.int8: "Char", torch.uint8: "Byte", torch.bool: "Bool", torch.complex64: "ComplexFloat",
    torch.complex128: "ComplexDouble", torch.complex32: "ComplexHalf",
}  # fmt: skip
_CPP_TYPES = {
    torch.float32: "float", torch.float64: "double", torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16", torch.int64: "long int", torch.int32: "int",
    torch.int16: "short int", torch.int8: "signed char", torch.uint8: "unsigned char",
    torch.bool: "bool", torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>", torch.complex32: "c10::complex<c10::Half>",
}  # fmt: skip
_C_NAMES = {torch.uint8: "uint8_t", torch.int8: "int8_t", torch.int16: "int16_t"}
"""As `Scalar::to` names them, where it is not the C++ type."""


def _name(dtype: torch.dtype) -> str:
    return _SCALAR_TYPES.get(dtype, str(dtype))


def _cpp(dtype: torch.dtype) -> str:
    return _CPP_TYPES.get(dtype, str(dtype))


def _tensor_type(dtype: torch.dtype) -> str:
    """As `DeprecatedTypeProperties` names it."""
    if dtype in (torch.bfloat16, torch.bool):
        return f"CUDA{_name(dtype)}Type"
    return f"torch.cuda.{_name(dtype)}Tensor"


def _mm(args: Args, kwargs: dict[str, Any]) -> str:
    left, right = args[0].dtype, args[1].dtype
    if left == right:
        return ""
    return f"expected mat1 and mat2 to have the same dtype, but got: {_cpp(left)} != {_cpp(right)}"


def _addmm(args: Args, kwargs: dict[str, Any]) -> str:
    added, left, right = (tensor.dtype for tensor in args[:3])
    if added != right:
        return f"self and mat2 must have the same dtype, but got {_name(added)} and {_name(right)}"
    if left != right:
        return f"mat1 and mat2 must have the same dtype, but got {_name(left)} and {_name(right)}"
    return ""


def _expects(first: int, second: int, kernel: str) -> Rule:
    """Of a kernel of floating-point numbers that reads the second argument as numbers of the type
    of the first.
    """

    def rule(args: Args, kwargs: dict[str, Any]) -> str:
        given = args[second] if len(args) > second else None
        if not args[first].dtype.is_floating_point and not args[first].is_complex():
            return f"\"{kernel}\" not implemented for '{_name(args[first].dtype)}'"
        if given is None or given.dtype == args[first].dtype:
            return ""
        expected, found = _name(args[first].dtype), _name(given.dtype)
        return f"expected scalar type {expected} but found {found}"

    return rule


def _convolution(args: Args, kwargs: dict[str, Any]) -> str:
    tensor, weight = args[0].dtype, args[1].dtype
    if tensor == weight:
        return ""
    types = f"{_tensor_type(tensor)}) and weight type ({_tensor_type(weight)}"
    return f"Input type ({types}) should be the same"


def _group_norm(args: Args, kwargs: dict[str, Any]) -> str:
    tensor, weight = args[0].dtype, args[1] if len(args) > 1 else None
    if weight is None or weight.dtype == tensor:
        return ""
    if tensor.itemsize > 2 and tensor != torch.float32:
        return "mixed dtype (CPU): all inputs must share same datatype."
    if weight.dtype != torch.float32:
        return "mixed dtype (CPU): expect parameter to have scalar type of Float"
    return f"expected scalar type {_name(tensor)} but found {_name(weight.dtype)}"


def _batch_norm(args: Args, kwargs: dict[str, Any]) -> str:
    """Parameters of half types' inputs are float32, or of the same type."""
    tensor, weight = args[0].dtype, args[1] if len(args) > 1 else None
    if weight is None or weight.dtype == tensor:
        return ""
    if tensor in (torch.float16, torch.bfloat16) and weight.dtype == torch.float32:
        return ""
    if not tensor.is_floating_point:
        return f"\"batch_norm_stats_cuda\" not implemented for '{_name(tensor)}'"
    expected = torch.float32 if tensor.itemsize == 2 else tensor
    return f"expected scalar type {_name(expected)} but found {_name(weight.dtype)}"


def _index_put(args: Args, kwargs: dict[str, Any]) -> str:
    target, source = args[0].dtype, args[2].dtype
    if target == source:
        return ""
    return (
        "Index put requires the source and destination dtypes match, got "
        f"{_name(target)} for the destination and {_name(source)} for the source."
    )


def _index_add(args: Args, kwargs: dict[str, Any]) -> str:
    if args[2].dtype not in (torch.int32, torch.int64):
        found = _name(args[2].dtype)
        return f"index_add_(): Expected dtype int32/int64 for index but got: {found}"
    if args[0].dtype == args[3].dtype:
        return ""
    types = f"self ({_name(args[0].dtype)}) and source ({_name(args[3].dtype)})"
    return f"index_add_(): {types} must have the same scalar type"


def _index_copy(args: Args, kwargs: dict[str, Any]) -> str:
    if args[0].dtype == args[3].dtype:
        return ""
    return (
        "index_copy_(): self and source expected to have the same dtype, but got "
        f"(self) {_name(args[0].dtype)} and (source) {_name(args[3].dtype)}"
    )


def _nll_loss(args: Args, kwargs: dict[str, Any]) -> str:
    if args[1].dtype in (torch.int64, torch.uint8):
        return ""
    kernel = '"nll_loss_forward_reduce_cuda_kernel_2d_index"'
    return f"{kernel} not implemented for '{_name(args[1].dtype)}'"


def _nll_loss2d(args: Args, kwargs: dict[str, Any]) -> str:
    if args[1].dtype in (torch.int64, torch.uint8):
        return ""
    return f"expected scalar type Long but found {_name(args[1].dtype)}"


def _probabilities(args: Args, kwargs: dict[str, Any]) -> str:
    """`binary_cross_entropy`."""
    if args[0].dtype == args[1].dtype:
        return ""
    return f"Found dtype {_name(args[1].dtype)} but expected {_name(args[0].dtype)}"


def _fits(number: int) -> Rule:
    """Of a number that is written into a tensor of the first argument's type."""

    def rule(args: Args, kwargs: dict[str, Any]) -> str:
        value = args[number] if len(args) > number else kwargs.get("value", 0)
        return overflow(value, args[0].dtype)

    return rule


def refuse_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
    """`validate_sdpa_input` of native/transformers/attention.cpp.

    Raises:
        RuntimeError: Types differ.
    """
    types = [tensor.dtype for tensor in (query, key, value)]
    if len(set(types)) > 1:
        first, second, third = map(_cpp, types)
        raise RuntimeError(
            "Expected query, key, and value to have the same dtype, but got query.dtype: "
            f"{first} key.dtype: {second} and value.dtype: {third} instead."
        )
    if mask is not None and mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise RuntimeError(
            "Expected attn_mask dtype to be bool or float or to match query dtype, but got "
            f"attn_mask.dtype: {_cpp(mask.dtype)} and  query.dtype: {_cpp(query.dtype)} instead."
        )


def _full(args: Args, kwargs: dict[str, Any]) -> str:
    dtype = kwargs.get("dtype")
    return "" if dtype is None else overflow(args[1], dtype)


def overflow(value: Any, dtype: torch.dtype) -> str:
    """Why a number cannot be of a type: `Scalar::to` of c10/core/Scalar.h. Infinity can."""
    if isinstance(value, bool | Tensor) or not isinstance(value, int | float):
        return ""
    if dtype is torch.bool or dtype.is_complex or not isfinite(value):
        return ""
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    if limits.min <= value <= limits.max:
        return ""
    if isinstance(limits, torch.iinfo) and limits.min == 0 and value < 0:
        return ""  # an unsigned number wraps
    named = _C_NAMES.get(dtype, _cpp(dtype))
    return f"value cannot be converted to type {named} without overflow"


RULES: dict[Any, Rule] = {
    aten.mm.default: _mm,  # cuda/Blas.cpp
    aten.addmm.default: _addmm,
    aten.addmv.default: _expects(1, 2, "addmv_impl_cuda"),
    aten.mv.default: _expects(0, 1, "addmv_impl_cuda"),
    aten.convolution.default: _convolution,  # native/Convolution.cpp
    aten.native_layer_norm.default: _expects(
        0, 2, "LayerNormKernelImpl"
    ),  # cuda/layer_norm_kernel.cu
    aten.native_group_norm.default: _group_norm,  # native/mixed_data_type.h
    aten.native_batch_norm.default: _batch_norm,  # cuda/Normalization.cu
    aten.cudnn_batch_norm.default: _batch_norm,
    aten._native_batch_norm_legit.default: _batch_norm,
    aten.index_put.default: _index_put,  # native/TensorAdvancedIndexing.cpp
    aten.index_put_.default: _index_put,
    aten.index_add.default: _index_add,
    aten.index_add_.default: _index_add,
    aten.index_copy.default: _index_copy,
    aten.index_copy_.default: _index_copy,
    aten.nll_loss_forward.default: _nll_loss,  # cuda/NLLLoss.cu
    aten.nll_loss2d_forward.default: _nll_loss2d,  # cuda/NLLLoss2d.cu
    aten.binary_cross_entropy.default: _probabilities,  # cuda/Loss.cu
    aten.grid_sampler_2d.default: _expects(0, 1, "grid_sampler_2d_cuda"),  # cuda/GridSampler.cu
    aten.masked_fill.Scalar: _fits(2),  # cuda/IndexKernel.cu, as the next
    aten.masked_fill_.Scalar: _fits(2),
    aten.fill_.Scalar: _fits(1),  # cuda/FillKernel.cu
    aten.constant_pad_nd.default: _fits(2),
    aten.full.default: _full,
}

_BY_IDENTITY = {id(func): rule for func, rule in RULES.items()}

_NOT_IMPLEMENTED = "not implemented for"


def refuse_generator(generator: torch.Generator | None, device: Any) -> None:
    """`check_generator` of ATen/core/Generator.h, for what is drawn on `device`.

    Raises:
        RuntimeError: The generator is of the other device.
    """
    wanted = torch.device(device or "cpu").type
    if generator is not None and (found := generator.device.type) != wanted:
        raise RuntimeError(f"Expected a '{wanted}' device type for generator but found '{found}'")


def refuse(func: Any, args: Args, kwargs: dict[str, Any]) -> None:
    """What the kernel of `func` checks before it runs on the card.

    Raises:
        RuntimeError: It refuses its arguments, in torch's words.
        NotImplementedError: It is not made for their type.
    """
    rule = _BY_IDENTITY.get(id(func))
    reason = rule(args, kwargs) if rule is not None else ""
    if reason:
        raise (NotImplementedError if _NOT_IMPLEMENTED in reason else RuntimeError)(reason)
