"""Sizes of cuDNN's recurrent layers: weights, workspaces, reserve space.

cuDNN does not publish its sizes; the formulas are fitted to calls on an H100 (cuDNN 9.19). 575
layers have all cells, 1 to 4 layers, both directions, 5 to 256 steps, batches of 1 to 128, widths
of 16 to 1500 and all float types, packed and not. 1,350 more have 16 to 1000 steps and batches of
up to 512, not packed; 1,331 are exact.

Weights, reserve space and the workspace of inference are exact to the allocator's 512 B for all
without projection. The workspace of training, the larger of a forward and a backward part, is exact
for 517 of 567, within 4 % for 556. `is_measured` is false for most of the rest; for 8 that are off
by more than 2 % (at most 24 %) it is true.

Shapes: T steps, B sequences, N = T * B rows (fewer where packed), I input width, H hidden width, L
layers, D directions, G gates: 4 (LSTM), 3 (GRU) or 1 (RNN).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from memest.estimator.hardware.gpus import Gpu
from memest.units import ceil_div, round_up

RNN_RELU, RNN_TANH, LSTM, GRU = range(4)  # `cudnnRNNMode_t`
_GATES = {RNN_RELU: 1, RNN_TANH: 1, LSTM: 4, GRU: 3}
_KEPT = {RNN_RELU: 1, RNN_TANH: 1, LSTM: 5, GRU: 6}  # rows of N * H in a layer's reserve space
_STATES = {RNN_RELU: (1, 3, 4), RNN_TANH: (1, 3, 4), LSTM: (6, 10, 8), GRU: (3, 5, 4)}
"""Rows of B * H of each layer in a forward workspace: packed, padded, small-H algorithm."""

_BACKWARD_STATES = {RNN_RELU: (1, 5, 6), RNN_TANH: (1, 5, 6), LSTM: (7, 11, 12), GRU: (3, 5, 6)}
_SMALL_BACKWARD = {RNN_RELU: 12, RNN_TANH: 12, LSTM: 15, GRU: 17}
_LAYER_WORKSPACE_BYTES = 8 << 20  # for the matrix products of each layer and direction
MOST_STEPS = 256  # in one matrix product of inputs, for kernels that are not persistent
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
        """Number of directions, 1 or 2."""
        return 2 if self.is_bidirectional else 1


def weight_shapes(
    mode: int, input_size: int, hidden_size: int, proj_size: int, num_layers: int, directions: int
) -> list[list[tuple[int, ...]]]:
    """Shapes of each layer's and direction's two matrices, two biases, and projection."""
    gates, out = _GATES[mode] * hidden_size, proj_size or hidden_size
    shapes = []
    for layer in range(num_layers):
        width = input_size if layer == 0 else out * directions
        one: list[tuple[int, ...]] = [(gates, width), (gates, out), (gates,), (gates,)]
        shapes += [one + ([(proj_size, hidden_size)] if proj_size else [])] * directions
    return shapes


def weight_offsets(shapes: Sequence[Sequence[tuple[int, ...]]]) -> tuple[list[list[int]], int]:
    """Return start and length of each parameter in the buffer: all matrices, then biases."""
    offsets = [[0] * len(one) for one in shapes]
    position = 0
    for wants_matrix in (True, False):
        for i, one in enumerate(shapes):
            for j, shape in enumerate(one):
                if (len(shape) == 2) is wants_matrix:
                    offsets[i][j] = position
                    position += torch.Size(shape).numel()
    return offsets, position


def weight_shapes_of(layers: Layers) -> list[list[tuple[int, ...]]]:
    """The shapes of the parameters of `layers`; see `weight_shapes`."""
    return weight_shapes(
        layers.mode, layers.input_size, layers.hidden_size, layers.proj_size, layers.num_layers,
        layers.directions,
    )  # fmt: skip


def _matrix_elements(layers: Layers) -> int:
    shapes = weight_shapes_of(layers)
    return sum(torch.Size(s).numel() for one in shapes for s in one if len(s) == 2)


def uses_small_algorithm(layers: Layers, *, forward: bool) -> bool:
    """Return whether `get_algo` of RNN.cpp takes the persistent kernels.

    cuDNN has none for bfloat16 and double.
    """
    if layers.proj_size or layers.is_packed or layers.dtype is torch.float64:
        return False
    is_plain = layers.mode in (RNN_RELU, RNN_TANH)
    limit = (384 if forward else 256) if is_plain else (192 if forward else 128)
    return layers.hidden_size <= limit and layers.dtype is not torch.bfloat16


def uses_static_algorithm(layers: Layers) -> bool:
    """Return whether `get_algo` takes `CUDNN_RNN_ALGO_PERSIST_STATIC`.

    It does for float16 and one layer, whose width is a multiple of 128.
    """
    h, b = layers.hidden_size, layers.batch
    is_fit = layers.num_layers == 1 and h <= 1024 and not h % 128 and not layers.input_size % 128
    if layers.dtype is not torch.float16 or layers.is_packed or layers.proj_size or not is_fit:
        return False
    if layers.directions == 2 or layers.mode == GRU or b % 8 or b > 128:
        return False
    return layers.mode == LSTM or b < 96 or h < 896


def reserve_bytes(layers: Layers) -> int:
    """Return the bytes of the reserve space of a training pass.

    It has a part for each layer, the outputs of all except the last, and a bit for each output.
    """
    size, d, n = layers.dtype.itemsize, layers.directions, layers.num_rows
    h, num = layers.hidden_size, layers.num_layers
    kept = _KEPT[layers.mode] + (1 if layers.proj_size else 0)
    rows = (kept + 1) * num - 1
    total = n * d * size * (rows * h + num * layers.proj_size)
    total = round_up(total, _MASK_ALIGN) + _ALIGN
    if layers.dropout and num > 1:
        mask = ceil_div(d * d * layers.num_steps * layers.batch * h, 8)
        total += (num - 1) * round_up(mask, _MASK_ALIGN)
    return total


def _common_bytes(layers: Layers) -> int:
    """Bytes of matrices in another layout, room for matrix products, and sequence lengths."""
    lengths = 0 if layers.is_packed else 8 * layers.batch
    room = layers.num_layers * layers.directions * _LAYER_WORKSPACE_BYTES
    return _matrix_elements(layers) * layers.dtype.itemsize + room + _ALIGN + lengths


def inference_workspace_bytes(layers: Layers) -> int:
    """Return the bytes of the workspace of a forward pass in inference."""
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
    """Return the number of steps whose gradients are computed at once."""
    if layers.num_layers == 1:
        return layers.num_steps
    if layers.batch < 8:
        return 96 if layers.batch == 1 else 48
    if layers.batch <= 16:
        return 8 * (layers.num_layers + 1)
    return 16 if layers.hidden_size <= 512 and layers.num_steps <= MOST_STEPS else 24


def training_workspace_bytes(layers: Layers) -> int:
    """Return the bytes of the workspace of a training pass, which both of its directions need."""
    forward = inference_workspace_bytes(layers)
    if layers.dropout and layers.directions == 1:
        forward += layers.num_rows * layers.hidden_size * layers.dtype.itemsize
    return max(forward, _backward_workspace_bytes(layers))


def dropout_state_bytes(gpu: Gpu) -> int:
    """State of cuDNN's generator: 24 B for each of 2048 threads on every multiprocessor."""
    return gpu.num_sms * 2048 * 24


def is_measured(layers: Layers, *, is_training: bool) -> bool:
    """Return whether the sizes were exact in measurements.

    Projections are not; in training neither are bidirectional persistent kernels nor packed layers
    narrower than their input.
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
