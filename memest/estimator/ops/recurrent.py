"""Recurrent layers and cells: LSTM, GRU and RNN.

torch calls cuDNN for layers (`ATen/native/cudnn/RNN.cpp` of torch 2.11). Cells are two products and
a fused kernel.

cuDNN does not publish sizes of weights, workspaces and reserve space. The formulas are fitted to
`cudnnGetRNNTempSpaceSizes` of cuDNN 9.19 on Hopper for 11,100 layers (`recurrent_sizes` in
validation/scripts). These have all cells, 1 to 4 layers, both directions, 2 to 400 steps, batches
of 1 to 128, and widths of 8 to 1024. They have all float types, packed and not.

Without projection all are exact to the allocator's 512 B or within 0.01 %. `is_measured` is false
for the exceptions: trainings with `CUDNN_RNN_ALGO_PERSIST_STATIC`, and packed layers of over 256
steps. 1,350 recorded layers have up to 1000 steps and batches of up to 512.

Shapes: T steps, B sequences, N = T * B rows (fewer where packed), I input width, H hidden width, L
layers, D directions, G gates: 4 (LSTM), 3 (GRU) or 1 (RNN).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from memest.estimator.hardware.gpus import Gpu
from memest.estimator.ops import registry
from memest.estimator.ops.autograd_ops import Next, active_gpu
from memest.estimator.ops.reductions import sum_bytes
from memest.estimator.ops.registry import KernelCall, op, register
from memest.estimator.ops.strides import contiguous_copy
from memest.estimator.ops.temporaries import Events, around, outputs, passing, temporaries
from memest.estimator.tensors.patches import Patches
from memest.estimator.tensors.placement import CPU, META, on_gpu, storage_key
from memest.units import ceil_div, round_up

RNN_RELU, RNN_TANH, LSTM, GRU = range(4)  # `cudnnRNNMode_t`
_GATES = {RNN_RELU: 1, RNN_TANH: 1, LSTM: 4, GRU: 3}
_RESERVE_ROWS = {RNN_RELU: 1, RNN_TANH: 1, LSTM: 5, GRU: 6}  # of N * H, in a layer's reserve
_STATE_ROWS = {RNN_RELU: (1, 3, 4), RNN_TANH: (1, 3, 4), LSTM: (6, 10, 8), GRU: (3, 5, 4)}
"""Rows of B * H per layer in a forward workspace: for packed, padded and persistent kernels."""

_BACKWARD_STATES = {RNN_RELU: (1, 5, 6), RNN_TANH: (1, 5, 6), LSTM: (3, 11, 12), GRU: (1, 5, 6)}
_PERSISTENT_BACKWARD = {RNN_RELU: 12, RNN_TANH: 12, LSTM: 15, GRU: 17}
_LAYER_WORKSPACE_BYTES = 8 << 20  # for the matrix products of each layer and direction
MOST_STEPS = 256  # in one matrix product of inputs, for kernels that are not persistent
_ALIGN = 256
_MASK_ALIGN = 32


@dataclass(frozen=True, slots=True)
class Layers:
    """Sizes and options of one call of cuDNN's recurrent layers; `mode` is a `cudnnRNNMode_t`.
    Without projections `proj_size` is 0. `num_rows` counts the steps of all sequences."""

    mode: int
    input_size: int
    hidden_size: int
    proj_size: int
    num_layers: int
    is_bidirectional: bool
    num_steps: int
    batch: int
    num_rows: int
    is_packed: bool
    dropout: float
    dtype: torch.dtype

    @property
    def directions(self) -> int:
        """Number of directions, 1 or 2."""
        return 2 if self.is_bidirectional else 1


def weight_places(weights: Sequence[Tensor], stride: int) -> tuple[list[int], int]:
    """Return (start of each weight in cuDNN's buffer, length of the buffer), both in elements. All
    matrices come first, then all biases. `stride` is the number of parameters per layer and
    direction. cuDNN's buffer has two biases also where torch has none."""
    offsets, position = [0] * len(weights), 0
    for num_dims in (2, 1):
        for i, weight in enumerate(weights):
            if weight.dim() == num_dims:
                offsets[i] = position
                position += weight.numel()
    if stride < 4:
        position += sum(2 * len(w_ih) for w_ih in weights[::stride])
    return offsets, position


def uses_small_algorithm(layers: Layers, *, forward: bool) -> bool:
    """Return whether torch selects cuDNN's kernels for small layers (`get_algo` of RNN.cpp).

    These persistent kernels take hidden sizes up to a limit, which depends on the mode and is
    smaller for a backward (`forward` is False). None take projections, packed inputs, bfloat16 or
    float64.
    """
    if layers.proj_size or layers.is_packed or layers.dtype is torch.float64:
        return False
    is_plain = layers.mode in (RNN_RELU, RNN_TANH)
    forward_limit, backward_limit = (384, 256) if is_plain else (192, 128)
    limit = forward_limit if forward else backward_limit
    return layers.hidden_size <= limit and layers.dtype is not torch.bfloat16


def uses_static_algorithm(layers: Layers) -> bool:
    """Return whether torch selects `CUDNN_RNN_ALGO_PERSIST_STATIC` (`get_algo` of RNN.cpp). The
    algorithm takes one LSTM or RNN layer in float16, whose width is a multiple of 128."""
    h, b = layers.hidden_size, layers.batch
    is_fit = layers.num_layers == 1 and h <= 1024 and not h % 128 and not layers.input_size % 128
    if layers.dtype is not torch.float16 or layers.is_packed or layers.proj_size or not is_fit:
        return False
    if layers.directions == 2 or layers.mode == GRU or b % 8 or b > 128:
        return False
    return layers.mode == LSTM or b < 96 or h < 896


def reserve_bytes(layers: Layers) -> int:
    """Return the bytes of cuDNN's reserve space, which training saves for the backward. For each
    row, a layer saves `_RESERVE_ROWS` vectors of the hidden size, such as gates. Each layer except
    the last also saves its outputs and, with dropout, a bit mask."""
    size, d, n = layers.dtype.itemsize, layers.directions, layers.num_rows
    h, num = layers.hidden_size, layers.num_layers
    layer_rows = _RESERVE_ROWS[layers.mode] + (1 if layers.proj_size else 0)
    rows = (layer_rows + 1) * num - 1
    total = n * d * size * (rows * h + num * layers.proj_size)
    total = round_up(total, _MASK_ALIGN) + _ALIGN
    if layers.dropout and num > 1:
        mask = ceil_div(d * d * layers.num_steps * layers.batch * h, 8)
        total += (num - 1) * round_up(mask, _MASK_ALIGN)
    return total


def _common_bytes(layers: Layers) -> int:
    """Return the bytes that forward and backward workspaces have in common. These are the
    rearranged weights, 8 MiB for the matrix products of each layer and direction, and the sequence
    lengths unless packed."""
    h, d, num = layers.hidden_size, layers.directions, layers.num_layers
    out = layers.proj_size or h
    lengths = 0 if layers.is_packed else 8 * layers.batch
    widths = layers.input_size + (num - 1) * out * d + num * out  # columns of one direction
    matrices = d * (_GATES[layers.mode] * h * widths + num * layers.proj_size * h)
    return matrices * layers.dtype.itemsize + num * d * _LAYER_WORKSPACE_BYTES + _ALIGN + lengths


def _forward_bytes(layers: Layers, is_persistent: bool) -> int:
    """Return the bytes of cuDNN's workspace of a forward in inference, which runs persistent
    kernels if `is_persistent`."""
    h, n, d, num = layers.hidden_size, layers.num_rows, layers.directions, layers.num_layers
    gates = _GATES[layers.mode]
    rows = n * gates * h * d
    if d == 1 and not is_persistent and not layers.is_packed:
        rows = min(layers.num_steps, MOST_STEPS) * layers.batch * gates * h * d
    if not layers.is_packed:
        rows += n * (layers.input_size + d * h)
    if is_persistent:
        rows += 4 * gates * n * h
    if d == 2:
        rows += 4 * n * h + (2 if is_persistent else 4) * num * layers.batch * h
    packed, padded, persistent = _STATE_ROWS[layers.mode]
    states = persistent if is_persistent else padded
    rows += (packed if layers.is_packed else states) * layers.batch * h * num * d
    return _common_bytes(layers) + rows * layers.dtype.itemsize


def _backward_bytes(layers: Layers, is_persistent: bool) -> int:
    h, i, n, d = layers.hidden_size, layers.input_size, layers.num_rows, layers.directions
    num, widest = layers.num_layers, max(layers.hidden_size, layers.input_size)
    stacked = 1 if num > 1 else 0
    packed, padded, persistent = _BACKWARD_STATES[layers.mode]
    if is_persistent:
        rows = n * ((_PERSISTENT_BACKWARD[layers.mode] + 3 * (d - 1) + stacked * d) * h + 2 * i)
        rows += n * widest * (4 if d == 2 else 1)
        states = persistent * d + 2 * (d - 1)
    else:
        rows = 0 if layers.is_packed else 2 * n * (d * h + i)
        if d == 2:
            rows += n * ((2 + 2 * stacked) * h + 4 * widest)
        else:
            rows += n * widest + min(n, _steps_at_once(layers) * layers.batch) * h
        states = (packed if layers.is_packed else padded) * d + 4 * (d - 1)
    rows += states * layers.batch * h * num
    return _common_bytes(layers) + rows * layers.dtype.itemsize


def _steps_at_once(layers: Layers) -> int:
    """Return the number of steps whose gradients cuDNN computes at once."""
    if layers.num_layers == 1:
        return layers.num_steps
    batch = layers.batch
    if batch <= 16 or layers.num_steps >= 128:
        per_layer = 8
        if batch <= 8:
            per_layer = 32 if batch == 1 else 16
    else:
        per_layer = 4 if batch <= 64 else 2
    return per_layer * layers.num_layers + max(per_layer, 8)


def workspace_bytes(layers: Layers, *, is_training: bool, is_backward: bool = False) -> int:
    """Return the bytes of the workspace that a call of cuDNN requests: a forward or, if
    `is_backward`, a backward. In training, a call requests the larger of a forward's and a
    backward's workspace. Both sizes are those of the algorithm that this call runs."""
    is_persistent = uses_small_algorithm(layers, forward=not is_backward)
    is_persistent |= uses_static_algorithm(layers)
    forward = _forward_bytes(layers, is_persistent)
    if not is_training:
        return forward
    if layers.dropout and layers.directions == 1:
        forward += layers.num_rows * layers.hidden_size * layers.dtype.itemsize
    return max(forward, _backward_bytes(layers, is_persistent))


def dropout_state_bytes(gpu: Gpu) -> int:
    """Return bytes of cuDNN's generator state: 24 for each of 2048 threads per multiprocessor."""
    return gpu.num_sms * 2048 * 24


def is_measured(layers: Layers, *, is_training: bool) -> bool:
    """Return whether cuDNN's sizes were measured for such `layers`. Not measured are projections,
    packed inputs of more than 256 steps, and training by the static algorithm."""
    is_long = layers.is_packed and layers.num_steps > MOST_STEPS
    return not (layers.proj_size or is_long or (is_training and uses_static_algorithm(layers)))


aten = torch.ops.aten


def _layers(call: KernelCall) -> Layers:
    x, sizes = call.input, call.batch_sizes
    if sizes:
        steps, batch, rows = len(sizes), sizes[0], x.shape[0]
    else:
        batch, steps = x.shape[:2] if call.batch_first else (x.shape[1], x.shape[0])
        rows = batch * steps
    return Layers(
        call.mode, x.shape[-1], call.hidden_size, call.proj_size, call.num_layers,
        call.bidirectional, steps, batch, rows, bool(sizes), call.dropout if call.train else 0.0,
        x.dtype,
    )  # fmt: skip


def _in_steps(x: Tensor | None, call: KernelCall) -> Tensor | None:
    """Return `x` with the dimension of steps first, as cuDNN reads it; None if `x` is None. In `x`
    the steps come second if `call.batch_first` is set and the sequences are not packed."""
    return x if x is None or not call.batch_first or call.batch_sizes else x.transpose(0, 1)


@registry.requests(
    "_cudnn_rnn",
    when="a call of `_cudnn_rnn` has sizes that were measured",
    modelled=lambda c: is_measured(_layers(c), is_training=c.train),
)
def recurrent(c: KernelCall) -> Events:
    """Allocations of `_cudnn_rnn` (RNN.cpp): copies, outputs, states, workspace, reserve space.
    Inputs are copied unless contiguous step by step, weights unless they are one buffer."""
    events = c.outputs(0, 1, 2)
    if c.weight_buf is None:
        events += c.outputs(4)
    workspace = workspace_bytes(_layers(c), is_training=c.train)
    events += around((workspace,), c.outputs(3))
    return around(contiguous_copy(_in_steps(c.input, c)), events)


@registry.requests("_cudnn_rnn_backward")
def recurrent_backward(c: KernelCall) -> Events:
    """Allocations of `_cudnn_rnn_backward`: gradients of input and states, one buffer for weights.
    Zeros are allocated first for states without an incoming gradient."""
    states = [(c.output, c.grad_output), (c.hx, c.grad_hy), (c.cx, c.grad_cy)]
    zeros = [state.nbytes for state, grad in states if state is not None and grad is None]
    x_copy = contiguous_copy(_in_steps(c.input, c))
    grads = contiguous_copy(_in_steps(c.grad_output, c), c.grad_hy, c.grad_cy)
    workspace = workspace_bytes(_layers(c), is_training=True, is_backward=True)
    events = temporaries(*x_copy, *grads) + c.outputs(0, 1, 2)
    events += passing(workspace) + temporaries(*(-n for n in (*grads, *x_copy)))
    *_, needs_weights = c.output_mask
    if needs_weights:
        flat = c.weight_buf.nbytes
        weight_events = outputs({3: flat}) + passing(workspace)
        if c.weight_stride0 < 4:  # without biases the gradients are copied out of the buffer
            copies = outputs({3 + i: g.nbytes for i, g in enumerate(c.out[3])})
            weight_events = around((flat,), passing(workspace) + copies)
        events += around(x_copy, weight_events)
    return around(zeros, events)


def _sums_over_samples(c: KernelCall, gates: int, bias: int) -> Events:
    """Return the allocations of a bias gradient. It is result number `bias` and sums result number
    `gates` over the samples. [] if the call does not return it."""
    if c.out[bias] is None:
        return []
    tensor: Tensor = c.out[gates]
    return c.outputs(bias) + passing(*sum_bytes(tensor, (0,), tensor.dtype, c.gpu))


for _name, _about, _requests in (
    ("_thnn_fused_lstm_cell", "gates, then the states", lambda c: c.outputs(2, 0, 1)),
    ("_thnn_fused_gru_cell", "the tensor that backward needs, then the state",
     lambda c: c.outputs(1, 0)),
    ("_thnn_fused_lstm_cell_backward_impl", "gates, state, sums of gates",
     lambda c: c.outputs(0, 1) + _sums_over_samples(c, 0, 2)),
    ("_thnn_fused_gru_cell_backward", "gradients, each gate's sum over samples",
     lambda c: c.outputs(0, 1, 2) + _sums_over_samples(c, 0, 3) + _sums_over_samples(c, 1, 4)),
):  # fmt: skip
    register(_name, about=f"{_about} (cuda/RNN.cu)", requests=_requests)


_MODES = {"RNN_RELU": RNN_RELU, "RNN_TANH": RNN_TANH, "LSTM": LSTM, "GRU": GRU}
_FLATTENED = (torch.float16, torch.float32, torch.float64)
"""`CUDNN_TENSOR_DTYPES` of torch/backends/cudnn; bfloat16 weights are copied at each call."""

_dropout_states: list[Tensor] = []  # cuDNN's one generator state, made at the first drop


def install(patches: Patches) -> None:
    """Make `flatten_parameters` of torch.nn run as if cuDNN were available."""
    rnn: Any = import_module("torch.backends.cudnn.rnn")  # torch 2.9 has an object of that name
    patches.on_undo(_dropout_states.clear)
    patches.set(torch, "_use_cudnn_rnn_flatten_weight", lambda: True)
    patches.set(torch, "_cudnn_rnn_flatten_weight", flatten_weights)
    patches.set(rnn, "get_cudnn_mode", _MODES.__getitem__)
    patches.set(torch.backends.cudnn, "is_acceptable", is_acceptable)


def is_acceptable(tensor: Tensor) -> bool:
    """Return whether cuDNN supports `tensor`: `torch.backends.cudnn.is_acceptable`."""
    return torch._C._get_cudnn_enabled() and on_gpu(tensor) and tensor.dtype in _FLATTENED


def flatten_weights(weights: Sequence[Tensor], stride: int, *sizes: Any) -> Tensor:
    """Make `weights` views of one new buffer and return it: `_cudnn_rnn_flatten_weight`. `stride`
    is the number of parameters per layer and direction; `sizes` are not used."""
    buffer, views = _flat_copies(weights, stride, weights[0].dtype)
    for weight, view in zip(weights, views, strict=True):
        weight.set_(view)  # type: ignore[call-overload]
    return buffer


def _flat_copies(
    weights: Sequence[Tensor], stride: int, dtype: torch.dtype
) -> tuple[Tensor, list[Tensor]]:
    offsets, length = weight_places(weights, stride)
    buffer = torch.zeros(length, dtype=dtype, device=weights[0].device)
    pairs = zip(weights, offsets, strict=True)
    return buffer, [_tensor_at(buffer, offset, w.shape).copy_(w) for w, offset in pairs]


def _flat_buffer(weights: Sequence[Tensor], stride: int) -> Tensor | None:
    """Return the buffer of which `weights` are views in cuDNN's order (`try_get_weight_buf`), or
    None. `stride` is the number of parameters per layer and direction."""
    offsets, length = weight_places(weights, stride)
    first = weights[0]
    if first.untyped_storage().nbytes() < length * first.itemsize:
        return None
    if {storage_key(weight) for weight in weights} != {storage_key(first)}:
        return None
    if [weight.storage_offset() for weight in weights] != offsets:
        return None
    return _tensor_at(first, 0, torch.Size((length,)))


def _tensor_at(tensor: Tensor, offset: int, shape: torch.Size) -> Tensor:
    """Return a contiguous tensor of `shape` at `offset` (elements) in the storage of `tensor`. For
    autograd it is not a view of `tensor`."""
    result = torch.empty(0, dtype=tensor.dtype, device=META)
    stride = torch.empty(shape, device=META).stride()
    return result.set_(tensor.untyped_storage(), offset, shape, stride)


@registry.result("_cudnn_rnn")
def _forward_results(c: KernelCall) -> Any:
    layers, x, hx, cx, buffer = _layers(c), c.input, c.hx, c.cx, c.weight_buf
    width = (layers.proj_size or layers.hidden_size) * layers.directions
    if layers.is_packed:
        output = x.new_empty((layers.num_rows, width))
    else:
        output = x.new_empty((layers.num_steps, layers.batch, width))
        output = output.transpose(0, 1) if c.batch_first else output
    if buffer is None:
        _, length = weight_places(c.weight, c.weight_stride0)
        buffer = x.new_empty(length)
    reserve = x.new_empty(reserve_bytes(layers) if c.train else 0, dtype=torch.uint8)
    cy = hx.new_empty(0) if cx is None else torch.empty_like(cx)
    return output, torch.empty_like(hx), cy, reserve, buffer


@registry.result("_cudnn_rnn_backward")
def _backward_results(c: KernelCall) -> Any:
    """Return meta results of `_cudnn_rnn_backward`: gradients of input, states and weights. Those
    of weights are views of one buffer, except for layers without biases."""
    if c.grad_output is None and c.grad_hy is None and c.grad_cy is None:
        return None, None, None, [None] * len(c.weight)
    layers, x = _layers(c), c.input
    if c.batch_first and not layers.is_packed:
        dx = x.new_empty((layers.num_steps, layers.batch, x.shape[2])).transpose(0, 1)
    else:
        dx = x.new_empty(x.shape)
    grads: list[Tensor] = []
    if c.output_mask[3]:
        offsets, _ = weight_places(c.weight, c.weight_stride0)
        flat = torch.empty_like(c.weight_buf)
        grads = [
            flat.narrow(0, offset, weight.numel()).view(weight.shape)
            if c.weight_stride0 >= 4
            else torch.empty_like(weight, memory_format=torch.contiguous_format)
            for weight, offset in zip(c.weight, offsets, strict=True)
        ]
    d_cx = None if c.cx is None else torch.empty_like(c.cx)
    return dx, torch.empty_like(c.hx), d_cx, grads


register(  # cuda/RNN.cu: state, workspace for backward
    "_thnn_fused_gru_cell",
    result=lambda c: (torch.empty_like(c.hx), c.hx.new_empty((c.hx.shape[0], c.hx.shape[1] * 5))),
)


@registry.result("_thnn_fused_gru_cell_backward")
def _gru_cell_backward(c: KernelCall) -> Any:
    """Return meta results of `_thnn_fused_gru_cell_backward`: gradients of gates, state, biases."""
    rows, hidden = c.workspace.shape[0], c.workspace.shape[1] // 5
    gates = [c.workspace.new_empty((rows, hidden * 3)) for _ in range(2)]
    biases = [c.workspace.new_empty(hidden * 3) if c.has_bias else None for _ in range(2)]
    return *gates, torch.empty_like(c.grad_hy), *biases


def _packed_segments(x: Tensor, lengths: Tensor, batch_first: bool) -> list[Tensor]:
    """Return slices of the padded `x`: runs of steps with the same samples
    (`_pack_padded_sequence`). `lengths` has the steps of each sample. If `batch_first`, samples
    come before steps in `x`."""
    steps = x.transpose(0, 1) if batch_first else x
    segments, start = [], 0
    for end in sorted(set(lengths.tolist())):
        batch = int((lengths >= end).sum())
        segments.append(steps[start:end, :batch])
        start = end
    return segments


@registry.result("_pack_padded_sequence", may_mix_devices=True)
def _packed_results(c: KernelCall) -> Any:
    """Return the results of `_pack_padded_sequence`: (packed rows of all steps on meta, batch size
    of each step on the host)."""
    x, lengths = c.input, c.lengths
    if not on_gpu(x) or on_gpu(lengths):
        raise NotImplementedError("the lengths of packed sequences are on the host")
    segments = _packed_segments(*c.args)
    sizes = [s.shape[1] for s in segments for _ in range(s.shape[0])]
    return x.new_empty((int(lengths.sum()), *x.shape[2:])), torch.tensor(sizes, device=CPU)


op(
    "_pack_padded_sequence",
    "copies of segments with gaps (PackedSequence.cpp)",
    before=lambda c: contiguous_copy(*_packed_segments(*c.args)),
)


def _layer_rule(mode: int, is_packed: bool) -> Callable[..., Any]:
    def layer(next_kernel: Next, *args: Any) -> Any:
        """Run `_cudnn_impl` of RNN.cpp with the arguments of `torch.lstm`; without cuDNN run
        `next_kernel`. Return output, last hidden state and, for an LSTM, cell. Autocast casts
        inputs and states to float16, weights into a new buffer (`_cudnn_rnn_cast_reflatten`)."""
        x, batch_sizes = args[0], []
        if not torch._C._get_cudnn_enabled():
            return next_kernel(*args)
        if is_packed:
            batch_sizes = args[1].tolist()
            args = (x, *args[2:], False)
        states, weights, has_biases, num_layers, dropout, train, both, batch_first = args[1:9]
        hx, cx = states if mode == LSTM else (states, None)
        hidden, proj = hx.shape[2], 0
        if cx is not None and cx.shape[2] != hidden:
            hidden, proj = cx.shape[2], hidden
        stride = (4 if has_biases else 2) + (1 if proj else 0)
        buffer = _flat_buffer(weights, stride)
        if train and dropout > 0 and not _dropout_states:  # `get_dropout_state` of RNN.cpp
            torch.empty((), dtype=torch.int64, device=x.device).random_()  # the seed
            num_bytes = dropout_state_bytes(active_gpu())
            _dropout_states.append(torch.empty(num_bytes, dtype=torch.uint8, device=x.device))
        state = _dropout_states[0] if _dropout_states else None
        if torch.is_autocast_enabled("cuda"):
            if weights[0].dtype is not torch.float16:
                buffer, weights = _flat_copies(weights, stride, torch.float16)
            cx = None if cx is None else cx.half()  # C++ casts the last argument first
            hx = hx.half()
            x = x.half()
        out = aten._cudnn_rnn.default(
            x, weights, stride, buffer, hx, cx, mode, hidden, proj, num_layers, batch_first,
            dropout, train, both, batch_sizes, state,
        )  # fmt: skip
        output, hy, cy, *_ = out
        return (output, hy, cy) if mode == LSTM else (output, hy)

    return layer


for _packet, _mode in (
    (aten.lstm, LSTM), (aten.gru, GRU), (aten.rnn_tanh, RNN_TANH), (aten.rnn_relu, RNN_RELU),
):  # fmt: skip
    for _op, _is_packed in ((_packet.input, False), (_packet.data, True)):
        register(_op, above_autograd=_layer_rule(_mode, _is_packed))


@registry.above_autograd("lstm_cell")
def lstm_cell(
    _: Next, x: Tensor, hidden: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None
) -> tuple[Tensor, Tensor]:
    """Run `LSTMCell` of RNN.cpp: two products, and one kernel for the rest; return (h, c). `hidden`
    has the previous (h, c). `b_ih` and `b_hh` are the biases of both products, or None."""
    hx, cx = hidden
    gates = torch.matmul(x, w_ih.t()), torch.matmul(hx, w_hh.t())
    new_hx, new_cx, _ = aten._thnn_fused_lstm_cell.default(*gates, cx, b_ih, b_hh)
    return new_hx, new_cx


@registry.above_autograd("gru_cell")
def gru_cell(
    _: Next, x: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None
) -> Tensor:
    """Run `GRUCell` of RNN.cpp: two products, and one kernel for the rest; return the new state.
    `hx` is the previous one. `b_ih` and `b_hh` are the biases of both products, or None."""
    gates = torch.matmul(x, w_ih.t()), torch.matmul(hx, w_hh.t())
    new_hx, _ = aten._thnn_fused_gru_cell.default(*gates, hx, b_ih, b_hh)
    return new_hx
