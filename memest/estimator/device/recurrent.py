"""LSTM, GRU and RNN on the virtual GPU: cuDNN's operators in place of the many that meta runs.

torch decides in C++ (`ATen/native/RNN.cpp`) that layers on CUDA go to cuDNN and cells to fused
kernels. `KERNELS` puts the decision back where it is made, above autograd; `MADE_HERE` gives the
results of the operators that torch's meta device does not know. The weights of a layer become
views of one buffer when they are moved to the card, as `flatten_parameters` does it there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from memest.estimator.device.patches import Patches
from memest.estimator.device.tensors import META, on_gpu, storage_key
from memest.estimator.hardware.gpus import Gpu
from memest.estimator.kernels.indexing import contiguous_copy
from memest.estimator.kernels.recurrent import (
    GRU,
    LSTM,
    RNN_RELU,
    RNN_TANH,
    dropout_state_bytes,
    layers_of_backward,
    layers_of_forward,
    reserve_bytes,
    weight_offsets,
    weight_shapes,
    weight_shapes_of,
)
from memest.estimator.kernels.scratch import Events, outputs, temporaries

aten = torch.ops.aten

_MODES = {"RNN_RELU": RNN_RELU, "RNN_TANH": RNN_TANH, "LSTM": LSTM, "GRU": GRU}
_FLATTENED = (torch.float16, torch.float32, torch.float64)
"""`CUDNN_TENSOR_DTYPES` of torch/backends/cudnn: weights of bfloat16 stay apart, and are brought
together anew at each call.
"""

_dropout_states: list[Tensor] = []
"""The one state of cuDNN's generator, made when a layer first drops something."""


def install(patches: Patches) -> None:
    """Let `flatten_parameters` of torch.nn find a cuDNN."""
    from torch.backends.cudnn import rnn

    _dropout_states.clear()
    patches.set(torch, "_use_cudnn_rnn_flatten_weight", lambda: True)
    patches.set(torch, "_cudnn_rnn_flatten_weight", flatten_weights)
    patches.set(rnn, "get_cudnn_mode", _MODES.__getitem__)
    patches.set(torch.backends.cudnn, "is_acceptable", is_acceptable)


def forget() -> None:
    """Drop the state of the generator: the session ends."""
    _dropout_states.clear()


def is_acceptable(tensor: Tensor) -> bool:
    """As `torch.backends.cudnn.is_acceptable`: cuDNN is on and has kernels for the dtype."""
    return torch._C._get_cudnn_enabled() and on_gpu(tensor) and tensor.dtype in _FLATTENED


def flatten_weights(
    weights: Sequence[Tensor], stride: int, input_size: int, mode: int, hidden_size: int,
    proj_size: int, num_layers: int, batch_first: bool, is_bidirectional: bool,
) -> Tensor:  # fmt: skip
    """`_cudnn_rnn_flatten_weight`: `weights` become views of one new buffer, which is returned."""
    directions = 2 if is_bidirectional else 1
    shapes = weight_shapes(mode, input_size, hidden_size, proj_size, num_layers, directions)
    buffer, views = _flat_copies(weights, stride, shapes, weights[0].dtype)
    for weight, view in zip(weights, views, strict=True):
        weight.set_(view)  # type: ignore[call-overload]
    return buffer


def _flat_copies(
    weights: Sequence[Tensor], stride: int, shapes: list[list[tuple[int, ...]]], dtype: torch.dtype
) -> tuple[Tensor, list[Tensor]]:
    offsets, length = weight_offsets(shapes)
    buffer = torch.zeros(length, dtype=dtype, device=weights[0].device)
    views = []
    for weight, offset in zip(weights, _positions(offsets, stride), strict=True):
        views.append(_of_storage(buffer, offset, weight.shape).copy_(weight))
    return buffer, views


def _positions(offsets: list[list[int]], stride: int) -> list[int]:
    """Where each parameter lies that torch has, which are all, or all but the biases."""
    picks = {2: (0, 1), 3: (0, 1, 4)}.get(stride, tuple(range(stride)))
    return [one[pick] for one in offsets for pick in picks]


def _flat_buffer(
    weights: Sequence[Tensor], stride: int, shapes: list[list[tuple[int, ...]]]
) -> Tensor | None:
    """`try_get_weight_buf`: the buffer of which all weights are views, or None."""
    offsets, length = weight_offsets(shapes)
    first = weights[0]
    key = storage_key(first)
    if first.untyped_storage().nbytes() < length * first.itemsize:
        return None
    for weight, offset in zip(weights, _positions(offsets, stride), strict=True):
        if storage_key(weight) != key or weight.storage_offset() != offset:
            return None
    return _of_storage(first, 0, torch.Size((length,)))


def _of_storage(tensor: Tensor, offset: int, shape: torch.Size) -> Tensor:
    """A contiguous tensor in the storage of `tensor`, which for autograd is no view of it."""
    made = torch.empty(0, dtype=tensor.dtype, device=META)
    stride = torch.empty(shape, device=META).stride()
    return made.set_(tensor.untyped_storage(), offset, shape, stride)


