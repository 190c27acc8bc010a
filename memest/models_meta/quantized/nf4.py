"""bitsandbytes' 4-bit linear layers on the meta device: the same tensors, none of its kernels.

A mirror of bitsandbytes 0.50.2 (nn/modules.py, autograd/_functions.py, functional.py and
backends/cuda/ops.py) as transformers 5.17 and peft 0.21 use it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from memest.errors import PlanError
from memest.models_meta.quantized.fused_gemm import BLOCK_NUMEL, FusedGemmRule

# functional.py: the block of the nested statistics, and the lengths of the two codes
# (`get_4bit_type`, `create_dynamic_map`).
NESTED_BLOCK_NUMEL = 256
CODE_NUMEL = 16
NESTED_CODE_NUMEL = 256

# Shapes: M rows of the input, N out_features, K in_features.


@dataclass(eq=False, kw_only=True, slots=True)
class QuantState:
    """What is needed to undo the quantisation of one weight; plain tensors, neither buffers nor
    parameters.
    """

    shape: tuple[int, int]
    """The weight's own shape, (out_features, in_features)."""

    dtype: torch.dtype
    """The dtype that it had when it was quantised: `dequantize_4bit` gives it back in this one."""

    absmax: Tensor
    """One scale per 64 elements: fp32, or uint8 when the scales are quantised as well."""

    code: Tensor
    """The 16 values of nf4, one copy per weight."""

    nested_absmax: Tensor | None = None
    """With double quantisation, one fp32 scale per 256 scales."""

    nested_code: Tensor | None = None
    """With double quantisation, the 256 values of its code, one copy per weight."""

    offset: Tensor | None = None
    """With double quantisation, the mean of the scales."""

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor of this state."""
        for tensor in (self.absmax, self.code, self.nested_absmax, self.nested_code, self.offset):
            if tensor is not None:
                yield tensor


def _quantise(
    weight: Tensor, shape: tuple[int, int], double_quant: bool, nested_map: list[Tensor]
) -> tuple[Tensor, QuantState]:
    """The packed weight and its state, born in the order of `quantize_4bit`.

    The first layer with double quantisation fills `nested_map`.
    """
    num_blocks = -(-weight.numel() // BLOCK_NUMEL)
    device = weight.device
    scales = torch.empty(num_blocks, dtype=torch.float32, device=device)
    packed = torch.empty(((weight.numel() + 1) // 2, 1), dtype=torch.uint8, device=device)
    code = torch.empty(CODE_NUMEL, dtype=torch.float32, device=device)
    code.div_(code.abs().max())  # `get_4bit_type`
    state = QuantState(shape=shape, dtype=weight.dtype, absmax=scales, code=code)
    if double_quant:
        num_nested = -(-num_blocks // NESTED_BLOCK_NUMEL)
        state.offset = scales.mean()
        shifted = scales - state.offset
        if not nested_map:
            nested_map.append(torch.empty(NESTED_CODE_NUMEL, dtype=torch.float32, device=device))
        state.nested_absmax = torch.empty(num_nested, dtype=torch.float32, device=device)
        state.absmax = torch.empty_like(shifted, dtype=torch.uint8)
        state.nested_code = torch.empty(NESTED_CODE_NUMEL, dtype=torch.float32, device=device)
    return packed, state


class Params4bit(nn.Parameter):
    """Packed 4-bit weights, uint8 of shape (ceil(N * K / 2), 1); peft knows it by this name."""

    quant_state: QuantState

    def __new__(cls, data: Tensor, quant_state: QuantState) -> Params4bit:
        """`data` as a frozen parameter that carries `quant_state`."""
        self: Params4bit = torch.Tensor._make_subclass(cls, data, False)
        self.quant_state = quant_state
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Params4bit:
        state = deepcopy(self.quant_state, memo)
        return type(self)(deepcopy(self.data, memo), state)


class QuantisedLinear(nn.Linear):
    """A mirror of a quantised layer, which keeps more than its parameters."""

    def state_tensors(self) -> Iterator[Tensor]:
        """What it keeps beside them."""
        raise NotImplementedError


class Linear4bit(QuantisedLinear):
    """`bitsandbytes.nn.Linear4bit` (nf4, uint8 storage) on the meta device."""

    weight: Params4bit
    bias: nn.Parameter | None  # type: ignore[assignment]

    def __init__(
        self,
        linear: nn.Module,
        *,
        compute_dtype: torch.dtype | None,
        double_quant: bool,
        rule: FusedGemmRule,
        nested_map: list[Tensor],
    ) -> None:
        nn.Module.__init__(self)
        weight = linear.weight
        assert isinstance(weight, Tensor)
        if not isinstance(linear, nn.Linear):  # transformers' Conv1D keeps its weight transposed
            weight = weight.T.contiguous()  # `Params4bit._quantize`: a copy, until it is packed
        shape = (weight.shape[0], weight.shape[1])
        self.out_features, self.in_features = shape
        self.weight = Params4bit(*_quantise(weight, shape, double_quant, nested_map))
        bias = linear.bias
        assert bias is None or isinstance(bias, Tensor)
        frozen = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.register_parameter("bias", frozen)
        self.compute_dtype = compute_dtype
        self.rule = rule
        self.training = linear.training

    def forward(self, input: Tensor) -> Tensor:
        """The product in the compute dtype, cast back to the input's.

        The bias is replaced for good by its cast to the compute dtype, at the first call.
        """
        if self.compute_dtype is None and input.dtype in (torch.float32, torch.bfloat16):
            self.compute_dtype = input.dtype
        input_dtype = input.dtype
        if self.compute_dtype is not None:
            input = input.to(self.compute_dtype)
        bias: Tensor | None = self.bias
        if bias is not None:
            if bias.dtype != input.dtype:
                bias.data = bias.data.to(input.dtype)
            if self.compute_dtype is not None:
                bias = bias.to(self.compute_dtype)
        return self._product(input, bias).to(input_dtype)

    def state_tensors(self) -> Iterator[Tensor]:
        """Scales and codes."""
        return self.weight.quant_state.tensors()

    def _product(self, input: Tensor, bias: Tensor | None) -> Tensor:
        needs_grad = input.requires_grad or (bias is not None and bias.requires_grad)
        if torch.is_grad_enabled() and needs_grad:
            product: Tensor = MatMul4Bit.apply(input, self.weight, bias, self.rule)  # type: ignore[no-untyped-call]
            return product
        with torch.no_grad():
            return gemm_4bit(input, self.weight, bias, self.rule)


def gemm_4bit(
    input: Tensor, weight: Params4bit, bias: Tensor | None, rule: FusedGemmRule
) -> Tensor:
    """Forward of the layer: one output when fused, else the whole weight dequantised beside it.

    temporaries = N * K * itemsize of the input's dtype
                  (+ 2 * ceil(N * K / 64) * 4 B with double quantisation)
    """
    state = weight.quant_state
    num_rows = prod(input.shape[:-1])
    if rule.applies(num_rows, state.shape, input.dtype):
        input = input.contiguous()
        return input.new_empty((*input.shape[:-1], state.shape[0]))
    scales = None
    if state.offset is not None:
        unshifted = torch.empty_like(state.absmax, dtype=torch.float32)
        scales = unshifted + state.offset
    dequantised = torch.empty(state.shape, dtype=input.dtype, device=input.device)
    product = functional.linear(input, dequantised, bias)
    del scales
    return product


def dequantize_4bit(weight: Params4bit) -> Tensor:
    """The weight (N, K) in the dtype that it had before it was quantised."""
    state = weight.quant_state
    scales = state.absmax
    if state.offset is not None:
        scales = torch.empty_like(state.absmax, dtype=torch.float32)
        scales += state.offset
    return torch.empty(state.shape, dtype=state.dtype, device=weight.device)


class MatMul4Bit(torch.autograd.Function):
    """The product with a frozen 4-bit weight: keeps neither the input nor a dequantised weight."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Params4bit, bias: Tensor | None, rule: FusedGemmRule
    ) -> Tensor:
        """The product; only the packed weight is kept."""
        ctx.weight = weight
        ctx.bias_dtype = None if bias is None else bias.dtype
        return gemm_4bit(input, weight, bias, rule)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """The gradient of the input, with the weight dequantised a second time."""
        (grad_output,) = grad_outputs
        needs_input, _, needs_bias, _ = ctx.needs_input_grad
        grad_input = grad_bias = None
        if needs_bias:
            # bitsandbytes sums over the first dimension only, which fits inputs of two dimensions.
            grad_bias = grad_output.sum(0, dtype=ctx.bias_dtype)
        if needs_input:
            grad_input = torch.matmul(
                grad_output, dequantize_4bit(ctx.weight).to(grad_output.dtype)
            )
        return grad_input, None, grad_bias, None


