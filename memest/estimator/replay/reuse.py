"""Programs (allocator events) of a plan at other batch sizes or lengths, without a run at each.

If the model takes the same branches, the calls at another size are the same with other numbers.
Each number is a polynomial in the size: of degree 1 in the batch size, of degree 2 in the sequence
length (strides of attention weights). An `Interpolation` needs two or three traces at sizes of one
spacing. Its program at a size n is made of

1. every number by Newton's forward differences, which have to be whole numbers;
2. the requests of each distinct call by the rules of kernels that a trace uses, so that their steps
   are right (a reduction in two stages, a split of the keys);
3. the spans of events, call by call, with the workspaces of cuBLAS at their first use (`call_log`).

The choice of an attention kernel is made again at n. A trace at the far end of the range checks all
other decisions (`related_plans`). Sizes of 1 are traced alone, since a dim of 1 has no stride of
its own. Left out: a branch that depends on the size other than by a threshold.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from importlib import import_module
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention

from memest.estimator.allocator.settings import DEFAULT
from memest.estimator.hardware.gpus import Gpu
from memest.estimator.ops.attention import choose_backend
from memest.estimator.replay.call_log import (
    GEMM_RULE,
    CallLog,
    CallRecorder,
    Choice,
    RequestOrder,
    Requests,
    ResizableProgram,
    Span,
    Template,
    requests_of,
    to_template,
    with_integers,
)
from memest.estimator.replay.replay import MicroBatch, Part, Program, TracedPlan, find_renames
from memest.estimator.replay.virtual_run import UNLIMITED_BYTES, NoLines
from memest.estimator.tensors.storages import EMPTIED, StorageTable, free_of
from memest.estimator.virtual_gpu import VirtualGpu
from memest.plan import TrainingPlan

DEGREE = {"batch_size": 1, "seq_len": 2}  # degree of the polynomials in the size, by the varied key


def with_value(plan: TrainingPlan, key: str, value: Any) -> TrainingPlan:
    """Return `plan` with `value` in its field `key`; raise `PlanError` if that is invalid."""
    return replace(plan, **{key: value})


class NotInterpolable(Exception):
    """Raised if a plan's program cannot be derived from other runs and has to be simulated."""


