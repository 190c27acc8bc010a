"""Kinds of kernels whose time follows from more than bytes and operations."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from memest.cli import main
from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.hardware.pace import (
    BANDWIDTH_SHARE,
    LEAST_S,
    Calls,
    Table,
    estimate,
    table_of,
)
from memest.estimator.hardware.work import Work, work_of
from memest.validate import pace
from tests.unit.test_pace import log_of, meta, work

aten = torch.ops.aten
H100, H200 = find_gpu("h100-80gb"), find_gpu("h200")


@pytest.mark.parametrize(
    ("shape", "dim", "size"),
    [
        ((4, 1000, 512), 1, (2048, 1000)),
        ((4, 1000, 512), -2, (2048, 1000)),
        ((4, 128, 16), 1, (4 * 16 * 64, 2)),  # 64 threads share a row of 128
        ((4, 60, 16), 1, (64, 60)),  # rows below 64 have one thread each
    ],
)
def test_a_softmax_before_the_last_dimension_has_its_threads(
    shape: tuple[int, ...], dim: int, size: tuple[int, int]
) -> None:
    found = work(aten._softmax.default, meta(*shape), dim, False)

    assert (found.kind, found.size) == ("_softmax-apart 2 float32", size)


@pytest.mark.parametrize(("shape", "dim"), [((8, 64), -1), ((8, 64, 1), 1), ((), 0)])
def test_other_softmaxes_are_rows(shape: tuple[int, ...], dim: int) -> None:
    x = meta(*shape)

    assert work(aten._log_softmax.default, x, dim, False).kind == "_log_softmax 2"


def test_a_power_of_a_number_has_as_many_tensors_as_its_list() -> None:
    found = work(aten._foreach_pow.ScalarAndTensor, 0.9, [meta(), meta(), meta()])

    assert found.num_tensors == 3


def test_a_softmax_of_masked_rows_has_no_rows() -> None:
    assert work(aten._safe_softmax.default, meta(4, 8, 16), 1).kind == "_safe_softmax 2"


def test_few_samples_of_many_classes_take_a_time_per_class() -> None:
    classes = (1000, 16_000)
    few, many = (work(aten._softmax.default, meta(1, n, 2048), 1, False) for n in classes)
    table = table_of(H100)

    assert table.kernel_s(many) / table.kernel_s(few) > 10
    assert table.kernel_s(many) > 5 * many.size[0] * many.size[1] * 4 / 3.35e12


def test_a_norm_of_a_tensor_in_another_order_copies_it() -> None:
    x, weight = meta(8, 768, 196).transpose(1, 2), meta(768)

    found = work(aten.native_layer_norm.default, x, [768], weight, weight, 1e-5)

    copy = Work("transpose 2", (2 * x.nbytes, 196, 768), "", 0, 2 * x.nbytes)
    assert found.more == (copy,)
    plain = found._replace(more=())
    table = table_of(H200)
    assert table.kernel_s(found) == table.kernel_s(plain) + table.kernel_s(copy)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_groups_of_both_halves_are_kinds_of_their_own(dtype: torch.dtype) -> None:
    x, weight = meta(2, 8, 16, 16).to(dtype), meta(8, 2, 3, 3).to(dtype)
    rest = ([1, 1], [1, 1], [1, 1], False, [0, 0], 4)

    found = work(aten.convolution.default, x, weight, None, *rest)

    assert (found.kind, found.rate) == (f"convolution grouped {found.rate}", str(dtype)[6:])
    assert found.kind in table_of(H100)._kinds


def test_a_convolution_with_a_weight_in_channels_last_runs_in_channels_last() -> None:
    plain, x = meta(8, 1, 7, 7), meta(2, 8, 16, 16)
    last = plain.as_strided((8, 1, 7, 7), (49, 1, 7, 1))
    rest = (None, [1, 1], [3, 3], [1, 1], False, [0, 0], 8)

    assert " nhwc" in work(aten.convolution.default, x, last, *rest).kind
    assert " nhwc" not in work(aten.convolution.default, x, plain, *rest).kind


def test_pools_of_volumes_have_their_window_or_ratio() -> None:
    x = meta(2, 8, 16, 16, 16)
    windows = work(aten.max_pool3d_with_indices.default, x, [2, 2, 2], [2, 2, 2])
    whole = work(aten._adaptive_avg_pool3d.default, x, [1, 1, 1])

    assert windows.size[1:] == (8,)
    assert whole.size[1:] == (4096,)


@pytest.mark.parametrize(
    ("expanded", "kind"), [(True, "scatter_add-rows 2"), (False, "scatter_add 2")]
)
def test_an_expanded_index_of_rows_is_a_kind(expanded: bool, kind: str) -> None:
    x = meta(16, 8)
    index = meta(16, 1).long().expand(16, 8) if expanded else meta(16, 8).long()

    assert work(aten.scatter_add_.default, x, 0, index, meta(16, 8)).kind == kind


@pytest.mark.parametrize(
    ("shape", "order", "kind", "size"),
    [
        ((8, 64, 32), (0, 1, 2), "pointwise 2", ()),
        ((8, 32, 64), (0, 2, 1), "broadcast 2", ()),
        ((64, 32), (0, 1), "broadcast 2", ()),
    ],
)
def test_a_pointwise_kernel_has_the_order_of_its_tensors(
    shape: tuple[int, ...], order: tuple[int, ...], kind: str, size: tuple[int, ...]
) -> None:
    found = work(aten.add.Tensor, meta(8, 64, 32), meta(*shape).permute(order))

    assert (found.kind, found.size[1:]) == (kind, size)


@pytest.mark.parametrize(
    ("shape", "channels", "kind"),
    [
        ((8, 1, 5, 5), 8, "convolution grouped bfloat16"),
        ((8, 1, 7, 7), 8, "convolution grouped wide bfloat16"),
        ((8, 4, 7, 7), 4, "convolution float16"),
    ],
)
def test_a_wide_depthwise_window_is_a_kind(
    shape: tuple[int, ...], channels: int, kind: str
) -> None:
    rest = ([1, 1], [0, 0], [1, 1], False, [0, 0], channels // shape[1])

    found = work(aten.convolution.default, meta(2, channels, 16, 16), meta(*shape), None, *rest)

    assert found.kind == kind


def test_no_kernel_is_shorter_than_the_shortest() -> None:
    assert table_of(H200).kernel_s(Work("pointwise 4", (4,), "", 0, 4)) == LEAST_S


@pytest.mark.parametrize("groups", [1, 32])
def test_group_norms_have_their_groups(groups: int) -> None:
    x, weight = meta(4, 64, 256), meta(64)
    shape = (4, 64, 256, groups)
    forward = work(aten.native_group_norm.default, x, weight, weight, *shape, 1e-5)
    means = meta(4, groups)
    given = (x, x, means, means, weight, *shape, [True, True, True])

    backward = work(aten.native_group_norm_backward.default, *given)

    assert forward.size[1] == backward.size[1] == 4 * groups


def test_one_group_takes_longer_than_many() -> None:
    one, many = (
        Work("native_group_norm 4", (104_859_712, n), "", 0, 104_859_712) for n in (8, 512)
    )

    assert table_of(H100).kernel_s(one) > 5 * table_of(H100).kernel_s(many)


def test_a_bias_of_attention_takes_longer() -> None:
    plain = Work("efficient float16", (512, 512, 512, 64), "float16", 4 * 512**3 * 64, 134_217_728)
    table = table_of(H100)

    biased = plain._replace(kind="efficient-bias float16")
    assert table.kernel_s(biased) > 1.2 * table.kernel_s(plain)


def test_kinds_of_attention_that_were_not_measured_take_the_time_of_the_plain_one() -> None:
    plain = Work("cudnn float16", (512, 512, 512, 64), "float16", 4 * 512**3 * 64, 134_217_728)
    table = table_of(H100)

    assert table.kernel_s(plain._replace(kind="cudnn-dropout float16")) == table.kernel_s(plain)
    assert table.is_measured("cudnn-bias float16")


def test_an_index_of_rows_that_is_expanded_is_a_kind() -> None:
    x, ids = meta(32, 64), torch.empty(16, 1, dtype=torch.long, device="meta")

    rows = work(aten.gather.default, x, 0, ids.expand(16, 64))
    each = work(aten.gather.default, x, 0, ids.expand(16, 64).contiguous())

    assert (rows.kind, rows.size[1:]) == ("gather-rows 2", (64,))
    assert (each.kind, each.size[1:]) == ("gather 2", ())


@pytest.mark.parametrize("family", ["indexed", "lists"])
def test_each_round_of_the_measurement_has_each_kind_of_a_family(family: str) -> None:
    calls = [{str(case.args[1][-1]) for case in each} for each in pace.rounds(family)]

    assert calls == [calls[0]] * pace.NUM_PARTS
    assert len(calls[0]) > 1


@pytest.fixture
def tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize(
    ("is_left_turned", "is_right_turned", "kind"),
    [(False, True, "matmul"), (False, False, "matmul-one"), (True, False, "matmul-both")],
)
def test_layouts_of_products_in_tf32_are_kinds(
    tf32: None, is_left_turned: bool, is_right_turned: bool, kind: str
) -> None:
    left, right = (
        meta(64, 64, dtype=torch.float32).t() if turned else meta(64, 64, dtype=torch.float32)
        for turned in (is_left_turned, is_right_turned)
    )

    assert work_of(aten.mm.default, (left, right), {}, left).kind == f"{kind} tf32"
    half = work_of(aten.mm.default, (left.half(), right.half()), {}, left.half())
    assert half.kind == "matmul float16"


def table_with(gpu: Any, kernels: dict[str, Any]) -> Table:
    """Return the times on a GPU from calls that an H100 measured."""
    kinds = {kind: Calls(kind, rows, H100) for kind, rows in kernels.items()}
    return Table(gpu, {"host": PLAIN_HOST, "first_us": {}}, kinds, H100, "")


def test_an_unmeasured_layout_takes_the_time_of_another() -> None:
    rows = [[1, n, n, n, 2 * n**3, 12 * n * n, 10.0] for n in (64, 128)]
    table = table_with(H100, {"matmul tf32": rows})

    assert table.is_measured("matmul-both tf32")
    found = Work("matmul-both tf32", (1, 64, 64, 64), "tf32", 2 * 64**3, 12 * 64 * 64)
    assert table.kernel_s(found) == pytest.approx(1e-5, rel=0.01)


PLAIN_HOST = dict.fromkeys(
    (
        "read", "list", "step", "zero_grad", "hook", "region", "choice", "loop",
        "forward_launch", "forward_cudnn", "forward_view",
        "backward_launch", "backward_cudnn", "backward_view",
    ),
    1.0,
)  # fmt: skip
"""Times of a host, a microsecond each."""


def test_a_gpu_with_the_same_rates_changes_the_time_for_bytes_alone() -> None:
    num_bytes = 1 << 30
    fastest_us = 1e6 * num_bytes / (BANDWIDTH_SHARE * 1e9 * H100.memory_gb_s)
    rows = [[num_bytes, 0, num_bytes, fastest_us], [1 << 20, 0, 1 << 20, 100 * fastest_us]]
    table = table_with(H200, {"pointwise 4": rows})

    def us(size: int) -> float:
        return 1e6 * table.kernel_s(Work("pointwise 4", (size,), "", 0, size))

    faster_us = fastest_us * H100.memory_gb_s / H200.memory_gb_s
    assert us(num_bytes) == pytest.approx(faster_us, rel=0.01)
    assert us(1 << 20) == pytest.approx(100 * fastest_us, rel=0.01)


def test_a_gpu_with_other_rates_has_the_roofline() -> None:
    other = replace(H100, name="other", chip="other", tflops={"float32": 1.0}, memory_gb_s=335)
    table = table_with(other, {"pointwise 4": [[1 << 20, 0, 1 << 20, 100.0]]})
    work = Work("pointwise 4", (1 << 20,), "", 0, 1 << 20)

    assert 1e6 * table.kernel_s(work) == pytest.approx(100 * H100.memory_gb_s / 335)


TABLES = """
import json, sys, torch
from memest.validate import pace
from memest.validate.pace import SHAPES, Observer

