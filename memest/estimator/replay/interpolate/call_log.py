"""A trace that also records its calls, so that it can be rebuilt at other sizes.

A call is stored as a *template*: operator, arguments and results, with all integers moved to a flat
row. Traces of one plan at two batch sizes have the same templates with other numbers; see `reuse`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from memest.estimator.gpu.kernel_calls import Recipe, dense_bytes
from memest.estimator.gpu.mode import CudaSimMode
from memest.estimator.hardware.gpus import Gpu
from memest.estimator.ops import attention
from memest.estimator.ops.registry import Op
from memest.estimator.replay.program import TracedPlan
from memest.estimator.replay.virtual_run import run_plan, shortened
from memest.estimator.tensors import placement
from memest.estimator.tensors.storages import Site
from memest.plan import TrainingPlan

aten = torch.ops.aten

GEMM_RULE = "_gemm_4bit_use_custom_fn"
"""bitsandbytes' choice of a kernel by a product's shapes (0.50.2, backends/cuda/ops.py); older
releases have none."""

READERS = ("lightning", "bitsandbytes")  # read the capability, but choose only by `GEMM_RULE`
ALIGNMENT = 16  # modulus of storage offsets in templates: kernels align to at most 16 elements


def is_plain(op: Op) -> bool:
    """Return whether calls of all shapes allocate only the outputs of the meta kernel."""
    return op.has_outputs_only and not op.takes_handle


@dataclass(frozen=True, slots=True)
class Template:
    """A call split into its structure and its whole numbers."""

    shape: Any  # (operator, arguments, keyword arguments, results), a mark for each number
    numbers: tuple[int, ...]
    floats: tuple[float, ...]  # of the call; no size depends on them, and they may differ


@dataclass(frozen=True, slots=True)
class Call:
    """One call in a span of events."""

    start: int  # position of its first event; the call made events `start` to `end`
    end: int
    template: int
    new_storages: tuple[tuple[int, int], ...]  # (position among the results, id)
    site: Site
    in_backward: bool


@dataclass(slots=True)
class Span:
    """The events from one cut to the next, with the calls that made them."""

    events: list[int]
    calls: list[Call]


@dataclass(frozen=True, slots=True)
class Choice:
    """A decision that was taken by shapes, and its outcome."""

    rule: str  # `attention`: the backend; `gemm_4bit`: whether the fused kernel multiplies
    template: Template  # its arguments
    grads: tuple[bool, ...]  # `requires_grad` of the tensors, then the grad mode
    outcome: Any


@dataclass(slots=True)
class CallLog:
    """The calls of one trace."""

    templates: list[Template] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    choices: dict[Choice, None] = field(default_factory=dict)
    is_for_one_chip: bool = False  # model code read the capability, or nothing was recorded


class CallRecorder:
    """Fills a `CallLog` with the calls of a run, through the run's dispatch mode."""

    def __init__(self, mode: CudaSimMode) -> None:
        self.calls = CallLog()
        self._mode = mode
        self._memory = mode.memory
        self._request, mode.request = mode.request, self._record
        self._calls: list[Call] = []
        self._templates: dict[Template, int] = {}
        self._by_recipe: dict[int, int] = {}
        self._kept: list[Recipe] = []  # so that the ids above stay theirs
        self._cut_at = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record the decisions that depend on shapes, until the block ends."""
        self._choose = attention.choose_backend
        with ExitStack() as self._patches:
            watched = mock.patch.object(attention, "choose_backend", self._choose_backend)
            self._patches.enter_context(watched)
            for name in ("get_device_capability", "get_device_properties"):
                read = self._watch_read(getattr(torch.cuda, name))
                self._patches.enter_context(mock.patch.object(torch.cuda, name, read))
            yield

    def cut(self) -> None:
        """End a span of the log: the events since the last cut, and their calls."""
        gemm = sys.modules.get("bitsandbytes.backends.cuda.ops")
        if not self.calls.spans and hasattr(gemm, GEMM_RULE):  # the model has imported it
            rule = mock.patch.object(gemm, GEMM_RULE, self._watch_gemm(getattr(gemm, GEMM_RULE)))
            self._patches.enter_context(rule)
        log = self._memory.log
        events = log.events[self._cut_at :].tolist()
        self._cut_at = len(log.events)
        self.calls.spans.append(Span(events, self._calls))
        self._calls = []

    def _record(self, op: Op, args: Any, kwargs: Any, out: Any, recipe: Recipe) -> None:
        memory = self._memory
        memory.settle()
        start, first_id = len(memory.log.events), len(memory.storages.num_bytes)
        self._request(op, args, kwargs, out, recipe)
        memory.settle()
        has_made = len(memory.storages.num_bytes) > first_id
        if not has_made and is_plain(op):  # nor does it request memory at another size
            return
        index = self._by_recipe.get(id(recipe))
        if index is None:
            value_of = self._mode.values.value_of
            more = () if op.from_values is None else op.from_values(value_of, args)
            template = take_numbers((op.func, args, kwargs, out, more))
            index = self._templates.setdefault(template, len(self._templates))
            if index == len(self.calls.templates):
                self.calls.templates.append(template)
            self._by_recipe[id(recipe)] = index
            self._kept.append(recipe)
        in_backward = op.takes_handle and torch._C._current_autograd_node() is not None
        new_storages: tuple[tuple[int, int], ...] = ()
        if has_made:
            new_storages = tuple(self._new_storages(out, recipe, first_id))
        first = self._cut_at
        end = len(memory.log.events)
        site = self._mode.attribution.site(op.func)
        self._calls.append(Call(start - first, end - first, index, new_storages, site, in_backward))

    def _new_storages(self, out: Any, recipe: Recipe, first_id: int) -> Iterator[tuple[int, int]]:
        seen = set()
        for position, tensor in enumerate(out if recipe.is_tuple else (out,)):
            if isinstance(tensor, Tensor):
                index = self._memory.id_of(tensor)
                if index is not None and index >= first_id and index not in seen:
                    seen.add(index)
                    yield position, index

    def _choose_backend(self, *args: Any, **kwargs: Any) -> Any:
        outcome = self._choose(*args, **kwargs)
        given = {k: v for k, v in kwargs.items() if k not in ("gpu", "release")}
        given_tensors = [a for a in args if isinstance(a, Tensor)]
        grads = (*(t.requires_grad for t in given_tensors), torch.is_grad_enabled())
        self.calls.choices[Choice("attention", take_numbers((args, given)), grads, outcome)] = None
        return outcome

    def _watch_read(self, read: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            reader = sys._getframe(1).f_globals["__name__"].partition(".")[0]
            self.calls.is_for_one_chip |= reader not in READERS
            return read(*args, **kwargs)

        return watched

    def _watch_gemm(self, rule: Callable[..., bool]) -> Callable[..., bool]:
        def watched(*args: Any, **kwargs: Any) -> bool:
            outcome = rule(*args, **kwargs)
            template = take_numbers((args, kwargs))
            self.calls.choices[Choice("gemm_4bit", template, (), outcome)] = None
            return outcome

        return watched


@dataclass(frozen=True, slots=True)
class LoggedTrace:
    """A traced plan with the calls that made it."""

    traced: TracedPlan
    log: CallLog


def logged_trace(plan: TrainingPlan, gpu: Gpu, *, trust_remote_code: bool = False) -> LoggedTrace:
    """Run `plan` on `gpu` and keep its calls."""
    with ExitStack() as stack:
        made: list[CallRecorder] = []

        def observe(mode: CudaSimMode) -> None:
            made.append(CallRecorder(mode))
            stack.enter_context(made[0].watching())

        plan, num_ahead = shortened(plan)
        traced = run_plan(
            plan,
            gpu,
            num_ahead=num_ahead,
            trust_remote_code=trust_remote_code,
            observe=observe,
            at_cut=lambda: made[0].cut(),
        )
    return LoggedTrace(traced, made[0].calls)


def take_numbers(value: Any) -> Template:
    """Split nested values into a template and its whole numbers."""
    numbers: list[int] = []
    floats: list[float] = []
    shape = _shape(value, numbers, floats)
    return Template(shape, tuple(numbers), tuple(floats))


_INT, _FLOAT = "an integer", "a float"

_CONSTANTS = (
    bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
    torch._ops.OpOverload,
)  # fmt: skip
"""Types that templates store unchanged; others do not affect sizes."""


@dataclass(frozen=True, slots=True)
class _TensorShape:
    num_dims: int
    dtype: torch.dtype
    device: str
    offset: int
    is_dense: bool  # True if the storage holds exactly the tensor's elements, from offset 0


@dataclass(frozen=True, slots=True)
class _Sequence:
    kind: type
    items: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Mapping:
    keys: tuple[str, ...]
    items: tuple[Any, ...]


def _shape(value: Any, numbers: list[int], floats: list[float]) -> Any:
    if isinstance(value, Tensor):
        return _tensor_shape(value, numbers)
    if type(value) is int:
        numbers.append(value)
        return _INT
    if type(value) is float:
        floats.append(value)
        return _FLOAT
    if isinstance(value, list | tuple):
        kind = list if isinstance(value, list) else tuple
        return _Sequence(kind, tuple(_shape(v, numbers, floats) for v in value))
    if isinstance(value, dict):
        items = tuple(_shape(v, numbers, floats) for v in value.values())
        return _Mapping(tuple(value), items)
    return value if isinstance(value, _CONSTANTS) else type(value).__name__


def _tensor_shape(tensor: Tensor, numbers: list[int]) -> _TensorShape:
    size, stride = tensor.size(), tensor.stride()
    numbers += size
    numbers += stride
    is_on_gpu = placement.on_gpu(tensor)
    num_bytes = tensor.untyped_storage().nbytes() if is_on_gpu else 0
    offset = int(tensor.storage_offset())
    is_dense = offset == 0 and num_bytes == dense_bytes(size, stride, tensor.element_size())
    numbers.append(num_bytes)
    device = "meta" if is_on_gpu else "cpu"
    return _TensorShape(len(size), tensor.dtype, device, offset % ALIGNMENT, is_dense)


def put_numbers(template: Template, numbers: Iterable[int]) -> Any:
    """The nested values of `template` with other numbers in it, its tensors as meta tensors."""
    return _value(template.shape, iter(numbers), iter(template.floats))


def _value(shape: Any, numbers: Iterator[int], floats: Iterator[float]) -> Any:
    if isinstance(shape, _TensorShape):
        return _tensor(shape, numbers)
    if shape is _INT:
        return next(numbers)
    if shape is _FLOAT:
        return next(floats)
    if isinstance(shape, _Sequence):
        return shape.kind(_value(item, numbers, floats) for item in shape.items)
    if isinstance(shape, _Mapping):
        values = (_value(item, numbers, floats) for item in shape.items)
        return dict(zip(shape.keys, values, strict=True))
    return shape


def _tensor(shape: _TensorShape, numbers: Iterator[int]) -> Tensor:
    size = [next(numbers) for _ in range(shape.num_dims)]
    stride = [next(numbers) for _ in range(shape.num_dims)]
    num_bytes = next(numbers)
    if shape.is_dense:
        return torch.empty_strided(size, stride, dtype=shape.dtype, device=shape.device)
    room = max(dense_bytes(size, stride, 1) + shape.offset, num_bytes // shape.dtype.itemsize)
    flat = torch.empty(room, dtype=shape.dtype, device=shape.device)
    return flat.as_strided(size, stride, shape.offset)


def storage_bytes(shape: Any, numbers: Iterator[int]) -> list[int]:
    """Bytes of the storage of each tensor in `shape`, which is a result or a tuple of them."""
    if isinstance(shape, _TensorShape):
        size = [next(numbers) for _ in range(shape.num_dims)]
        stride = [next(numbers) for _ in range(shape.num_dims)]
        num_bytes = next(numbers)
        return [dense_bytes(size, stride, shape.dtype.itemsize) if shape.is_dense else num_bytes]
    if isinstance(shape, _Sequence):
        return [b for item in shape.items for b in (storage_bytes(item, numbers) or [0])]
    if shape is _INT:
        next(numbers)
    return []


def count_numbers(shape: Any) -> int:
    """Count the whole numbers that were taken out of `shape`."""
    if isinstance(shape, _TensorShape):
        return 2 * shape.num_dims + 1
    if isinstance(shape, _Sequence | _Mapping):
        return sum(map(count_numbers, shape.items))
    return int(shape is _INT)


def on_gpu(shape: Any) -> list[bool]:
    """Return, for each result in `shape`, whether it is a tensor on the GPU."""
    items = shape.items if isinstance(shape, _Sequence) else (shape,)
    return [isinstance(item, _TensorShape) and item.device == "meta" for item in items]
