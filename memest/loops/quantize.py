"""Quantise QLoRA's base in place: replace linear layers by 4-bit or 8-bit ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from memest.models_meta.assemble import compute_dtype
from memest.models_meta.quantized import THRESHOLD, layers_to_quantize, skipped_modules
from memest.plan import TrainingPlan


def quantize_as_planned(model: nn.Module, plan: TrainingPlan) -> None:
    """Replace the linear layers of `model` as `plan` specifies.

    Raises:
        PlanError: no layer is left to quantise.
    """
    quantize(
        model,
        compute_dtype=compute_dtype(plan),
        double_quant=plan.double_quant,
        skip=skipped_modules(model, plan),
        quant=plan.quant,
    )


def quantize(
    model: nn.Module,
    *,
    compute_dtype: torch.dtype,
    double_quant: bool = False,
    skip: Sequence[str] = (),
    quant: str = "nf4",
) -> None:
    """Replace the linear layers of `model` by `bitsandbytes.nn.Linear4bit` (nf4) or `Linear8bitLt`.

    The list of layers holds the originals to the end, as a loop over `list(model.named_modules())`
    does.

    Raises:
        PlanError: no layer is left to quantise.
    """
    original: Any
    for name, original in layers_to_quantize(model, skip):
        layer = (
            _in_8_bits(original)
            if quant == "int8"
            else _in_4_bits(original, compute_dtype, double_quant)
        )
        if original.bias is not None:
            layer.bias = nn.Parameter(original.bias.detach(), requires_grad=False)
        layer.train(original.training)
        model.set_submodule(name, layer)
        del layer
    model.__dict__["is_loaded_in_8bit" if quant == "int8" else "is_loaded_in_4bit"] = True


def _weight_of(original: Any) -> torch.Tensor:
    """Return the weight as (out_features, in_features); transformers' Conv1D transposes it."""
    weight: torch.Tensor = original.weight.data
    return weight if isinstance(original, nn.Linear) else weight.T


def _in_8_bits(original: Any) -> Any:
    """Make the 8-bit layer through the host, as transformers does; the move quantises it."""
    import bitsandbytes

    weight = _weight_of(original)
    rows, columns = weight.shape
    layer = bitsandbytes.nn.Linear8bitLt(
        columns,
        rows,
        bias=original.bias is not None,
        has_fp16_weights=False,
        threshold=THRESHOLD,
        device="meta",
    )
    in_host = bitsandbytes.nn.Int8Params(
        weight.to("cpu"), requires_grad=False, has_fp16_weights=False
    )
    layer.weight = in_host.to(weight.device)
    return layer


def _in_4_bits(original: Any, compute_dtype: torch.dtype, double_quant: bool) -> Any:
    import bitsandbytes

    weight = _weight_of(original)
    rows, columns = weight.shape
    layer = bitsandbytes.nn.Linear4bit(
        columns,
        rows,
        bias=original.bias is not None,
        compute_dtype=compute_dtype,
        compress_statistics=double_quant,
        quant_type="nf4",
        device="meta",
    )
    packed = bitsandbytes.nn.Params4bit(
        weight,
        requires_grad=False,
        compress_statistics=double_quant,
        quant_type="nf4",
        module=layer,
    )
    layer.weight = packed.to(weight.device)  # packs it
    return layer


def quant_state_tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors of quantisation besides the parameters of `model`: scales and codes.

    They are the nested `quant_state` of `Params4bit`, and the `SCB` of `Int8Params`.
    """
    for module in model.modules():
        weight = module._parameters.get("weight")
        state = getattr(weight, "quant_state", None)
        while state is not None:
            held = (state.absmax, state.code, state.offset)
            yield from (tensor for tensor in held if isinstance(tensor, torch.Tensor))
            state = state.state2
        scales = getattr(weight, "SCB", None)
        if isinstance(scales, torch.Tensor):
            yield scales
