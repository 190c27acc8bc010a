"""A plan's program on another chip, from the calls of its run on the first.

The requests of each call are computed again with the other GPU. If the other GPU takes another
attention kernel for some shapes, attention runs alone with these shapes on both GPUs. The calls of
the one run are then replaced by those of the other.
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
    """Return the program on `gpu` of `sample`, which ran on `first`.

    Raises:
        NotInterpolable: the plan makes other calls on `gpu`, and has to be run there.
    """
    if sample.log.is_for_one_chip:
        raise NotInterpolable("calls can differ by the compute capability")
    templates = sample.log.templates
    replaced, extra = _replaced_attention(sample.log, first, gpu)
    try:
        calls = [replaced.get(template, template) for template in templates]
        requests = [requests_of(gpu, call, call.numbers) for call in calls]
    except (RuntimeError, ArithmeticError, LookupError, ValueError) as error:
        raise NotInterpolable(f"there is no such call: {error}") from error
    renamed = {_name(a): _name(b) for a, b in replaced.items() if _name(a) != _name(b)}
    if any(_name(t) in renamed and t not in replaced for t in templates):
        raise NotInterpolable("an operator is replaced in some calls only")
    dropped = {n: extra[t] for n, t in enumerate(templates) if t in extra}
    rebuilt = rebuild(sample, tuple(r.order for r in requests), dropped)
    program = rebuilt.with_bytes(requests, sample)
    sites = [replace(s, op=renamed.get(s.op, s.op)) for s in program.storages.sites]
    program = replace(program, storages=replace(program.storages, sites=sites))
    return replace(sample.traced, program=program)


def _name(template: Template) -> str:
    return str(template.shape.items[0]).removesuffix(".default")


def _replaced_attention(
    log: CallLog, first: Gpu, gpu: Gpu
) -> tuple[dict[Template, Template], dict[Template, frozenset[int]]]:
    """Return calls on `gpu`, and positions of the outputs that only they make, by old calls."""
    replaced: dict[Template, Template] = {}
    extra: dict[Template, frozenset[int]] = {}
    for choice in log.choices:
        outcome = choose_again(choice, choice.template.numbers, gpu)
        if outcome == choice.outcome:
            continue
        if choice.outcome not in FUSED or outcome not in FUSED:
            raise NotInterpolable("a decision by shapes is another")
        for scale, backward in _uses(choice, log):
            old_calls, old_strides = _run_alone(choice, scale, backward, first)
            new_calls, new_strides = _run_alone(choice, scale, backward, gpu)
            if len(old_calls) != len(new_calls) or old_strides != new_strides:
                raise NotInterpolable("attention makes other calls, or results with other strides")
            for old, new in zip(old_calls, new_calls, strict=True):
                if old.template not in log.templates:
                    raise NotInterpolable("attention alone makes other calls than in the model")
                replaced[old.template] = new.template
                extra[old.template] = _extra_outputs(old, new)
    return replaced, extra


def _uses(choice: Choice, log: CallLog) -> Iterator[tuple[float | None, Template | None]]:
    """Yield the scale of each use of a decision, and its backward."""
    (query, key, value, *_), _ = put_numbers(choice.template, choice.template.numbers)
    inputs = take_numbers((query, key, value))
    name = FUSED[choice.outcome]
    backward_name = f"{name}_backward" if choice.grads[-1] and any(choice.grads[:-1]) else ""
    backwards = [t for t in log.templates if _name(t) == backward_name and _inputs(t, 1) == inputs]
    for template in log.templates:
        if _name(template) == name and _inputs(template, 0) == inputs:
            scale = put_numbers(template, template.numbers)[2].get("scale")
            yield from ((scale, backward) for backward in backwards or (None,))


def _inputs(template: Template, position: int) -> Template:
    """Return query, key and value of a call of attention, whose query is at `position`."""
    args = put_numbers(template, template.numbers)[1]
    return take_numbers(tuple(args[position : position + 3]))


Output = tuple[int, int]  # storage of an attention run alone: its call, its place in the results
_NO_CALL = -1  # in place of the number of a call, for storages that are made between logged calls


@dataclass(frozen=True, slots=True)
class _CallAlone:
    """One call of an attention that runs alone."""

    template: Template
    outputs: frozenset[Output]  # outputs that take memory
    later: list[Output | int]  # made and freed until the next call; inputs by their ids


def _extra_outputs(old: _CallAlone, new: _CallAlone) -> frozenset[int]:
    """Return positions of the outputs that only `new` makes, and that are freed at once.

    Raises:
        NotInterpolable: the calls differ in more than such outputs.
    """
    extra, missing = new.outputs - old.outputs, old.outputs - new.outputs
    is_freed_first = set(new.later[: len(extra)]) == extra
    rest = [name for name in new.later if name not in extra]
    if not is_freed_first or rest != [name for name in old.later if name not in missing]:
        raise NotInterpolable("attention keeps other results")
    return frozenset(position for _, position in extra)


def _run_alone(
    choice: Choice, scale: float | None, backward: Template | None, gpu: Gpu
) -> tuple[list[_CallAlone], list[tuple[int, ...]]]:
    """Run one attention on `gpu`, with its backward if there is one.

    Return its calls, and the strides of the output and of the gradients.
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
    return list(_calls_alone(recorder.calls, num_bytes)), strides


def _calls_alone(log: CallLog, num_bytes: Sequence[int]) -> Iterator[_CallAlone]:
    span = log.spans[1]
    names: dict[int, Output] = {}
    starts = [*(call.start for call in span.calls[1:]), len(span.events)]
    for number, (call, next_start) in enumerate(zip(span.calls, starts, strict=True)):
        own = {id: (number, position) for position, id in call.new_storages if num_bytes[id]}
        names |= own
        later: list[Output | int] = []
        for event in span.events[call.end : next_start]:
            id = event if event >= 0 else free_of(event)
            if event >= 0:
                names[id] = _NO_CALL, len(names)
            if num_bytes[id]:
                later.append(names.get(id, id))
        yield _CallAlone(log.templates[call.template], frozenset(own.values()), later)


def _on_gpu(value: Any) -> Any:
    """Return `value`, a meta tensor as a tensor of the virtual GPU in a storage of its size."""
    if not isinstance(value, Tensor):
        return value
    num_items = value.untyped_storage().nbytes() // value.itemsize
    flat = torch.empty(num_items, dtype=value.dtype, device="cuda")
    return flat.as_strided(value.size(), value.stride(), value.storage_offset())
