"""Log of a run's operator calls, and programs rebuilt from it for other batch sizes or GPUs.

A call is stored as a *template*: operator, arguments and results, with all integers moved to a flat
row. Traces of one plan at two batch sizes have the same templates with other integers; see `reuse`.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from memest.estimator.gpu.kernel_calls import Recipe, dense_bytes, recipe_of, results_of
from memest.estimator.gpu.mode import CudaSimMode
from memest.estimator.hardware.gpus import Gpu
from memest.estimator.ops import attention
from memest.estimator.ops.matmul import CublasWorkspaces
from memest.estimator.ops.registry import Op, op_of
from memest.estimator.ops.temporaries import OLDEST
from memest.estimator.replay.replay import Program, Renames, TracedPlan, within_model
from memest.estimator.tensors import placement
from memest.estimator.tensors.storages import EMPTIED, MemKind, Site, StorageTable, free_of

aten = torch.ops.aten

GEMM_RULE = "_gemm_4bit_use_custom_fn"
"""bitsandbytes' choice of a kernel by shapes (0.50.2, backends/cuda/ops.py), if it has one."""

_OMITTED = ("gpu", "release")  # arguments of a choice that are not those of the call
READERS = ("lightning.", "bitsandbytes", "torch.cuda")  # choose nothing, or only by `GEMM_RULE`
ALIGNMENT = 16  # modulus of storage offsets in templates: kernels align to at most 16 elements


def is_plain(op: Op) -> bool:
    """Return whether `op` allocates only its outputs, for any shapes, and uses no cuBLAS."""
    return op.has_outputs_only and not op.takes_handle


@dataclass(frozen=True, slots=True)
class Template:
    """A call (operator, arguments, results) as a nested structure, `shape`, with a mark in place of
    each number. The numbers are in `integers` (such as sizes) and `floats`. Each of the two tuples
    is in the order of its marks."""

    shape: Any  # (operator, arguments, keyword arguments, results), a mark for each number
    integers: tuple[int, ...]
    floats: tuple[float, ...]  # floats of the call; no size depends on them, and they may differ

    @property
    def operator(self) -> str:
        """Name of the operator, such as `aten.mm`."""
        return str(self.shape.items[0]).removesuffix(".default")


@dataclass(frozen=True, slots=True)
class Call:
    """One operator call in a `Span`, which made the events from `start` to before `end`."""

    start: int
    end: int
    template: int  # index in `CallLog.templates`
    new_storages: tuple[tuple[int, int], ...]  # (position among the results, id)
    site: Site
    in_backward: bool


@dataclass(slots=True)
class Span:
    """Allocator events between two cuts of the log (ends of phases), and the calls among them."""

    events: list[int]
    calls: list[Call]


@dataclass(frozen=True, slots=True)
class Choice:
    """Choice of a kernel by a `rule`, such as `attention`, and its outcome."""

    rule: str  # `attention`: the backend; `gemm_4bit`: whether the fused kernel multiplies
    template: Template  # the arguments with their shapes
    grads: tuple[bool, ...]  # `requires_grad` of the tensors, then the grad mode
    outcome: Any


@dataclass(slots=True)
class CallLog:
    """Operator calls and kernel choices of one simulated run, for programs at other sizes. The log
    also holds for other chips, unless the model's code reads the GPU's compute capability. In this
    case, or if nothing was recorded, `is_for_one_chip` is True."""

    templates: list[Template] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    choices: dict[Choice, None] = field(default_factory=dict)
    is_for_one_chip: bool = False  # model code read the capability, or nothing was recorded
    on_chips: dict[Any, TracedPlan] = field(default_factory=dict)
    """Programs on other chips, by the calls that differ there from this run."""