def modules_to_skip(model: nn.Module) -> list[str]:
    """The patterns of modules that transformers leaves unquantised in `model`.

    The output embedding, tied weights, the last module, and what the model's classes keep in fp32
    (T5: `wo`; BLIP-2: `query_tokens`, `qformer`), as `HfQuantizer.get_modules_to_not_convert` says.
    """
    from transformers import PreTrainedModel
    from transformers.quantizers.base import HfQuantizer

    if not isinstance(model, PreTrainedModel):
        return []
    kept = list(model._keep_in_fp32_modules or [])
    return sorted(HfQuantizer.get_modules_to_not_convert(model, None, kept))


def quantize_nf4(
    model: nn.Module,
    *,
    compute_dtype: torch.dtype | None,
    double_quant: bool = False,
    skip: Sequence[str] | None = None,
    rule: FusedGemmRule | None = None,
) -> nn.Module:
    """Replaces the linear layers of `model` by 4-bit ones, in place, and gives it back.

    Per layer of N x K weights: N * K / 2 bytes packed, N * K / 64 scales of 4 bytes (1 byte and
    4 / 256 with `double_quant`), and a code of 64 bytes.

    Args:
        model: on the meta device, in the dtype in which its weights would be loaded.
        compute_dtype: of the products; None takes that of the first input, as bitsandbytes does.
        double_quant: whether the scales are quantised as well.
        skip: patterns of module names to leave alone; None takes `modules_to_skip(model)`.
        rule: which products run fused, by the GPU; None is an H100 or H200.

    Raises:
        PlanError: no layer is left to quantise.
    """
    nested_map: list[Tensor] = []
    for name, original in layers_to_quantize(model, skip):
        layer = Linear4bit(
            original,
            compute_dtype=compute_dtype,
            double_quant=double_quant,
            rule=rule or FusedGemmRule(),
            nested_map=nested_map,
        )
        model.set_submodule(name, layer)
    model.__dict__["is_loaded_in_4bit"] = True
    # `quantize_blockwise` keeps one copy of its map on the device, beside each layer's own.
    model.__dict__["nf4_dynamic_map"] = next(iter(nested_map), None)
    return model


