"""Work of a GPU operator: its kind, its sizes, and the bytes and operations that it needs.

`pace.py` turns the work into a time. `memest validate --pace` measures the time of each kind of
work on a GPU, so both describe a call by the same function, `work_of`.
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from math import prod
from threading import current_thread, main_thread
from time import thread_time
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch._prims_common import make_contiguous_strides_for, suggest_memory_format

from memest.estimator.tensors.placement import tensors_in
from memest.estimator.versions import allows_tf32
from memest.plan.reading import read_table

Strides = Sequence[int]
Sizes = tuple[int, ...]


class Work(NamedTuple):
    """Work of one operator call, to estimate its time: kind of kernel, sizes, operations, bytes.
    `rate` is the precision of the operations, `more` are further kernels of the call."""

    kind: str  # kernels that take the same time at the same sizes, such as `matmul float16`
    size: tuple[int, ...]  # sizes that decide the efficiency; bytes if there are no operations
    rate: str  # peak rate of its operations: `float16`, `bfloat16`, `tf32`, `float32` or `float64`
    num_flops: int
    num_bytes: int  # bytes read and written, each tensor once
    num_tensors: int = 1  # number of tensors in the list of one call; each takes host time
    more: tuple["Work", ...] = ()  # further kernels: a bias, copies of strided tensors


NOTHING = Work("", (), "", 0, 0)  # work of a call without a kernel
VIEW = Work("view", (), "", 0, 0)  # a view, which takes time of the host alone
HOST_KINDS = ("launch", "cudnn", "view")  # a kernel launch, a call of cuDNN, a view
_NAMES: dict[str, Any] = {
    trait: frozenset(names) if isinstance(names, list) else names
    for trait, names in read_table(__file__, "work.json").items()
}
"""Names of operators by trait.