class CallRecorder:
    """Records the operator calls of a run in `calls`, by a wrapper of `mode.request`."""

    def __init__(self, mode: CudaSimMode) -> None:
        self.calls = CallLog()
        self._mode = mode
        self._memory = mode.memory
        self._request, mode.request = mode.request, self._record
        self._calls: list[Call] = []
        self._templates: dict[Template, int] = {}
        self._index_by_recipe: dict[int, int] = {}
        self._recipes: list[Recipe] = []  # keeps objects alive whose `id` is used above
        self._cut_at = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record, until the block ends, the kernel choices that depend on shapes."""
        with ExitStack() as self._patches:
            self._watch_choice("attention", attention, "choose_backend")
            for name in ("get_device_capability", "get_device_properties"):
                replacement = self._watch_read(getattr(torch.cuda, name))
                self._patches.enter_context(mock.patch.object(torch.cuda, name, replacement))
            yield

    def cut(self) -> None:
        """Append a `Span` to the log: the events and calls since the last cut."""
        gemm = sys.modules.get("bitsandbytes.backends.cuda.ops")
        if not self.calls.spans and hasattr(gemm, GEMM_RULE):  # the model has imported it
            self._watch_choice("gemm_4bit", gemm, GEMM_RULE)
        log = self._memory.log
        events = log.events[self._cut_at :].tolist()
        self._cut_at = len(log.events)
        self.calls.spans.append(Span(events, self._calls))
        self._calls = []

    @property
    def num_calls(self) -> int:
        """Number of calls since the last cut."""
        return len(self._calls)

    def calls_since(self, position: int) -> list[Call]:
        """Return the calls since the last cut, without the first `position` ones. Positions of
        their events are counted from the start of the event log, not from the cut."""
        cut, calls = self._cut_at, self._calls[position:]
        return [replace(call, start=call.start + cut, end=call.end + cut) for call in calls]

    def repeat(
        self, calls: Sequence[Call], first: int, positions: Sequence[int], ids: Mapping[int, int]
    ) -> None:
        """Record `calls`, from `calls_since`, again for a later step that repeats their events.
        Event number `first + n` of the log is repeated as event number `positions[n]`. `ids` maps
        storage ids of `calls` to those of the later step."""
        for call in calls:
            self._calls.append(
                replace(
                    call,
                    start=positions[call.start - first] - self._cut_at,
                    end=positions[call.end - first] - self._cut_at,
                    new_storages=tuple([(pos, ids[index]) for pos, index in call.new_storages]),
                )
            )

    def _record(self, op: Op, args: Any, kwargs: Any, out: Any, recipe: Recipe) -> None:
        memory = self._memory
        memory.settle()
        start, first_id = len(memory.log.events), len(memory.storages.num_bytes)
        self._request(op, args, kwargs, out, recipe)
        memory.settle()
        has_allocated = len(memory.storages.num_bytes) > first_id
        if not has_allocated and is_plain(op):  # nor does it request memory at another size
            return
        index = self._index_by_recipe.get(id(recipe))
        if index is None:
            value_of = self._mode.values.value_of
            known = () if op.from_values is None else op.from_values(value_of, args)
            template = to_template((op.func, args, kwargs, out, known))
            index = self._templates.setdefault(template, len(self._templates))
            if index == len(self.calls.templates):
                self.calls.templates.append(template)
            self._index_by_recipe[id(recipe)] = index
            self._recipes.append(recipe)
        in_backward = op.takes_handle and torch._C._current_autograd_node() is not None
        positions: dict[int, int] = {}  # position among the results, by storage id
        if has_allocated:
            for position, tensor in enumerate(out if recipe.is_tuple else (out,)):
                storage = memory.id_of(tensor) if isinstance(tensor, Tensor) else None
                if storage is not None and storage >= first_id:
                    positions.setdefault(storage, position)
            site = memory.storages.sites[first_id]
        else:
            site = self._mode.attribution.site(op.func)
        start, end = start - self._cut_at, len(memory.log.events) - self._cut_at
        new_storages = tuple((position, storage) for storage, position in positions.items())
        self._calls.append(Call(start, end, index, new_storages, site, in_backward))

    def _watch_choice(self, rule: str, module: Any, name: str) -> None:
        """Record each outcome of function `name` of `module`, until `watching` ends. It is
        recorded as a `Choice` by the rule of name `rule`."""
        choose = getattr(module, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            outcome = choose(*args, **kwargs)
            template = to_template((args, {k: v for k, v in kwargs.items() if k not in _OMITTED}))
            requires_grad = (a.requires_grad for a in args if isinstance(a, Tensor))
            grads = (*requires_grad, torch.is_grad_enabled())
            self.calls.choices[Choice(rule, template, grads, outcome)] = None
            return outcome

        self._patches.enter_context(mock.patch.object(module, name, watched))

    def _watch_read(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            reader = sys._getframe(1).f_globals["__name__"]
            self.calls.is_for_one_chip |= not reader.startswith(READERS)
            return original(*args, **kwargs)

        return watched


def to_template(value: Any) -> Template:
    """Split `value`, such as a call's nested arguments, into structure, integers and floats."""
    integers: list[int] = []
    floats: list[float] = []
    shape = _shape(value, integers, floats)
    return Template(shape, tuple(integers), tuple(floats))


