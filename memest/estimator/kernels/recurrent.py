"""What cuDNN's recurrent layers ask for: weights, workspace, reserve space, and in which order.

torch calls cuDNN for LSTM, GRU and RNN (`ATen/native/cudnn/RNN.cpp` of torch 2.11). What cuDNN asks
for it does not publish; the formulas here were read off 575 layers on an H100 (cuDNN 9.19): cells,
1 to 4 layers, both directions, 5 to 256 steps, batches of 1 to 128, widths of 16 to 1500, float32,
float16, bfloat16, float64, packed and not; and off 1,350 of 16 to 1000 steps and batches of up to
512, not packed, of which 1,331 are exact. Weights, reserve space and the workspace of inference
are exact to the allocator's 512 B for all without projection; the workspace of training, the
larger of a forward and a backward part, for 517 of 567 of the former, within 4 % for 556.
`is_measured` names most of the rest; 8 that are off by more than 2 % (at most 24 %) it takes for
right.

Shapes: T steps, B sequences, N = T * B rows (fewer where packed), I input width, H hidden width, L
layers, D directions, gates G of 4 (LSTM), 3 (GRU) or 1 (RNN).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memest.estimator.hardware.gpus import Gpu
from memest.estimator.kernels.indexing import contiguous_copy
from memest.estimator.kernels.reductions import sum_bytes
from memest.estimator.kernels.scratch import (
    Events,
    KernelEvent,
    bytes_of,
    outputs,
    passing,
    temporaries,
)

aten = torch.ops.aten

RNN_RELU, RNN_TANH, LSTM, GRU = range(4)
"""`cudnnRNNMode_t`."""

_GATES = {RNN_RELU: 1, RNN_TANH: 1, LSTM: 4, GRU: 3}
_KEPT = {RNN_RELU: 1, RNN_TANH: 1, LSTM: 5, GRU: 6}
"""Rows of N * H that the reserve space keeps of each layer: gates, cell states, inner products."""

_STATES = {RNN_RELU: (1, 3, 4), RNN_TANH: (1, 3, 4), LSTM: (6, 10, 8), GRU: (3, 5, 4)}
"""Rows of B * H of each layer in a forward workspace: packed, padded, small-H algorithm."""

_BACKWARD_STATES = {RNN_RELU: (1, 5, 6), RNN_TANH: (1, 5, 6), LSTM: (7, 11, 12), GRU: (3, 5, 6)}
_SMALL_BACKWARD = {RNN_RELU: 12, RNN_TANH: 12, LSTM: 15, GRU: 17}
_LAYER_WORKSPACE_BYTES = 8 << 20
"""For the matrix products of each layer and direction."""

MOST_STEPS = 256
"""Steps whose inputs are multiplied at once in one direction, where kernels are not persistent."""

_ALIGN = 256
_MASK_ALIGN = 32


@dataclass(frozen=True, slots=True)
class Layers:
    """One call of cuDNN."""

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
        """1 or 2."""
        return 2 if self.is_bidirectional else 1


def weight_shapes(
    mode: int, input_size: int, hidden_size: int, proj_size: int, num_layers: int, directions: int
) -> list[list[tuple[int, ...]]]:
    """Shapes of the parameters of each layer and direction: two matrices, two biases, and the
    projection where there is one.
    """
    gates, out = _GATES[mode] * hidden_size, proj_size or hidden_size
    shapes = []
    for layer in range(num_layers):
        width = input_size if layer == 0 else out * directions
        one: list[tuple[int, ...]] = [(gates, width), (gates, out), (gates,), (gates,)]
        shapes += [one + ([(proj_size, hidden_size)] if proj_size else [])] * directions
    return shapes


def weight_offsets(shapes: Sequence[Sequence[tuple[int, ...]]]) -> tuple[list[list[int]], int]:
    """Where each parameter begins in the one buffer, and its length: all matrices, then all
    biases.
    """
    offsets = [[0] * len(one) for one in shapes]
    position = 0
    for wants_matrix in (True, False):
        for i, one in enumerate(shapes):
            for j, shape in enumerate(one):
                if (len(shape) == 2) is wants_matrix:
                    offsets[i][j] = position
                    position += torch.Size(shape).numel()
    return offsets, position


def _matrix_elements(layers: Layers) -> int:
    shapes = weight_shapes(
        layers.mode, layers.input_size, layers.hidden_size, layers.proj_size, layers.num_layers,
        layers.directions,
    )  # fmt: skip
    return sum(torch.Size(s).numel() for one in shapes for s in one if len(s) == 2)


def uses_small_algorithm(layers: Layers, *, forward: bool) -> bool:
    """Whether `get_algo` of RNN.cpp takes the persistent kernels, but not those of bfloat16 and
    double, which cuDNN has none of.
    """
    if layers.proj_size or layers.is_packed or layers.dtype is torch.float64:
        return False
    is_plain = layers.mode in (RNN_RELU, RNN_TANH)
    limit = (384 if forward else 256) if is_plain else (192 if forward else 128)
    return layers.hidden_size <= limit and layers.dtype is not torch.bfloat16


def uses_static_algorithm(layers: Layers) -> bool:
    """Whether `get_algo` takes `CUDNN_RNN_ALGO_PERSIST_STATIC`: float16, one layer of a width that
    is a multiple of 128.
    """
    h, b = layers.hidden_size, layers.batch
    is_fit = layers.num_layers == 1 and h <= 1024 and not h % 128 and not layers.input_size % 128
    if layers.dtype is not torch.float16 or layers.is_packed or layers.proj_size or not is_fit:
        return False
    if layers.directions == 2 or layers.mode == GRU or b % 8 or b > 128:
        return False
    return layers.mode == LSTM or b < 96 or h < 896


def reserve_bytes(layers: Layers) -> int:
    """The reserve space of a training pass: what the backward pass needs of each layer, the outputs
    of all but the last, and a bit for each of them that dropout may drop.
    """
    size, d, n = layers.dtype.itemsize, layers.directions, layers.num_rows
    h, num = layers.hidden_size, layers.num_layers
    kept = _KEPT[layers.mode] + (1 if layers.proj_size else 0)
    rows = (kept + 1) * num - 1
    total = n * d * size * (rows * h + num * layers.proj_size)
    total = -(-total // _MASK_ALIGN) * _MASK_ALIGN + _ALIGN
    if layers.dropout and num > 1:
        mask = -(-d * d * layers.num_steps * layers.batch * h // 8)
        total += (num - 1) * -(-mask // _MASK_ALIGN) * _MASK_ALIGN
    return total


def _common_bytes(layers: Layers) -> int:
    """The matrices in another layout, room for matrix products, and the lengths of sequences."""
    lengths = 0 if layers.is_packed else 8 * layers.batch
    room = layers.num_layers * layers.directions * _LAYER_WORKSPACE_BYTES
    return _matrix_elements(layers) * layers.dtype.itemsize + room + _ALIGN + lengths


def inference_workspace_bytes(layers: Layers) -> int:
    """The workspace of a forward pass."""
    h, n, d, num = layers.hidden_size, layers.num_rows, layers.directions, layers.num_layers
    gates = _GATES[layers.mode]
    is_small = uses_small_algorithm(layers, forward=True) or uses_static_algorithm(layers)
    rows = n * gates * h * d
    if d == 1 and not is_small and not layers.is_packed:
        rows = min(layers.num_steps, MOST_STEPS) * layers.batch * gates * h * d
    if not layers.is_packed:
        rows += n * (layers.input_size + d * h)
    if is_small:
        rows += 4 * gates * n * h
    if d == 2:
        rows += 4 * n * h + (2 if is_small else 4) * num * layers.batch * h
    kind = 0 if layers.is_packed else 2 if is_small else 1
    rows += _STATES[layers.mode][kind] * layers.batch * h * num * d
    return _common_bytes(layers) + rows * layers.dtype.itemsize


def _backward_workspace_bytes(layers: Layers) -> int:
    h, i, n, d = layers.hidden_size, layers.input_size, layers.num_rows, layers.directions
    num, states = layers.num_layers, layers.batch * h * layers.num_layers
    per = _BACKWARD_STATES[layers.mode]
    if uses_small_algorithm(layers, forward=False):
        widths = (_SMALL_BACKWARD[layers.mode] + (num > 1)) * h * d + 2 * i + max(h, i)
        rows = n * widths + per[2] * states * d
        return _common_bytes(layers) + rows * layers.dtype.itemsize
    copies = 0 if layers.is_packed else 2 * n * (d * h + i)
    states *= per[0 if layers.is_packed else 1] * d
    if d == 2:
        rows = (
            n * max((6 + 2 * (num > 1)) * h, (5 + (num > 1)) * h + i) + 4 * num * layers.batch * h
        )
    else:
        rows = n * max(h, i) + min(layers.num_steps, _chunk(layers)) * layers.batch * h
    return _common_bytes(layers) + (rows + copies + states) * layers.dtype.itemsize


def _chunk(layers: Layers) -> int:
    """Steps whose gradients are worked on at once: all of a single layer, else so many."""
    if layers.num_layers == 1:
        return layers.num_steps
    if layers.batch < 8:
        return 96 if layers.batch == 1 else 48
    if layers.batch <= 16:
        return 8 * (layers.num_layers + 1)
    return 16 if layers.hidden_size <= 512 and layers.num_steps <= MOST_STEPS else 24


def training_workspace_bytes(layers: Layers) -> int:
    """The workspace of a training pass, which both of its directions ask for."""
    forward = inference_workspace_bytes(layers)
    if layers.dropout and layers.directions == 1:
        forward += layers.num_rows * layers.hidden_size * layers.dtype.itemsize
    return max(forward, _backward_workspace_bytes(layers))


def dropout_state_bytes(gpu: Gpu) -> int:
    """The state of cuDNN's generator: 24 B for each of 2048 threads on every multiprocessor."""
    return gpu.num_sms * 2048 * 24