`reads few`: reads or writes only some rows of its first argument, as many as its result or its
values have. `writes few`: changes as many rows as there are values. `unread`: position of an
argument that is not read. `size`: key of `_SIZES`. `matrices`: positions of the two matrices of a
product. `alike`: operators whose kernels take the time of another's.
"""

LIBRARIES: dict[str, dict[str, str]] = _NAMES["libraries"]  # kinds by module and function
IN_LAUNCHES: dict[str, float] = _NAMES["in launches"]
"""Host times of library code in launches of a forward: `validation/scripts/library_host.py` on an
H200. `dtensor` is an operator on DTensors, `dtensors` a DTensor in a list of one."""

STEP, ZERO_GRAD, HOOK, REGION, CHOICE = _OWN = "step", "zero_grad", "hook", "region", "choice"
IN_PYTHON = (*_OWN, *IN_LAUNCHES)
"""Kinds of Python code whose host time is counted. `Optimizer.step` and `zero_grad` run it for each
parameter. The others are a call of a hook of saved tensors, a checkpointed region, an operator of
selective checkpointing, and library code."""

_ATTENTION = "_scaled_dot_product_"
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
        left, right = (args[i] for i in _NAMES["matrices"][name])
        return _product(name, left, right, num_bytes)
    values = dict(zip(_arguments(func), args, strict=False)) | kwargs
    if name.startswith(_ATTENTION):
        return _attention(name.removeprefix(_ATTENTION), values, num_bytes)
    if name in ("convolution", "cudnn_convolution", "convolution_backward"):
        return _convolution(values, out, num_bytes)
    if name in ("_cudnn_rnn", "_cudnn_rnn_backward"):
        return _recurrent(values)
    if not (tensors := [*tensors_in(args)]):
        return by_bytes(f"{name} 4", num_bytes)
    x = tensors[-1 if name in _NAMES["copies"] else 0]  # of a copy, the source
    copies: tuple[Work, ...] = ()
    if _NAMES["size"].get(name) == "row":
        if "softmax" in name and prod(x.shape[values["dim"] + 1 or x.dim() :]) > 1:
            return _spatial_softmax(name, x, values["dim"])
        copies = tuple(_copy_work(t) for t in tensors if not t.is_contiguous())
    kind, *sizes = _kind(name, func, x, values, out)
    work = by_bytes(f"{kind} {x.element_size()}", num_bytes, *sizes)
    return work._replace(num_tensors=_num_listed(values) or 1, more=copies)


def by_bytes(kind: str, num_bytes: int, *sizes: int) -> Work:
    """Return the work of a memory-bound kernel of `kind`; its time also depends on `sizes`."""
    return Work(kind, (num_bytes, *sizes), "", 0, num_bytes)


def fused_work(tensors: Iterable[Tensor]) -> Work:
    """Return the work of a compiled kernel that reads or writes each of `tensors` once."""
    return by_bytes("fused 4", sum(map(_bytes_of, tensors)))


def host_kind(work: Work) -> str:
    """Return the one of `HOST_KINDS` that the host does for `work`."""
    if work == VIEW:
        return "view"
    return "cudnn" if work.kind.startswith(("convolution", "cudnn_batch_norm")) else "launch"


def _scale(x: Tensor, out: Tensor) -> int:
    """Return the larger number of elements divided by the smaller, an integer of at least 1."""
    a, b = x.numel(), out.numel()
    return max(1, a // max(1, b), b // max(1, a))


def _length(x: Tensor, dims: Any = None) -> int:
    """Return the number of elements along `dims`: one dimension, several, or by default all. It is
    1 for a tensor without dimensions."""
    dims = [dims] if isinstance(dims, int) else dims or range(x.dim())
    return prod(x.shape[dim] for dim in dims if -x.dim() <= dim < x.dim())


_SIZES: dict[str, Callable[[Tensor, dict[str, Any], Any], tuple[int, ...]]] = {
    "channels": lambda x, v, out: (_length(x, 1),),
    "resized": lambda x, v, out: (prod(x.shape[:2]), _scale(x, out)),
    "pooled": lambda x, v, out: (prod(v.get("kernel_size") or [_scale(x, out)]),),
    "groups": lambda x, v, out: (v.get("mean", out[1]).numel(),),
    "last": lambda x, v, out: (_length(x, -1),),
    "row": lambda x, v, out: (prod(v.get("normalized_shape") or [_length(x, v["dim"])]),),
    "reduced": lambda x, v, out: (_length(x, v.get("dim")),),
    "joined": lambda x, v, out: (_num_joined(**v | {"out": out}),),
    "listed": lambda x, v, out: (_num_listed(v),),
}
"""Sizes, besides the bytes, on which the time of a kernel depends."""


def _num_listed(values: dict[str, Any]) -> int:
    """Return the length of the first list in `values`, arguments by name; 0 if there is none."""
    return next((len(value) for value in values.values() if isinstance(value, list | tuple)), 0)


def _kind(name: str, func: Any, x: Tensor, values: dict[str, Any], out: Any) -> tuple[Any, ...]:
    """Return (kind, *sizes) of a memory-bound kernel of the operator `func`, called `name` in
    tables. `sizes` are the numbers besides its bytes on which its time depends, such as channels.
    `values` are the arguments by name, `x` is the first tensor, `out` the result."""
    if name in _NAMES["copies"]:
        if x.stride() == out.stride():
            return ("copy" if x.dtype == out.dtype else "cast",)
        if x.dim() != out.dim():  # the copy broadcasts
            return "permute", 1
        return _order(out.shape, x.stride(), out.stride())
    if torch.Tag.pointwise in func.tags:
        result = next(tensors_in((out, x)))
        inputs = [t for t in tensors_in(tuple(values.values())) if t.dim()]
        if any(t.shape != result.shape or _steps(t) != _steps(result) for t in inputs):
            return ("broadcast",)
        return ("pointwise",)
    index = values.get("index")
    if isinstance(index, Tensor) and index.stride()[-1:] == (0,):
        return f"{name}-rows", _length(index, -1)  # an index of rows that is expanded
    layout = _layout(x) if "2d" in name or "batch_norm" in name else ""
    sizes_of = _SIZES.get(_NAMES["size"].get(name, ""))
    return name + layout, *(sizes_of(x, values, out) if sizes_of else ())


def _steps(x: Tensor) -> list[int]:
    """Return the strides of the dimensions with more than one element."""
    return [step for num, step in zip(x.shape, x.stride(), strict=True) if num > 1]


def _num_joined(tensors: Sequence[Tensor], dim: int = 0, *, out: Tensor) -> int:
    """Return the length in elements of the contiguous runs that a `cat` or `stack` along `dim`
    copies, from the largest of `tensors` to `out`."""
    x, steps = max(tensors, key=Tensor.numel), list(out.stride())
    if out.dim() > x.dim():
        del steps[dim]
    return _run(x.shape, x.stride(), steps)


def _order(shape: Strides, source: Strides, target: Strides) -> tuple[Any, ...]:
    """Return (kind, *sizes) of a copy of a tensor of `shape` from strides `source` to `target`. The
    innermost dimension is the one with stride 1. If it is the same in source and target, the result
    is (`permute`, number of elements that are contiguous in both). Otherwise the result is
    (`transpose`, length of the source's innermost dimension, length of the target's)."""
    source_end, target_end = (
        max((i for i, step in enumerate(steps) if step == 1), key=shape.__getitem__, default=None)
        for steps in (source, target)
    )
    if source_end == target_end:
        return "permute", _run(shape, source, target)
    return "transpose", *(1 if end is None else shape[end] for end in (source_end, target_end))


def _run(shape: Strides, source: Strides, target: Strides) -> int:
    """Return how many elements of `shape` are contiguous with the strides `source` and `target`."""
    adjacent = 1
    for size, *steps in sorted(zip(shape, source, target, strict=True), key=lambda dim: dim[-1]):
        if size > 1:
            if set(steps) != {adjacent}:
                break
            adjacent *= size
    return adjacent


def _copy_work(x: Tensor) -> Work:
    """Return the work of the contiguous copy of `x` that a norm or a softmax makes."""
    kind, *sizes = _order(x.shape, x.stride(), make_contiguous_strides_for(x.shape))
    return by_bytes(f"{kind} {x.element_size()}", 2 * x.nbytes, *sizes)


def _layout(x: Tensor) -> str:
    is_last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return " nhwc" if is_last else ""


def _with_marks(kind: str, marks: dict[str, Any]) -> str:
    """Return `kind`, followed by the keys of `marks` whose values are true."""
    return kind + "".join(mark for mark, applies in marks.items() if applies)


def _spatial_softmax(name: str, x: Tensor, dim: int) -> Work:
    """Return the work of the softmax `name` over an inner `dim`, of size (threads, elements per
    thread). A thread reads its elements one after another, so it waits for memory and does not use
    all of the bandwidth. Source: `SpatialSoftMax_getBlockSize` of ATen/native/cuda/SoftMax.cu."""
    inner, num = prod(x.shape[dim + 1 or x.dim() :]), x.shape[dim]  # -1 is the last
    sharing = 1  # threads that read one row
    if inner <= 64 <= num:
        while inner * sharing * 2 <= 1024 and sharing * 2 <= num:
            sharing *= 2
    size = (x.numel() // max(1, num) * sharing, -(-num // sharing))
    return Work(f"{name}-apart {x.element_size()} float32", size, "float32", prod(size), 0)


def _with_rate(kind: str, rate: str, size: Sizes, num_flops: float, num_bytes: int) -> Work:
    """Return the work of a kernel with `num_flops` at the peak rate `rate`, such as `float16`. Its
    kind ends with the rate; bfloat16 counts as float16, except in grouped convolutions."""
    rate_name = "float16" if rate == "bfloat16" and " grouped" not in kind else rate
    return Work(f"{kind} {rate_name}", size, rate, int(num_flops), num_bytes)


def rate_of(dtype: torch.dtype, operation: str = "") -> str:
    """Return the name of the peak rate of products of `dtype`. For float32 it is "tf32" if the
    script allows that for `operation`: "matmul", "conv", "rnn", or "" to exclude it."""
    if dtype is torch.float32 and operation and allows_tf32(operation):
        return "tf32"
    name = str(dtype).removeprefix("torch.")
    return name if name in ("float16", "bfloat16", "float32", "float64", "int8") else "float8"


def _product(name: str, left: Tensor, right: Tensor, num_bytes: int) -> Work:
    """Return the work of the product `name`, of size (matrices, rows, columns, length of the sums).
    Kernels of TF32 are fast only if both matrices are contiguous along the summed dimension."""
    if name == "int8_linear_matmul":  # bitsandbytes: rows of any number of dimensions
        left, right = left.flatten(0, -2), right.t()
    *batch, rows, inner = left.shape
    if name == "_grouped_mm" and right.dim() != left.dim():
        batch = []  # each row or column belongs to one group
    size = (prod(batch), rows, right.shape[-1], inner)
    rate, kind = rate_of(left.dtype, "matmul"), "matmul"
    if rate == "tf32":
        num_strided = [left.stride(-1) == 1, right.stride(-2) == 1].count(False)
        kind += ("", "-one", "-both")[num_strided]
    leading = right.shape[-1], *(max((1, *t.stride()[-2:])) for t in (left, right))
    if left.element_size() == 2 and any(n % 8 for n in leading):  # not aligned to 16 bytes
        kind += "-odd"
    return _with_rate(kind, rate, size, 2 * prod(size), num_bytes)


def _attention(name: str, values: dict[str, Any], num_bytes: int) -> Work:
    """Return the work of attention, of size (heads of all samples, queries, keys, head length).
    `name` is the operator without its prefix, such as `flash_attention`. `values` are the
    operator's arguments by name. `num_bytes` are the bytes that the kernel reads and writes."""
    query, key = values["query"], values["key"]
    *batch, num_queries, width = query.shape
    size = (prod(batch), num_queries, key.shape[-2], width)
    is_backward, is_causal = name.endswith("_backward"), bool(values.get("is_causal"))
    has_bias = values.get("attn_bias") is not None
    marks = {"-backward": is_backward, "-causal": is_causal, "-bias": has_bias}
    kind = _with_marks(name.partition("_")[0], marks)
    flops = 4 * prod(size) * (_BACKWARD_FLOPS if is_backward else 1) / (2 if is_causal else 1)
    return _with_rate(kind, rate_of(query.dtype), size, flops, num_bytes)