@dataclass(frozen=True, slots=True)
class _CallPolynomials:
    """Integers of one operator call, such as sizes and strides, as polynomials in the batch size or
    sequence length. The call was recorded in a few runs at equally spaced sizes. A polynomial is
    stored as forward differences of one integer. For example, a dim of 10, 20 and 30 in three runs
    is stored as 10, 10 and 0."""

    template: Template
    differences: tuple[tuple[int, ...], ...]  # integers in the first run, then their differences
    at_first: list[Requests] = field(default_factory=list, compare=False, repr=False)
    """Requests of the call at the smallest size, once computed."""

    def at(self, index: Fraction) -> list[int]:
        """Return the call's integers at a size. `index` is 0 at the size of the first simulated
        run, 1 at that of the second. Raise `ValueError` if a result is not a whole number."""
        values = list(self.differences[0])
        binomial = Fraction(1)
        for order, difference in enumerate(self.differences[1:], 1):
            binomial = binomial * (index - order + 1) / order
            numerator, denominator = binomial.as_integer_ratio()
            if denominator > 1 and any(numerator * d % denominator for d in difference):
                raise ValueError("a number is not whole")
            pairs = zip(values, difference, strict=True)
            values = [value + numerator * d // denominator for value, d in pairs]
        return values

    def requests(self, index: Fraction, gpu: Gpu) -> Requests:
        """Return the call's allocator requests on `gpu` at a size. `index` is 0 at the size of the
        first simulated run, 1 at that of the second."""
        if index and any(map(any, self.differences[1:])):  # else equal at all sizes
            return requests_of(gpu, self.template, self.at(index))
        if not self.at_first:
            self.at_first.append(requests_of(gpu, self.template, self.differences[0]))
        return self.at_first[0]


def _fit_polynomials(samples: Sequence[Template]) -> _CallPolynomials:
    """Fit a polynomial to each integer of one operator call. `samples` has the recorded call
    (`Template`) of each run, in ascending order of the runs' sizes. Raise `NotInterpolable` if the
    recorded calls differ in more than numbers, such as in a dtype."""
    first = samples[0]
    if any(other.shape != first.shape for other in samples[1:]):
        raise NotInterpolable("a call has other arguments")
    rows = [sample.integers for sample in samples]
    differences = []
    while rows:
        differences.append(rows[0])
        rows = [tuple(b - a for a, b in zip(x, y, strict=True)) for x, y in pairwise(rows)]
    return _CallPolynomials(first, tuple(differences))


class Interpolation:
    """Programs of one plan at any batch size or sequence length, computed from few simulated runs.

    `samples` are runs on `gpu` at the sizes `start`, `start + spacing` and so on. Their number is
    one more than the degree of the polynomials (`DEGREE`). Raise `NotInterpolable` if the samples
    do not run the same operators.

    A program can be computed at `start` plus any multiple of `step`. By default `step` is
    `spacing`. A smaller `step`, which divides `spacing`, allows sizes between the samples. For
    example, samples at 8 and 64 with a `step` of 8 allow 16, 24 and so on.
    """

    def __init__(
        self, samples: Sequence[TracedPlan], gpu: Gpu, start: int, spacing: int, *,
        step: int | None = None,
    ) -> None:  # fmt: skip
        self.start, self.spacing, self.step = start, spacing, step or spacing
        self._gpu = gpu
        self._rebuilt: dict[tuple[RequestOrder, ...], ResizableProgram] = {}
        first = samples[0]
        for other in samples[1:]:
            comparable = replace(other, program=first.program, seq_len=first.seq_len)
            if comparable != first:
                raise NotInterpolable("the model differs")
        logs = [sample.calls for sample in samples if sample.calls is not None]
        self._polynomials, calls = _match_calls(logs)
        self._sample = replace(first, calls=calls)
        if len({len(log.choices) for log in logs}) > 1:
            raise NotInterpolable("other things are decided")
        rows = zip(*(log.choices for log in logs), strict=True)
        self._choices = {
            row[0]: _fit_polynomials([choice.template for choice in row]) for row in rows
        }
        for position, sample in enumerate(samples):
            value = start + position * spacing
            if self.at(value).program != sample.program:
                raise NotInterpolable(f"the calls at {value} are not all that its trace did")

    def at(self, value: int) -> TracedPlan:
        """Return the interpolated result of a run at `value`, a batch size or sequence length.
        Raise `NotInterpolable` if another kernel is chosen there, or if an interpolated size or
        stride is a fraction."""
        if not self.has_same_kernels(value):
            raise NotInterpolable(f"another kernel is chosen at {value}")
        index = Fraction(value - self.start, self.spacing)
        try:
            requests = [call.requests(index, self._gpu) for call in self._polynomials]
        except (RuntimeError, ArithmeticError, LookupError, ValueError) as error:
            raise NotInterpolable(f"there is no such call at {value}: {error}") from error
        orders = tuple([r.order for r in requests])
        if orders not in self._rebuilt:
            self._rebuilt[orders] = ResizableProgram(self._sample, orders)
        program = self._rebuilt[orders].with_bytes(requests)
        return replace(self._sample, program=program, work=None, calls=None)

    def has_same_kernels(self, value: int) -> bool:
        """Return whether the same kernels are chosen at the size `value` as in the simulated
        runs."""
        outcomes = self.outcomes(value)
        return outcomes is not None and all(
            outcome == choice.outcome
            for outcome, choice in zip(outcomes, self._choices, strict=True)
        )

    def outcomes(self, value: int) -> tuple[Any, ...] | None:
        """Return the outcomes of all recorded kernel choices at the size `value`, in the order of
        the first run. An outcome is an attention backend, or whether the fused 4-bit kernel runs
        (`choose_again`). Return None if `value` is not `start` plus a multiple of `step`. Also
        return None if an interpolated size or stride of an argument is a fraction at `value`."""
        if (value - self.start) % self.step:
            return None
        index = Fraction(value - self.start, self.spacing)
        try:
            return tuple(
                choose_again(choice, integers.at(index), self._gpu)
                for choice, integers in self._choices.items()
            )
        except ValueError:
            return None


def choose_again(choice: Choice, integers: Sequence[int], gpu: Gpu) -> Any:
    """Repeat a recorded kernel choice on `gpu` for `integers`, the sizes and strides of its
    arguments. Return an attention backend, or whether the fused 4-bit kernel runs; None if a shape
    is invalid."""
    try:
        args, kwargs = with_integers(choice.template, integers)
    except RuntimeError:  # no tensor can have such a shape
        return None
    if choice.rule == "gemm_4bit":
        ops = import_module("bitsandbytes.backends.cuda.ops")
        props = gpu.num_sms, *gpu.capability
        with mock.patch.object(ops, "_gpu_dispatch_props", return_value=props):
            return getattr(ops, GEMM_RULE)(*args, **kwargs)
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
    for tensor, needs_grad in zip(tensors, choice.grads, strict=False):
        tensor.requires_grad_(needs_grad)
    with torch.set_grad_enabled(choice.grads[-1]):
        return choose_backend(*args, **kwargs, gpu=gpu)


def _match_calls(logs: Sequence[CallLog]) -> tuple[list[_CallPolynomials], CallLog]:
    """Match the operator calls of several runs by position, and fit polynomials to each distinct
    call. Return (polynomials, log). The log is a copy of the first of `logs`. In the copy, the
    `template` of a call is an index into the returned polynomials. Raise `NotInterpolable` if the
    runs make different calls."""
    indices: dict[tuple[int, ...], int] = {}
    spans = []
    for group in zip(*(log.spans for log in logs), strict=True):
        if len({len(span.calls) for span in group}) > 1:
            raise NotInterpolable("the model makes other calls")
        calls = []
        for row in zip(*(span.calls for span in group), strict=True):
            key = tuple([call.template for call in row])
            calls.append(replace(row[0], template=indices.setdefault(key, len(indices))))
        spans.append(Span(group[0].events, calls))
    polynomials = [
        _fit_polynomials([log.templates[i] for log, i in zip(logs, key, strict=True)])
        for key in indices
    ]
    return polynomials, CallLog([p.template for p in polynomials], spans, logs[0].choices)


def of_one_micro_batch(traced: TracedPlan) -> TracedPlan:
    """Return a run with one micro-batch per step, made from `traced`, a run with two. The events of
    the second micro-batch are removed, but not the optimizer's step. The second micro-batch may
    free a storage and leave an equal one allocated instead. Raise `NotInterpolable` if it changes
    the allocated storages in any other way."""
    program = traced.program
    storages = StorageTable()
    copier = _Copier(program.storages, storages)
    setup = copier.copy(program.setup)
    steps: list[list[MicroBatch]] = []
    for number, (first, last) in enumerate(program.steps):
        parts = [replace(part, events=copier.copy(part.events)) for part in first]
        copier.leave_out(
            [p.events for p in last if not p.is_optimizers], program.micro_renames[number]
        )
        parts += [replace(p, events=copier.copy(p.events)) for p in last if p.is_optimizers]
        steps.append([parts])
    return replace(traced, program=_program_of(storages, setup, steps, program), work=None)


class OptimizerStep:
    """Allocator events of one optimizer's step, which can replace those in programs of other plans.
    `own` is a run with this optimizer, `other` a run of the same plan with another optimizer. Both
    have one micro-batch per step. Raise `NotInterpolable` if the two runs differ in more than the
    optimizer's step."""

    def __init__(self, own: TracedPlan, other: TracedPlan) -> None:
        self._own = own
        self._parts = [{part.phase: part for part in step[0]} for step in own.program.steps]
        self._notes = [note for note in own.notes if note not in other.notes]
        self._other_notes = [note for note in other.notes if note not in own.notes]
        result = self.applied_to(other)
        if replace(result, program=replace(result.program, coverage=own.program.coverage)) != own:
            raise NotInterpolable("more than the optimizer's step is another")

    def applied_to(self, traced: TracedPlan) -> TracedPlan:
        """Return `traced`, a run with another optimizer, with the steps of this optimizer instead.
        The setup and the phases of the optimizer's step are copied from `own`, the run with this
        optimizer. All other phases are copied from `traced`.

        Raise `NotInterpolable` if the two runs have different phases, or if their setups differ in
        more than optimizer state. Also raise it if a copied phase frees a storage that was not
        copied. For example, a forward of `traced` frees one that its optimizer's step allocated.
        """
        program = traced.program
        storages = StorageTable()
        copier = _Copier(program.storages, storages)
        own_copier = _Copier(self._own.program.storages, storages)
        setup = own_copier.copy(self._own.program.setup)  # some optimizers make their state in it
        copier.align_setup(program, self._own.program, setup)
        steps: list[list[MicroBatch]] = [
            [list(self._micro_batch(batch, number, copier, own_copier)) for batch in step]
            for number, step in enumerate(program.steps)
        ]
        groups = traced.param_groups | {"optimizer": self._own.param_groups["optimizer"]}
        notes = [note for note in traced.notes if note not in self._other_notes]
        return replace(
            traced, program=_program_of(storages, setup, steps, program), param_groups=groups,
            notes=(*notes, *self._notes), host_bytes=self._own.host_bytes,
            libraries_bytes=self._own.libraries_bytes, work=None,
        )  # fmt: skip

    def _micro_batch(
        self, parts: Sequence[Part], step: int, copier: "_Copier", own_copier: "_Copier"
    ) -> Iterator[Part]:
        for part in parts:
            own_part = self._parts[step].get(part.phase)
            if part.phase is None or own_part is None:
                raise NotInterpolable("the loop has other phases")
            if part.is_optimizers:
                events = own_copier.copy(own_part.events)
            else:
                events = copier.copy(part.events)
                own_copier.align(own_part.events, events)
            state = replace(part.state, optimizer=own_part.state.optimizer)
            yield Part(events, part.phase, state)


def _program_of(
    storages: StorageTable, setup: list[int], steps: list[list[MicroBatch]], original: Program
) -> Program:
    program = Program(storages=storages, setup=setup, steps=steps, coverage=original.coverage)
    find_renames(program)
    return program


@dataclass(slots=True)
class _Copier:
    """Copier of allocator events from a program with storages `old_table` to a program with
    storages `new_table`."""

    old_table: StorageTable
    new_table: StorageTable
    ids: dict[int, int] = field(default_factory=dict)  # in the other table, by those in this

    def __post_init__(self) -> None:
        if self.old_table.streams or self.old_table.depends_on_time:
            raise NotInterpolable("more than one stream runs")

    def copy(self, events: Sequence[int]) -> list[int]:
        """Return `events` (an id for an allocation, ~id for a free) with ids in `new_table`.
        Storages that they allocate are added to it."""
        old, new, ids = self.old_table, self.new_table, self.ids
        copies = []
        for event in events:
            if event >= 0:
                ids[event] = new.add(old.num_bytes[event], old.sites[event], old.kinds[event])
                copies.append(ids[event])
            elif event == EMPTIED:
                copies.append(event)
            elif free_of(event) in ids:
                copies.append(free_of(ids.pop(free_of(event))))
            else:
                raise NotInterpolable("a part frees what another made")
        return copies

    def align(self, events: Sequence[int], copied: Sequence[int]) -> None:
        """Record that each storage id in `events` becomes the id at the same position in `copied`.
        Do nothing if the two lists do not allocate and free in the same order."""
        if [event >= 0 for event in events] != [event >= 0 for event in copied]:
            return
        for event, new_id in zip(events, copied, strict=True):
            if event >= 0:
                self.ids[event] = new_id
            else:
                self.ids.pop(free_of(event), None)

    def align_setup(self, old: Program, source: Program, copied: Sequence[int]) -> None:
        """Record which id each storage of the setup of `old` has in the new program.

        `old` is the program from which this copier copies. The new program does not have the setup
        of `old`, but the setup of another program, `source`. `copied` is the setup of `source` with
        the ids of the new program.

        The n-th event of the setup of `old` corresponds to the n-th event of the setup of `source`.
        Raise `NotInterpolable` if two corresponding events differ in id or size. One setup can be
        longer, since some optimizers allocate their state there. Its further events are ignored.
        """
        old_events = [event for event in old.setup if event != EMPTIED]
        source_events = [event for event in source.setup if event != EMPTIED]
        num = min(len(old_events), len(source_events))
        old_sizes = [old.storages.num_bytes[e] for e in old_events[:num] if e >= 0]
        source_sizes = [source.storages.num_bytes[e] for e in source_events[:num] if e >= 0]
        if old_events[:num] != source_events[:num] or old_sizes != source_sizes:
            raise NotInterpolable("the setups differ")
        self.align(old_events[:num], [event for event in copied if event != EMPTIED][:num])

    def leave_out(self, streams: Sequence[Sequence[int]], renames: Mapping[int, int]) -> None:
        """Leave out the event lists `streams` of the old program, which replace some storages.

        For example, `streams` free storage 7 and allocate an equal storage 12, which stays
        allocated. Then `renames` is {12: 7}. Both ids are of the old program. The new program keeps
        its copy of storage 7. When later events of storage 12 are copied, they become events of
        this copy.

        The storages that `streams` leave allocated must be the keys of `renames`. The older
        storages that `streams` free must be the values of `renames`, and must have been copied.
        Raise `NotInterpolable` if not.
        """
        new: set[int] = set()
        freed: set[int] = set()
        for event in (event for events in streams for event in events):
            if event >= 0:
                new.add(event)
            elif free_of(event) in new:
                new.remove(free_of(event))
            else:
                freed.add(free_of(event))
        if new != renames.keys() or freed != set(renames.values()) or not freed <= self.ids.keys():
            raise NotInterpolable("what is left out keeps other things than it frees")
        for new_id, old_id in renames.items():
            self.ids[new_id] = self.ids.pop(old_id)


FUSED = {
    SDPBackend.FLASH_ATTENTION: "aten._scaled_dot_product_flash_attention",
    SDPBackend.EFFICIENT_ATTENTION: "aten._scaled_dot_product_efficient_attention",
    SDPBackend.CUDNN_ATTENTION: "aten._scaled_dot_product_cudnn_attention",
}
"""Attention kernels with one call forward and one backward."""


def on_other_chip(sample: TracedPlan, first: Gpu, gpu: Gpu) -> TracedPlan:
    """Convert `sample`, a run on the GPU `first`, into a run of the same plan on `gpu`. Requests of
    each call are computed again. Where `gpu` takes another attention kernel, attention runs alone
    on both GPUs, and the calls of one run replace those of the other. Return `sample` itself if all
    requests are equal. Raise `NotInterpolable` if the plan makes other calls on `gpu`."""
    log = sample.calls
    if log is None or log.is_for_one_chip:
        raise NotInterpolable("calls can differ by the compute capability")
    templates = log.templates
    replacements, extra_outputs = _replaced_attention(log, first, gpu)
    try:
        calls = [replacements.get(template, template) for template in templates]
        requests = [requests_of(gpu, call, call.integers) for call in calls]
        if not replacements and requests == [requests_of(first, t, t.integers) for t in templates]:
            return sample
    except (RuntimeError, ArithmeticError, LookupError, ValueError) as error:
        raise NotInterpolable(f"there is no such call: {error}") from error
    new_ops = {a.operator: b.operator for a, b in replacements.items() if a.operator != b.operator}
    if any(t.operator in new_ops and t not in replacements for t in templates):
        raise NotInterpolable("an operator is replaced in some calls only")
    key = (*requests, *replacements.items())
    if key in log.on_chips:
        return log.on_chips[key]
    dropped = {n: extra_outputs[t] for n, t in enumerate(templates) if t in extra_outputs}
    program = ResizableProgram(sample, [r.order for r in requests], dropped).with_bytes(requests)
    sites = [replace(s, op=new_ops[s.op]) if s.op in new_ops else s for s in program.storages.sites]
    program = replace(program, storages=replace(program.storages, sites=sites))
    log.on_chips[key] = replace(sample, program=program, calls=None)
    return log.on_chips[key]


def _replaced_attention(
    log: CallLog, first: Gpu, gpu: Gpu
) -> tuple[dict[Template, Template], dict[Template, frozenset[int]]]:
    """Find the attention calls in `log`, a run on the GPU `first`, that are other calls on `gpu`.
    Return (replacements, extra outputs). Replacements map a recorded call (`Template`) on `first`
    to the call on `gpu`. Extra outputs map a call on `first` to positions in the results of the
    call on `gpu`. Only the call on `gpu` allocates the results at these positions."""
    replacements: dict[Template, Template] = {}
    extra: dict[Template, frozenset[int]] = {}
    for choice in log.choices:
        outcome = choose_again(choice, choice.template.integers, gpu)
        if outcome == choice.outcome:
            continue
        if choice.outcome not in FUSED or outcome not in FUSED:
            raise NotInterpolable("a decision by shapes is another")
        for scale, backward in _attention_uses(choice, log):
            old_calls, old_strides = _run_alone(choice, scale, backward, first)
            new_calls, new_strides = _run_alone(choice, scale, backward, gpu)
            if len(old_calls) != len(new_calls) or old_strides != new_strides:
                raise NotInterpolable("attention makes other calls, or results with other strides")
            for old, new in zip(old_calls, new_calls, strict=True):
                if old.template not in log.templates:
                    raise NotInterpolable("attention alone makes other calls than in the model")
                replacements[old.template] = new.template
                extra[old.template] = _extra_outputs(old, new)
    return replacements, extra


def _attention_uses(choice: Choice, log: CallLog) -> Iterator[tuple[float | None, Template | None]]:
    """Yield (scale, backward) for each attention call in `log` whose kernel `choice` decided. The
    yielded scale is None if the call did not pass `scale`. The yielded backward is the recorded
    call of the backward. It is None if the run has no backward of the attention."""
    (query, key, value, *_), _ = with_integers(choice.template, choice.template.integers)
    inputs = to_template((query, key, value))
    name = FUSED[choice.outcome]
    backward_name = f"{name}_backward" if choice.grads[-1] and any(choice.grads[:-1]) else ""
    backwards = [
        template
        for template in log.templates
        if template.operator == backward_name and _attention_inputs(template, 1) == inputs
    ]
    for template in log.templates:
        if template.operator == name and _attention_inputs(template, 0) == inputs:
            _, _, options, *_ = with_integers(template, template.integers)
            yield from ((options.get("scale"), backward) for backward in backwards or (None,))


def _attention_inputs(template: Template, position: int) -> Template:
    """Return query, key and value of the recorded attention call `template`: its three arguments
    from `position` on."""
    _, args, *_ = with_integers(template, template.integers)
    return to_template(tuple(args[position : position + 3]))


Output = tuple[int, int]  # storage of an attention run alone: its call, its place in the results
_NO_CALL = -1  # index of a call for storages that are made between logged calls


@dataclass(frozen=True, slots=True)
class _CallAlone:
    """One operator call of an attention that runs without its model, to compare it on two GPUs."""

    template: Template
    outputs: frozenset[Output]  # positions of outputs that take memory
    later: list[Output | int]  # made and freed until the next call; inputs by their ids


def _extra_outputs(old: _CallAlone, new: _CallAlone) -> frozenset[int]:
    """Compare one call on two GPUs, `old` and `new`. Return the positions of the outputs that only
    `new` has. Raise `NotInterpolable` if the calls differ in more, or such an output outlives the
    call."""
    extra, missing = new.outputs - old.outputs, old.outputs - new.outputs
    is_freed_first = set(new.later[: len(extra)]) == extra
    shared = [name for name in new.later if name not in extra]
    if not is_freed_first or shared != [name for name in old.later if name not in missing]:
        raise NotInterpolable("attention keeps other results")
    return frozenset(position for _, position in extra)


def _run_alone(
    choice: Choice, scale: float | None, backward: Template | None, gpu: Gpu
) -> tuple[list[_CallAlone], list[tuple[int, ...]]]:
    """Run the attention call of `choice` on `gpu` without the model. `scale` is its argument; None
    is torch's default. Also run its backward, unless the recorded call `backward` is None. Return
    (operator calls, strides of the output and of the gradients)."""
    virtual = VirtualGpu(gpu, limit_bytes=UNLIMITED_BYTES, lines=NoLines(), settings=DEFAULT)
    recorder = CallRecorder(virtual.mode)
    args, kwargs = with_integers(choice.template, choice.template.integers)
    grad = None
    if backward is not None:
        _, (grad, *_), *_ = with_integers(backward, backward.integers)
    with virtual, recorder.watching():
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
    _before, span = log.spans  # `_run_alone` cuts the log before attention and after it
    names: dict[int, Output] = {}  # by storage
    next_starts = [*(call.start for call in span.calls[1:]), len(span.events)]
    for number, (call, next_start) in enumerate(zip(span.calls, next_starts, strict=True)):
        outputs = {index: (number, pos) for pos, index in call.new_storages if num_bytes[index]}
        names |= outputs
        later: list[Output | int] = []
        for event in span.events[call.end : next_start]:
            index = event if event >= 0 else free_of(event)
            if event >= 0:
                names[index] = _NO_CALL, len(names)
            if num_bytes[index]:
                later.append(names.get(index, index))
        yield _CallAlone(log.templates[call.template], frozenset(outputs.values()), later)


def _on_gpu(value: Any) -> Any:
    """Return an empty GPU tensor with the shape and strides of `value`, a meta tensor. Return a
    value that is no tensor unchanged."""
    if not isinstance(value, Tensor):
        return value
    num_items = value.untyped_storage().nbytes() // value.itemsize
    flat = torch.empty(num_items, dtype=value.dtype, device="cuda")
    return flat.as_strided(value.size(), value.stride(), value.storage_offset())
