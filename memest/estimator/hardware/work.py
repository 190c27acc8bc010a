"""Work of a GPU operator: its kind, its sizes, and the bytes and operations that it needs.

`pace.py` turns the work into a time. `memest validate --pace` measures the time of each kind of
work on a GPU, so both describe a call by the same function, `work_of`.
"""

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from math import prod
from threading import current_thread, main_thread
from time import thread_time
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch._prims_common import make_contiguous_strides_for

from memest.estimator.tensors.placement import tensors_in
from memest.estimator.versions import allows_tf32
from memest.plan.reading import read_table

Strides = Sequence[int]


class Work(NamedTuple):
    """Work of one call: kind of kernel, sizes, operations and bytes, for the estimated time."""

    kind: str  # kernels that take the same time at the same sizes, such as `matmul float16`
    size: tuple[int, ...]  # on which the efficiency depends; bytes where operations are none
    rate: str  # peak rate of its operations: `float16`, `bfloat16`, `tf32`, `float32` or `float64`
    num_flops: int
    num_bytes: int  # bytes read and written, each tensor once
    num_tensors: int = 1  # tensors of a list that one call works on; each takes the host time
    more: tuple["Work", ...] = ()  # further kernels: a bias, copies of tensors that are strided


NOTHING = Work("", (), "", 0, 0)  # work of a call without a kernel
VIEW = Work("view", (), "", 0, 0)  # a view, which takes time of the host alone
STEP, ZERO_GRAD, HOOK, REGION, CHOICE = IN_PYTHON = (
    "step", "zero_grad", "hook", "region", "choice",
)  # fmt: skip
"""Kinds of Python code whose host time is counted.

`Optimizer.step` and `zero_grad` run it for each parameter, checkpointing for each region. `hook` is
a call of a hook of saved tensors, and `choice` that of selective checkpointing for an operator.
"""

HOST_KINDS = ("launch", "cudnn", "view")  # a launch, a call of cuDNN, a view
_NAMES: dict[str, Any] = {
    trait: frozenset(names) if isinstance(names, list) else names
    for trait, names in read_table(__file__, "work.json").items()
}
"""Names of operators by trait.

`reads few`: reads or writes only some rows of its first argument, as many as its result or its
values have. `writes few`: changes as many rows as there are values. `writes only`: does not read
its first argument. `moves rows`: the kernel moves elements of the last dimension together. `row`
has the position of the argument that gives the length of a
row: a dimension, or the row's shape. `matrices` has positions of the two matrices of a product.
`alike` has operators whose kernels take the time of another's.
"""

_ATTENTION = "_scaled_dot_product_"
_HALVES = (torch.float16, torch.bfloat16)
_BACKWARD_FLOPS = 2.5
"""Operations of attention's backward relative to its forward: five products where the forward has
two (`sdpa_backward_flop_count` of torch/utils/flop_counter.py)."""