_INT, _FLOAT = "an integer", "a float"

_CONSTANTS = (
    bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
    torch._ops.OpOverload,
)  # fmt: skip
"""Types of arguments that templates store as they are; other types do not affect sizes."""


@dataclass(frozen=True, slots=True)
class _TensorShape:
    num_dims: int
    dtype: torch.dtype
    device: str
    offset: int
    is_dense: bool  # True if the storage holds exactly the tensor's elements, from offset 0


@dataclass(frozen=True, slots=True)
class _Items:
    kind: type  # `list`, `tuple` or `dict`
    items: tuple[Any, ...]
    keys: tuple[str, ...] = ()  # of a dict


def _shape(value: Any, integers: list[int], floats: list[float]) -> Any:
    if isinstance(value, Tensor):
        return _tensor_shape(value, integers)
    if type(value) is int:
        integers.append(value)
        return _INT
    if type(value) is float:
        floats.append(value)
        return _FLOAT
    if isinstance(value, list | tuple):
        kind = list if isinstance(value, list) else tuple
        return _Items(kind, tuple(_shape(v, integers, floats) for v in value))
    if isinstance(value, dict):
        items = tuple(_shape(v, integers, floats) for v in value.values())
        return _Items(dict, items, tuple(value))
    return value if isinstance(value, _CONSTANTS) else type(value).__name__


def _tensor_shape(tensor: Tensor, integers: list[int]) -> _TensorShape:
    size, stride = tensor.size(), tensor.stride()
    integers += size
    integers += stride
    is_on_gpu = placement.on_gpu(tensor)
    num_bytes = tensor.untyped_storage().nbytes() if is_on_gpu else 0
    offset = int(tensor.storage_offset())
    is_dense = offset == 0 and num_bytes == dense_bytes(size, stride, tensor.element_size())
    integers.append(num_bytes)
    device = "meta" if is_on_gpu else "cpu"
    return _TensorShape(len(size), tensor.dtype, device, offset % ALIGNMENT, is_dense)


def with_integers(template: Template, integers: Iterable[int]) -> Any:
    """Rebuild the value of a `template` with other `integers`; GPU tensors are meta tensors."""
    return _value(template.shape, iter(integers), iter(template.floats))


def _value(shape: Any, integers: Iterator[int], floats: Iterator[float]) -> Any:
    if isinstance(shape, _TensorShape):
        return _tensor(shape, integers)
    if shape is _INT:
        return next(integers)
    if shape is _FLOAT:
        return next(floats)
    if isinstance(shape, _Items):
        values = (_value(item, integers, floats) for item in shape.items)
        return shape.kind(zip(shape.keys, values, strict=True) if shape.kind is dict else values)
    return shape


