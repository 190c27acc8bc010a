"""Programs of a plan at other batch sizes or sequence lengths, without tracing each.

A trace at one size is a list of calls (`call_log`). As long as the model takes the same branches,
the calls at another size are the same with other numbers, and each number is a polynomial in the
size: of degree 1 in the batch size, of degree 2 in the sequence length (the strides of attention
weights). So a `Family` is made of two or three traces at neighbouring sizes, and its program at a
size n is made by

1. every number by Newton's forward differences, which are whole numbers for whole n;
2. the requests of each distinct call by the same kernel tables that a trace asks, once per call;
   steps in them (a reduction in two stages, a split of the keys) are thereby where they are;
3. the stretches of events, call by call, with the workspaces of cuBLAS at their first use.

It is the program of a trace where no branch was taken otherwise. What decides by shapes outside of
the kernel tables, the choice of an attention backend, is taken again at n; that the rest agrees is
checked at the far end of the range, by a trace there (`trace_series`). Sizes of 1 are traced
by themselves: a dim of 1 has no stride of its own, and a batch of 1 has no padding.

Left out: a branch that depends on the size other than by a threshold, such as on its last digit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import pairwise
from typing import Any, NamedTuple
from unittest import mock

import torch

from memest.estimator.device.dispatch import Recipe, Recorder
from memest.estimator.device.storages import EMPTIED, Coverage, MemKind, Site, StorageTable
from memest.estimator.hardware.gpus import Gpu
from memest.estimator.kernels.attention.choice import choose_backend
from memest.estimator.kernels.cublas import MATMULS, CublasWorkspaces
from memest.estimator.kernels.scratch import OLDEST, Events
from memest.estimator.kernels.staged import masked_scatter_backward_events
from memest.estimator.trace.family.call_log import (
    GEMM_RULE,
    MASKED_SCATTER_BACKWARD,
    Call,
    CallLog,
    Choice,
    LoggingRecorder,
    Stretch,
    Template,
    count_numbers,
    is_plain,
    on_gpu,
    put_numbers,
    storage_bytes,
)
from memest.estimator.trace.program import Part, Program, Shift
from memest.estimator.trace.traced import TracedPlan
from memest.estimator.trace.virtual_run import run_plan, shortened, within_model
from memest.plan import TrainingPlan

DEGREE = {"batch_size": 1, "seq_len": 2}
"""Of the polynomials in the size, by the key of the plan that is varied."""


def with_value(plan: TrainingPlan, key: str, value: Any) -> TrainingPlan:
    """`plan` with another value of one key.

    Raises:
        PlanError: there is no such plan.
    """
    changes = {key: value}
    return replace(plan, **changes)


class FormBroken(Exception):
    """The calls at one size are not those of another with other numbers."""


@dataclass(frozen=True, slots=True)
class LoggedTrace:
    """A traced plan with the calls that made it."""

    traced: TracedPlan
    log: CallLog


def logged_trace(plan: TrainingPlan, gpu: Gpu, *, trust_remote_code: bool = False) -> LoggedTrace:
    """Run `plan` on `gpu` and keep its calls."""
    with ExitStack() as stack:
        made: list[LoggingRecorder] = []

        def make_recorder(*args: Any) -> LoggingRecorder:
            made.append(LoggingRecorder(*args))
            stack.enter_context(made[0].watching())
            return made[0]

        plan, num_ahead = shortened(plan)
        traced = run_plan(
            plan,
            gpu,
            num_ahead=num_ahead,
            trust_remote_code=trust_remote_code,
            make_recorder=make_recorder,
            at_cut=lambda: made[0].cut(),
        )
    return LoggedTrace(traced, made[0].calls)


@dataclass(frozen=True, slots=True)
class _Numbers:
    """The numbers of one call as polynomials: their forward differences at the first sample."""

    template: Template
    differences: tuple[tuple[int, ...], ...]
    """The values at the first sample, their first differences, their second."""

    def at(self, index: int) -> list[int]:
        """The numbers `index` steps after the first sample."""
        values = list(self.differences[0])
        binomial = 1
        for order, difference in enumerate(self.differences[1:], 1):
            binomial = binomial * (index - order + 1) // order
            values = [v + binomial * d for v, d in zip(values, difference, strict=True)]
        return values

    @property
    def is_constant(self) -> bool:
        """Whether the size does not show in this call."""
        return not any(any(difference) for difference in self.differences[1:])


def _numbers(samples: Sequence[Template]) -> _Numbers:
    """The polynomial through the samples of one call."""
    first = samples[0]
    if any(other.shape != first.shape for other in samples[1:]):
        raise FormBroken("a call has other arguments")
    rows = [sample.numbers for sample in samples]
    differences = []
    while rows:
        differences.append(rows[0])
        rows = [tuple(b - a for a, b in zip(x, y, strict=True)) for x, y in pairwise(rows)]
    return _Numbers(first, tuple(differences))


@dataclass(frozen=True, slots=True)
class _Asks:
    """What one call asks of the allocator."""

    form: _Form
    """All but the numbers of bytes: calls of one form make the same stream of events."""

    num_bytes: tuple[int, ...]
    """Of each storage that the form makes, in its order."""


class _Form(NamedTuple):
    """The requests of a call, in order, without their bytes."""

    requests: tuple[int | tuple[int] | None, ...]
    """A number is the position of an output that is made here; (n,) frees the n-th temporary; None
    makes one.
    """

    num_copies: int
    """Contiguous operands of a matrix product: temporaries after the outputs."""

    num_cublas: int
    """Workspaces that it needs: that of the handle, then that of cuBLASLt."""

    is_partial: bool


class _CountingRecorder(Recorder):  # type: ignore[no-untyped-call]
    """A `Recorder` that is told how many elements of a mask are true, and does not count them."""

    num_selected: int | None = None

    def _ordered_events(self, func: Any, args: Any, kwargs: Any, out: Any) -> Events | None:
        if func is MASKED_SCATTER_BACKWARD:
            return masked_scatter_backward_events(args, kwargs, out, self.gpu, self.num_selected)
        return super()._ordered_events(func, args, kwargs, out)


class _Evaluator:
    """Asks the kernel tables what a call with given numbers allocates."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self._recorder = _CountingRecorder(gpu, StorageTable())

    def asks(self, template: Template, numbers: Sequence[int]) -> _Asks:
        """The requests of one call."""
        items = template.shape.items
        start = sum(map(count_numbers, items[:3]))
        own = storage_bytes(items[3], iter(numbers[start:]))
        func = items[0]
        if is_plain(func):
            positions = [i for i, is_made in enumerate(on_gpu(items[3])) if is_made]
            form = _Form(tuple(positions), 0, 0, False)
            return _Asks(form, tuple(own[i] for i in positions))
        func, args, kwargs, out, more = put_numbers(template, numbers)
        self._recorder.num_selected = None
        if more:  # of a mask whose values the trace knew: how many are true
            self._recorder.num_selected = more[0] * (args[0].numel() // max(1, args[1].numel()))
        recipe = self._recorder._recipe(func, args, kwargs, out)
        cublas: tuple[int, ...] = ()
        copies: tuple[int, ...] = ()
        if func in MATMULS:
            fresh = CublasWorkspaces(self.gpu.capability)
            cublas, copies = fresh.bytes_for(func, args, kwargs, "main")
        requests, num_bytes = _requests(recipe, own)
        form = _Form(requests, len(copies), len(cublas), recipe.is_partial)
        return _Asks(form, (*num_bytes, *copies, *cublas))


def _requests(
    recipe: Recipe, own: Sequence[int]
) -> tuple[tuple[int | tuple[int] | None, ...], list[int]]:
    """The form of a recipe's events, and the bytes of what they make."""
    requests: list[int | tuple[int] | None] = []
    num_bytes: list[int] = []
    temporary: list[tuple[int, int]] = []  # (ordinal, bytes)
    for n, position in recipe.events:
        if position is not None and position != OLDEST:
            requests.append(position)
            num_bytes.append(own[position] if n is None else n)
        elif n is not None and n < 0:
            among = temporary if position == OLDEST else reversed(temporary)
            freed = next(t for t in among if t[1] == -n)
            temporary.remove(freed)
            requests.append((freed[0],))
        else:
            assert n is not None
            temporary.append((sum(r is None for r in requests), n))
            requests.append(None)
            num_bytes.append(n)
    return tuple(requests), num_bytes


_NO_CALL = -1
"""In place of a template: a storage that was there before the trace saw it."""

_ZERO = -2
"""In place of a template: an output that meta makes and CUDA does not."""


class _Weaver:
    """Makes the event streams of a program from the forms of its calls.

    `slots` says of each storage where its bytes are found: (template, position in its `num_bytes`).
    """

    def __init__(self, sample: LoggedTrace, forms: Sequence[_Form]) -> None:
        self.base = sample.traced.program
        self.storages = StorageTable()
        self.slots: list[tuple[int, int]] = []
        self.ids: dict[int, int] = {}
        self.unmodelled: Counter[str] = Counter()
        self._forms = forms
        self._names = [str(t.shape.items[0]).removesuffix(".default") for t in sample.log.templates]
        self._workspaces: dict[tuple[bool, int], int] = {}
        self.streams = [self._stream(stretch) for stretch in sample.log.stretches]

    def _stream(self, stretch: Stretch) -> list[int]:
        events: list[int] = []
        done = 0
        for call in stretch.calls:
            if call.start > done:
                self._copy(stretch.events[done : call.start], events)
            self._call(call, self._forms[call.template], events)
            done = call.end
        self._copy(stretch.events[done:], events)
        return events

    def _copy(self, old: Sequence[int], events: list[int]) -> None:
        """Deaths, and births outside of calls."""
        for event in old:
            if event == EMPTIED:
                events.append(event)
            elif (
                event < 0 and ~event not in self.ids
            ):  # one of the workspaces, all cleared in order
                first = next(iter(self._workspaces))
                events.append(~self._workspaces.pop(first))
            elif event < 0:
                events.append(~self.ids[~event])
            else:
                events.append(self._born(event, (_NO_CALL, event)))

    def renamed(self, shift: Shift) -> dict[int, int]:
        """`shift` in the ids of the storages that were made here."""
        return {self.ids[made]: self.ids[before] for made, before in shift.items()}

    def _born(self, old: int, slot: tuple[int, int]) -> int:
        table = self.base.storages
        index = self.ids[old] = self._add(slot, table.sites[old], table.kinds[old])
        return index

    def _add(self, slot: tuple[int, int], site: Site, kind: MemKind) -> int:
        self.slots.append(slot)
        return self.storages.add(0, site, kind)

    def _call(self, call: Call, form: _Form, events: list[int]) -> None:
        """As `Recorder._record` does it."""
        if form.is_partial:
            self.unmodelled[self._names[call.template]] += 1
        born = dict(call.born)
        site = within_model(call.site)
        temporary: dict[int, int] = {}
        count = num_temporary = 0
        for request in form.requests:
            if isinstance(request, tuple):
                events.append(~temporary.pop(request[0]))
                continue
            if request is None:
                index = self._add((call.template, count), site, MemKind.WORKSPACE)
                events.append(index)
                temporary[num_temporary] = index
                num_temporary += 1
            elif request in born:
                events.append(self._born(born.pop(request), (call.template, count)))
            count += 1
        passing = list(temporary.values())
        for position in range(form.num_copies + form.num_cublas):
            workspace = (call.in_backward, position - form.num_copies)
            if workspace in self._workspaces:
                continue
            slot = (call.template, count + position)
            events.append(self._add(slot, site, MemKind.WORKSPACE))
            if position < form.num_copies:
                passing.append(events[-1])
            else:
                self._workspaces[workspace] = events[-1]
        events.extend(~index for index in reversed(passing))
        for old in born.values():
            events.append(self._born(old, (_ZERO, 0)))


@dataclass(frozen=True, slots=True)
class _Woven:
    """A program without its bytes, for all sizes at which the calls have the same forms."""

    program: Program
    slots: tuple[tuple[int, int], ...]


def _weave(sample: LoggedTrace, forms: Sequence[_Form]) -> _Woven:
    base = sample.traced.program
    weaver = _Weaver(sample, forms)
    streams = iter(weaver.streams)
    setup = next(streams)
    steps: list[Any] = [
        [[Part(next(streams), part.probe) for part in batch] for batch in step]
        for step in base.steps
    ]
    program = Program(
        storages=weaver.storages,
        setup=setup,
        steps=steps,
        step_shift=weaver.renamed(base.step_shift),
        micro_shifts=[weaver.renamed(shift) for shift in base.micro_shifts],
        coverage=Coverage(base.coverage.num_ops, weaver.unmodelled),
    )
    return _Woven(program, tuple(weaver.slots))


class Family:
    """The programs of one plan at all sizes, from traces at neighbouring sizes.

    Args:
        samples: traces at `start`, `start + spacing` and so on, one more than the polynomials'
            degree.

    Raises:
        FormBroken: the samples do not make the same calls.
    """

    def __init__(self, samples: Sequence[LoggedTrace], gpu: Gpu, start: int, spacing: int) -> None:
        self.start, self.spacing = start, spacing
        self._sample = samples[0]
        self._gpu = gpu
        self._evaluator = _Evaluator(gpu)
        self._woven: dict[tuple[_Form, ...], _Woven] = {}
        _check_alike(samples)
        self._numbers, calls = _match(samples)
        self._sample = LoggedTrace(samples[0].traced, calls)
        self._choices = [
            (_numbers([choice.template for choice in choices]), choices[0])
            for choices in zip(*(s.log.choices for s in samples), strict=True)
        ]
        self._constant = {
            i: self._evaluator.asks(n.template, n.differences[0])
            for i, n in enumerate(self._numbers)
            if n.is_constant
        }
        for position, sample in enumerate(samples):
            value = start + position * spacing
            if self.at(value).program != sample.traced.program:
                raise FormBroken(f"the calls at {value} are not all that its trace did")

    def at(self, value: int) -> TracedPlan:
        """The traced plan at `value`.

        Raises:
            FormBroken: an attention backend is chosen otherwise there, or a number is impossible.
        """
        if not self.chooses_alike(value):
            raise FormBroken(f"another kernel is chosen at {value}")
        index = (value - self.start) // self.spacing
        try:
            asks = [
                self._constant[i] if i in self._constant else self._asks(numbers, index)
                for i, numbers in enumerate(self._numbers)
            ]
        except (RuntimeError, ArithmeticError, LookupError, ValueError) as error:
            raise FormBroken(f"there is no such call at {value}: {error}") from error
        forms = tuple(a.form for a in asks)
        woven = self._woven.get(forms)
        if woven is None:
            woven = self._woven[forms] = _weave(self._sample, forms)
        table = self._sample.traced.program.storages
        tables: list[Sequence[int]] = [a.num_bytes for a in asks]
        tables += [(0,), table.num_bytes]  # at -2 and -1: `_ZERO` and `_NO_CALL`
        num_bytes = [tables[i][position] for i, position in woven.slots]
        storages = replace(woven.program.storages, num_bytes=num_bytes)
        program = replace(woven.program, storages=storages)
        return replace(self._sample.traced, program=program)

    def _asks(self, numbers: _Numbers, index: int) -> _Asks:
        return self._evaluator.asks(numbers.template, numbers.at(index))

    def chooses_alike(self, value: int) -> bool:
        """Whether every decision that is taken by shapes falls at `value` as in the samples."""
        outcomes = self.outcomes(value)
        return outcomes is not None and all(
            outcome == choice.outcome
            for outcome, (_, choice) in zip(outcomes, self._choices, strict=True)
        )

    def outcomes(self, value: int) -> tuple[Any, ...] | None:
        """The decisions by shapes at `value`; None where the spacing leaves it out."""
        index, rest = divmod(value - self.start, self.spacing)
        if rest:
            return None
        return tuple(
            choose_again(choice, numbers.at(index), self._gpu) for numbers, choice in self._choices
        )


def choose_again(choice: Choice, numbers: Sequence[int], gpu: Gpu) -> Any:
    """The outcome of `choice` with other numbers."""
    try:
        args, kwargs = put_numbers(choice.template, numbers)
    except RuntimeError:  # no tensor has such a shape
        return None
    if choice.rule == "gemm_4bit":
        ops = import_module("bitsandbytes.backends.cuda.ops")
        card = gpu.num_sms, *gpu.capability
        with mock.patch.object(ops, "_gpu_dispatch_props", return_value=card):
            return getattr(ops, GEMM_RULE)(*args, **kwargs)
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
    for tensor, needs_grad in zip(tensors, choice.grads, strict=False):
        tensor.requires_grad_(needs_grad)
    with torch.set_grad_enabled(choice.grads[-1]):
        return choose_backend(*args, **kwargs, gpu=gpu)


def _check_alike(samples: Sequence[LoggedTrace]) -> None:
    """What is said of the plan as a whole must be the same at all sizes."""
    first = samples[0].traced
    for other in (sample.traced for sample in samples[1:]):
        same = replace(other, program=first.program, seq_len=first.seq_len)
        if same != first:
            raise FormBroken("the model differs")


def _match(samples: Sequence[LoggedTrace]) -> tuple[list[_Numbers], CallLog]:
    """The calls of the samples side by side: calls that differ in one sample differ in all.

    Returns the polynomials of each distinct call, and the first sample's log in terms of them.
    """
    logs = [sample.log for sample in samples]
    known: dict[tuple[int, ...], int] = {}
    stretches = []
    for group in zip(*(log.stretches for log in logs), strict=True):
        if len({len(stretch.calls) for stretch in group}) > 1:
            raise FormBroken("the model makes other calls")
        calls = []
        for row in zip(*(stretch.calls for stretch in group), strict=True):
            key = tuple(call.template for call in row)
            index = known.setdefault(key, len(known))
            calls.append(replace(row[0], template=index))
        stretches.append(Stretch(group[0].events, calls))
    numbers = [
        _numbers([log.templates[i] for log, i in zip(logs, key, strict=True)]) for key in known
    ]
    return numbers, CallLog([n.template for n in numbers], stretches, logs[0].choices)