def _convolution(values: dict[str, Any], out: Any, num_bytes: int) -> Work:
    """Return the work of a convolution, or of the gradients of a convolution, with result `out`.

    `values` are the operator's arguments by name. `num_bytes` are the bytes that the kernel has to
    read and write.

    The size of the work is a tuple. For a grouped convolution, its channels are those of one group.

        one group       (output positions, input positions, output channels, input channels, window)
        several groups  (the same five numbers, number of groups)

    A transposed convolution counts as the convolution that it reverses. The kind of a grouped
    convolution has further words in three cases:

        one   windows of one element
        wide  depthwise in one or two dimensions, with windows of more than 25 elements (5 x 5)
        1d    one spatial dimension
    """
    x: Tensor = values["input" if "input" in values else "self"]
    weight: Tensor = values["weight"]
    output = values.get("grad_output", out)
    data, weights, bias = values.get("output_mask", (False, False, values.get("bias") is not None))
    extra = []
    if bias:  # a forward adds it in place, a backward sums the gradient
        extra = [by_bytes("pointwise 4", output.nbytes * (1 if "grad_output" in values else 2))]
    result, source = (x, output) if values.get("transposed") else (output, x)
    num_out, num_in = (t.numel() // max(1, t.shape[1]) for t in (result, source))
    c_out, c_in, *sides = weight.shape
    window = prod(sides)
    kind = _with_marks("convolution", {"-data": data and weights, "-weight": weights})
    size: Sizes = (num_out, num_in, c_out, c_in, window)
    if (groups := source.shape[1] // max(1, c_in)) > 1:
        size = (num_out, num_in, c_out // groups, c_in, window, groups)
        is_wide = c_in == 1 and x.dim() < 5 and window > 25
        marks = {" grouped": True, " one": window == 1, " wide": is_wide, " 1d": x.dim() == 3}
        kind = _with_marks(kind, marks)
    # `cudnn_conv_suggest_memory_format` of ATen/native/ConvUtils.h
    is_last = bool(_layout(x)) or suggest_memory_format(weight) == torch.channels_last
    kind = _with_marks(kind, {" 3d": x.dim() == 5, " nhwc": is_last})
    flops = 2 * num_out * weight.numel() * max(1, data + weights)  # of each gradient
    work = _with_rate(kind, rate_of(x.dtype, "conv"), size, flops, num_bytes)
    if is_last and groups <= 1 and x.dim() != 5 and num_out == num_in and window == 1:
        work = work._replace(kind=PRODUCTS)
        extra = [*_products(size, work.rate, x.element_size(), data, weights), *extra]
    return work._replace(more=(*extra,))


PRODUCTS = "convolution products"  # kind of a convolution that runs the kernels of products


def _products(size: Sizes, rate: str, itemsize: int, data: bool, weights: bool) -> list[Work]:
    """Return the matrix products that equal a 1x1 convolution in channels-last. `size` is (output
    positions, input positions, output channels, input channels, 1), as in `_convolution`. `rate` is
    the key of a peak rate, `itemsize` the bytes of an element. In a backward, `data` is True for
    the input's gradient and `weights` for the weight's. In a forward both are False."""
    rows, _, c_out, c_in, _ = size
    shapes = [(rows, c_out, c_in)]  # of the forward
    if data or weights:
        shapes = [(rows, c_in, c_out)] * data + [(c_out, c_in, rows)] * weights
    kind = "matmul-odd" if itemsize == 2 and (c_out % 8 or c_in % 8) else "matmul"
    return [
        _with_rate(kind, rate, (1, m, n, k), 2 * m * n * k, itemsize * (m * n + m * k + n * k))
        for m, n, k in shapes
    ]


def _recurrent(values: dict[str, Any]) -> Work:
    """Return the work of a recurrent network, of size (steps, layers, samples, hidden size, gates).
    `values` are the operator's arguments by name. Steps run one after another, the kernels of both
    directions at the same time. Only products with the hidden state count: those with the inputs
    are one large product for all steps."""
    x, lengths, hidden = values["input"], values["batch_sizes"], values["hidden_size"]
    num_steps = len(lengths) or x.shape[1 if values["batch_first"] else 0]
    samples = max(1, x.shape[:-1].numel() // max(1, num_steps))
    gates = {2: 4, 3: 3}.get(values["mode"], 1)  # of an LSTM and a GRU by cuDNN's numbers, and RNNs
    size = (num_steps, values["num_layers"], samples, hidden, gates)
    is_backward, is_two_way = "grad_output" in values, bool(values["bidirectional"])
    num_products = (2 if is_two_way else 1) * (2 if is_backward else 1)  # by direction, gradient
    flops = 2 * prod(size) * (values["proj_size"] or hidden) * num_products
    kind = _with_marks("rnn", {"-both": is_two_way, "-backward": is_backward})
    return _with_rate(kind, rate_of(x.dtype, "rnn"), size, flops, 0)


@cache
def _name(func: Any) -> str:
    """Return an operator's name in tables: one for all variants that run the same kernels."""
    name: str = func._overloadpacket.__name__
    if name.startswith("_foreach"):
        return "foreach"
    return _NAMES["alike"].get(name, name[:-1] if name.endswith("_") else name)


@cache
def _arguments(func: Any) -> tuple[str, ...]:
    return tuple([argument.name for argument in func._schema.arguments])


def _num_bytes(name: str, func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the least bytes that a kernel of `func`, `name` in tables, has to read and write."""
    if name in _NAMES["writes few"] and func._schema.is_mutable:
        tensors = list(tensors_in(args[1:]))
        return sum(map(_bytes_of, tensors)) + 2 * _bytes_of(tensors[-1])  # what the values change
    unread = _NAMES["unread"].get(name)
    inputs = [value for i, value in enumerate(args) if i != unread]
    # `g * g` reads `g` once
    distinct = {id(t): t for t in tensors_in((inputs, tuple(kwargs.values())))}
    total = sum(map(_bytes_of, (*distinct.values(), *tensors_in((out,)))))
    if name in _NAMES["reads few"]:
        like_rows = (out,) if name in _NAMES["reads as its result"] else args[1:]
        total += sum(map(_bytes_of, tensors_in(like_rows)))
    elif not func._schema.returns:
        total += sum(map(_bytes_of, tensors_in([args[i] for i in written(func) if i < len(args)])))
    return total


def _bytes_of(tensor: Tensor) -> int:
    """Return the bytes of distinct elements: an expanded dimension counts once."""
    if tensor.is_contiguous():  # true for a lazy parameter, which has no shape
        return tensor.nbytes
    count = prod(n for n, step in zip(tensor.shape, tensor.stride(), strict=True) if step or n == 1)
    return (count if tensor.numel() else 0) * tensor.element_size()


@cache
def written(func: Any) -> tuple[int, ...]:
    """Return the positions of the arguments that the operator `func` writes."""
    arguments = enumerate(func._schema.arguments)
    return tuple(i for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)


# The log of launches and waits of the host, from which the time of a step is estimated.

MAX_STEPS = 13  # most steps that are kept: the last ones
WAITS = -1  # event of a host that waits for the GPU
CUT = -2  # event after the backward of a micro-batch
HOST = -10  # event of an operator on the host that takes `HOST - event` microseconds
MIN_HOST_US = 50  # shortest operator on the host that counts; others are part of a launch's time
LINK = "link"  # kind of a collective
NUM_HOSTS = 3
FORWARD, BACKWARD, OPTIMIZER = range(NUM_HOSTS)  # kinds of Python and C++ code around a launch


class WorkLog:
    """Log of what the host launches and waits for in the last steps, to estimate their time.

    Each event is an integer. A launch is `NUM_HOSTS * index + phase`. Its `index` is that of its
    work in `works`, and its `phase` is `FORWARD`, `BACKWARD` or `OPTIMIZER`. Other events are
    negative:

        WAITS      the host waits for the GPU
        CUT        the backward of a micro-batch ends
        HOST - us  an operator runs on the host for `us` microseconds
    """

    has_called: ClassVar[bool] = False  # whether an operator called bitsandbytes' library

    def __init__(self) -> None:
        self.works: list[Work] = []
        self.steps: deque[array[int]] = deque(maxlen=MAX_STEPS)  # one step per element
        self.num_known: deque[int] = deque(maxlen=MAX_STEPS)  # works that occurred before each
        self.events = array("q")  # since the last step of an optimizer
        self.is_in_optimizer = False  # True within `Optimizer.step`
        self.is_in_engine = False  # True within the step of DeepSpeed's engine
        self.has_host = True  # False while host operators are not part of training
        self._stepped: set[int] = set()  # ids of optimizers that stepped in this training step
        self._captured: list[Work] | None = None  # kernels of the graph that is captured
        self._num_works_before = 0  # works that occurred until the last step of an optimizer
        self._index: dict[Work, int] = {}

    def launch(self, func: Any, args: Any, kwargs: Any, out: Any, recipe: Any) -> None:
        """Add the kernels of one call of the operator `func` to the log. `recipe` is the `Recipe`
        of the call (gpu/kernel_calls.py). Calls with the same shapes can share it. Its field `work`
        caches the index of the kernels in `works`: None before the first call, and -1 if the call
        has no kernel."""
        if recipe.work is None:
            recipe.work = self._index_of(work_of(func, args, kwargs, out))
        if recipe.work >= 0:
            self._add(recipe.work)

    def call_library(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Add the kernel that an operator of bitsandbytes has called, if it has called one."""
        if WorkLog.has_called:
            WorkLog.has_called = False
            self.add(work_of(func, args, kwargs, out))

    def add(self, work: Work) -> None:
        """Add the work of an operator, a compiled kernel, a collective or a view."""
        self._add(self._index_of(work))

    def copy(self, direction: str, num_bytes: int, *, is_pinned: bool, waits: bool) -> None:
        """Add a copy in `direction` "to_gpu" or "to_host"; with `waits`, the host waits for it."""
        self.add(by_bytes(f"{direction}_{'pinned' if is_pinned else 'pageable'}", num_bytes))
        if waits:
            self.wait()

    def capture(self) -> None:
        """Begin to capture a CUDA graph: collect the next kernels for `captured`, not as events."""
        self._captured = []

    def captured(self) -> Work | None:
        """End the capture; return its kernels as one launch, or None if it has none."""
        works, self._captured = self._captured or [], None
        kernels = [kernel for work in works for kernel in (work._replace(more=()), *work.more)]
        return kernels[0]._replace(more=tuple(kernels[1:])) if kernels else None

    def wait(self) -> None:
        """Add a wait of the host until the GPU is done."""
        if self.events and self.events[-1] != WAITS:
            self.events.append(WAITS)

    @contextmanager
    def host_works(self) -> Iterator[None]:
        """Add the CPU time of the block, measured here, to the host's time of the step.

        Only the main thread counts: threads that load data run at the same time.
        """
        start = thread_time()
        try:
            yield
        finally:
            us = int(1e6 * (thread_time() - start))
            if us >= MIN_HOST_US and self.has_host and current_thread() is main_thread():
                self.events.append(HOST - us)

    def stepped(
        self, optimizer: int = 0, num_params: int = 0, *, has_backward: bool = True
    ) -> None:
        """Record a step of the optimizer whose `id()` is `optimizer` (0: a loop without one). If
        this optimizer has already stepped in the training step, another training step begins.
        `num_params` counts the parameters with gradients. `has_backward` is False if no backward
        ran since the last optimizer step. Then no other training step begins, because DeepSpeed
        steps once for each group of parameters."""
        self.run_python(STEP, num_params)
        if not self.steps or (optimizer in self._stepped and has_backward):
            self.steps.append(array("q"))
            self.num_known.append(self._num_works_before)
            self._stepped.clear()
        self.steps[-1].extend(self.events)
        self._num_works_before = len(self.works)
        self._stepped.add(optimizer)
        self.events = array("q")
        self.run_python(ZERO_GRAD, num_params)

    def dispatch(self, args: Any) -> None:
        """Add the host time of an operator whose `args` dispatch it themselves, as DTensors do."""
        lists = [a for a in args if isinstance(a, list | tuple) and a and isinstance(a[0], Tensor)]
        self.run_python("dtensors" if lists else "dtensor", sum(map(len, lists)) or 1)

    def run_python(self, kind: str, count: int = 1) -> None:
        """Add the host time of `count` executions of Python code; `kind` is one of `IN_PYTHON`."""
        if count:
            self.add(Work(kind, (), "", 0, 0, count))

    def _index_of(self, work: Work) -> int:
        if work is NOTHING:
            return -1
        index = self._index.setdefault(work, len(self.works))
        if index == len(self.works):
            self.works.append(work)
        return index

    def _add(self, index: int) -> None:
        if self._captured is not None:
            self._captured.append(self.works[index])
            return
        if torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled():
            host = BACKWARD
        else:  # in a backward with gradients, checkpointing runs a forward again
            host = OPTIMIZER if self.is_in_optimizer else FORWARD
        self.events.append(NUM_HOSTS * index + host)
