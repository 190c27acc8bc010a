"""A plan's program on another chip, from the calls of its run on the first.

Requests and decisions by shapes are evaluated again with the other GPU. Where it takes another
kernel of attention, one forward and backward run alone on both GPUs and replace the calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from memest.estimator.allocator.settings import DEFAULT
from memest.estimator.hardware.gpus import Gpu
from memest.estimator.ops.attention import SdpaBackend
from memest.estimator.replay.interpolate.call_log import (
    CallLog,
    CallRecorder,
    Choice,
    LoggedTrace,
    Template,
    put_numbers,
    take_numbers,
)
from memest.estimator.replay.interpolate.rebuild import rebuild, requests_of
from memest.estimator.replay.interpolate.reuse import NotInterpolable, choose_again
from memest.estimator.replay.program import TracedPlan
from memest.estimator.replay.virtual_run import UNLIMITED_BYTES, NoLines
from memest.estimator.tensors.storages import free_of
from memest.estimator.virtual_gpu import VirtualGpu

FUSED = {
    SdpaBackend.FLASH: "aten._scaled_dot_product_flash_attention",
    SdpaBackend.EFFICIENT: "aten._scaled_dot_product_efficient_attention",
    SdpaBackend.CUDNN: "aten._scaled_dot_product_cudnn_attention",
}
"""Attention kernels with one call forward and one backward."""


def on_other_chip(sample: LoggedTrace, first: Gpu, gpu: Gpu) -> TracedPlan:
    """Return the program of `sample`, which ran on `first`, on `gpu`.

    Raises:
        NotInterpolable: the plan makes other calls on `gpu`, and has to be run there.
    """
    if sample.log.is_for_one_chip:
        raise NotInterpolable("calls can differ by the compute capability")
    templates = sample.log.templates
    others, dropped = _replaced(sample.log, first, gpu)
    try:
        calls = [others.get(template, template) for template in templates]
        requests = [requests_of(gpu, call, call.numbers) for call in calls]
    except (RuntimeError, ArithmeticError, LookupError, ValueError) as error:
        raise NotInterpolable(f"there is no such call: {error}") from error
    names = {_name(old): _name(new) for old, new in others.items() if _name(old) != _name(new)}
    if any(_name(t) in names and t not in others for t in templates):
        raise NotInterpolable("an operator is replaced in some calls only")
    more = {n: dropped[t] for n, t in enumerate(templates) if t in dropped}
    rebuilt = rebuild(sample, tuple(r.order for r in requests), more)
    program = rebuilt.with_bytes(requests, sample)
    sites = [replace(s, op=names.get(s.op, s.op)) for s in program.storages.sites]
    program = replace(program, storages=replace(program.storages, sites=sites))
    return replace(sample.traced, program=program)


def _name(template: Template) -> str:
    return str(template.shape.items[0]).removesuffix(".default")


def _replaced(
    log: CallLog, first: Gpu, gpu: Gpu
) -> tuple[dict[Template, Template], dict[Template, frozenset[int]]]:
    """Return attention calls on `gpu` and their own outputs, by the calls on `first`."""
    calls: dict[Template, Template] = {}
    dropped: dict[Template, frozenset[int]] = {}
    for choice in log.choices:
        outcome = choose_again(choice, choice.template.numbers, gpu)
        if outcome == choice.outcome:
            continue
        if choice.outcome not in FUSED or outcome not in FUSED:
            raise NotInterpolable("a decision by shapes is another")
        for scale, backward in _uses(choice, log):
            (here, strides), (there, others) = (
                _alone(choice, scale, backward, g) for g in (first, gpu)
            )
            if len(here) != len(there) or strides != others:
                raise NotInterpolable("attention makes other calls, or results with other strides")
            for old, new in zip(here, there, strict=True):
                only_new, only_old = (
                    new.new_storages - old.new_storages,
                    old.new_storages - new.new_storages,
                )
                later = [n for n in new.later if n not in only_new]
                is_dropped = set(new.later[: len(only_new)]) == only_new
                if later != [n for n in old.later if n not in only_old] or not is_dropped:
                    raise NotInterpolable("attention keeps other results")
                if old.template not in log.templates:
                    raise NotInterpolable("attention alone makes other calls than in the model")
                calls[old.template] = new.template
                dropped[old.template] = frozenset(n % OUTPUTS for n in only_new)
    return calls, dropped


def _uses(choice: Choice, log: CallLog) -> Iterator[tuple[float | None, Template | None]]:
    """Return the scale of each use of a decision, and its backward."""
    (query, key, value, *_), _ = put_numbers(choice.template, choice.template.numbers)
    inputs = take_numbers((query, key, value))
    name = FUSED[choice.outcome]
    backward_name = f"{name}_backward" if choice.grads[-1] and any(choice.grads[:-1]) else ""
    backwards = [t for t in log.templates if _name(t) == backward_name and _at(t, 1) == inputs]
    for template in log.templates:
        if _name(template) == name and _at(template, 0) == inputs:
            scale = put_numbers(template, template.numbers)[2].get("scale")
            yield from ((scale, backward) for backward in backwards or (None,))


def _at(template: Template, position: int) -> Template:
    """Return query, key and value of a call of attention."""
    args = put_numbers(template, template.numbers)[1]
    return take_numbers(tuple(args[position : position + 3]))


@dataclass(frozen=True, slots=True)
class _Moves:
    """One call of an attention that runs alone. Outputs are named by call and position."""

    template: Template
    new_storages: frozenset[int]
    """Positions of the outputs that take memory."""

    later: list[int]
    """Storages freed until the next call, and those made: outputs by name, earlier below 0."""


def _alone(
    choice: Choice, scale: float | None, backward: Template | None, gpu: Gpu
) -> tuple[list[_Moves], list[tuple[int, ...]]]:
    """Run one attention on `gpu`, with its backward if there is one.

    Returns its calls, and the strides of the output and of the gradients.
    """
    made: list[CallRecorder] = []
    virtual = VirtualGpu(
        gpu,
        limit_bytes=UNLIMITED_BYTES,
        lines=NoLines(),
        watch=lambda mode: made.append(CallRecorder(mode)),
        settings=DEFAULT,
    )
    args, kwargs = put_numbers(choice.template, choice.template.numbers)
    grad = None if backward is None else put_numbers(backward, backward.numbers)[1][0]
    with virtual, made[0].watching():
        recorder = made[0]
        args, grad = [_on_gpu(arg) for arg in args], _on_gpu(grad)
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        for tensor, needs_grad in zip(tensors, choice.grads, strict=False):
            tensor.requires_grad_(needs_grad)
        recorder.cut()
        with torch.set_grad_enabled(choice.grads[-1]):
            out = scaled_dot_product_attention(*args, **{**kwargs, "scale": scale})
        results = [out]
        if backward is not None:
            inputs = [tensor for tensor in tensors if tensor.requires_grad]
            results += torch.autograd.grad(out, inputs, grad)
        recorder.cut()
        num_bytes = virtual.mode.memory.storages.num_bytes
        strides = [result.stride() for result in results]
    return list(_moves(recorder.calls, num_bytes)), strides


def _moves(log: CallLog, num_bytes: Sequence[int]) -> Iterator[_Moves]:
    span = log.spans[1]
    names: dict[int, int] = {}
    starts = [*(call.start for call in span.calls[1:]), len(span.events)]
    for n, (call, start) in enumerate(zip(span.calls, starts, strict=True)):
        own = {at: id for at, id in call.new_storages if num_bytes[id]}
        names |= {id: OUTPUTS * n + at for at, id in own.items()}
        later: list[int] = []
        for event in span.events[call.end : start]:
            id = event if event >= 0 else free_of(event)
            if event >= 0:  # of a call that is not logged
                names[id] = BETWEEN + len(names)
            if num_bytes[id]:
                later.append(names.get(id, ~id))
        new_storages = frozenset(OUTPUTS * n + at for at in own)
        yield _Moves(log.templates[call.template], new_storages, later)


OUTPUTS, BETWEEN = 16, 1 << 10
"""More than the results of an attention, and more than those of all its calls."""


def _on_gpu(value: Any) -> Any:
    """Return `value`, a meta tensor as a tensor of the virtual GPU in a storage of its size."""
    if not isinstance(value, Tensor):
        return value
    num_items = value.untyped_storage().nbytes() // value.itemsize
    flat = torch.empty(num_items, dtype=value.dtype, device="cuda")
    return flat.as_strided(value.size(), value.stride(), value.storage_offset())
