"""QLoRA's base on a GPU: linear layers replaced by those of bitsandbytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from memest.errors import PlanError
from memest.models_meta.quantization import convertible_names


def quantize_for_real(
    model: nn.Module,
    *,
    compute_dtype: torch.dtype,
    double_quant: bool = False,
    skip: Sequence[str] = (),
) -> None:
    """Replace the linear layers of `model` by `bitsandbytes.nn.Linear4bit` (nf4), in place.

    Layer by layer over a list of the modules, which holds the originals to the end, as a loop over
    `list(model.named_modules())` does. The layers, their order and the skipped names are those of
    the prediction (`memest.models_meta.quantization.quantize_nf4`).

    Raises:
        PlanError: no layer is left to quantise.
    """
    names = convertible_names(model, list(skip))
    if not names:
        raise PlanError(
            f"`{type(model).__name__}` has no linear layer to quantise",
            hint=f"left alone by name: {', '.join(f'`{p}`' for p in skip) or 'none'}",
        )
    originals: list[Any] = [model.get_submodule(name) for name in names]
    for name, original in zip(names, originals, strict=True):
        model.set_submodule(name, _quantised(original, compute_dtype, double_quant))
    model.__dict__["is_loaded_in_4bit"] = True


def _quantised(original: Any, compute_dtype: torch.dtype, double_quant: bool) -> nn.Module:
    import bitsandbytes

    weight = original.weight.data
    if not isinstance(original, nn.Linear):  # transformers' Conv1D keeps its weight transposed
        weight = weight.T
    rows, columns = weight.shape
    layer: nn.Module = bitsandbytes.nn.Linear4bit(
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
    if original.bias is not None:
        layer.bias = nn.Parameter(original.bias.detach(), requires_grad=False)
    layer.train(original.training)
    return layer
