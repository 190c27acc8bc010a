"""Collectives and point-to-point operators of `c10d` in a process group without communication.

NCCL's buffers are outside the caching allocator. A sum over W ranks is W times the known or guessed
value of this rank, as if all ranks had equal values. A broadcast or a receive returns the value
that its source has posted in the mailbox (`gpu/worlds.py`).
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from memest.estimator.ops.registry import Args, Kwargs, arguments_by_name
from memest.estimator.ops.sim_mode import SimMode
from memest.estimator.tensors.placement import is_meta, storage_key, tensors_in

_SUM = 0  # number of the sum in `c10d::ReduceOp::RedOpType` (torch/csrc/distributed/c10d/Types.hpp)
MAX_GATHERED = 1 << 20  # elements of the largest gathered value: scripts read counts and lengths
SUMS = "values of collectives are those of sums: this torch does not expose the reduction"


def run(mode: SimMode, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Simulate `func`, an operator of `c10d`: set the values of its outputs, return its results."""
    arguments = arguments_by_name(func, args, kwargs)
    tensors = list(tensors_in(arguments.values()))
    name = func._schema.name.removeprefix("c10d::")
    stream = mode.timeline.stream
    if any(map(is_meta, tensors)):
        is_point_to_point = name in ("send", "recv_")
        peer = args[2] if is_point_to_point else None  # argument `dst` or `src`
        group = _group(arguments.values())
        stream = mode.works.communicate(group, name, peer, _messages(func, arguments, group))
        mode.timeline.transfer(max(t.numel() * t.element_size() for t in tensors), stream)
        if is_point_to_point:
            for tensor in tensors:
                mode.memory.record_stream(tensor, stream)
        if func is torch.ops.c10d.allgather_.default:
            _flatten(mode, args[0], func)
    if name in ("send", "recv_", "recv_any_source_"):
        _send_or_receive(mode, name, args)
    else:
        _fill(mode, name, args)
    work = mode.works.new_work(tensors if _is_asynchronous(func, arguments) else (), stream)
    results = tuple(
        args[0] if "Tensor" in str(result.type) else work for result in func._schema.returns
    )
    if len(results) > 1:
        return results
    return results[0] if results else None


def _messages(func: Any, arguments: Kwargs, group: Any) -> list[tuple[int, bool]]:
    """Return the messages by which NCCL runs a gather, scatter or all-to-all; [] for other `func`.
    A message is (other rank, True if this rank sends). `arguments` are `func`'s by name. Source:
    `all2all`, `gather` and `scatter` of torch/csrc/cuda/nccl.cpp (torch 2.11)."""
    name = func._schema.name.removeprefix("c10d::")
    peers = [rank for rank in range(group.size()) if rank != group.rank()]
    if name.startswith("alltoall"):
        return [(rank, sends) for rank in peers for sends in (True, False)]
    if name not in ("gather_", "scatter_"):
        return []
    root = arguments["root_rank"]
    is_root = root == group.rank()
    sends = is_root == (name == "scatter_")
    return [(rank, sends) for rank in (peers if is_root else [root])]


def _flatten(mode: SimMode, outputs: list[list[Tensor]], func: Any) -> None:
    """Allocate and free NCCL's flat tensor for each list in `outputs` whose tensors have equal
    sizes. `ProcessGroupNCCL::allgather`, `newLikeFlat` and `check_same_size` of torch 2.11."""
    for parts in outputs:
        if parts and is_meta(parts[0]) and len({part.size() for part in parts}) == 1:
            with mode.memory.lock:
                mode.allocate_and_free(func, len(parts) * parts[0].nbytes)


@cache
def _async_argument(func: Any) -> Any:
    return next((a for a in func._schema.arguments if a.name in ("asyncOp", "async_op")), None)


def _is_asynchronous(func: Any, arguments: Kwargs) -> bool:
    """Return whether a call of `func` is asynchronous; `arguments` are its arguments by name."""
    if argument := _async_argument(func):
        return bool(arguments.get(argument.name, argument.default_value))
    # before torch 2.7, Python waits for a work that it does not return
    return _async_argument(torch.ops.c10d.allreduce_.default) is None


def _fill(mode: SimMode, name: str, args: Args) -> None:
    """Set known values of the outputs of collective `name`, as if all ranks had equal inputs."""
    outputs, inputs, *_ = args  # `inputs` is the process group for an operator in place
    if name in ("allreduce_", "allreduce_coalesced_", "reduce_"):
        for tensor in outputs:
            _write(mode, tensor, tensor, _reduction_factor(mode, args))
    elif name == "broadcast_":
        _broadcast(mode, args)
    elif name in ("allgather_", "allgather_coalesced_", "gather_"):
        for gathered, source in zip(outputs, inputs, strict=False):
            for output in gathered:
                _write(mode, output, source)
    elif name in ("_allgather_base_", "_reduce_scatter_base_"):
        _fill_flat(mode, outputs, inputs, _reduction_factor(mode, args))
    elif name in ("allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_"):
        for output, source in zip(outputs, inputs, strict=True):
            _fill_flat(mode, output, source, _reduction_factor(mode, args))
    elif name in ("scatter_", "reduce_scatter_"):
        for output, sources in zip(outputs, inputs, strict=False):
            if sources:
                _write(mode, output, sources[_group(args).rank()], _reduction_factor(mode, args))
    elif name == "alltoall_":
        for output, source in zip(outputs, inputs, strict=True):
            _write(mode, output, source)
    elif name == "alltoall_base_":
        _write(mode, outputs, inputs)


