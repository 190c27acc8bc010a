"""Fake quantization of `torch.ao.quantization`.

Sources (torch 2.11, `aten/src/ATen/native/quantized`): FakeQuantPerTensorAffine.cpp,
FakeQuantPerChannelAffine.cpp, cuda/FusedObsFakeQuant.cu.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from memest.estimator.ops import registry
from memest.estimator.ops.registry import outputs_only

aten = torch.ops.aten

outputs_only(
    "fake_quantize_per_channel_affine_cachemask fake_quantize_per_tensor_affine_cachemask "
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams"
)


@registry.composed("_fused_moving_avg_obs_fq_helper")
def observe_and_quantize(
    x: Tensor,
    observer_on: Tensor,
    fake_quant_on: Tensor,
    running_min: Tensor,
    running_max: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    averaging_const: float,
    quant_min: int,
    quant_max: int,
    channel: int,
    per_row: bool = False,
    symmetric: bool = False,
) -> tuple[Tensor, Tensor]:
    """Run `fused_moving_avg_obs_fake_quant_cuda`: extremes, then the quantized values."""
    contiguous = x.contiguous()
    if not per_row:
        torch.aminmax(contiguous)
        quantize: Callable[..., tuple[Tensor, Tensor]] = (
            aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams
        )
        return quantize(x, scale, zero_point, fake_quant_on, quant_min, quant_max)
    if not running_min.numel():
        for state in (running_min, running_max, scale, zero_point):
            state.resize_(x.size(channel))
        running_min.fill_(math.inf)
        running_max.fill_(-math.inf)
    torch.aminmax(x if x.dim() == 2 else x.transpose(0, channel).flatten(1), dim=1)
    if not fake_quant_on.item():
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    quantize = aten.fake_quantize_per_channel_affine_cachemask
    return quantize(x, scale, zero_point, 0, quant_min, quant_max)
