"""ZeRO 3's linear layer: it keeps the parameters themselves, not views that would hold their bytes.

DeepSpeed 0.19.8 puts it in place of `torch.nn.functional.linear` for good once a model is divided
(runtime/zero/partition_parameters.py, `_enable_mem_efficient_linear`; `memory_efficient_linear` is
on by default). Stands for runtime/zero/linear.py, `LinearFunctionForZeroStage3`: the bias is added
in place, and the gradients are plain matrix products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from memest.estimator.parallel.zero3_parameters import ParameterStore, Status

GetStore = Callable[[], ParameterStore | None]


@contextmanager
def keeping_parameters(get_store: GetStore) -> Iterator[None]:
    """Inside, `F.linear` is DeepSpeed's once `get_store` gives the parameters of a model."""
    original = F.linear

    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        store = get_store()
        if store is None:
            return original(input, weight, bias)
        return _Linear.apply(store, input, weight, bias)  # type: ignore[no-any-return, no-untyped-call]

    with mock.patch.object(F, "linear", linear):
        yield


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(store: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if x.dim() == 2 and bias is not None:
            return torch.addmm(bias, x, weight.t())
        out = x.matmul(weight.t())
        if bias is not None:
            out += bias
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        store, x, weight, bias = inputs
        ctx.store = store
        ctx.save_for_backward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, bias = ctx.saved_tensors
        one = ctx.store.find(weight)
        was_away = one is not None and one.status is Status.AWAY
        if was_away:
            ctx.store.gather_now([one])
        _, needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        of_x = of_weight = of_bias = None
        if needs_x:
            of_x = grad.matmul(weight)
        if needs_weight:
            of_weight = _outer(grad, x)
        if bias is not None and needs_bias:
            of_bias = grad.sum(list(range(grad.dim() - 1))) if grad.dim() > 1 else grad
        if was_away:
            ctx.store.free(one)
        return None, of_x, of_weight, of_bias


def _outer(grad: Tensor, x: Tensor) -> Tensor:
    if grad.dim() > 2:
        return grad.reshape(-1, grad.shape[-1]).t().matmul(x.reshape(-1, x.shape[-1]))
    if grad.dim() == 1:
        return grad.unsqueeze(-1) * x.unsqueeze(0)
    return grad.t().matmul(x)