def _broadcast(mode: SimMode, args: Args) -> None:
    tensors, _, root, *_ = args
    group = _group(args)
    ranks = tuple(dist.get_process_group_ranks(group))
    key = "broadcast", ranks, root
    for tensor in tensors:
        if group.rank() == root:
            mode.rank.mailbox.post(key, mode.values.value_of(tensor))
        else:
            _receive(mode, tensor, mode.rank.mailbox.fetch(key, ranks[root]))


def _send_or_receive(mode: SimMode, name: str, args: tuple[Any, ...]) -> None:
    """Run the operator `name`: `send` or `recv_`. `recv_any_source_` does nothing. Request that the
    other rank is simulated at the same time as this rank. A receive of integers waits for the
    message, since a script may read integers. All other operators do not wait here. A message of a
    rank to itself needs no other rank, and does not wait."""
    if name == "recv_any_source_":
        return  # the source is not known
    tensors, _, group_peer, tag = args
    group = _group(args)
    ranks = tuple(dist.get_process_group_ranks(group))
    own_rank, peer = ranks[group.rank()], ranks[group_peer]
    if own_rank == peer:
        if name == "recv_":
            for tensor in filter(is_meta, tensors):
                mode.values.forget(storage_key(tensor))
        return
    mailbox = mode.rank.mailbox
    mailbox.meet(peer)
    line = mode.attribution.lines.current()
    for tensor in tensors:
        has_integers = not (tensor.is_floating_point() or tensor.is_complex())
        if name == "send":
            value = mode.values.value_of(tensor) if has_integers else None
            mailbox.post(("send", own_rank, peer, tag), value)
            mailbox.expect(("recv", peer, own_rank, tag), peer, line)
            continue
        mailbox.post(("recv", own_rank, peer, tag), None)
        key = ("send", peer, own_rank, tag)
        if not has_integers:
            mailbox.expect(key, peer, line)
        is_known = has_integers and _receive(mode, tensor, mailbox.fetch(key, peer))
        if is_meta(tensor) and not is_known:
            mode.values.forget(storage_key(tensor))


def _receive(mode: SimMode, tensor: Tensor, value: Any) -> bool:
    """Store `value` in `tensor`; return False if `value` is None or has another shape or dtype."""
    fits = value is not None and value.shape == tensor.shape and value.dtype == tensor.dtype
    if fits:
        _set(mode, tensor, value)
    return fits


def _fill_flat(mode: SimMode, output: Tensor, source: Tensor, factor: int) -> None:
    """Set the value of `output`, the flat tensor of a gather or of a reduce-scatter. It is a gather
    if `output` has at least as many elements as `source`. A gather repeats `source` until `output`
    is full. A reduce-scatter multiplies the first elements of `source` by `factor`. `factor` is the
    number of ranks for a sum, and 1 for any other reduction."""

    def gather_or_scatter(value: Tensor) -> Tensor:
        flat, count = value.reshape(-1), output.numel()
        if count >= flat.numel():
            return flat.repeat(count // max(1, flat.numel())).view(output.shape)
        return (flat[:count] * factor).view(output.shape)

    is_small = not is_meta(output) or output.numel() <= MAX_GATHERED
    _store(mode, output, source if is_small else None, gather_or_scatter)


def _write(mode: SimMode, output: Tensor, source: Tensor, factor: int = 1) -> None:
    if output is not source or factor != 1:
        is_alike = not is_meta(output) or source.shape == output.shape
        _store(mode, output, source if is_alike else None, lambda value: value * factor)


def _store(
    mode: SimMode, output: Tensor, source: Tensor | None, transform: Callable[[Tensor], Tensor]
) -> None:
    """Set `output` to `transform(value)` of the known or guessed value of `source`, if any."""
    value = None if source is None else mode.values.value_of(source)
    if value is not None:
        _set(mode, output, transform(value))
        return
    guess = None if source is None else mode.guessed.value_of(source)
    if is_meta(output):
        mode.guessed.forget(storage_key(output))
        if guess is not None and output.nbytes == output.untyped_storage().nbytes():
            mode.guessed.adopt(output, transform(guess))


def _set(mode: SimMode, output: Tensor, value: Tensor) -> None:
    """Write `value` to `output`: as data of a host tensor, or as known values of a GPU tensor."""
    if not is_meta(output):
        output.copy_(value.reshape(output.shape))
        return
    target = mode.values.value_of(output)
    if target is not None:
        target.copy_(value)
    elif output.is_contiguous():
        mode.values.adopt(output, value)


def _reduction_factor(mode: SimMode, args: Args) -> int:
    """Return the factor of a reduction over equal inputs: the group's size for a sum, else 1."""
    for argument in args:
        if isinstance(argument, torch._C.ScriptObject) and "ReduceOp" in str(argument._type()):
            reduction: Any = argument
            if not reduction._has_method("op"):
                mode.notes.add(SUMS)
            elif reduction.op() != _SUM:
                return 1
            return int(_group(args).size())
    return 1


def _group(args: Iterable[Any]) -> Any:
    for value in args:
        if isinstance(value, torch._C.ScriptObject) and "ProcessGroup" in str(value._type()):
            return torch._C._distributed_c10d.ProcessGroup.unbox(value)
    raise TypeError("a collective without a group")