def layers_to_quantize(model: nn.Module, skip: Sequence[str] | None) -> list[tuple[str, nn.Module]]:
    """Names and layers, all at once: a loop over `list(model.named_modules())` holds the originals
    to its end, and so does a loop over this.

    Raises:
        PlanError: there are none.
    """
    patterns = list(modules_to_skip(model) if skip is None else skip)
    names = convertible_names(model, patterns)
    if not names:
        own = {type(m).__name__ for m in model.modules() if isinstance(m, nn.Linear)} - {"Linear"}
        why = (
            f"transformers converts no {', '.join(f'`{c}`' for c in sorted(own))}; " if own else ""
        )
        raise PlanError(
            f"`{type(model).__name__}` has no linear layer to quantise",
            hint=f"{why}left alone by name: {', '.join(f'`{p}`' for p in patterns) or 'none'}",
        )
    return [(name, model.get_submodule(name)) for name in names]


def convertible_names(model: nn.Module, patterns: list[str]) -> list[str]:
    """The names of the layers that `replace_with_bnb_linear` of transformers would convert."""
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.quantizers_utils import should_convert_module

    return [
        name
        for name, module in model.named_modules()
        if (type(module) is nn.Linear or isinstance(module, Conv1D))
        and should_convert_module(name, patterns)
    ]


def prepare_for_kbit_training(model: nn.Module, *, use_gradient_checkpointing: bool) -> nn.Module:
    """`peft.prepare_model_for_kbit_training`: all frozen, what is not 4-bit in fp32.

    With checkpointing it also makes the embeddings' output require a gradient, and turns
    checkpointing on (reentrant, the default of transformers).
    """
    from peft import prepare_model_for_kbit_training

    return prepare_model_for_kbit_training(  # type: ignore[no-untyped-call, no-any-return]
        model, use_gradient_checkpointing=use_gradient_checkpointing, auto_clear_cache=False
    )


def quant_state_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Every tensor that quantisation keeps beside the parameters of `model`, each once."""
    for module in model.modules():
        if isinstance(module, QuantisedLinear):
            yield from module.state_tensors()
        dynamic_map = module.__dict__.get("nf4_dynamic_map")
        if isinstance(dynamic_map, Tensor):
            yield dynamic_map
