"""What a batch is, and what is asked of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

IGNORE_INDEX = -100
"""The label that torch's cross entropy leaves out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchTensor:
    """One keyword of forward whose value is a tensor."""

    name: str
    value: Tensor

    @property
    def is_real(self) -> bool:
        """True for values that count (ids, masks, labels), False for a meta tensor."""
        return self.value.device.type != "meta"

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements, before an allocator rounds them."""
        return self.value.numel() * self.value.element_size()


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """The keywords of one forward, in the order in which they are moved to the GPU."""

    tensors: tuple[BatchTensor, ...]
    flags: Mapping[str, bool]
    """Keywords that are no tensors, such as CLIP's `return_loss`."""

    loss_output: str = "loss"
    """The output to differentiate; other than `loss` it is a tensor of which the mean is taken."""

    image_size: int | None = None
    notes: tuple[str, ...] = ()
    """Assumptions that the reader of a report should know."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, before an allocator rounds them."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def kwargs(self) -> dict[str, Any]:
        """What forward takes: real integer tensors on the CPU, meta floats, and the flags."""
        return {tensor.name: tensor.value for tensor in self.tensors} | dict(self.flags)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """The arguments of `make_batch`, checked, with what its recipes ask of the model."""

    config: Any
    class_name: str
    forward: frozenset[str]
    """Names of the parameters of the class's forward."""

    batch_size: int
    seq_len: int
    image_size: int | None
    padded: bool
    device: torch.device
    generator: torch.Generator

    @property
    def num_padded(self) -> int:
        """Masked tokens at the end of each row but the first: a quarter of it, at least one."""
        can_pad = self.padded and self.batch_size > 1 and self.seq_len > 1
        return max(1, self.seq_len // 4) if can_pad else 0


Recipe = Callable[[Request], Batch]