if "--quantized" in sys.argv:
    import bitsandbytes
found = {}
with torch.no_grad():
    for family, table in SHAPES["families"].items():
        if family == "quantized" and "--quantized" not in sys.argv:
            continue
        for make in pace.cases(table):
            name = f"{family}: {make.args[1][-1]}"
            if name not in found:
                call = make()
                with Observer() as observer:
                    call()
                found[name] = [work.kind for work in observer.found]
with open(sys.argv[1], "w") as file:
    json.dump(found, file)
"""


def test_each_call_of_the_tables_runs_one_kernel_of_a_known_kind(tmp_path: Path) -> None:
    script, found = tmp_path / "calls.py", tmp_path / "found.json"
    script.write_text(TABLES, encoding="utf-8")

    command = ["run", "--gpu", "h200", str(script), str(found)]
    if find_spec("bitsandbytes") is not None:
        command.append("--quantized")

    result = CliRunner().invoke(main, command)

    assert found.exists(), result.output
    kinds = json.loads(found.read_text(encoding="utf-8"))
    assert {name: each for name, each in kinds.items() if len(each) != 1} == {}
    names = {each[0] for each in kinds.values()}
    table = table_of(H100)
    assert [kind for kind in names if not table.is_measured(kind)] == []
    assert {"max_pool2d_with_indices_backward 2", "gather-rows 2", "_fused_sgd 4"} <= names
    assert {"efficient-backward-bias float16", "rnn-backward float16"} <= names


def test_cases_have_each_combination_of_the_axes() -> None:
    family = {
        "axes": {"dtype": ["half", "full"], "rows columns": [[1, 2], [3, 4]]},
        "names": {
            "x": ["ones", ["rows", "columns"], {"dtype": "dtype", "device": "cpu"}],
            "y": ["add", "x", 1],
        },
        "calls": [[["mul", "x", "y"]], [["aten.add", "y", 1], ["aten.mul", "r0", "rows"]]],
    }

    made = [make()() for make in pace.cases(family)]

    assert len(made) == 4 * 3
    assert made[2].tolist() == [[3, 3]]
    assert made[5].tolist() == [[9] * 4] * 3
    assert (made[0].dtype, made[-1].dtype) == (torch.bfloat16, torch.float32)


def test_a_kind_without_first_calls_has_those_of_the_nearest() -> None:
    """Libraries choose kernels for attention with a bias, too."""
    plain, biased = (Work(f"cudnn{mark} float16", (8, 8, 8, 8), "", 0, 1) for mark in ("", "-bias"))

    assert table_of(H100).first_s(biased.kind) == table_of(H100).first_s(plain.kind) > 0.01


TINY = Work("pointwise 2", (64,), "", 0, 64)
MOVED = Work("pointwise 2", (1 << 32,), "", 0, 1 << 32)
PRODUCT = Work("matmul float16", (1, 8192, 8192, 8192), "float16", 2 * 8192**3, 6 * 8192**2)


@pytest.mark.parametrize(
    ("works", "bound"),
    [
        ([TINY] * 100, "host"),
        ([MOVED, TINY], "memory"),
        ([PRODUCT] * 3 + [TINY], "compute"),
        ([TINY, Work("link", (1 << 36,), "", 0, 1 << 36)], "link"),
        ([MOVED] + [TINY] * 500, "host"),  # most of the time is the kernel's, which overlaps
    ],
)
def test_what_binds_is_the_resource_without_which_the_step_is_shortest(
    works: list[Work], bound: str
) -> None:
    time = estimate(log_of(*[works] * 3), H200)

    assert time is not None
    assert time.bound_by == bound
