"""Collectives of a process group that sends nothing: the other ranks have what this one has.

They move no memory that the caching allocator sees, NCCL's buffers are its own, but take their time
on the stream that is current (`hardware/speed.py`). Where values are known they follow: a sum over
W ranks is W times what this one has, so that what ranks agree on comes out as if all had said the
same. A broadcast gives what its source has said, where that rank was run before.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from memest.estimator.device.tensors import is_meta, tensors_in

_SUM = 0
"""Of `c10d::ReduceOp::RedOpType` (torch/csrc/distributed/c10d/Types.hpp)."""


def run(mode: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `func`, an operator of `c10d`, returns, once its outputs are as they would be."""
    given = (*args, *kwargs.values())
    tensors = list(tensors_in(given))
    if any(map(is_meta, tensors)):
        mode.works.another()
        mode.timeline.transfer(max((t.numel() * t.element_size() for t in tensors), default=0))
        if func is torch.ops.c10d.allgather_.default:
            _flatten(mode, args[0], func)
    _fill(mode, func._schema.name.removeprefix("c10d::"), args)
    work = mode.works.begun(tensors if _goes_on(func, args) else ())
    returned = tuple(
        args[0] if "Tensor" in str(result.type) else work for result in func._schema.returns
    )
    if len(returned) > 1:
        return returned
    return returned[0] if returned else None


def _flatten(mode: Any, outputs: list[list[Tensor]], func: Any) -> None:
    """Gather into one tensor, and copy from it to the list of outputs if all have one size.

    `ProcessGroupNCCL::allgather`, `newLikeFlat` and `check_same_size` of torch 2.11. Frees the
    tensor at once, where the work of an asynchronous gather would keep it.
    """
    for parts in outputs:
        if parts and is_meta(parts[0]) and len({part.size() for part in parts}) == 1:
            num_bytes = len(parts) * parts[0].numel() * parts[0].element_size()
            memory = mode.memory
            with memory.lock:
                memory.free(memory.allocate_workspace(num_bytes, mode.attribution.site(func)))


def _goes_on(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether the host goes on at once; operators leave arguments out that are as by default."""
    found = _of_asynchronous(func)
    if found is None:
        return False
    position, default = found
    return bool(args[position] if position < len(args) else default)


@cache
def _of_asynchronous(func: Any) -> tuple[int, bool] | None:
    """Where the argument is that says so, and its default; none for a monitored barrier."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name in ("asyncOp", "async_op"):
            return position, argument.default_value
    return None


def _fill(mode: Any, name: str, args: tuple[Any, ...]) -> None:
    """Give the outputs of a collective their values, as far as they are known."""
    if name in ("allreduce_", "allreduce_coalesced_", "reduce_"):
        for tensor in args[0]:
            _write(mode, tensor, tensor, _factor(args))
    elif name == "broadcast_":
        _broadcast(mode, args)
    elif name in ("allgather_", "allgather_coalesced_", "gather_"):
        for outputs, given in zip(args[0], args[1], strict=False):
            for output in outputs:
                _write(mode, output, given)
    elif name in ("_allgather_base_", "_reduce_scatter_base_"):
        _fill_flat(mode, name, args[0], args[1], _factor(args))
    elif name in ("allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_"):
        for output, given in zip(args[0], args[1], strict=True):
            _fill_flat(mode, name, output, given, _factor(args))
    elif name in ("scatter_", "reduce_scatter_"):
        for output, given in zip(args[0], args[1], strict=False):
            if given:
                _write(mode, output, given[_group(args).rank()], _factor(args))
    elif name == "alltoall_":
        for output, given in zip(args[0], args[1], strict=True):
            _write(mode, output, given)
    elif name == "alltoall_base_":
        _write(mode, args[0], args[1])


def _broadcast(mode: Any, args: tuple[Any, ...]) -> None:
    tensors, root = args[0], args[2]
    group = _group(args)
    key = (tuple(dist.get_process_group_ranks(group)), root)
    for tensor in tensors:
        if group.rank() == root:
            known = tensor if not is_meta(tensor) else mode.values.value_of(tensor)
            mode.ranks.broadcasts.says(key, known)
            continue
        heard = mode.ranks.broadcasts.hears(key)
        if heard is not None and heard.shape == tensor.shape and heard.dtype == tensor.dtype:
            _set(mode, tensor, heard)


def _fill_flat(mode: Any, name: str, output: Tensor, given: Tensor, factor: int) -> None:
    """Of a gather the input over and over, of a scattered sum the part of this rank."""
    if is_meta(output) or is_meta(given):
        return  # shards of floats, whose values nobody knows
    if output.numel() >= given.numel():
        output.view(-1, given.numel()).copy_(given.reshape(1, -1))
    else:
        output.copy_(given.reshape(-1)[: output.numel()].view(output.shape) * factor)


def _write(mode: Any, output: Tensor, given: Tensor, factor: int = 1) -> None:
    known = given if not is_meta(given) else mode.values.value_of(given)
    if known is None or (is_meta(output) and known.shape != output.shape):
        if is_meta(output) and output is not given:
            mode.values.forget(output.untyped_storage()._cdata)
    elif output is not given or factor != 1:
        _set(mode, output, known * factor)


def _set(mode: Any, output: Tensor, value: Tensor) -> None:
    """Let `output` have the values of `value`."""
    if not is_meta(output):
        output.copy_(value.reshape(output.shape))
        return
    twin = mode.values.value_of(output)
    if twin is not None:
        twin.copy_(value)
    elif output.is_contiguous():
        mode.values.adopt(output, value)


def _factor(args: tuple[Any, ...]) -> int:
    """By what a sum over ranks that have the same is more than that of one."""
    for op in args[2:]:
        if isinstance(op, torch._C.ScriptObject) and "ReduceOp" in str(op._type()):
            what: Any = op
            return int(_group(args).size()) if what.op() == _SUM else 1
    return 1


def _group(args: Iterable[Any]) -> Any:
    for value in args:
        if isinstance(value, torch._C.ScriptObject) and "ProcessGroup" in str(value._type()):
            return torch._C._distributed_c10d.ProcessGroup.unbox(value)
    raise TypeError("a collective without a group")
