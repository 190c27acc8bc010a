"""bitsandbytes' 8-bit linear layers (LLM.int8) on the meta device: the same tensors, none of its
kernels.

A mirror of bitsandbytes 0.50.2 (nn/modules.py, autograd/_functions.py, backends/cuda/ops.py and
backends/default/ops.py) as transformers 5.17 and peft 0.21 use it: weights in int8 for good, the
threshold of outliers at its default.

Assumed: no activation reaches the threshold. Each column of the input that holds one is multiplied
in 16 bit beside the rest, so what a layer allocates would depend on values.

Shapes: M rows of the input, N out_features, K in_features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memest.models_meta.quantized.nf4 import QuantisedLinear, layers_to_quantize

THRESHOLD = 6.0
"""`llm_int8_threshold`, the default of transformers' `BitsAndBytesConfig`."""

ASSUMPTION = (
    f"LLM.int8: no activation reaches {THRESHOLD}, so no column is kept in 16 bit; those of trained"
    " checkpoints do, and so can products of a gated MLP with random weights, which costs their"
    " columns of input and weight in 16 bit"
)

_OUT_OF_127 = 1 / 127


class Int8Params(nn.Parameter):
    """int8 weights (N, K); peft knows them by this name."""

    def __new__(cls, data: Tensor) -> Int8Params:
        """`data` as a frozen parameter."""
        return torch.Tensor._make_subclass(cls, data, False)


@dataclass(eq=False, slots=True)
class Int8State:
    """What the layer keeps beside its weight: `MatmulLtState`."""

    CB: Tensor
    """The weight itself."""

    SCB: Tensor
    """One fp32 scale per row."""


class Linear8bitLt(QuantisedLinear):
    """`bitsandbytes.nn.Linear8bitLt` with `has_fp16_weights=False` on the meta device."""

    weight: Int8Params
    bias: nn.Parameter | None  # type: ignore[assignment]

    def __init__(self, linear: nn.Module) -> None:
        nn.Module.__init__(self)
        weight = linear.weight
        assert isinstance(weight, Tensor)
        if not isinstance(linear, nn.Linear):  # transformers' Conv1D keeps its weight transposed
            weight = weight.T
        self.out_features, self.in_features = weight.shape
        half = torch.empty(weight.shape, dtype=torch.float16, device=weight.device)  # via the host
        quantised, scales = _quantise_rows(half, threshold=0.0)
        self.weight = Int8Params(quantised)
        self.state = Int8State(self.weight.data, scales)
        bias = linear.bias
        assert bias is None or isinstance(bias, Tensor)
        frozen = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.register_parameter("bias", frozen)
        self.training = linear.training

    def state_tensors(self) -> Iterator[Tensor]:
        """The scales."""
        yield self.state.SCB

    def forward(self, input: Tensor) -> Tensor:
        """The product in the input's dtype, which the bias takes for good at the first call."""
        if self.bias is not None and self.bias.dtype != input.dtype:
            self.bias.data = self.bias.data.to(input.dtype)
        product: Tensor = MatMul8bitLt.apply(input, self.bias, self.state)  # type: ignore[no-untyped-call]
        return product


