"""What DistributedDataParallel sends as it wraps a module: sizes that must agree, and weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

BROADCASTS_IN_FLIGHT = 2
"""`max_in_flight` of `broadcast_coalesced` (`comm.cpp`)."""


def verify_params(group: Any, params: Sequence[Tensor], logger: Any = None) -> None:
    """As `verify_params_across_processes`: their number is gathered, flat and one by one, and then
    their sizes and strides are sent from rank 0.
    """
    device = params[0].device
    given = torch.empty(1, dtype=torch.int64, device=device)
    found = [torch.empty_like(given) for _ in range(group.size())]
    flat = torch.empty(group.size(), dtype=torch.int64, device=device)
    del flat
    num_told = 2 * sum(parameter.dim() for parameter in params)
    told = torch.empty(num_told, dtype=torch.int64, device=device)
    del told, found, given


def broadcast(tensors: Sequence[Tensor], buffer_bytes: int) -> None:
    """As `broadcast_coalesced`: buckets are flattened, sent, and copied back, two in flight."""
    if not tensors:
        return
    buckets, _ = c10d._compute_bucket_assignment_by_size(list(tensors), [buffer_bytes])
    in_flight: list[Tensor | None] = []
    for indices in buckets:
        if len(in_flight) >= BROADCASTS_IN_FLIGHT:
            in_flight.pop(0)
        members = [tensors[i].detach() for i in indices]
        whole = len(members) > 1
        in_flight.append(torch.cat([t.contiguous().view(-1) for t in members]) if whole else None)
    while in_flight:
        in_flight.pop(0)