def is_measured(layers: Layers, *, is_training: bool) -> bool:
    """Whether the sizes are among those that were exact: without projections, and in training
    neither with the persistent kernels in both directions nor packed and narrower than its input.
    """
    if layers.proj_size or (layers.is_packed and layers.num_steps > MOST_STEPS):
        return False
    if not is_training:
        return True
    if layers.directions == 2 and uses_small_algorithm(layers, forward=True):
        return False
    if layers.mode in (RNN_RELU, RNN_TANH) and uses_static_algorithm(layers):
        return False
    return not (layers.is_packed and layers.hidden_size < layers.input_size)


def layers_of_forward(args: tuple[Any, ...]) -> Layers:
    """What a call of `_cudnn_rnn` asks of cuDNN."""
    return _layers(args[0], *args[6:10], *args[10:15])


def layers_of_backward(args: tuple[Any, ...]) -> Layers:
    """What a call of `_cudnn_rnn_backward` asks of cuDNN."""
    return _layers(args[0], *args[10:14], *args[14:19])


def _layers(
    x: Tensor, mode: int, hidden: int, proj: int, num_layers: int, batch_first: bool,
    dropout: float, train: bool, bidirectional: bool, batch_sizes: Sequence[int],
) -> Layers:  # fmt: skip
    if batch_sizes:
        steps, batch, rows = len(batch_sizes), batch_sizes[0], x.shape[0]
    else:
        batch, steps = (x.shape[0], x.shape[1]) if batch_first else (x.shape[1], x.shape[0])
        rows = batch * steps
    return Layers(
        mode, x.shape[-1], hidden, proj, num_layers, bidirectional, steps, batch, rows,
        bool(batch_sizes), dropout if train else 0.0, x.dtype,
    )  # fmt: skip


