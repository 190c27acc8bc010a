"""Params, gradients and optimizer state of this rank, wherever a strategy keeps them.

One reading for both sides: of a run on a GPU, and of one on a virtual GPU. Reads attributes alone:
no collective, no allocation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


class States:
    """What to read of a model that a strategy has divided, and of its optimizer.

    The parameters are remembered as they are between steps: FSDP2 puts others in their place while
    a layer is gathered.
    """

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self._flats = _flat_parameters(model)
        self._parameters: list[Any] = [] if self._flats else list(model.parameters())
        self._optimizer = optimizer

    def params(self) -> Iterator[Tensor]:
        """What this rank keeps of the parameters between steps.

        FSDP1: the shards of the flat parameters with their padding; FSDP2: the local tensors;
        DeepSpeed 3: `ds_tensor`, the partition.
        """
        yield from (getattr(flat, "_local_shard", flat) for flat in self._flats)
        yield from (_local(getattr(p, "ds_tensor", p)) for p in self._parameters)

    def grads(self) -> Iterator[Tensor]:
        """Gradients that are kept: `.grad`, or what stands in for it.

        FSDP1: of the flat parameters, which outlive `zero_grad`; DeepSpeed 1 and 2: the partition's
        averaged and accumulated ones beside `.grad`; DeepSpeed 3: its flat buffer of partitions.
        """
        found: list[Any] = [p.grad for p in self._parameters]
        for flat in self._flats:
            found += [flat.grad, getattr(flat, "_saved_grad_shard", None)]
        if _is_deepspeed(self._optimizer):
            for name in ("averaged_gradients", "all_grad_tensors"):
                groups = getattr(self._optimizer, name, None) or {}
                found += [grad for grads in groups.values() for grad in grads or ()]
            found.append(getattr(self._optimizer, "grad_partitions_flat_buffer", None))
            found += [getattr(p, "grad_accum", None) for p in self._parameters]
        return _distinct(_local(t) for t in found if isinstance(t, Tensor))

    def optimizer(self) -> Iterator[Tensor]:
        """State of the optimizer; of DeepSpeed's the innermost one's, and the master copies.

        A master copy that is a parameter's own partition is none.
        """
        inner = self._optimizer
        while hasattr(inner, "optimizer"):
            inner = inner.optimizer
        values = [v for s in inner.state.values() for v in s.values() if isinstance(v, Tensor)]
        yield from (_local(v) for v in values)
        if inner is not self._optimizer:
            kept = {_address(t) for t in self.params()}
            masters = [p for group in inner.param_groups for p in group["params"]]
            masters += getattr(self._optimizer, "fp32_partitioned_groups_flat", [])  # of stage 3
            yield from (p for p in _distinct(iter(masters)) if _address(p) not in kept)


def _is_deepspeed(optimizer: Any) -> bool:
    """Whether it is one of ZeRO's, which wrap the optimizer that is asked for."""
    return hasattr(optimizer, "averaged_gradients")


def _flat_parameters(model: nn.Module) -> list[Any]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    units = (m for m in model.modules() if isinstance(m, FullyShardedDataParallel))
    handles: list[Any] = [unit._handle for unit in units]
    return [handle.flat_param for handle in handles if handle is not None]


def _local(tensor: Any) -> Tensor:
    """The local part of a DTensor; any other tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)  # type: ignore[no-any-return]


def _address(tensor: Tensor) -> tuple[Any, Any]:
    """Storage and offset: what an address is on a GPU, and known on the meta device as well."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset()


def _distinct(tensors: Iterator[Tensor]) -> Iterator[Tensor]:
    seen: set[tuple[Any, Any]] = set()
    for tensor in tensors:
        address = _address(tensor)
        if tensor.numel() and address not in seen:
            seen.add(address)
            yield tensor