def _dropout_state(dropout: float, train: bool, like: Tensor, gpu: Gpu) -> Tensor | None:
    """`get_dropout_state` of RNN.cpp; a seed is drawn on the card when the state is made."""
    if train and dropout > 0 and not _dropout_states:
        torch.empty((), dtype=torch.int64, device=like.device).random_()
        made = torch.empty(dropout_state_bytes(gpu), dtype=torch.uint8, device=like.device)
        _dropout_states.append(made)
    return _dropout_states[0] if _dropout_states else None


def run_cudnn(
    x: Tensor, batch_sizes: list[int], hx: Tensor, cx: Tensor | None, weights: list[Tensor],
    has_biases: bool, mode: int, num_layers: int, dropout: float, train: bool,
    is_bidirectional: bool, batch_first: bool, gpu: Gpu, autocast: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`_cudnn_impl` of RNN.cpp: output, last hidden state and last cell state.

    Under autocast (`_cudnn_rnn_cast_reflatten` of AutocastRNN.cpp) everything is cast, the weights
    into a flat buffer of their own.
    """
    hidden, proj = hx.shape[2], 0
    if cx is not None and cx.shape[2] != hidden:
        hidden, proj = cx.shape[2], hidden
    stride = (4 if has_biases else 2) + (1 if proj else 0)
    shapes = weight_shapes(
        mode, x.shape[-1], hidden, proj, num_layers, 2 if is_bidirectional else 1
    )
    buffer = _flat_buffer(weights, stride, shapes)
    state = _dropout_state(dropout, train, x, gpu)
    if autocast is not None and weights[0].dtype is not autocast:
        buffer, weights = _flat_copies(weights, stride, shapes, autocast)
    if autocast is not None:
        cx = None if cx is None else cx.to(autocast)  # C++ casts the last argument first
        hx = hx.to(autocast)
        x = x.to(autocast)
    out = aten._cudnn_rnn.default(
        x, weights, stride, buffer, hx, cx, mode, hidden, proj, num_layers, batch_first, dropout,
        train, is_bidirectional, batch_sizes, state,
    )  # fmt: skip
    return out[0], out[1], out[2]


def _forward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The results of `_cudnn_rnn`."""
    x, hx, cx, weight_buffer, train = args[0], args[4], args[5], args[3], args[12]
    layers = layers_of_forward(args)
    width = (layers.proj_size or layers.hidden_size) * layers.directions
    if layers.is_packed:
        output = x.new_empty((layers.num_rows, width))
    else:
        output = x.new_empty((layers.num_steps, layers.batch, width))
        output = output.transpose(0, 1) if args[10] else output
    if weight_buffer is None:
        weight_buffer = x.new_empty(weight_offsets(weight_shapes_of(layers))[1])
    reserve = x.new_empty(reserve_bytes(layers) if train else 0, dtype=torch.uint8)
    cy = hx.new_empty(0) if cx is None else torch.empty_like(cx)
    return output, torch.empty_like(hx), cy, reserve, weight_buffer


def _backward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The results of `_cudnn_rnn_backward`: those of the weights are views of one buffer, but for
    layers without biases.
    """
    x, weights, stride, flat, hx, cx = args[:6]
    if args[7] is None and args[8] is None and args[9] is None:
        return None, None, None, [None] * len(weights)
    layers = layers_of_backward(args)
    if args[14] and not layers.is_packed:
        dx = x.new_empty((layers.num_steps, layers.batch, x.shape[2])).transpose(0, 1)
    else:
        dx = x.new_empty(x.shape)
    grads: list[Tensor] = []
    if args[21][3]:
        offsets, _ = weight_offsets(weight_shapes_of(layers))
        made = torch.empty_like(flat)
        grads = [
            made.narrow(0, offset, weight.numel()).view(weight.shape)
            if stride >= 4
            else torch.empty_like(weight, memory_format=torch.contiguous_format)
            for weight, offset in zip(weights, _positions(offsets, stride), strict=True)
        ]
    return dx, torch.empty_like(hx), None if cx is None else torch.empty_like(cx), grads


def _gru_cell(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The results of `_thnn_fused_gru_cell` (cuda/RNN.cu): the state, and five rows to go back."""
    hx = args[2]
    return torch.empty_like(hx), hx.new_empty((hx.shape[0], hx.shape[1] * 5))


def _gru_cell_backward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The results of `_thnn_fused_gru_cell_backward`: of both gates, the state and both biases."""
    grad, workspace, has_bias = args
    rows, hidden = workspace.shape[0], workspace.shape[1] // 5
    gates = [workspace.new_empty((rows, hidden * 3)) for _ in range(2)]
    biases = [workspace.new_empty(hidden * 3) for _ in range(2)] if has_bias else [None, None]
    return gates[0], gates[1], torch.empty_like(grad), *biases


def _packed_segments(x: Tensor, lengths: Tensor, batch_first: bool) -> list[Tensor]:
    """`_pack_padded_sequence` (PackedSequence.cpp): the steps that have equally many sequences."""
    steps = x.transpose(0, 1) if batch_first else x
    found, start = [], 0
    for end in sorted(set(lengths.tolist())):
        batch = int((lengths >= end).sum())
        found.append(steps[start:end, :batch])
        start = end
    return found


def _packed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The rows of all steps, and on the host how many sequences each step has."""
    x, lengths, batch_first = args
    if not on_gpu(x) or on_gpu(lengths):
        raise NotImplementedError("the lengths of packed sequences are on the host")
    segments = _packed_segments(x, lengths, batch_first)
    sizes = [s.shape[1] for s in segments for _ in range(s.shape[0])]
    return x.new_empty((int(lengths.sum()), *x.shape[2:])), torch.tensor(sizes)


def packing_events(args: tuple[Any, ...], kwargs: Any, out: Any, gpu: Gpu) -> Events:
    """A copy of each segment that is not contiguous, then all of them in a row."""
    copies = contiguous_copy(*_packed_segments(*args))
    made = outputs({0: out[0].numel() * out[0].itemsize})
    return tuple(temporaries(*copies) + made + temporaries(*(-n for n in copies)))


MADE_HERE: dict[Any, Callable[[tuple[Any, ...], dict[str, Any]], Any]] = {
    aten._cudnn_rnn.default: _forward,
    aten._cudnn_rnn_backward.default: _backward,
    aten._pack_padded_sequence.default: _packed,
    aten._thnn_fused_gru_cell.default: _gru_cell,
    aten._thnn_fused_gru_cell_backward.default: _gru_cell_backward,
}
"""Operator -> its results as meta tensors, from `(args, kwargs)`."""

MakeKernel = Callable[[Any, Callable[[], tuple[Gpu, torch.dtype | None]]], Callable[..., Any]]


def kernels(
    below: Any, decisions: Callable[[], tuple[Gpu, torch.dtype | None]]
) -> dict[str, Callable[..., Any]]:
    """The kernels of the layers and cells by the names of the operators they stand for.

    Args:
        below: the key set that what is not for the card goes on with.
        decisions: the GPU, and the dtype of autocast where it is on.
    """
    made: dict[str, Callable[..., Any]] = {}
    for name, mode in (
        ("lstm", LSTM),
        ("gru", GRU),
        ("rnn_tanh", RNN_TANH),
        ("rnn_relu", RNN_RELU),
    ):
        for overload in ("input", "data"):
            op = getattr(getattr(aten, name), overload)
            made[f"{name}.{overload}"] = _layer_kernel(
                op, mode, overload == "data", below, decisions
            )
    made["lstm_cell"] = _cell_kernel(aten.lstm_cell.default, below)
    made["gru_cell"] = _cell_kernel(aten.gru_cell.default, below)
    return made


def _layer_kernel(
    op: Any, mode: int, is_packed: bool, below: Any,
    decisions: Callable[[], tuple[Gpu, torch.dtype | None]],
) -> Callable[..., Any]:  # fmt: skip
    def layer(keyset: Any, *args: Any) -> Any:
        x = args[0]
        if not on_gpu(x) or not torch._C._get_cudnn_enabled():
            return op.redispatch(keyset & below, *args)
        batch_sizes: list[int] = []
        if is_packed:
            batch_sizes = args[1].tolist()
            args = (x, *args[2:], False)
        hidden, weights, biases, num_layers, dropout, train, both, batch_first = args[1:9]
        hx, cx = hidden if mode == LSTM else (hidden, None)
        gpu, autocast = decisions()
        output, hy, cy = run_cudnn(
            x, batch_sizes, hx, cx, list(weights), biases, mode, num_layers, dropout, train, both,
            batch_first, gpu, autocast,
        )  # fmt: skip
        return (output, hy, cy) if mode == LSTM else (output, hy)

    return layer


def _cell_kernel(op: Any, below: Any) -> Callable[..., Any]:
    """`LSTMCell` and `GRUCell` of RNN.cpp: two products, and one kernel for the rest."""

    def cell(keyset: Any, x: Tensor, hidden: Any, w_ih: Tensor, w_hh: Tensor, *biases: Any) -> Any:
        if not on_gpu(x):
            return op.redispatch(keyset & below, x, hidden, w_ih, w_hh, *biases)
        hx = hidden[0] if op is aten.lstm_cell.default else hidden
        gates = torch.matmul(x, w_ih.t()), torch.matmul(hx, w_hh.t())
        b_ih, b_hh = (*biases, None, None)[:2]
        if op is aten.lstm_cell.default:
            out = aten._thnn_fused_lstm_cell.default(*gates, hidden[1], b_ih, b_hh)
            return out[0], out[1]
        return aten._thnn_fused_gru_cell.default(*gates, hx, b_ih, b_hh)[0]

    return cell
