"""Kernels over lists of tensors."""

from __future__ import annotations

import torch

from memest.estimator.ops.temporaries import Scratch
from tests.op_calls import meta, scratch

aten = torch.ops.aten
INT, FLOAT = torch.int64, torch.float32


def test_norms_of_many_tensors_share_one_table_of_chunks() -> None:
    """ForeachReduceOp.cu: 2 tensors * ceil(524288 / 65536) chunks * 4 B."""
    tensors = [meta(524_288, dtype=torch.bfloat16), meta(3, dtype=torch.bfloat16)]

    assert scratch(aten._foreach_norm.Scalar, tensors) == Scratch(before=(2 * 8 * 4,))
