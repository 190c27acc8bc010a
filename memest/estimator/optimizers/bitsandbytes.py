"""The optimizers of bitsandbytes, whose kernels need a GPU: a mirror of their Python side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Params = Sequence[Tensor]
Closure = Callable[[], Any] | None

# bitsandbytes 0.50.2, optim/optimizer.py: `min_8bit_size` of the base classes, the block of
# `init_state`, the threshold of `get_state_buffer`, and the length of `create_dynamic_map`.
MIN_8BIT_NUMEL = 4096
BLOCK_NUMEL = 256
MIN_PAGED_NUMEL = 100_000
QMAP_NUMEL = 256


class BlockwiseOptimizer(torch.optim.Optimizer):
    """A bitsandbytes optimizer: what it allocates, in its order, without its arithmetic.

    With 8 bits, per parameter of at least 4096 elements, at its first step:

        num_moments * (numel * 1 B + ceil(numel / 256) * 4 B)

    and fp32 moments below that, or for all with 32 bits; one 1 KiB quantisation map per moment is
    shared by all. The update kernels allocate nothing. A paged optimizer takes the moments of
    100 000 elements and more from `cudaMallocManaged`, outside the caching allocator: here they are
    CPU tensors of one element, expanded to their shape (see `managed_state_bytes`).
    Left out: `max_unorm`, `GlobalOptimManager` overrides (neither can be asked for by a plan).
    Source: bitsandbytes 0.50.2, optim/optimizer.py and backends/cuda/ops.py.
    """

    def __init__(
        self, params: Params, *, lr: float, num_moments: int, is_paged: bool, num_bits: int = 8
    ) -> None:
        super().__init__(params, {"lr": lr})
        self.num_moments = num_moments
        self.num_bits = num_bits
        self.is_paged = is_paged
        self._qmaps: list[Tensor] = []

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                if not self.state[param]:
                    self._init_state(param)
                param.data = param.data.contiguous()
                param.grad = param.grad.contiguous()
                self.state[param]["step"] += 1
        return loss

    def _init_state(self, param: Tensor) -> None:
        state = self.state[param]
        state["step"] = 0
        moments = range(1, self.num_moments + 1)
        if self.num_bits == 32 or param.numel() < MIN_8BIT_NUMEL:
            for i in moments:
                state[f"state{i}"] = self._moment(param, torch.float32)
            return
        if not self._qmaps:
            self._qmaps = [torch.empty(QMAP_NUMEL, device=param.device) for _ in moments]
        for i in moments:
            state[f"state{i}"] = self._moment(param, torch.uint8)
            state[f"qmap{i}"] = self._qmaps[i - 1]
        num_blocks = -(-param.numel() // BLOCK_NUMEL)
        for i in moments:
            state[f"absmax{i}"] = torch.zeros(
                (num_blocks,), dtype=torch.float32, device=param.device
            )

    def _moment(self, param: Tensor, dtype: torch.dtype) -> Tensor:
        if not self.is_paged or param.numel() < MIN_PAGED_NUMEL:
            return torch.zeros_like(param, dtype=dtype, device=param.device)
        return torch.zeros(1, dtype=dtype, device="cpu").expand(param.shape)