def _in_steps(x: Tensor, args: tuple[Any, ...], batch_first: int, batch_sizes: int) -> Tensor:
    return x.transpose(0, 1) if args[batch_first] and not args[batch_sizes] else x


def recurrent_events(args: tuple[Any, ...], kwargs: Any, out: Any, gpu: Gpu) -> Events:
    """`_cudnn_rnn` of RNN.cpp: a copy of an input that is not contiguous step by step, the outputs
    and last states, the weights where they lie apart, workspace and reserve space.
    """
    layers = layers_of_forward(args)
    copies = contiguous_copy(_in_steps(args[0], args, 10, 14))
    made = outputs({i: bytes_of(out[i]) for i in range(3)})
    if args[3] is None:
        made += outputs({4: bytes_of(out[4])})
    train = args[12]
    workspace = (training_workspace_bytes if train else inference_workspace_bytes)(layers)
    made += temporaries(workspace) + outputs({3: bytes_of(out[3])})
    return tuple(temporaries(*copies) + made + temporaries(-workspace, *(-n for n in copies)))


def recurrent_backward_events(args: tuple[Any, ...], kwargs: Any, out: Any, gpu: Gpu) -> Events:
    """`_cudnn_rnn_backward`: zeros for the gradients of states that nobody asked for, the gradients
    of input and states, then those of the weights in one buffer.
    """
    layers = layers_of_backward(args)
    x, hx, cx, grad, grad_hy, grad_cy = args[0], args[4], args[5], args[7], args[8], args[9]
    zeros = [bytes_of(args[6])] if grad is None else []
    zeros += [bytes_of(hx)] if grad_hy is None else []
    zeros += [bytes_of(cx)] if cx is not None and grad_cy is None else []
    x_copy = contiguous_copy(_in_steps(x, args, 14, 18))
    grads = contiguous_copy(None if grad is None else _in_steps(grad, args, 14, 18))
    grads += contiguous_copy(grad_hy, grad_cy)
    workspace = training_workspace_bytes(layers)
    between = temporaries(workspace, -workspace)
    events = temporaries(*zeros, *x_copy, *grads)
    events += outputs({i: bytes_of(out[i]) for i in range(3) if out[i] is not None})
    events += between + temporaries(*(-n for n in (*grads, *x_copy)))
    if args[21][3]:
        flat = bytes_of(args[3])
        is_own = args[2] < 4
        events += temporaries(*x_copy)
        events += temporaries(flat) if is_own else [KernelEvent(flat, 3)]
        events += between
        if is_own:  # without biases the gradients are copied out of the buffer
            events += outputs({3 + i: bytes_of(g) for i, g in enumerate(out[3])})
            events += temporaries(-flat)
        events += temporaries(*(-n for n in x_copy))
    return tuple(events + temporaries(*(-n for n in reversed(zeros))))


