"""Programs of a plan at other batch sizes or sequence lengths, without tracing each.

If the model takes the same branches, the calls at another size are the same with other numbers.
Each number is a polynomial in the size: of degree 1 in the batch size, of degree 2 in the sequence
length (strides of attention weights). An `Interpolation` needs two or three traces at sizes of one
spacing. Its program at a size n is made of

1. every number by Newton's forward differences, which have to be whole numbers;
2. the requests of each distinct call by the rules of kernels that a trace uses, so that their steps
   are right (a reduction in two stages, a split of the keys);
3. the spans of events, call by call, with the workspaces of cuBLAS at their first use (`rebuild`).

The choice of an attention kernel is made again at n. A trace at the far end of the range checks all
other decisions (`related_plans`). Sizes of 1 are traced alone, since a dim of 1 has no stride of
its own. Left out: a branch that depends on the size other than by a threshold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from importlib import import_module
from itertools import pairwise
from typing import Any
from unittest import mock

import torch

from memest.estimator.hardware.gpus import Gpu
from memest.estimator.ops.attention import choose_backend
from memest.estimator.replay.interpolate.call_log import (
    GEMM_RULE,
    CallLog,
    Choice,
    LoggedTrace,
    Span,
    Template,
    put_numbers,
)
from memest.estimator.replay.interpolate.rebuild import (
    Rebuilt,
    RequestOrder,
    Requests,
    rebuild,
    requests_of,
)
from memest.estimator.replay.program import TracedPlan
from memest.plan import TrainingPlan

DEGREE = {"batch_size": 1, "seq_len": 2}  # of the polynomials in the size, by the varied key


def with_value(plan: TrainingPlan, key: str, value: Any) -> TrainingPlan:
    """Return `plan` with another value of one key; `PlanError` if there is no such plan."""
    changes = {key: value}
    return replace(plan, **changes)


class NotInterpolable(Exception):
    """The calls of two traces differ in more than numbers."""


@dataclass(frozen=True, slots=True)
class _Numbers:
    """The numbers of one call as polynomials: their forward differences at the first sample."""

    template: Template
    differences: tuple[tuple[int, ...], ...]  # values at the first sample, then differences
    at_first: list[Requests] = field(default_factory=list, compare=False, repr=False)
    """Requests of the call at the first sample, once known."""

    def at(self, index: Fraction) -> list[int]:
        """Return the numbers `index` steps after the first sample; `ValueError` if not whole."""
        values = list(self.differences[0])
        binomial = Fraction(1)
        for order, difference in enumerate(self.differences[1:], 1):
            binomial = binomial * (index - order + 1) / order
            times, among = binomial.as_integer_ratio()
            if among > 1 and any(times * d % among for d in difference):
                raise ValueError("a number is not whole")
            values = [v + times * d // among for v, d in zip(values, difference, strict=True)]
        return values

    def requests(self, index: Fraction, gpu: Gpu) -> Requests:
        """Return the call's requests `index` steps after the first sample."""
        if index and not self.is_constant:
            return requests_of(gpu, self.template, self.at(index))
        if not self.at_first:
            self.at_first.append(requests_of(gpu, self.template, self.differences[0]))
        return self.at_first[0]

    @property
    def is_constant(self) -> bool:
        """Return whether the call is the same at all sizes."""
        return not any(any(difference) for difference in self.differences[1:])


def _numbers(samples: Sequence[Template]) -> _Numbers:
    """The polynomial through the samples of one call."""
    first = samples[0]
    if any(other.shape != first.shape for other in samples[1:]):
        raise NotInterpolable("a call has other arguments")
    rows = [sample.numbers for sample in samples]
    differences = []
    while rows:
        differences.append(rows[0])
        rows = [tuple(b - a for a, b in zip(x, y, strict=True)) for x, y in pairwise(rows)]
    return _Numbers(first, tuple(differences))


