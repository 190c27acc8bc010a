"""`_grouped_mm`: the product of a mixture of experts, one group of rows for each expert.

transformers 5.17 sorts the tokens by expert and multiplies them in one call
(integrations/moe.py, `grouped_mm_experts_forward`), so that no shape depends on the routing: the
rows of all groups together are tokens times experts per token, however they are spread. Three ways
lead there, by the GPU: CUTLASS's fused kernel, torch's loop of `mm` over the groups, and before
compute capability 8.0 a loop in transformers itself.

Sources (torch 2.11): aten/src/ATen/native/cuda/GroupedBlas.cpp, GroupMM.cu, and
aten/src/ATen/native/GroupedMMUtils.h; the fused kernel's workspace was recorded on an H100.

Shapes: G groups, M rows of the left, N columns of the right.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from memest.estimator.hardware.gpus import Gpu
from memest.estimator.kernels.scratch import Scratch

_POINTER_BYTES = 8
_PROBLEM_BYTES = 3 * 4
"""M, N and K of a group as int32."""

_RECORDED = (9, 0)
"""Capability of the GPU on which the workspace was recorded."""

_DESCRIPTOR_BYTES = 128
"""A `CUtensorMap`."""

_DESCRIPTORS_PER_SM = 4
"""Of both operands, the result and the addend (CUTLASS's array mainloop and epilogue): 67,584 bytes
for 132 multiprocessors, in each of 528 recorded calls."""


def grouped_mm_output(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """What torch's own meta kernel refuses for other types than bfloat16: the result.

    Rows are padded to 16 bytes, as `create_grouped_gemm_output_tensor` does.
    """
    left, right = args[0], args[1]
    offsets: Any = args[2] if len(args) > 2 else kwargs.get("offs")
    if left.dim() == 2 and right.dim() == 2:
        size = [offsets.size(0), left.size(0), right.size(1)]
    elif left.dim() == 2:
        size = [left.size(0), right.size(-1)]
    elif right.dim() == 2:
        size = [left.size(1), right.size(1)]
    else:
        size = [left.size(0), left.size(1), right.size(-1)]
    vector = 16 // left.itemsize
    row = -(-size[-1] // vector) * vector
    stride = [row, 1] if len(size) == 2 else [size[1] * row, row, 1]
    return torch.empty_strided(size, stride, dtype=left.dtype, device=left.device)


def grouped_mm_scratch(
    args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, gpu: Gpu
) -> Scratch:
    """Pointers, strides and sizes of each group for the fused kernel, and its descriptors of
    tensors; one `mm` per group elsewhere.

    ::

        3 * 8 * round_up(G, 2) + 12 * G + 3 * 8 * G
        4 * 128 * multiprocessors
    """
    if not _is_fused(args, gpu):
        return Scratch()
    offsets = args[2] if len(args) > 2 else kwargs.get("offs")
    groups = args[0].size(0) if offsets is None else offsets.size(0)
    pointers = 3 * _POINTER_BYTES * (groups + groups % 2)
    descriptors = gpu.num_sms * _DESCRIPTORS_PER_SM * _DESCRIPTOR_BYTES
    return Scratch(after=(pointers + groups * _PROBLEM_BYTES + 3 * 8 * groups, descriptors))


def grouped_mm_is_modelled(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], gpu: Gpu
) -> bool:
    """Whether the product is a loop over groups, which asks for nothing, or a kernel that was
    recorded.
    """
    return not _is_fused(args, gpu) or gpu.capability == _RECORDED


def _is_fused(args: tuple[Any, ...], gpu: Gpu) -> bool:
    """`use_fast_path`: bfloat16 on compute capability 9.0 or 10.x."""
    is_bfloat16 = args[0].dtype == args[1].dtype == torch.bfloat16
    return is_bfloat16 and (gpu.capability == (9, 0) or gpu.capability[0] == 10)