def work_of(func: Any, args: Any, kwargs: Any, out: Any) -> Work:
    """Return the work of one call of the operator `func` with result `out`."""
    name = _name(func)
    if func.is_view or name in _NAMES["without kernel"]:
        return NOTHING
    num_bytes = _num_bytes(name, func, args, kwargs, out)
    if name in _NAMES["matrices"]:
        return _product(name, args, num_bytes)
    if name.startswith(_ATTENTION):
        return _attention(name, func, args, kwargs, num_bytes)
    if name in ("convolution", "cudnn_convolution"):
        is_transposed = name == "convolution" and args[6]
        kind = "convolution" + "-data" * is_transposed  # the kernel of a gradient
        found = _convolution(kind, args[0], args[1], out, is_transposed, num_bytes)
        has_bias = isinstance(args[2], Tensor)
        return found._replace(more=_moved(2 * out.nbytes) if has_bias else ())
    if name == "convolution_backward":
        data, weight, bias = args[10]
        kind = "convolution" + "-data" * bool(data) + "-weight" * bool(weight)
        found = _convolution(kind, args[1], args[2], args[0], args[7], num_bytes)
        return found._replace(more=_moved(args[0].nbytes) if bias else ())
    if name in ("_cudnn_rnn", "_cudnn_rnn_backward"):
        return _recurrent(func, args)
    row = _NAMES["row"].get(name)
    if "softmax" in name and row is not None and _num_after(args[0], args[row]) > 1:
        return _apart(name, args[0], args[row])
    given = [*tensors_in(args)]
    first = given[-1 if name in _NAMES["copies"] else 0] if given else None
    more: tuple[int, ...] = ()
    if first is not None:
        name, more = _kind_by_bytes(name, first, (func, args, kwargs), out)
    item_bytes = 4 if first is None else first.element_size()
    num_tensors = len(args[0]) if args and isinstance(args[0], list | tuple) else 1
    copies = (
        tuple(_copied(t) for t in given if not t.is_contiguous()) if name in _NAMES["row"] else ()
    )
    return Work(f"{name} {item_bytes}", (num_bytes, *more), "", 0, num_bytes, num_tensors, copies)


def _moved(num_bytes: int) -> tuple[Work]:
    """Return the work of a further kernel that reads and writes `num_bytes`."""
    return (Work("pointwise 4", (num_bytes,), "", 0, num_bytes),)


def _copied(x: Tensor) -> Work:
    """Return the work of the copy that a norm or a softmax makes of a tensor in another order."""
    kind, more = _kind_by_order(x.shape, x.stride(), make_contiguous_strides_for(x.shape))
    return Work(f"{kind} {x.element_size()}", (2 * x.nbytes, *more), "", 0, 2 * x.nbytes)