class Interpolation:
    """The programs of one plan at all sizes, from traces at some.

    `samples` are traces at `start`, `start + spacing` and so on, one more than the degree. `step`
    is between the sizes: a divisor of `spacing`, which it is by default.

    Raises:
        NotInterpolable: the samples do not make the same calls.
    """

    def __init__(
        self,
        samples: Sequence[LoggedTrace],
        gpu: Gpu,
        start: int,
        spacing: int,
        *,
        step: int | None = None,
    ) -> None:
        self.start, self.spacing, self.step = start, spacing, step or spacing
        self._gpu = gpu
        self._rebuilt: dict[tuple[RequestOrder, ...], Rebuilt] = {}
        _check_alike(samples)
        self._numbers, calls = _match(samples)
        self._sample = LoggedTrace(samples[0].traced, calls)
        if len({len(sample.log.choices) for sample in samples}) > 1:
            raise NotInterpolable("other things are decided")
        rows = zip(*(sample.log.choices for sample in samples), strict=True)
        self._choices = {row[0]: _numbers([choice.template for choice in row]) for row in rows}
        for position, sample in enumerate(samples):
            value = start + position * spacing
            if self.at(value).program != sample.traced.program:
                raise NotInterpolable(f"the calls at {value} are not all that its trace did")

    def at(self, value: int) -> TracedPlan:
        """The traced plan at `value`.

        Raises:
            NotInterpolable: another attention backend is chosen there, or a number is impossible.
        """
        if not self.chooses_alike(value):
            raise NotInterpolable(f"another kernel is chosen at {value}")
        index = Fraction(value - self.start, self.spacing)
        try:
            requests = [numbers.requests(index, self._gpu) for numbers in self._numbers]
        except (RuntimeError, ArithmeticError, LookupError, ValueError) as error:
            raise NotInterpolable(f"there is no such call at {value}: {error}") from error
        orders = tuple([r.order for r in requests])
        rebuilt = self._rebuilt.get(orders)
        if rebuilt is None:
            rebuilt = self._rebuilt[orders] = rebuild(self._sample, orders)
        program = rebuilt.with_bytes(requests, self._sample)
        return replace(self._sample.traced, program=program, work=None)

    def chooses_alike(self, value: int) -> bool:
        """Return whether every decision by shapes is the same at `value` as in the samples."""
        outcomes = self.outcomes(value)
        return outcomes is not None and all(
            outcome == choice.outcome
            for outcome, choice in zip(outcomes, self._choices, strict=True)
        )

    def outcomes(self, value: int) -> tuple[Any, ...] | None:
        """Return the shape-dependent decisions at `value`; None for no multiple of the step."""
        if (value - self.start) % self.step:
            return None
        index = Fraction(value - self.start, self.spacing)
        try:
            return tuple(
                choose_again(choice, numbers.at(index), self._gpu)
                for choice, numbers in self._choices.items()
            )
        except ValueError:
            return None


def choose_again(choice: Choice, numbers: Sequence[int], gpu: Gpu) -> Any:
    """The outcome of `choice` with other numbers."""
    try:
        args, kwargs = put_numbers(choice.template, numbers)
    except RuntimeError:  # no tensor has such a shape
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


def _check_alike(samples: Sequence[LoggedTrace]) -> None:
    """Check that the properties of the whole plan are the same at all sizes."""
    first = samples[0].traced
    for other in (sample.traced for sample in samples[1:]):
        same = replace(other, program=first.program, seq_len=first.seq_len)
        if same != first:
            raise NotInterpolable("the model differs")


def _match(samples: Sequence[LoggedTrace]) -> tuple[list[_Numbers], CallLog]:
    """The calls of the samples side by side: calls that differ in one sample differ in all.

    Returns the polynomials of each distinct call, and the first sample's log in terms of them.
    """
    logs = [sample.log for sample in samples]
    known: dict[tuple[int, ...], int] = {}
    spans = []
    for group in zip(*(log.spans for log in logs), strict=True):
        if len({len(span.calls) for span in group}) > 1:
            raise NotInterpolable("the model makes other calls")
        calls = []
        for row in zip(*(span.calls for span in group), strict=True):
            key = tuple([call.template for call in row])
            index = known.setdefault(key, len(known))
            calls.append(replace(row[0], template=index))
        spans.append(Span(group[0].events, calls))
    numbers = [
        _numbers([log.templates[i] for log, i in zip(logs, key, strict=True)]) for key in known
    ]
    return numbers, CallLog([n.template for n in numbers], spans, logs[0].choices)