def weight_shapes_of(layers: Layers) -> list[list[tuple[int, ...]]]:
    """The shapes of the parameters of `layers`; see `weight_shapes`."""
    return weight_shapes(
        layers.mode, layers.input_size, layers.hidden_size, layers.proj_size, layers.num_layers,
        layers.directions,
    )  # fmt: skip


def recurrent_is_modelled(func: Any, args: tuple[Any, ...], kwargs: Any, gpu: Gpu) -> bool:
    """Whether a call of `_cudnn_rnn` has sizes that were measured."""
    return is_measured(layers_of_forward(args), is_training=bool(args[12]))


def lstm_cell_events(args: tuple[Any, ...], kwargs: Any, out: Any, gpu: Gpu) -> Events:
    """`_thnn_fused_lstm_cell` (cuda/RNN.cu): what the gradient needs, then the states."""
    return tuple(outputs({i: bytes_of(out[i]) for i in (2, 0, 1)}))


def gru_cell_events(args: tuple[Any, ...], kwargs: Any, out: Any, gpu: Gpu) -> Events:
    """`_thnn_fused_gru_cell`, likewise."""
    return tuple(outputs({i: bytes_of(out[i]) for i in (1, 0)}))


def lstm_cell_backward_events(args: tuple[Any, ...], kwargs: Any, out: Any, gpu: Gpu) -> Events:
    """`_thnn_fused_lstm_cell_backward_impl`: the gradients of gates and state, and the sum of the
    gates' over the samples.
    """
    gates, state, bias = out
    if gates is None:
        return ()
    events = outputs({0: bytes_of(gates), 1: bytes_of(state)})
    if bias is not None:
        events += outputs({2: bytes_of(bias)}) + passing(*sum_bytes(gates, (0,), gates.dtype, gpu))
    return tuple(events)


def gru_cell_backward_events(args: tuple[Any, ...], kwargs: Any, out: Any, gpu: Gpu) -> Events:
    """`_thnn_fused_gru_cell_backward`: the gradients of both gates and the state, and the sum of
    either gates' over the samples.
    """
    events = outputs({i: bytes_of(out[i]) for i in (0, 1, 2)})
    for gates, position in ((out[0], 3), (out[1], 4)):
        if out[position] is not None:
            staged = sum_bytes(gates, (0,), gates.dtype, gpu)
            events += outputs({position: bytes_of(out[position])}) + passing(*staged)
    return tuple(events)


RECURRENT_EVENTS = {
    aten._cudnn_rnn.default: recurrent_events,
    aten._cudnn_rnn_backward.default: recurrent_backward_events,
    aten._thnn_fused_lstm_cell.default: lstm_cell_events,
    aten._thnn_fused_gru_cell.default: gru_cell_events,
    aten._thnn_fused_lstm_cell_backward_impl.default: lstm_cell_backward_events,
    aten._thnn_fused_gru_cell_backward.default: gru_cell_backward_events,
}
"""What each operation asks of the allocator, in order."""
