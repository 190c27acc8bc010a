"""The estimated time of a step: work of a call, two clocks, micro-batches, prices."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from memest import TrainingPlan, predict, virtual_gpu
from memest.cli import main
from memest.errors import OOM_EXIT_CODE, PlanError
from memest.estimator import hardware
from memest.estimator.hardware import pace
from memest.estimator.hardware.gpus import Gpu, find_gpu, list_gpus
from memest.estimator.hardware.pace import (
    ELSEWHERE,
    FORMAT,
    PACE,
    PAUSE_S,
    Clocks,
    estimate,
    table_of,
)
from memest.estimator.hardware.work import (
    BACKWARD,
    CUT,
    FORWARD,
    IN_PYTHON,
    MAX_STEPS,
    NOTHING,
    NUM_HOSTS,
    VIEW,
    WAITS,
    Work,
    WorkLog,
    work_of,
)
from memest.report import StepTime
from memest.report.times import Training, read_prices, seconds, steps_of_plan
from tests import forked

aten = torch.ops.aten
H100 = find_gpu("h100-80gb")
PACE_FILE = Path("memest/estimator/hardware/pace/h100-80gb.json")
OLD_PACE = json.dumps({"device": "NVIDIA L4", "kernels": {ELSEWHERE: []}, "host": {"loop_us": 1}})
"""A file without the memory of its GPU, as releases before wrote it."""
LARGE = Work("matmul float16", (1, 8192, 4096, 4096), "float16", 2 * 8192 * 4096**2, 167_772_160)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def work(func: object, *args: object) -> Work:
    return work_of(func, args, {}, func(*args))  # type: ignore[operator]


def test_a_product_counts_its_operations_and_each_tensor_once() -> None:
    found = work(aten.mm.default, meta(64, 32), meta(32, 16))

    assert found.kind == "matmul float16"
    assert found.size == (1, 64, 16, 32)
    assert found.num_flops == 2 * 64 * 16 * 32
    assert found.num_bytes == 2 * (64 * 32 + 32 * 16 + 64 * 16)


def test_a_product_with_an_odd_side_is_another_kind() -> None:
    assert work(aten.mm.default, meta(64, 32), meta(32, 17)).kind == "matmul-odd float16"


def test_float32_products_have_the_rate_that_the_script_chose() -> None:
    x = meta(64, 64, dtype=torch.float32)
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        kinds = []
        for allowed in (False, True):
            torch.backends.cuda.matmul.allow_tf32 = allowed
            kinds.append(work(aten.mm.default, x, x).kind)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before

    assert kinds == ["matmul float32", "matmul-one tf32"]


@pytest.mark.parametrize("precision", ["tf32", "ieee"])
def test_the_new_switches_of_tf32_count(precision: str) -> None:
    backends = torch.backends
    if not hasattr(backends.cuda.matmul, "fp32_precision"):
        pytest.skip("torch has them from 2.9")
    x, image = meta(64, 64, dtype=torch.float32), meta(2, 3, 8, 8, dtype=torch.float32)
    weight = meta(4, 3, 3, 3, dtype=torch.float32)
    before = backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32
    try:
        backends.cuda.matmul.fp32_precision = backends.cudnn.conv.fp32_precision = precision
        product = work(aten.mm.default, x, x)
        convolution = work(
            aten.convolution.default, image, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1
        )  # fmt: skip
    finally:
        backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32 = before

    rate = {"tf32": "tf32", "ieee": "float32"}[precision]
    assert (product.rate, convolution.rate) == (rate, rate)


def test_causal_attention_counts_half_of_the_operations() -> None:
    q = meta(2, 4, 128, 64)
    kernel = aten._scaled_dot_product_flash_attention.default

    whole, half = (work(kernel, q, q, q, 0.0, causal) for causal in (False, True))

    assert whole.num_flops == 4 * 8 * 128 * 128 * 64 == 2 * half.num_flops
    assert (whole.kind, half.kind) == ("flash float16", "flash-causal float16")


def test_the_backward_of_a_convolution_counts_both_products() -> None:
    x, weight = meta(8, 16, 10, 10), meta(32, 16, 3, 3)
    rest = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    forward = work(aten.convolution.default, x, weight, None, *rest)
    grad = meta(8, 32, 10, 10)

    found = work(
        aten.convolution_backward.default, grad, x, weight, None, *rest, [True, True, False]
    )

    assert forward.num_flops == 2 * 800 * 32 * 144
    assert found.num_flops == 2 * forward.num_flops
    assert found.kind == "convolution-data-weight float16"


def test_a_transposed_convolution_multiplies_each_position_of_its_input() -> None:
    x, weight = meta(8, 16, 10, 10), meta(16, 32, 4, 4)
    rest = ([2, 2], [1, 1], [1, 1], True, [0, 0], 1)

    found = work(aten.convolution.default, x, weight, None, *rest)

    assert found.num_flops == 2 * 800 * weight.numel()
    assert found.size == (800, 3200, 16, 32, 16)


def test_the_bias_of_a_convolution_takes_time_too() -> None:
    x, weight, bias = meta(8, 16, 64, 64), meta(32, 16, 3, 3), meta(32)
    rest = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    without, given = (work(aten.convolution.default, x, weight, b, *rest) for b in (None, bias))
    grad = meta(8, 32, 64, 64)
    mask = [True, True, True]
    backward = work(aten.convolution_backward.default, grad, x, weight, [32], *rest, mask)

    assert (without.more, given.more[0].num_bytes) == ((), 2 * grad.nbytes)
    assert backward.more[0].num_bytes == grad.nbytes
    table = table_of(H100)
    added = Work(ELSEWHERE, (2 * grad.nbytes,), "", 0, 2 * grad.nbytes)
    same = given._replace(num_bytes=without.num_bytes)
    assert table.kernel_s(same) == pytest.approx(table.kernel_s(without) + table.kernel_s(added))


def test_a_tensor_that_is_given_twice_is_read_once() -> None:
    x, y = meta(1024), meta(1024)

    assert work(aten.mul.Tensor, x, x).num_bytes == 2 * x.nbytes
    assert work(aten.mul.Tensor, x, y).num_bytes == 3 * x.nbytes
    lists = [x], [y], [y]
    assert work(aten._foreach_addcmul_.Scalar, *lists, 1.0).num_bytes == 3 * x.nbytes


def test_joined_tensors_have_the_elements_that_stay_adjacent() -> None:
    x = meta(4, 8, 16)

    assert work(aten.cat.default, [x, x]).size[1] == 512
    assert work(aten.cat.default, [x, x], 1).size[1] == 128
    assert work(aten.stack.default, [x, x], -1).size[1] == 1
    assert work(aten.stack.default, [x.transpose(0, 1)] * 3).size[1] == 16


def test_resized_images_have_their_planes_and_the_scale() -> None:
    x = meta(2, 8, 16, 16)

    assert work(aten.upsample_bilinear2d.default, x, [64, 64], False).size[1:] == (16, 16)


@pytest.mark.parametrize(
    ("shape", "is_transposed", "groups", "kind"),
    [
        ((32, 16, 3), False, 1, "convolution float16"),
        ((32, 4, 3), False, 4, "convolution grouped 1d bfloat16"),
        ((16, 1, 3), False, 16, "convolution grouped 1d bfloat16"),
        ((16, 32, 3), True, 1, "convolution float16"),
        ((16, 8, 3), True, 4, "convolution grouped 1d bfloat16"),
    ],
)
def test_groups_of_a_convolution_are_a_kind_of_their_own(
    shape: tuple[int, ...], is_transposed: bool, groups: int, kind: str
) -> None:
    rest = ([1], [1], [1], is_transposed, [0], groups)

    assert work(aten.convolution.default, meta(8, 16, 10), meta(*shape), None, *rest).kind == kind


@pytest.mark.parametrize(
    ("mask", "forms"),
    [(None, [(128, 32, 16)]), ([True, True, False], [(128, 16, 32), (32, 16, 128)])],
)
def test_a_convolution_of_single_positions_in_channels_last_is_products(
    mask: list[bool] | None, forms: list[tuple[int, ...]]
) -> None:
    layout = torch.channels_last
    x, weight = meta(2, 16, 8, 8).to(memory_format=layout), meta(32, 16, 1, 1)
    rest = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    if mask is None:
        found = work(aten.convolution.default, x, weight, None, *rest)
    else:
        grad = meta(2, 32, 8, 8).to(memory_format=layout)
        found = work(aten.convolution_backward.default, grad, x, weight, None, *rest, mask)

    assert found.kind == "convolution products"
    assert [(each.kind, each.size[1:]) for each in found.more] == [
        ("matmul float16", form) for form in forms
    ]
    table = table_of(H100)
    assert table.kernel_s(found) == sum(map(table.kernel_s, found.more))
    assert table.host_s(found, 0) > table.host_s(found.more[0], 0)


def test_views_and_empty_tensors_are_no_work() -> None:
    assert work(aten.view.default, meta(4, 4), [16]) is NOTHING
    assert work(aten.empty_like.default, meta(4, 4)) is NOTHING


def test_an_embedding_reads_the_rows_it_returns() -> None:
    ids = torch.zeros(10, dtype=torch.long, device="meta")

    assert work(aten.embedding.default, meta(50_000, 64), ids).num_bytes == 80 + 2 * 2 * 10 * 64


def test_a_copy_that_turns_a_matrix_is_a_transpose() -> None:
    x = meta(64, 32)

    def kind(source: torch.Tensor) -> str:
        made = meta(*source.shape)
        return work_of(aten.copy_.default, (made, source), {}, made).kind

    assert kind(x) == "copy 2"
    assert kind(x.float()) == "cast 4"
    assert kind(meta(32, 64).t()) == "transpose 2"
    assert kind(meta(8, 4, 32).transpose(0, 1)) == "permute 2"


def test_a_copy_does_not_read_what_it_writes() -> None:
    assert work(aten.copy_.default, meta(8, 8), meta(8, 8)).num_bytes == 2 * 2 * 64
    assert work(aten.zero_.default, meta(8, 8)).num_bytes == 2 * 64


def test_a_permutation_has_the_length_that_is_adjacent_on_both_sides() -> None:
    heads = meta(2, 16, 4, 32).transpose(1, 2)

    found = work_of(aten.clone.default, (heads,), {}, meta(2, 4, 16, 32))

    assert found.size == (2 * 2 * 4096, 32)


@pytest.mark.parametrize(
    ("func", "args", "size"),
    [
        (aten.sum.dim_IntList, ([0],), 64),
        (aten.sum.dim_IntList, ([0, -1],), 64 * 32),
        (aten.mean.dim, ([-1], True), 32),
        (aten.amax.default, ([1],), 32),
        (aten.linalg_vector_norm.default, (2.0,), 64 * 32),
    ],
)
def test_a_reduction_has_the_number_of_its_elements(
    func: object, args: tuple[object, ...], size: int
) -> None:
    found = work(func, meta(64, 32), *args)

    assert found.kind == "sum 2"
    assert found.size[1:] == (size,)


def test_single_numbers_and_broadcast_copies_have_work() -> None:
    """Dimensions that a tensor lacks, and sources with fewer dimensions, are allowed in torch."""
    number = meta()

    assert work(aten.sum.dim_IntList, number, [0]).size[1:] == (1,)
    assert work(aten._softmax.default, number, 0, False).size[1] == 1
    assert work(aten.index_select.default, meta(1), 0, meta(1).long()).size[1] == 1
    assert work(aten.copy_.default, meta(8, 1), meta(1)).kind == "permute 2"


def test_a_norm_of_images_has_its_channels_and_layout() -> None:
    x = meta(2, 8, 4, 4).to(memory_format=torch.channels_last)
    rest = (None, None, None, None, True, 0.1, 1e-5)

    found = work(aten.native_batch_norm.default, x, *rest)

    assert found.kind == "native_batch_norm nhwc 2"
    assert found.size == (found.num_bytes, 8)


def test_indexed_rows_have_the_length_of_the_last_dimension() -> None:
    ids = torch.zeros(10, dtype=torch.long, device="meta")

    assert work(aten.index_select.default, meta(64, 32), 0, ids).size[1] == 32


@pytest.mark.parametrize("num_rows", [10, 1_000_000])
def test_rows_that_are_added_take_the_same_time_in_any_tensor(num_rows: int) -> None:
    ids, rows = torch.zeros(8, dtype=torch.long, device="meta"), meta(8, 32)

    found = work(aten.index_add_.default, meta(num_rows, 32), 0, ids, rows)

    assert found.num_bytes == 8 * 8 + 3 * rows.nbytes


def test_a_norm_has_the_length_of_its_rows() -> None:
    weight = meta(32)

    found = work(aten.native_layer_norm.default, meta(8, 4, 32), [32], weight, weight, 1e-5)

    assert found.size == (found.num_bytes, 32)


@pytest.mark.parametrize("backward", [False, True])
def test_a_recurrent_network_has_its_steps_one_after_another(backward: bool) -> None:
    x, h, c = meta(20, 8, 16), meta(2, 8, 32), meta(2, 8, 32)
    weights = [w for _ in "12" for w in (meta(128, 16), meta(128, 32), meta(128), meta(128))]
    options = (2, 32, 0, 1, False, 0.0, True, True, [], None)
    given = (x, weights, 4, None, h, c)
    func = aten._cudnn_rnn.default
    if backward:
        given += (meta(20, 8, 64), meta(20, 8, 64), None, None)
        options += (meta(64), [True] * 4)
        func = aten._cudnn_rnn_backward.default

    found = work_of(func, (*given, *options), {}, ())

    assert found.kind.startswith("rnn-both-backward" if backward else "rnn-both ")
    assert found.size == (20, 1, 8, 32, 4)  # four gates
    assert found.num_flops == (4 if backward else 2) * 2 * 128 * 32 * 20 * 8


def test_both_directions_of_a_recurrent_network_run_at_the_same_time() -> None:
    table, size = table_of(H100), (100, 1, 64, 512, 4)
    each, both = (Work(f"{kind} float16", size, "float16", 1, 0) for kind in ("rnn", "rnn-both"))

    times = [table.kernel_s(w._replace(num_flops=n)) for w, n in ((each, 1 << 33), (both, 1 << 34))]

    assert 1.1 < times[1] / times[0] < 1.6  # 1.3 in the median of measured networks


CONVOLUTIONS_VARY = pytest.mark.xfail(
    strict=True, reason="cuDNN chooses among kernels, and the sizes do not say which"
)


@pytest.mark.parametrize(
    "is_convolution", [False, pytest.param(True, marks=CONVOLUTIONS_VARY)], ids=["other", "conv"]
)
def test_left_out_calls_are_predicted_from_the_others(is_convolution: bool) -> None:
    errors = []
    for kind, rows in json.loads(PACE_FILE.read_text("utf-8"))["kernels"].items():
        rate = kind.rpartition(" ")[2]
        is_other = kind.startswith("convolution") != is_convolution
        if is_other or rate.isdigit() or len(rows) < 8:
            continue
        for left_out in range(0, len(rows), 5):
            *size, num_flops, num_bytes, us = rows[left_out]
            calls = pace.Calls(kind, rows[:left_out] + rows[left_out + 1 :], H100)
            ideal = max(pace.roofline_s(rate, num_flops, num_bytes, H100))
            errors.append(abs(ideal / calls.efficiency(tuple(size)) / (1e-6 * us) - 1))

    assert len(errors) > 150
    assert median(errors) < 0.15


def step_times(log: WorkLog, gpu: Gpu) -> list[tuple[float, float]]:
    """Seconds of each step, and those of first calls."""
    return Clocks(log.works, gpu).run(log.steps, log.num_known)


def log_of(*steps: list[Work | None]) -> WorkLog:
    """A log of forward launches; None is a wait of the host."""
    log = WorkLog()
    for step in steps:
        for each in step:
            log.wait() if each is None else log.add(each)
        log.stepped()
    return log


def test_a_busy_gpu_takes_the_time_of_its_kernels() -> None:
    table = table_of(H100)
    launch, kernel = table.host_s(LARGE, 0), table.kernel_s(LARGE)

    *_, (last, _) = step_times(log_of(*[[LARGE] * 50] * 3), H100)

    assert last == pytest.approx(launch + 50 * (kernel + PAUSE_S))


def test_small_kernels_take_the_time_of_the_host() -> None:
    small = Work("pointwise 4", (1024,), "", 0, 1024)
    table = table_of(H100)
    launch, kernel = table.host_s(small, 0), table.kernel_s(small)

    *_, (last, _) = step_times(log_of(*[[small] * 50] * 3), H100)

    assert last == pytest.approx(50 * launch + kernel + PAUSE_S)


def test_python_of_the_optimizer_counts_its_parameters_with_gradients() -> None:
    with virtual_gpu("h100-80gb") as virtual:
        layer = torch.nn.Linear(8, 8, device="cuda")
        torch.nn.init.zeros_(layer.weight)
        optimizer = torch.optim.SGD([layer.weight, layer.bias])
        layer.weight.grad = torch.ones_like(layer.weight)
        optimizer.step()
        log = virtual.virtual.mode.work

    counts = {work.kind: work.num_tensors for work in log.works if work.kind in IN_PYTHON}
    assert counts == {"step": 1, "zero_grad": 1}
    assert table_of(H100).host_s(Work("step", (), "", 0, 0, 9), 0) > 9e-6


def in_python(train: Callable[[torch.nn.Module], torch.Tensor]) -> dict[str, int]:
    """How often code of each kind of `IN_PYTHON` runs in a step of the loss that `train` makes."""
    with virtual_gpu("h100-80gb") as virtual:
        layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()).cuda()
        optimizer = torch.optim.SGD(layer.parameters())
        train(layer).backward()
        optimizer.step()
        log = virtual.virtual.mode.work
    kinds = [log.works[event // NUM_HOSTS].kind for event in log.steps[0] if event >= 0]
    return {kind: kinds.count(kind) for kind in ("region", "hook", "choice")}


def recompute(*args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = partial(create_selective_checkpoint_contexts, recompute)


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        ({"use_reentrant": True}, {"region": 1, "hook": 0, "choice": 0}),
        ({"use_reentrant": False}, {"region": 1, "hook": 9, "choice": 0}),
        (
            {"use_reentrant": False, "context_fn": SELECTIVE},
            {"region": 1, "hook": 9, "choice": 8},
        ),
    ],
    ids=["reentrant", "hooks", "selective"],
)
def test_python_of_checkpointing_counts(options: dict[str, Any], counts: dict[str, int]) -> None:
    """Three tensors are saved, saved again and read; four operators are chosen twice."""

    def train(layer: torch.nn.Module) -> torch.Tensor:
        x = torch.ones(4, 8, device="cuda", requires_grad=True)
        return checkpoint(layer, x, **options).sum()

    assert in_python(train) == counts


def test_a_host_that_reads_a_value_waits_for_the_gpu() -> None:
    free, waiting = (
        step_times(log_of(*[step] * 4), H100)[-1] for step in ([LARGE] * 4, [LARGE, None] * 4)
    )

    assert waiting > free


def test_micro_batches_that_did_not_run_are_like_those_that_did() -> None:
    log = WorkLog()
    for _ in range(3):
        for _ in range(2):
            log.add(LARGE)
            log.events.append(CUT)
        log.stepped()

    two, eight = (estimate(log, H100, num_micro_batches=n) for n in (2, 8))

    assert two is not None
    assert eight is not None
    each = table_of(H100).kernel_s(LARGE) + PAUSE_S
    assert eight.seconds - two.seconds == pytest.approx(6 * each, rel=1e-3)


def test_a_run_without_a_step_has_no_estimate() -> None:
    assert estimate(WorkLog(), H100) is None
    assert estimate(log_of([LARGE]), replace(H100, tflops={})) is None


def test_every_gpu_has_rates_and_an_estimate() -> None:
    log = log_of([LARGE] * 3)
    for gpu in list_gpus():
        found = estimate(log, gpu)
        assert found is not None
        assert 0 < found.peak_share < 1, gpu.name
        assert found.low_seconds < found.seconds < found.high_seconds


def test_a_gpu_that_was_not_measured_is_slower_by_its_rates_and_less_certain() -> None:
    a100, h100 = (estimate(log_of([LARGE] * 3), find_gpu(n)) for n in ("a100-80gb", "h100-80gb"))

    assert a100 is not None
    assert h100 is not None
    assert (a100.origin, h100.origin) == ("h100-80gb", "")
    without_kernels = table_of(H100).host_s(LARGE, 0) + 3 * PAUSE_S
    busy = [time.seconds - without_kernels for time in (a100, h100)]
    assert busy[0] == pytest.approx(busy[1] * 989.4 / 312, rel=1e-3)
    assert a100.high_seconds / a100.seconds > h100.high_seconds / h100.seconds


def test_every_measured_kind_has_a_finite_efficiency() -> None:
    kinds = json.loads(PACE_FILE.read_text(encoding="utf-8"))["kernels"]
    table = table_of(H100)
    for kind, rows in kinds.items():
        rate = kind.rpartition(" ")[2]
        for *size, flops, num_bytes, us in rows:
            made = Work(kind, tuple(size), "" if rate.isdigit() else rate, flops, num_bytes)
            assert 0 < table.kernel_s(made) < 2, (kind, size, us)


def test_a_user_s_own_times_count_on_that_gpu_and_their_host_on_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = dict.fromkeys(json.loads(PACE_FILE.read_text(encoding="utf-8"))["host"], 1000.0)
    l4 = find_gpu("l4")
    own = {
        "format": FORMAT, "device": "NVIDIA L4", "memory_bytes": l4.memory_bytes,
        "host": host, "first_us": {}, "kernels": {ELSEWHERE: [[1 << 20, 0, 1 << 20, 1e6]]},
    }  # fmt: skip
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(own), encoding="utf-8")
    small = Work("pointwise 4", (1 << 20,), "", 0, 1 << 20)
    before = table_of(H100)

    monkeypatch.setenv(PACE, str(path))

    assert table_of(l4).kernel_s(small) == pytest.approx(1)
    assert table_of(H100).kernel_s(small) == before.kernel_s(small)
    assert table_of(H100).host_s(small, 0) == pytest.approx(1e-3)
    found = estimate(log_of(*[[small]] * 3), l4)
    assert found is not None
    assert (found.measured_in, found.origin) == ("mine.json", "")
    elsewhere = estimate(log_of(*[[small]] * 3), H100)
    assert elsewhere is not None
    assert elsewhere.measured_in == "mine.json (host only)"


@pytest.mark.parametrize("text", [None, "{}", "[]", "no json", OLD_PACE])
def test_a_file_without_times_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    path = tmp_path / "mine.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    monkeypatch.setenv(PACE, str(path))

    with pytest.raises(PlanError, match="no measured times"):
        table_of(H100)


def test_a_file_of_another_version_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = Path(hardware.__file__).with_name("pace") / "h100-80gb.json"
    own = json.loads(measured.read_text("utf-8"))
    own["format"] -= 1
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(own), encoding="utf-8")
    monkeypatch.setenv(PACE, str(path))

    with pytest.raises(PlanError, match="another version of memest"):
        table_of(H100)


def test_an_operator_without_measured_times_is_counted() -> None:
    other = Work("fft_r2c 4", (1 << 28,), "", 0, 1 << 28)

    found = estimate(log_of([other] * 3), H100)

    assert found is not None
    assert found.unmeasured_share > 0.9


def test_a_plan_has_times_for_each_gpu_and_more_samples_take_longer() -> None:
    small, large = (
        predict(TrainingPlan(model_name="gpt2", batch_size=n, seq_len=256)) for n in (8, 32)
    )

    assert set(small.times) == set(small.verdicts)
    assert small.times["h100-80gb"].seconds < large.times["h100-80gb"].seconds
    assert small.times["h100-80gb"].seconds < small.times["a100-80gb"].seconds
    assert type(small).from_dict(small.to_dict()).times == small.times


def test_hours_and_price_follow_from_the_step() -> None:
    time = StepTime(
        seconds=0.36, low_seconds=0.3, high_seconds=0.72, peak_share=0.4, bound_by="compute",
        origin="", unmeasured_share=0.0,
    )  # fmt: skip
    training = Training(10_000, {"h100-80gb": 2.0, "": 1.0}, num_gpus=4)

    assert training.hours(time) == pytest.approx((1.0, 0.8333, 2.0), rel=1e-3)
    assert training.price_of("h100-80gb") == 8.0
    assert training.price_of("t4") == 4.0
    assert Training(1, {}).price_of("t4") is None


def test_epochs_become_steps_of_all_gpus() -> None:
    plan = {"batch_size": 4, "accumulate_grad_batches": 2, "devices": 2, "num_nodes": 1}

    assert steps_of_plan(plan, 3, 1000) == 188


@pytest.mark.parametrize("given", ["-1", "0", "1e999"])
def test_a_price_is_a_positive_number(given: str) -> None:
    with pytest.raises(PlanError, match="is not a price"):
        read_prices(given)


def test_a_price_may_have_an_exponent() -> None:
    assert read_prices("2.5e-1") == {"": 0.25}


def test_prices_of_a_file_are_by_gpu(tmp_path: Path) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text("h100-80gb: 2.1\nt4: 0.2\n", encoding="utf-8")
    assert read_prices(str(path)) == {"h100-80gb": 2.1, "t4": 0.2}
    path.write_text("NVIDIA A100: 1.5\nh1000: 2\n", encoding="utf-8")
    with pytest.raises(PlanError, match="`h1000` is not in the catalogue"):
        read_prices(str(path))
    path.write_text("h100-80gb: cheap\n", encoding="utf-8")
    with pytest.raises(PlanError, match="`cheap` is not a price"):
        read_prices(str(path))
    path.write_text("- 2\n", encoding="utf-8")
    with pytest.raises(PlanError, match="has no prices"):
        read_prices(str(path))


COLUMNS = (
    "instance_name,location,price,cpu,memory,gpu_count,gpu_name,gpu_memory,spot,disk_size,"
    "gpu_vendor,flags,cpu_arch,provider_data\n"
)


def test_a_catalogue_of_gpuhunt_gives_the_lowest_price_of_one_gpu(tmp_path: Path) -> None:
    rows = (
        ("two", 5.0, 2, "H100", 80, False),
        ("dear", 3.0, 1, "H100", 80, False),
        ("spot", 0.5, 1, "H100", 80, True),
        ("small", 1.0, 1, "A100", 40, False),
        ("l4", 0.4, 1, "L4", 24, False),
        ("unknown", 0.1, 1, "MI300X", 192, False),
    )
    lines = [
        f"{name},eu,{price},8,64,{count},{gpu},{memory},{spot},100,nvidia,,x86,{{}}\n"
        for name, price, count, gpu, memory, spot in rows
    ]
    (tmp_path / "runpod.csv").write_text(COLUMNS + "".join(lines), encoding="utf-8")

    found = read_prices(str(tmp_path))

    assert found == {"h100-80gb": 2.5, "a100-40gb": 1.0, "l4": 0.4}


@pytest.mark.parametrize(("name", "text"), [("runpod.csv", "price\n1\n"), ("cheap.csv", COLUMNS)])
def test_a_folder_that_is_no_catalogue_is_refused(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")

    with pytest.raises(PlanError, match=r"is no catalogue of gpuhunt|has no prices"):
        read_prices(str(tmp_path))


def test_times_are_printed_with_three_digits() -> None:
    assert [seconds(v) for v in (0.00123, 0.5, 2, 1234.5)] == [
        "1.23 ms", "500 ms", "2 s", "1.23e+03 s",
    ]  # fmt: skip


SCRIPT = """
import torch
model = torch.nn.Linear(512, 512).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range({steps}):
    model(torch.randn(64, 512, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_cheapest_leaves_out_gpus_on_which_the_plan_fails() -> None:
    """cuDNN has no convolution in bfloat16 before compute capability 8.0, such as on a T4."""
    flags = ["--model", "vit-base-patch16-224", "--bs", "1", "--precision", "bf16-true"]

    found = CliRunner().invoke(main, ["cheapest", *flags])
    named = CliRunner().invoke(main, ["cheapest", *flags, "--gpu", "t4"])

    assert found.exit_code == 0
    assert "warning: fails on v100-16gb, v100-32gb, t4:" in found.stdout
    assert "h100-80gb" in found.stdout
    assert named.exit_code != 0
    assert "fails: GET was unable" in named.stderr


def test_a_plan_that_fails_on_one_gpu_has_a_verdict_on_another() -> None:
    flags = ["--model", "vit-base-patch16-224", "--bs", "1", "--precision", "bf16-true"]

    found = CliRunner().invoke(
        main, ["predict", *flags, "--gpu", "t4", "--gpu", "h100-80gb", "--json", "--check"]
    )

    report = json.loads(found.stdout)
    assert list(report["verdicts"]) == ["h100-80gb"]
    assert report["gpu"] == "h100-80gb"
    assert report["warnings"][0].startswith("fails on t4: ")
    assert found.exit_code == OOM_EXIT_CODE


def test_cheapest_reports_a_plan_that_fails_everywhere_once() -> None:
    found = CliRunner().invoke(main, ["cheapest", "--model", "gpt2", "--seq-len", "9999"])

    assert found.exit_code != 0
    assert "fails on" not in found.output


def test_cheapest_lists_gpus_by_price_and_then_by_time(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(steps=4), encoding="utf-8")
    prices = tmp_path / "prices.yaml"
    prices.write_text("t4: 0.01\nh100-80gb: 50\n", encoding="utf-8")
    command = ["cheapest", "--price", str(prices), "--train-steps", "100", "--json"]
    for name in ("t4", "h100-80gb", "h200"):
        command += ["--gpu", name]

    result = CliRunner().invoke(main, [*command, str(script)])

    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["gpu"] for row in rows] == ["t4", "h100-80gb", "h200"]
    assert rows[1]["price"] == pytest.approx(50 * rows[1]["hours"])
    assert rows[2]["price"] is None


def test_a_script_that_never_steps_has_no_block(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(steps=0), encoding="utf-8")

    result = CliRunner().invoke(main, ["cheapest", "--gpu", "t4", str(script)])

    assert "no whole optimizer step ran" in result.output


def test_options_of_plans_are_refused_beside_a_script() -> None:
    result = CliRunner().invoke(main, ["cheapest", "--bs", "2", "train.py"])

    assert "`--batch-size` is an option of plans, and a script is given" in str(result.output)


def test_a_step_has_one_step_of_each_optimizer() -> None:
    log = WorkLog()
    for _ in range(4):
        for optimizer in (1, 2):
            log.add(LARGE)
            log.stepped(optimizer)

    assert [len(step) for step in log.steps] == [2, 2, 2, 2]


def test_an_optimizer_that_steps_for_each_group_takes_one_step() -> None:
    log = WorkLog()
    for _ in range(4):
        for has_backward in (True, False):
            log.add(LARGE)
            log.stepped(1, has_backward=has_backward)

    assert [len(step) for step in log.steps] == [2, 2, 2, 2]


ATTENTION = Work("cudnn float16", (64, 1024, 1024, 64), "float16", 10**9, 10**8)


def test_a_library_takes_longer_for_the_first_call_with_new_sizes() -> None:
    sizes = [ATTENTION._replace(size=(64, 128 * n, 1024, 64)) for n in range(1, 7)]
    first = table_of(H100).first_s(ATTENTION.kind)

    changing, constant = (estimate(log_of(*steps), H100) for steps in (
        [[ATTENTION, size] for size in sizes], [[ATTENTION, ATTENTION]] * 6,
    ))  # fmt: skip

    assert changing is not None
    assert constant is not None
    assert changing.first_seconds == pytest.approx(first, rel=1e-3)
    assert changing.seconds > first > 0.01
    assert constant.first_seconds == 0


def test_hours_are_those_of_steps_without_new_sizes() -> None:
    time = StepTime(
        seconds=2.0, low_seconds=1.0, high_seconds=4.0, peak_share=0.1, bound_by="host", origin="",
        unmeasured_share=0.0, first_seconds=1.0,
    )  # fmt: skip

    assert Training(num_steps=3600, prices={}).hours(time) == (1.0, 0.5, 2.0)


def test_sizes_of_steps_that_are_not_kept_any_more_are_not_new() -> None:
    rare = LARGE._replace(size=(1, 1, 2, 3))
    log = log_of([LARGE, rare], *[[LARGE]] * MAX_STEPS, [LARGE, rare])

    assert [list(log.num_known)[i] for i in (0, -1)] == [2, 2]
    assert step_times(log, H100)[-1][1] == 0


def test_the_host_takes_longer_for_cudnn_than_for_another_launch_and_for_a_view() -> None:
    table, convolution = table_of(H100), LARGE._replace(kind="convolution float16")
    log = log_of([VIEW] * 10)

    assert table.host_s(convolution, 0) > 2 * table.host_s(LARGE, 0)
    assert table.kernel_s(VIEW) == 0
    assert step_times(log, H100)[0][0] == pytest.approx(10 * table.host_s(VIEW, 0))


def test_a_forward_that_is_run_again_in_the_backward_takes_python_s_time() -> None:
    with virtual_gpu("h100-80gb") as virtual:
        layer = torch.nn.Linear(64, 64, device="cuda")
        x = torch.randn(8, 64, device="cuda", requires_grad=True)
        out = torch.utils.checkpoint.checkpoint(lambda: layer(x).tanh(), use_reentrant=False)
        log = virtual.virtual.mode.work
        del log.events[:]
        out.sum().backward()
        log.stepped()

    products = [e for e in log.steps[0] if log.works[e // NUM_HOSTS].kind.startswith("matmul")]
    assert {event % NUM_HOSTS for event in products} == {FORWARD, BACKWARD}


def test_views_and_kernels_of_bitsandbytes_are_in_the_log() -> None:
    pytest.importorskip("bitsandbytes")
    with virtual_gpu("h100-80gb") as virtual:
        from bitsandbytes import functional

        weight = torch.empty(128, 256, device="cuda", dtype=torch.bfloat16)
        packed, state = functional.quantize_4bit(weight, quant_type="nf4")
        functional.dequantize_4bit(packed, state).t()
        log = virtual.virtual.mode.work
        log.stepped()

    kinds = [log.works[event // NUM_HOSTS].kind for event in log.steps[0]]
    decoded = next(work for work in log.works if work.kind == "dequantize_4bit 1")
    assert kinds[-2:] == ["dequantize_4bit 1", "view"]
    assert decoded.num_bytes == 128 * 256 // 2 + 128 * 256 // 64 * 4 + 128 * 256 * 2


def test_a_copy_of_pinned_memory_has_its_rate_even_if_the_host_waits() -> None:
    with virtual_gpu("h100-80gb") as virtual:
        pinned, pageable = torch.empty(1000, pin_memory=True), torch.empty(1000)
        for source in (pinned, pageable):
            source.cuda()
        pinned.copy_(torch.empty(1000, device="cuda"))
        log = virtual.virtual.mode.work
        log.stepped()

    copies = [work.kind for work in log.works if work.kind.startswith("to_")]
    assert copies == ["to_gpu_pinned", "to_gpu_pageable", "to_host_pinned"]
    assert list(log.steps[0]).count(WAITS) == 3


def test_text_and_page_have_the_estimated_time(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(steps=4), encoding="utf-8")
    page = tmp_path / "report.html"
    command = ["run", "--html", str(page), "--price", "2", str(script)]

    done = forked.run(
        [sys.executable, "-m", "memest", *command], capture_output=True, text=True, check=True
    )

    assert "estimated time; hours of 1,000 steps" in done.stdout
    assert "<h2>Estimated time of a step</h2>" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--price -3", "`-3` is not a price"),
        ("--epochs 3", "`--epochs` needs `--samples`"),
        ("--samples 9 --train-steps 3", "`--samples` and `--train-steps` exclude each other"),
    ],
)
@pytest.mark.parametrize("command", ["predict", "cheapest"])
def test_training_options_are_checked_before_anything_runs(
    command: str, words: str, message: str
) -> None:
    result = CliRunner().invoke(main, [command, "--model", "no-such-model", *words.split()])

    assert message in result.output
