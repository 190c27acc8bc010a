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

# functional.py: the default `blocksize` of `quantize_4bit`, the block of its nested statistics, and
# the lengths of the two codes (`get_4bit_type`, `create_dynamic_map`).
BLOCK_NUMEL = 64
NESTED_BLOCK_NUMEL = 256
CODE_NUMEL = 16
NESTED_CODE_NUMEL = 256

# Shapes: M rows of the input, N out_features, K in_features.


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedGemmRule:
    """When the CUDA backend multiplies by the packed weight, without dequantising it first.

    The thresholds are those of `_gemm_4bit_use_custom_cuda` (backends/cuda/ops.py). `num_blocks` is
    the number of 64-column tiles of the output; a wave is one tile per multiprocessor.
    """

    capability: tuple[int, int] = (9, 0)
    """Compute capability of the GPU, `(major, minor)`."""

    num_sms: int = 132
    """Its streaming multiprocessors."""

    def applies(self, num_rows: int, shape: Sequence[int], dtype: torch.dtype) -> bool:
        """Whether an input of `num_rows` rows and a weight of `shape` (N, K) take that kernel."""
        n, k = shape
        if num_rows > 1536 or k % BLOCK_NUMEL:
            return False
        if num_rows <= 4:
            return True
        if dtype == torch.float32 or not self._has_tensor_core_kernel(dtype):
            return num_rows < 8
        if self.capability == (8, 7) or self.capability[0] == 11:
            return False
        tiles = -(-n // 64)
        if self.capability[0] == 10:
            return num_rows <= self._limit_sm100(n, k, tiles)
        if n * k < 4 * 2**20:
            return num_rows <= self._limit_small_weight(n, k, tiles, num_rows)
        if num_rows > 512:
            return False
        if num_rows < 8:
            return not self._few_rows_dequantise(n, k, tiles, num_rows)
        return num_rows <= self._limit_large_weight(n, k, tiles)

    def _has_tensor_core_kernel(self, dtype: torch.dtype) -> bool:
        if self.capability < (7, 5):
            return False
        return self.capability[0] > 7 or dtype == torch.float16

    def _limit_sm100(self, n: int, k: int, tiles: int) -> int:
        if tiles >= 3 * self.num_sms:
            return 32
        return 8 if tiles >= self.num_sms and k < n else 0

    def _limit_small_weight(self, n: int, k: int, tiles: int, num_rows: int) -> int:
        if 2 * k < n:
            return self._limit_short_small_weight(k, tiles)
        quarter_wave = 4 * tiles <= self.num_sms
        if self.capability == (8, 0) and quarter_wave:
            if k < n:
                return 384
            return 32 if 8 * tiles <= self.num_sms else 128
        if self.capability == (7, 5) and tiles < self.num_sms and num_rows > 8:
            return 64
        if quarter_wave:
            return 32 if k < n or self._has_hbm else 23
        return 16 if 2 * tiles <= self.num_sms else 0

    def _limit_short_small_weight(self, k: int, tiles: int) -> int:
        if self._has_hbm:
            low_wave = 3 * tiles < self.num_sms
            if self.capability == (8, 0):
                return 1536 if low_wave else 512
            return 512 if low_wave else 320
        if self.capability == (7, 5):
            if tiles >= 3 * self.num_sms or k < 704:
                return 320
            return 64 if k >= 1024 else 96
        crowded = tiles < self.num_sms and tiles * k > 320 * self.num_sms
        return 192 if crowded else 320

    @property
    def _has_hbm(self) -> bool:
        return self.capability == (8, 0) or self.capability[0] == 9

    def _few_rows_dequantise(self, n: int, k: int, tiles: int, num_rows: int) -> bool:
        hopper = self.capability[0] == 9
        if not self._has_hbm or num_rows < 6 or tiles < (36 if hopper else 48):
            return False
        below_75 = 4 * tiles < 3 * self.num_sms
        below_60 = 5 * tiles < 3 * self.num_sms
        if k > n:
            return below_75
        return k == n and (below_75 and not below_60 if hopper else below_60)

    def _limit_large_weight(self, n: int, k: int, tiles: int) -> int:
        limits = {(7, 5): self._limit_sm75, (8, 0): self._limit_sm80, (12, 0): self._limit_sm120}
        if self.capability[0] == 9:
            return self._limit_sm90(n, k, tiles)
        if self.capability == (8, 6):
            return self._by_waves(tiles, ((1, 128), (0.5, 64)), 16)
        if self.capability == (12, 1) and tiles >= self.num_sms:
            return 256
        return limits.get(self.capability, self._limit_sm89)(n, k, tiles)

    def _by_waves(self, tiles: int, tiers: Sequence[tuple[float, int]], otherwise: int) -> int:
        """The limit of the first tier whose number of waves `tiles` fill."""
        for waves, limit in tiers:
            if tiles >= int(waves * self.num_sms):
                return limit
        return otherwise

    def _limit_sm75(self, n: int, k: int, tiles: int) -> int:
        return self._by_waves(tiles, ((3, 128 if k < n else 64), (0.5, 64)), 32)

    def _limit_sm80(self, n: int, k: int, tiles: int) -> int:
        sms = self.num_sms
        if tiles >= sms:
            return self._by_waves(tiles, ((3, 128),), 64 if k < n else 32)
        if k >= 3 * n and 4 * tiles > sms:
            return 0
        if k == n and tiles >= 48 and 5 * tiles < 3 * sms:
            return 0
        if 2 * tiles < sms:
            if k <= n:
                return 128
            if 3 * tiles >= sms:
                return 0
        return 128 if tiles >= sms // 2 and k < n else 16

    def _limit_sm90(self, n: int, k: int, tiles: int) -> int:
        if tiles < self.num_sms and k >= n and 4 * tiles < 3 * self.num_sms:
            return 0
        return self._by_waves(tiles, ((3, 64), (2, 48), (1, 32), (0.5, 16)), 0)

    def _limit_sm120(self, n: int, k: int, tiles: int) -> int:
        if 5 * tiles >= 4 * self.num_sms:
            return self._by_waves(tiles, ((3, 256), (2, 128)), 96 if k >= n else 64)
        if tiles >= self.num_sms // 2:
            return 64 if 2 * k >= n and tiles >= 128 else 8
        return 16 if k > 2 * n and tiles > 64 else 8

    def _limit_sm89(self, n: int, k: int, tiles: int) -> int:
        tall = k > 2 * n
        if tiles >= 2 * self.num_sms:
            return 256 if tiles >= 3 * self.num_sms else 128
        if 5 * tiles >= 4 * self.num_sms:
            if tall or tiles >= 200:
                return 128
            if k >= n:
                return 128 if self.num_sms >= 60 else 32
            return 64
        if tiles >= self.num_sms // 2:
            return 64 if tall else 8 if tiles >= 64 else 32
        if k > n and tiles <= 48:
            return 12 if k >= 3 * n else 10
        return 16 if tall or tiles < 48 else 8


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