def _quantise_rows(rows: Tensor, *, threshold: float) -> tuple[Tensor, Tensor]:
    """`int8_vectorwise_quant` of fp16: int8 of the same shape and a scale per row.

    The search for outliers passes through the absolute values and a mask; it finds none.
    """
    assert rows.dtype is torch.float16
    scales = torch.empty(rows.numel() // rows.shape[-1], dtype=torch.float32, device=rows.device)
    quantised = torch.empty(rows.shape, dtype=torch.int8, device=rows.device)
    if threshold > 0:
        outliers = rows.abs() >= threshold
        outliers.any()
        columns = torch.empty(0, dtype=torch.int64, device=rows.device)
        if len(rows) > 1:
            quantised[:, columns] = 0
    return quantised, scales


def _product_of_int8(rows: Tensor, weight: Tensor) -> Tensor:
    """`int8_linear_matmul`: int32 (M, N); cuBLASLt gets no workspace, and takes multiples of 4."""
    out = torch.empty((rows.shape[0], weight.shape[0]), dtype=torch.int32, device=rows.device)
    if rows.shape[1] % 4:
        product = torch.matmul(rows.float(), weight.float().t()).to(torch.int32)
        return out.copy_(product)
    return out


def _scaled(product: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`int8_mm_dequant`: fp16, then the dtype asked for; a bias that is not fp16 is added after."""
    out = torch.empty_like(product, dtype=torch.float16)
    if bias is not None and bias.dtype is not torch.float16:
        out.add_(bias)
    return out.to(dtype)


def _scaled_product(
    rows: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """`int8_scaled_mm`; the int32 product lives until its scaled copy is made."""
    product = _product_of_int8(rows, weight)
    return _scaled(product, bias, dtype)


class MatMul8bitLt(torch.autograd.Function):
    """The product with a frozen int8 weight; keeps its input where that needs a gradient."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, bias: Tensor | None, state: Int8State) -> Tensor:
        """The product, in the dtype of the input.

        Beside the output: the input in fp16 (where it is not), 1 B per element of the input and 4 B
        per row for its int8 copy, 3 B per element while outliers are looked for, and 6 B per
        element of the output for its int32 and fp16 forms.
        """
        shape = input.shape
        if input.dim() == 3:
            input = input.reshape(-1, shape[-1])
        quantised, _scales = _quantise_rows(input.to(torch.float16), threshold=THRESHOLD)
        no_outliers = torch.empty(0, dtype=input.dtype, device=input.device)
        output = _scaled_product(quantised, state.CB, bias, input.dtype)
        ctx.state = state
        ctx.shape, ctx.dtype = shape, input.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        # Attributes and not saved tensors: they live as long as the graph.
        ctx.tensors = (no_outliers, input) if ctx.needs_input_grad[0] else ()
        if len(shape) == 3:
            return output.reshape(*shape[:-1], state.CB.shape[0])
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """The gradient of the input, by the weight in the input's dtype."""
        (grad_output,) = grad_outputs
        needs_input, needs_bias, _ = ctx.needs_input_grad
        grad_input = grad_bias = None
        if needs_bias:
            # bitsandbytes sums over the first dimension only, and autograd over the rest.
            grad_bias = grad_output.sum(0, dtype=ctx.bias_dtype)
        if grad_output.dim() == 3:
            grad_output = grad_output.reshape(-1, grad_output.shape[-1]).contiguous()
        if needs_input:
            weight, scales = ctx.state.CB, ctx.state.SCB
            weight = weight.to(ctx.dtype, copy=True).mul_(scales.unsqueeze(1).mul(_OUT_OF_127))
            grad_input = torch.matmul(grad_output.to(ctx.dtype), weight).view(ctx.shape)
        return grad_input, grad_bias, None


def dequantize_int8(weight: Tensor, scales: Tensor) -> Tensor:
    """`int8_vectorwise_dequant`: the weight in fp32, through a product with the scales."""
    return weight.data * scales.view(-1, 1) * _OUT_OF_127


def quantize_int8(model: nn.Module, *, skip: Sequence[str] | None = None) -> nn.Module:
    """Replaces the linear layers of `model` by 8-bit ones, in place, and gives it back.

    Per layer of N x K weights: N * K bytes, and N scales of 4 bytes.

    Args:
        model: on the meta device, in the dtype in which its weights would be loaded.
        skip: patterns of module names to leave alone; None takes `modules_to_skip(model)`.

    Raises:
        PlanError: no layer is left to quantise.
    """
    for name, original in layers_to_quantize(model, skip):
        model.set_submodule(name, Linear8bitLt(original))
    model.__dict__["is_loaded_in_8bit"] = True
    return model