def _tensor(shape: _TensorShape, integers: Iterator[int]) -> Tensor:
    size = [next(integers) for _ in range(shape.num_dims)]
    stride = [next(integers) for _ in range(shape.num_dims)]
    num_bytes = next(integers)
    if shape.is_dense:
        return torch.empty_strided(size, stride, dtype=shape.dtype, device=shape.device)
    room = max(dense_bytes(size, stride, 1) + shape.offset, num_bytes // shape.dtype.itemsize)
    flat = torch.empty(room, dtype=shape.dtype, device=shape.device)
    return flat.as_strided(size, stride, shape.offset)


NO_CALL = -1  # mark instead of a template: a storage that existed before the trace
ZERO = -2  # mark instead of a template: an output that meta makes and CUDA does not


class ResizableProgram:
    """Makes programs for other batch sizes or GPUs from the program of one run, `sample`.

    `orders` has, for each template of `sample.calls`, the order of its requests. A size or GPU with
    other orders needs another instance. `dropped` maps the index of a template to the positions of
    the outputs that are freed at the end of the call; None drops none.
    """

    def __init__(
        self, sample: TracedPlan, orders: "Sequence[RequestOrder]",
        dropped: Mapping[int, Set[int]] | None = None,
    ) -> None:  # fmt: skip
        assert sample.calls is not None
        self._base = sample.program
        self._storages = StorageTable()
        self._slots: list[tuple[int, int]] = []
        """Place of each storage's bytes: template, position in its `num_bytes`."""

        self._ids: dict[int, int] = {}
        self._unmodelled: Counter[str] = Counter()
        self._orders, self._dropped = orders, dropped or {}
        self._templates = sample.calls.templates
        self._workspaces: dict[tuple[bool, int], int] = {}
        setup, *part_streams = [self._events_of(span) for span in sample.calls.spans]
        streams = iter(part_streams)
        steps: list[Any] = [
            [[replace(part, events=next(streams)) for part in batch] for batch in step]
            for step in self._base.steps
        ]
        self._program = Program(
            storages=self._storages, setup=setup, steps=steps,
            step_renames=self._with_new_ids(self._base.step_renames),
            micro_renames=list(map(self._with_new_ids, self._base.micro_renames)),
            coverage=replace(self._base.coverage, unmodelled=self._unmodelled),
        )  # fmt: skip

    def with_bytes(self, requests: "Sequence[Requests]") -> Program:
        """Return the program of a size or GPU, given the `requests` of each template there."""
        tables: list[Sequence[int]] = [request.num_bytes for request in requests]
        tables += [(0,), self._base.storages.num_bytes]  # for the marks `ZERO` and `NO_CALL`
        num_bytes = [tables[i][position] for i, position in self._slots]
        return replace(self._program, storages=replace(self._storages, num_bytes=num_bytes))

    def _events_of(self, span: Span) -> list[int]:
        events: list[int] = []
        position = 0
        for call in span.calls:
            if call.start > position:
                self._append_copies(span.events[position : call.start], events)
            self._append_call(call, self._orders[call.template], events)
            position = call.end
        self._append_copies(span.events[position:], events)
        return events

    def _append_copies(self, old_events: Sequence[int], events: list[int]) -> None:
        """Append `old_events`, which no operator call made, to `events` with new storage ids."""
        for event in old_events:
            if event == EMPTIED:
                events.append(event)
            elif event >= 0:
                events.append(self._allocated(event, (NO_CALL, event)))
            elif free_of(event) in self._ids:
                events.append(free_of(self._ids[free_of(event)]))
            else:  # workspaces are freed in order
                oldest = next(iter(self._workspaces))
                events.append(free_of(self._workspaces.pop(oldest)))

    def _with_new_ids(self, renames: Renames) -> dict[int, int]:
        """Return `renames` with keys and values replaced by the storage ids of this program."""
        return {self._ids[allocated]: self._ids[freed] for allocated, freed in renames.items()}

    def _allocated(self, old_id: int, slot: tuple[int, int]) -> int:
        table = self._base.storages
        index = self._ids[old_id] = self._add(slot, table.sites[old_id], table.kinds[old_id])
        return index

    def _add(self, slot: tuple[int, int], site: Site, kind: MemKind) -> int:
        self._slots.append(slot)
        return self._storages.add(0, site, kind)

    def _append_call(self, call: Call, order: "RequestOrder", events: list[int]) -> None:
        """Append the events of `call` to `events`: its requests in `order`, as
        `KernelCalls.request` makes them."""
        if order.is_partial:
            self._unmodelled[self._templates[call.template].operator] += 1
        new_storages = dict(call.new_storages)
        site = within_model(call.site)
        temporary: dict[int, int] = {}
        dropped: list[int] = []
        count = num_temporary = 0
        for request in order.requests:
            if isinstance(request, tuple):
                (number,) = request
                events.append(free_of(temporary.pop(number)))
                continue
            if request is None:
                index = self._add((call.template, count), site, MemKind.WORKSPACE)
                events.append(index)
                temporary[num_temporary] = index
                num_temporary += 1
            elif request in new_storages:
                events.append(self._allocated(new_storages.pop(request), (call.template, count)))
            elif request in self._dropped.get(call.template, ()):
                _, first_id = call.new_storages[0]
                kind = self._base.storages.kinds[first_id]
                events.append(self._add((call.template, count), site, kind))
                dropped.append(events[-1])
            count += 1
        passing = list(temporary.values())
        for position in range(order.num_copies + order.num_cublas):
            workspace = (call.in_backward, position - order.num_copies)
            if workspace in self._workspaces:
                continue
            slot = (call.template, count + position)
            events.append(self._add(slot, site, MemKind.WORKSPACE))
            if position < order.num_copies:
                passing.append(events[-1])
            else:
                self._workspaces[workspace] = events[-1]
        events.extend(free_of(index) for index in (*reversed(passing), *dropped))
        events.extend(self._allocated(old_id, (ZERO, 0)) for old_id in new_storages.values())


@dataclass(frozen=True, slots=True)
class Requests:
    """Allocator requests of one operator call: their order, and the bytes of each allocation."""

    order: "RequestOrder"  # requests without bytes; equal orders make the same stream of events
    num_bytes: tuple[int, ...]  # bytes of each storage that the call allocates, in order


class RequestOrder(NamedTuple):
    """Order of the allocations and frees of one operator call, without their bytes. After
    `requests` come `num_copies` copies of operands, then `num_cublas` workspaces of cuBLAS.
    `is_partial` is True if not all requests are modelled."""

    requests: tuple[int | tuple[int] | None, ...]
    """Items: n allocates output n, None a new temporary, and (n,) frees temporary n. For example,
    (None, 0, (0,)) frees the first temporary after the first output was allocated."""

    num_copies: int  # contiguous operands of a matrix product: temporaries after the outputs
    num_cublas: int  # number of workspaces: the handle's, then cuBLASLt's
    is_partial: bool


def requests_of(gpu: Gpu, template: Template, integers: Sequence[int]) -> Requests:
    """Return the allocator requests on `gpu` of the call `template` with other `integers`."""
    func, args, kwargs, out, known = with_integers(template, integers)
    op = op_of(func)
    recipe = recipe_of(gpu, op, args, kwargs, out, known)
    cublas: tuple[int, ...] = ()
    copies: tuple[int, ...] = ()
    if op.takes_handle:
        workspaces = CublasWorkspaces(gpu.capability)
        cublas, copies = workspaces.bytes_for(func, args, kwargs, ("main", 0))
    requests, num_bytes = _requests(recipe, results_of(out))
    order = RequestOrder(requests, len(copies), len(cublas), recipe.is_partial)
    return Requests(order, (*num_bytes, *copies, *cublas))


def _requests(
    recipe: Recipe, out: Sequence[Tensor]
) -> tuple[tuple[int | tuple[int] | None, ...], list[int]]:
    """Return (`requests` of `RequestOrder`, bytes of each allocation) for the events of `recipe`.
    An item of the requests is n for an allocation of output n, None for a new temporary, or (n,)
    for a free of temporary n. `out` has the results of the call."""
    requests: list[int | tuple[int] | None] = []
    num_bytes: list[int] = []
    temporaries: dict[int, int] = {}  # bytes by number
    for size, position in recipe.events:
        if position is not None and position != OLDEST:
            requests.append(position)
            num_bytes.append(out[position].untyped_storage().nbytes() if size is None else size)
        elif size is not None and size < 0:  # a free of the newest or oldest temporary of this size
            candidates = temporaries if position == OLDEST else reversed(temporaries)
            number = next(number for number in candidates if temporaries[number] == -size)
            del temporaries[number]
            requests.append((number,))
        else:
            assert size is not None
            temporaries[requests.count(None)] = size
            requests.append(None)
            num_bytes.append(size)
    return tuple(requests), num_bytes
