"""What cuDNN asks for, as it was recorded on an H100 (torch 2.11+cu130, cuDNN 9.19)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.ops.recurrent import (
    GRU,
    LSTM,
    RNN_RELU,
    RNN_TANH,
    Layers,
    dropout_state_bytes,
    reserve_bytes,
    weight_places,
    workspace_bytes,
)
from tests.op_calls import meta, requests

aten = torch.ops.aten

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "recurrent.json").read_text())


@pytest.mark.parametrize("recorded", RECORDED["layers"], ids=str)
def test_workspaces_of_up_to_1000_steps_are_those_recorded(recorded):
    """Beyond 256 steps the inputs are multiplied in parts."""
    kind, steps, batch, width, hidden, num_layers, dtype, is_training, is_both, recorded_bytes = (
        recorded
    )
    layers = _layers(
        {"LSTM": LSTM, "GRU": GRU, "RNN": RNN_TANH}[kind], input_size=width, hidden_size=hidden,
        num_layers=num_layers, is_bidirectional=is_both, num_steps=steps, batch=batch,
        num_rows=steps * batch, dtype=getattr(torch, dtype),
    )  # fmt: skip

    found = workspace_bytes(layers, is_training=is_training)

    assert -(-found // 512) == -(-recorded_bytes // 512)


@pytest.mark.parametrize("asked", RECORDED["asked"], ids=str)
def test_sizes_are_those_that_cudnn_answered(asked):
    kind, steps, batch, rows, width, hidden, num_layers, dtype, is_both, is_packed, *rest = asked
    dropout, inference, training, reserve = rest
    layers = _layers(
        {"LSTM": LSTM, "GRU": GRU, "RNN": RNN_TANH, "RELU": RNN_RELU}[kind], input_size=width,
        hidden_size=hidden, num_layers=num_layers, is_bidirectional=is_both, num_steps=steps,
        batch=batch, num_rows=rows, is_packed=is_packed, dropout=dropout,
        dtype=getattr(torch, dtype),
    )  # fmt: skip

    assert workspace_bytes(layers, is_training=True) == pytest.approx(training, abs=512)
    assert reserve_bytes(layers) == pytest.approx(reserve, abs=512)
    if inference:
        found = workspace_bytes(layers, is_training=False)
        assert found == pytest.approx(inference, abs=512)


def _layers(mode, **changes):
    base = dict(
        mode=mode, input_size=512, hidden_size=768, proj_size=0, num_layers=2,
        is_bidirectional=False, num_steps=128, batch=16, num_rows=2048, is_packed=False,
        dropout=0.0, dtype=torch.float32,
    )  # fmt: skip
    return Layers(**(base | changes))


@pytest.mark.parametrize(
    ("layers", "inference", "reserve"),
    [
        (_layers(LSTM), 88015232, 69206272),
        (_layers(LSTM, num_layers=1), 60260736, 31457536),
        (_layers(LSTM, num_layers=3), 115769728, 106955008),
        (_layers(LSTM, hidden_size=128), 44958080, 11534592),
        (_layers(LSTM, num_layers=1, is_bidirectional=True), 141689216, 62914816),
        (_layers(LSTM, is_packed=True, num_rows=1353), 68595968, 45720832),
    ],
)
def test_a_pass_asks_for_what_was_recorded(layers, inference, reserve):
    assert abs(workspace_bytes(layers, is_training=False) - inference) <= 512
    assert abs(reserve_bytes(layers) - reserve) <= 512


def test_dropout_keeps_a_bit_for_each_output_and_asks_for_one_more_row_in_training():
    layers = _layers(LSTM, dropout=0.2)
    assert reserve_bytes(layers) == 69402880
    assert workspace_bytes(layers, is_training=True) == 94306688


def test_the_backward_of_a_width_that_is_small_for_the_forward_alone_takes_standard_kernels():
    layers = _layers(
        LSTM, input_size=512, hidden_size=150, num_steps=50, batch=16, num_rows=800, dropout=0.5
    )
    backward = workspace_bytes(layers, is_training=True, is_backward=True)
    assert backward == pytest.approx(25403200, abs=512)  # cuDNN's answer for standard kernels
    assert workspace_bytes(layers, is_training=True) > 1.1 * backward


@pytest.mark.parametrize("mode", [GRU, RNN_TANH])
def test_training_never_asks_for_less_than_inference(mode):
    for hidden in (64, 256, 768):
        layers = _layers(mode, hidden_size=hidden)
        inference = workspace_bytes(layers, is_training=False)
        assert workspace_bytes(layers, is_training=True) >= inference


def test_all_matrices_come_before_all_biases_in_the_one_buffer():
    weights = [meta(*shape) for width in (512, 768) for shape in _parameters(width, 768)]
    places, length = weight_places(weights, 4)
    assert length * 4 == 34652160
    assert places[5] < places[2] < places[7] < length
    assert weight_places([w for w in weights if w.dim() == 2], 2) == (
        [places[i] for i in (0, 1, 4, 5)],
        length,
    )


def _parameters(width, hidden):
    return (4 * hidden, width), (4 * hidden, hidden), (4 * hidden,), (4 * hidden,)


def test_the_generator_keeps_a_state_for_every_thread_of_the_gpu():
    assert dropout_state_bytes(find_gpu("h100-80gb")) == 6488064


def test_cells_make_what_their_gradient_needs_first() -> None:
    gates, state = meta(64, 3072), meta(64, 768)

    bias = meta(3072)
    found = requests(aten._thnn_fused_lstm_cell.default, gates, gates, state, bias, bias)
    assert found == [786432, 196608, 196608]
    found = requests(aten._thnn_fused_gru_cell.default, meta(64, 2304), meta(64, 2304), state)
    assert found == [64 * 768 * 5 * 4, 196608]


def test_the_gradient_of_a_gru_cell_sums_either_bias_over_the_samples() -> None:
    hidden = meta(3200, 1024)
    args = (hidden, meta(3200, 5 * 1024), True)

    assert requests(aten._thnn_fused_gru_cell_backward.default, *args) == [
        39321600, 39321600, 13107200, 12288, 78643200, 96, -96, -78643200,
        12288, 78643200, 96, -96, -78643200,
    ]  # fmt: skip