def _kind_by_bytes(name: str, x: Tensor, call: Any, out: Any) -> tuple[str, tuple[int, ...]]:
    """Return the kind of a memory-bound kernel, and its sizes besides the bytes."""
    func, args, kwargs = call
    if name in _NAMES["copies"]:
        return _kind_of_copy(x, out)
    if torch.Tag.pointwise in func.tags:
        return _kind_of_pointwise(name, args, out)
    if name in ("nll_loss_forward", "nll_loss_backward"):
        return name, (next((t.numel() for t in tensors_in(args) if t.dtype == torch.int64), 1),)
    if name == "sum":
        return name, _reduced(func, args, kwargs)
    if name.startswith("upsample") and isinstance(out, Tensor):
        large, small = sorted((out.numel(), x.numel()), reverse=True)
        return name + _layout(x), (prod(x.shape[:2]), max(1, large // max(1, small)))
    if "group_norm" in name:
        mean = args[2] if "backward" in name else out[1]
        return name + _layout(x), (mean.numel(),)
    if "pool" in name:
        return name + _layout(x), (_length(x, 1), _window(func, args, out))
    if "batch_norm" in name:
        return name + _layout(x), (_length(x, 1), prod(x.shape[2:]))
    if name.startswith("_fft"):
        shape = max(x, out, key=Tensor.numel).shape
        return name, (prod(shape[dim] for dim in args[1]), len(args[1]))
    if name == "gather" and args[2].dim() > 1 and args[2].stride(-1) == 0:
        return "gather-rows", (
            _length(args[2], -1),
        )  # libraries for graphs expand an index of rows
    if isinstance(args[0], list | tuple) and name.startswith(("foreach", "_fused")):
        return name, (len(args[0]),)
    if "ctc_loss" in name:
        return name, (next(t.shape[0] for t in tensors_in(args) if t.dim() == 3),)
    if name == "cat":
        return name, (_adjacent(func, args),)
    if name in _NAMES["moves rows"]:
        return name, (_length(x, -1),)
    if name in ("sort", "topk"):
        return name, (_length(x, _values(func, args, kwargs).get("dim", -1)),)
    if name in _NAMES["row"]:
        row = args[_NAMES["row"][name]]
        return name, (prod(row) if isinstance(row, list | tuple) else _length(args[0], row),)
    return name, ()


def _kind_of_copy(source: Tensor, out: Tensor) -> tuple[str, tuple[int, ...]]:
    """Return the kind of a copy, by the order in which it reads and writes memory."""
    if source.stride() == out.stride():
        return "copy" if source.dtype == out.dtype else "cast", ()
    if source.dim() != out.dim():  # the copy broadcasts
        return "permute", (1,)
    return _kind_by_order(out.shape, source.stride(), out.stride())


def _kind_by_order(shape: Strides, given: Strides, made: Strides) -> tuple[str, tuple[int, ...]]:
    """Return the kind of a copy to other strides: both innermost lengths, or the contiguous run."""
    ends = [_innermost(shape, strides) for strides in (given, made)]
    if ends[0] != ends[1]:
        return "transpose", tuple(shape[end] if end >= 0 else 1 for end in ends)
    return "permute", (_run(shape, given, made),)


def _run(shape: Strides, *orders: Strides) -> int:
    """Return the number of elements that are contiguous under all given strides."""
    adjacent = 1
    for size, *steps in sorted(zip(shape, *orders, strict=True), key=lambda dim: dim[-1]):
        if size > 1:
            if set(steps) != {adjacent}:
                break
            adjacent *= size
    return adjacent


def _num_after(x: Tensor, dim: int) -> int:
    """Return the number of elements of the dimensions after `dim`."""
    return prod(x.shape[dim + 1 or x.dim() :])


MAX_THREADS = 1024  # threads of a block


def _apart(name: str, x: Tensor, dim: int) -> Work:
    """Return the work of a softmax over an inner dimension: its threads, and elements per thread.

    A thread reads its elements one after another, so it waits for memory and does not use all of
    the bandwidth. Source: `SpatialSoftMax_getBlockSize` of ATen/native/cuda/SoftMax.cu.
    """
    inner, num = _num_after(x, dim), x.shape[dim]
    sharing = 1  # threads that read one row
    if inner <= 64 <= num:
        while inner * sharing * 2 <= MAX_THREADS and sharing * 2 <= num:
            sharing *= 2
    size = (x.numel() // max(1, num) * sharing, -(-num // sharing))
    return Work(f"{name}-apart {x.element_size()} float32", size, "float32", prod(size), 0)


def _length(x: Tensor, dim: int) -> int:
    """Return the size of a dimension; 1 if there is none, as of a single number."""
    return x.shape[dim] if -x.dim() <= dim < x.dim() else 1


def _reduced(func: Any, args: Any, kwargs: Any) -> tuple[int, int]:
    """Return how many elements a reduction combines into one, and their smallest stride."""
    dims = _values(func, args, kwargs).get("dim")
    x = next(tensors_in(args))
    dims = [dims] if isinstance(dims, int) else dims or range(x.dim())
    dims = dims if x.dim() else ()  # `sum(0)` of a single number
    steps = [x.stride(dim) for dim in dims if x.shape[dim] > 1]
    return prod(x.shape[dim] for dim in dims), max(1, min(steps, default=1))


def _adjacent(func: Any, args: Any) -> int:
    """Return how many elements of a `cat` or `stack` are contiguous in source and result."""
    tensors, dim = args[0], args[1] if len(args) > 1 else 0
    first = max(tensors, key=Tensor.numel)
    is_new = func._overloadpacket.__name__ == "stack"
    run = 1
    for size, step in zip(reversed(first.shape), reversed(first.stride()), strict=True):
        if size > 1 and step != run:
            break
        run *= size
    return min(run, prod(first.shape[dim if dim >= 0 else first.dim() + is_new + dim :]))


def _window(func: Any, args: Any, out: Any) -> int:
    """Return the elements that a pool reads for each of its results."""
    sides = _values(func, args).get("kernel_size")
    if sides:
        return int(prod(sides) if len(sides) > 1 else sides[0] ** 2)
    numels = [t.numel() for t in tensors_in((*args, out))]
    return max(1, max(numels) // max(1, min(numels)))


def _kind_of_pointwise(name: str, args: Any, out: Any) -> tuple[str, tuple[int, ...]]:
    """Return the kind of a pointwise kernel by the shapes and layouts of its tensors.

    GELU in half precision takes its operations longer than its bytes on an H200. Tensors of one
    shape in different orders are `strided`, with the elements that are adjacent in all of them.
    """
    result = next(tensors_in((out, args)))
    shape, made = result.shape, result.stride()
    others = [t for t in tensors_in(args) if t.dim() and (t.shape, t.stride()) != (shape, made)]
    if any(t.shape != shape or 0 in t.stride() for t in others):
        return "broadcast", ()
    run = _run(shape, *(t.stride() for t in others), made) if others else result.numel()
    if run < result.numel():
        return "strided", (run,)
    return ("gelu" if name.startswith("gelu") else "pointwise"), ()


def _innermost(shape: Strides, strides: Strides) -> int:
    """Return the longest dimension whose elements are adjacent; -1 if there is none."""
    adjacent = [i for i, step in enumerate(strides) if step == 1]
    return max(adjacent, key=lambda i: shape[i], default=-1)


def dequantized(name: str, args: tuple[Any, ...]) -> Work | None:
    """Return the work of a function of bitsandbytes' library that decodes; None for others.

    Source: `dequantizeBlockwise` of csrc/ops.cu: code, input, scales, output, block, elements.
    """
    if not name.startswith("cdequantize_blockwise"):
        return None
    block, numel = args[4:6]
    item_bytes = 4 if "fp32" in name else 2
    num_bytes = numel // (2 if name.endswith("4") else 1) + numel * (item_bytes + 4 / block)
    return Work("dequantize_4bit 1", (int(num_bytes),), "", 0, int(num_bytes))


def host_kind(work: Work) -> int:
    """Return the position in `HOST_KINDS` of the call that starts `work`."""
    return 2 if work == VIEW else int(work.kind.startswith(("convolution", "cudnn_batch_norm")))


def fused_work(tensors: Iterable[Tensor]) -> Work:
    """Return the work of a compiled kernel that reads or writes each of `tensors` once."""
    num_bytes = sum(map(_bytes_of, tensors))
    return Work("fused 4", (num_bytes,), "", 0, num_bytes)


@cache
def _name(func: Any) -> str:
    """Return the operator's name without the marks of variants that run the same kernels."""
    name: str = func._overloadpacket.__name__
    if name.startswith("_foreach"):
        return "foreach"
    return _NAMES["alike"].get(name, name[:-1] if name.endswith("_") else name)


def rate_of(dtype: torch.dtype, operation: str = "") -> str:
    """Return the peak rate of products of `dtype`; TF32 if the script allows it for `operation`."""
    if dtype in _HALVES:
        return str(dtype).removeprefix("torch.")
    if dtype is torch.float32:
        return "tf32" if operation and allows_tf32(operation) else "float32"
    return {torch.float64: "float64", torch.int8: "int8"}.get(dtype, "float8")


def _alike(rate: str) -> str:
    """Return the precision whose kernels were measured; float16 and bfloat16 take the same time."""
    return "float16" if rate == "bfloat16" else rate


LAYOUTS = ("", "-one", "-both")
"""Marks of products by how many of the matrices are not adjacent along the summed dimension.

Kernels of TF32 read only that layout fast. Those of other precisions take the same time for all.
"""


def _product(name: str, args: Any, num_bytes: int) -> Work:
    left, right = (args[i] for i in _NAMES["matrices"][name])
    if name == "int8_linear_matmul":  # of bitsandbytes: rows of any number of dimensions
        left, right = left.flatten(0, -2), right.t()
    *batch, rows, inner = left.shape
    if name == "_grouped_mm" and right.dim() != left.dim():
        batch = []  # each row or column belongs to one group
    columns = right.shape[-1]
    rate = rate_of(left.dtype, "matmul")
    size = (*batch, rows, columns, inner)
    per_16_bytes = 16 // left.element_size()
    leading = columns, *(max((1, *t.stride()[-2:])) for t in (left, right))
    is_odd = left.element_size() == 2 and any(n % per_16_bytes for n in leading)
    kind = "bmm" if batch else "matmul"
    if rate == "tf32":
        kind += LAYOUTS[(left.stride(-1) != 1) + (right.stride(-2) != 1)]
    kind = f"{kind}{'-odd' * is_odd} {_alike(rate)}"
    return Work(kind, size, rate, 2 * prod(size), num_bytes)


def _attention(name: str, func: Any, args: Any, kwargs: Any, num_bytes: int) -> Work:
    values = _values(func, args, kwargs)
    query, key = values["query"], values["key"]
    *batch, num_queries, width = query.shape
    is_backward = name.endswith("_backward")
    is_causal = bool(values.get("is_causal"))
    size = (prod(batch), num_queries, key.shape[-2], width)
    flops = 4 * prod(size) * (_BACKWARD_FLOPS if is_backward else 1) / (2 if is_causal else 1)
    rate = rate_of(query.dtype)
    backend = name.removeprefix(_ATTENTION).partition("_")[0]
    marks = {
        "-backward": is_backward,
        "-causal": is_causal,
        "-bias": values.get("attn_bias") is not None,
        "-grad": is_backward and backend == "efficient" and values["grad_input_mask"][3],
        "-dropout": values.get("dropout_p"),
    }
    kind = f"{backend}{''.join(mark for mark, has in marks.items() if has)} {_alike(rate)}"
    return Work(kind, size, rate, int(flops), num_bytes)


def _convolution(
    kind: str, x: Tensor, weight: Tensor, out: Tensor, is_transposed: bool, num_bytes: int
) -> Work:
    """Work of a convolution: its positions, channels, and elements of the window.

    A transposed one counts as the plain one that it reverses. `wide` is depthwise above 5 x 5.
    """
    whole, made = (out, x) if is_transposed else (x, out)
    positions = [t.numel() // max(1, t.shape[1]) for t in (made, whole)]
    window = prod(weight.shape[2:])
    size = (*positions, weight.shape[0], weight.shape[1], window)
    rate = rate_of(x.dtype, "conv")
    flops = 2 * positions[0] * weight.numel() * (kind.count("-") or 1)
    layout = ""
    if weight.shape[1] != whole.shape[1]:
        layout = " depthwise" if weight.shape[1] == 1 else " grouped"
    layout += " 3d" if x.dim() == 5 else " wide" * (layout == " depthwise" and window > 25)
    return Work(f"{kind}{layout}{_layout(x)} {_alike(rate)}", size, rate, flops, num_bytes)


_GATES = {2: 4, 3: 3}
"""Gates of an LSTM and a GRU by cuDNN's number of the mode; other networks have one."""


def _recurrent(func: Any, args: Any) -> Work:
    """Work of a recurrent network: its steps, layers, samples, hidden units and gates.

    Steps run one after another, the kernels of both directions at the same time. Only products with
    the hidden state count, as those with the inputs are one large product for all steps.
    """
    values = _values(func, args)
    x, lengths, hidden = values["input"], values["batch_sizes"], values["hidden_size"]
    num_steps = len(lengths) or x.shape[1 if values["batch_first"] else 0]
    samples = max(1, x.shape[:-1].numel() // max(1, num_steps))
    size = (num_steps, values["num_layers"], samples, hidden, _GATES.get(values["mode"], 1))
    is_backward, both = "grad_output" in values, bool(values["bidirectional"])
    flops = 2 * prod(size) * (values["proj_size"] or hidden) * (1 + both) * (1 + is_backward)
    rate = rate_of(x.dtype, "rnn")
    kind = "rnn" + "-both" * both + "-backward" * is_backward
    return Work(f"{kind} {_alike(rate)}", size, rate, flops, 0)


def _values(func: Any, args: Any, kwargs: Any = MappingProxyType({})) -> dict[str, Any]:
    """Return the arguments of a call by name."""
    return {**dict(zip(_names(func), args, strict=False)), **kwargs}


@cache
def _names(func: Any) -> tuple[str, ...]:
    return tuple([argument.name for argument in func._schema.arguments])


def _layout(x: Tensor) -> str:
    is_last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return " nhwc" * is_last


def _num_bytes(name: str, func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the bytes that a kernel reads and writes at least."""
    if name in _NAMES["writes few"] and func._schema.is_mutable:
        given = list(tensors_in(args[1:]))
        return sum(map(_bytes_of, given)) + 2 * _bytes_of(given[-1])  # what the values change
    read = args[1:] if name in _NAMES["reads few"] | _NAMES["writes only"] else args
    if name == "nll_loss_backward":
        read = (args[0], *args[2:])
    once = {id(t): t for t in tensors_in((read, tuple(kwargs.values())))}  # `g * g` reads `g` once
    total = sum(map(_bytes_of, (*once.values(), *tensors_in((out,)))))
    if name in _NAMES["reads few"]:
        like_rows = (out,) if name in _NAMES["reads as its result"] else args[1:]
        total += sum(map(_bytes_of, tensors_in(like_rows)))
    elif not func._schema.returns:
        total += sum(map(_bytes_of, tensors_in([args[i] for i in written(func) if i < len(args)])))
    return total


def _bytes_of(tensor: Tensor) -> int:
    """Return the bytes of distinct elements: an expanded dimension counts once."""
    if tensor.is_contiguous():
        return tensor.nbytes
    if not tensor.numel():
        return 0
    count = prod(n for n, step in zip(tensor.shape, tensor.stride(), strict=True) if step or n == 1)
    return count * tensor.element_size()


@cache
def written(func: Any) -> tuple[int, ...]:
    """Return positions of arguments that an operator writes."""
    arguments = enumerate(func._schema.arguments)
    return tuple(i for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)


# The log of launches and waits of the host, from which the time of a step is estimated.

MAX_STEPS = 12  # most steps that are kept: the last ones
WAITS = -1  # event of a host that waits for the GPU
CUT = -2  # event between two micro-batches
HOST = -10  # event of an operator on the host that takes `HOST - event` microseconds
MIN_HOST_US = 50  # shortest operator on the host that counts; others are part of a launch's time
LINK = "link"  # kind of a collective
NUM_HOSTS = 3
FORWARD, BACKWARD, OPTIMIZER = range(NUM_HOSTS)  # what Python and C++ run around a launch


class WorkLog:
    """Events of the last steps: a launch is `NUM_HOSTS * work + host kind`, others are negative."""

    library_call: ClassVar[tuple[str, tuple[Any, ...]]] = ("", ())
    """The last called function of bitsandbytes' library; shared by all logs."""

    def __init__(self) -> None:
        self.works: list[Work] = []
        self._steps: deque[array[int]] = deque(maxlen=MAX_STEPS)
        self._step = array("q")
        self._stepped: set[int] = set()
        self._starts: deque[int] = deque(maxlen=MAX_STEPS)
        self._start = self._end = 0
        self.is_in_optimizer = False  # True within `Optimizer.step`
        self.has_host = True  # False if operators on the host are not of the training
        self._events = array("q")
        self._index: dict[Work, int] = {}
        self._view = self._index_of(VIEW)

    def launch(self, func: Any, args: Any, kwargs: Any, out: Any, recipe: Any) -> None:
        """Add the kernels of one call; its recipe keeps the number of its work."""
        if recipe.work is None:
            recipe.work = self._index_of(work_of(func, args, kwargs, out))
        if recipe.work >= 0:
            self._add(recipe.work)

    def view(self) -> None:
        """Add a view."""
        self._add(self._view)

    def call_library(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Add the kernel that an operator of bitsandbytes has called."""
        (name, given), WorkLog.library_call = WorkLog.library_call, ("", ())
        if name:
            self.add(dequantized(name, given) or work_of(func, args, kwargs, out))

    def add(self, work: Work) -> None:
        """Add work that no operator describes: a compiled kernel, a collective."""
        self._add(self._index_of(work))

    def copy(self, direction: str, num_bytes: int, *, is_pinned: bool, waits: bool) -> None:
        """Add a copy, `to_gpu` or `to_host`; the host `waits` for it or not."""
        kind = f"{direction}_{'pinned' if is_pinned else 'pageable'}"
        self.add(Work(kind, (num_bytes,), "", 0, num_bytes))
        if waits:
            self.wait()

    @property
    def num_events(self) -> int:
        """Number of events since the last step of an optimizer."""
        return len(self._events)

    def since(self, position: int) -> "array[int]":
        """Return the events after the first `position` of `num_events`."""
        return self._events[position:]

    def repeat(self, events: "array[int]") -> None:
        """Add events of `since` again."""
        self._events.extend(events)

    def drop_last(self) -> None:
        """Remove the last launch."""
        if self._events:
            self._events.pop()

    def wait(self) -> None:
        """Let the host wait until the GPU is done."""
        if self._events and self._events[-1] != WAITS:
            self._events.append(WAITS)

    @contextmanager
    def host_works(self) -> Iterator[None]:
        """Add the host time of the block, as measured on this machine.

        Threads that load data work at the same time as the script.
        """
        began = thread_time()
        try:
            yield
        finally:
            us = int(1e6 * (thread_time() - began))
            if us >= MIN_HOST_US and self.has_host and current_thread() is main_thread():
                self._events.append(HOST - us)

    def cut(self) -> None:
        """End a micro-batch."""
        self._events.append(CUT)

    def restart(self) -> None:
        """Remove the events since the last step."""
        self._events = array("q")

    def stepped(self, optimizer: int = 0, num_params: int = 0) -> None:
        """End a step of an optimizer, by its id; its second step begins another training step.

        `num_params` counts the parameters with gradients.
        """
        self.run_python(STEP, num_params)
        if optimizer in self._stepped:
            self._steps.append(self._step)
            self._starts.append(self._start)
            self._step, self._stepped, self._start = array("q"), set(), self._end
        self._step.extend(self._events)
        self._end = len(self.works)
        self._stepped.add(optimizer)
        self._events = array("q")
        self.run_python(ZERO_GRAD, num_params)

    def run_python(self, kind: str, count: int = 1) -> None:
        """Add `count` times the Python code of a kind of `IN_PYTHON`."""
        if count:
            self.add(Work(kind, (), "", 0, 0, count))

    @property
    def steps(self) -> "list[array[int]]":
        """Events of the last training steps."""
        return [*self._steps, *([self._step] if self._stepped else [])]

    @property
    def num_known(self) -> list[int]:
        """Number of works that occurred before each of `steps`."""
        return [*self._starts, *([self._start] if self._stepped else [])]

    def _index_of(self, work: Work) -> int:
        if work is NOTHING:
            return -1
        index = self._index.get(work)
        if index is None:
            index = self._index[work] = len(self.works)
            self.works.append(work)
        return index

    def _add(self, index: int) -> None:
        if torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled():
            host = BACKWARD  # with gradients, Python runs a forward again
        else:
            host = OPTIMIZER if self.is_in_optimizer else FORWARD
        self._events.append(NUM_HOSTS * index + host)
