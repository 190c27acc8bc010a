"""Workspaces from the installed cuDNN: measured calls, broken libraries, unknown GPUs."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from memest.estimator.hardware.gpus import find_gpu, list_gpus
from memest.estimator.kernels import cudnn_convolution, cudnn_library
from memest.estimator.kernels.cudnn_convolution import (
    DIRECTIONS,
    ConvolutionShapes,
    Kernels,
    workspaces,
)
from memest.estimator.kernels.cudnn_library import (
    DOWN_CONVERTS,
    LAYOUT_KNOWN,
    NONDETERMINISTIC,
    TENSOR_CORES,
    CudnnError,
    Plan,
    device_properties,
    library,
    strides,
)

H100, A100 = find_gpu("h100-80gb"), find_gpu("a100-80gb")
BLOCK_BYTES = 512
ODD = ConvolutionShapes(
    (3, 17, 301, 203), (29, 17, 3, 3), (3, 29, 299, 201), (1, 1), (0, 0), (1, 1), 1,
    torch.float32, False,
)  # fmt: skip
"""A convolution that was not measured."""

PRODUCT = ConvolutionShapes(
    (3, 17, 31, 23), (29, 17, 1, 1), (3, 29, 31, 23), (1, 1), (0, 0), (1, 1), 1,
    torch.float32, False,
)  # fmt: skip

DEPTHWISE = ConvolutionShapes(
    (3, 34, 31, 23), (34, 1, 3, 3), (3, 34, 29, 21), (1, 1), (0, 0), (1, 1), 34,
    torch.float32, False,
)  # fmt: skip


class Stub:
    """An installed cuDNN with one plan for every call."""

    version = LAYOUT_KNOWN[0]

    def __init__(self, plan: Plan | Exception | None) -> None:
        self.plan = plan

    def knows(self, gpu: Any) -> bool:
        return True

    def first_plan(self, *args: Any, **kwargs: Any) -> Plan | None:
        if isinstance(self.plan, Exception):
            raise self.plan
        return self.plan


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    for cached in (library, workspaces):
        cached.cache_clear()
    yield
    for cached in (library, workspaces):
        cached.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, plan: Plan | Exception | None) -> None:
    monkeypatch.setattr(cudnn_convolution, "library", lambda: Stub(plan))


def test_the_installed_cudnn_answers_what_was_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Plan(68, 12345, frozenset()))
    found = workspaces(ODD, gpu=H100)
    assert {d: found[d].num_bytes for d in DIRECTIONS} == dict.fromkeys(DIRECTIONS, 12345)
    assert all(w.is_sure for w in found.values())
    exact = workspaces(ODD, Kernels(are_without_tf32=True), H100)
    assert not any(w.is_sure for w in exact.values()), "86 to 95 % are right without TF32"


@pytest.mark.parametrize("shapes", [PRODUCT, DEPTHWISE])
def test_trees_answer_for_products_by_cublaslt_and_for_depthwise(
    monkeypatch: pytest.MonkeyPatch, shapes: ConvolutionShapes
) -> None:
    alone = workspaces(shapes)
    install(monkeypatch, Plan(68, 12345, frozenset()))
    assert workspaces(shapes, gpu=H100) == alone


def test_a_measured_call_keeps_its_workspace_on_an_h100_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    image = (32, 64, 56, 56)
    shapes = ConvolutionShapes(
        image, (64, 64, 3, 3), image, (1, 1), (1, 1), (1, 1), 1, torch.float32, False
    )
    install(monkeypatch, Plan(68, 12345, frozenset()))
    assert workspaces(shapes, gpu=H100) == workspaces(shapes)
    assert workspaces(shapes, gpu=A100)["forward"].num_bytes == 12345


@pytest.mark.parametrize("answer", [CudnnError("refused"), None])
def test_trees_answer_what_cudnn_refuses(
    monkeypatch: pytest.MonkeyPatch, answer: CudnnError | None
) -> None:
    alone = workspaces(ODD)
    install(monkeypatch, answer)
    assert workspaces(ODD, gpu=H100) == alone


def test_filters_follow_the_settings_of_torch() -> None:
    def kept(*notes: int) -> list[bool]:
        plan = Plan(0, 0, frozenset(notes))
        return [
            plan.is_allowed(deterministic=deterministic, without_tf32=without_tf32)
            for deterministic in (False, True)
            for without_tf32 in (False, True)
        ]

    assert kept() == [True] * 4
    assert kept(TENSOR_CORES) == [True, False, True, False]
    assert kept(NONDETERMINISTIC) == [True, True, False, False]
    assert kept(DOWN_CONVERTS) == [False] * 4


def test_strides_are_dense_in_both_layouts() -> None:
    assert strides([2, 3, 5, 7], False) == [105, 35, 7, 1]
    assert strides([2, 3, 5, 7], True) == [105, 1, 21, 3]


def test_properties_of_a_gpu_name_their_source_and_agree_with_the_catalogue() -> None:
    known = json.loads(cudnn_library.DEVICE_PROPERTIES.read_text())
    assert {gpu.name for gpu in list_gpus()} >= set(known)
    for name, entry in known.items():
        assert entry["source"]
        found = device_properties(name)
        assert found is not None
        properties, gpu = json.loads(found[0]), find_gpu(name)
        assert properties["multiProcessorCount"] == gpu.num_sms
        assert properties["totalGlobalMem"] == gpu.memory_bytes
        assert properties["deviceVer"] == 100 * gpu.capability[0] + 10 * gpu.capability[1]
    assert device_properties("24.00GiB") is None


def at(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(cudnn_library, "_folders", lambda: iter([folder]))


def test_a_file_that_is_no_library_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "libcudnn_graph.so.9").write_bytes(b"no library")
    at(monkeypatch, tmp_path)
    assert library() is None


def test_cudnn_older_than_9_8_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def loaded(version: int) -> SimpleNamespace:
        def get_version() -> int:
            return version

        call = SimpleNamespace
        return SimpleNamespace(
            cudnnGetVersion=get_version, cudnnBackendSetAttribute=call(),
            cudnnBackendGetAttribute=call(), cudnnBackendFinalize=call(),
            cudnnBackendDestroyDescriptor=call(),
        )  # fmt: skip

    (tmp_path / "libcudnn_graph.so.9").touch()
    at(monkeypatch, tmp_path)
    for version, is_used in ((90701, False), (90800, True)):
        monkeypatch.setattr(ctypes, "CDLL", lambda path, v=version: loaded(v))
        library.cache_clear()
        found = library()
        assert (found is not None) is is_used
        if found is not None:
            assert found.knows(A100)
            assert not found.knows(H100), "the layout of its descriptors is not known"
            assert not found.knows(find_gpu("b200")), "its properties are not known"


def test_the_library_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cudnn_library.DISABLED, "0")
    assert library() is None


def installed() -> cudnn_library.Library:
    found = library()
    if found is None or not found.knows(H100):
        pytest.skip("cuDNN 9.19 is not installed")
    return found


@pytest.mark.parametrize(
    ("direction", "share"), [("forward", 0.98), ("input", 0.98), ("weight", 0.96)]
)
def test_the_installed_cudnn_is_right_about_measured_calls(direction: str, share: float) -> None:
    """Calls that `takes_library` sends to cuDNN, right to 512 B."""
    cudnn, place = installed(), DIRECTIONS.index(direction)
    data = cudnn_convolution.read()
    rows = np.flatnonzero(data["is_common"] & (data["calls"][:, 3] == 1))
    rows = [i for i in rows[:: len(rows) // 300] if data["calls"][i][13:16].max() > 1]
    right = 0
    for i in rows:
        plan = cudnn.first_plan(
            data["calls"][i].tolist(), direction, H100.name,
            deterministic=False, without_tf32=False,
        )  # fmt: skip
        measured = int(data["workspaces"][i, place])
        right += plan is not None and -(-plan.workspace_bytes // BLOCK_BYTES) == -(
            -measured // BLOCK_BYTES
        )
    assert len(rows) > 150
    assert right >= share * len(rows)


def test_an_a100_takes_other_workspaces_than_an_h100() -> None:
    cudnn = installed()
    image = (32, 64, 56, 56)
    row = ConvolutionShapes(
        image, (64, 64, 3, 3), image, (1, 1), (1, 1), (1, 1), 1, torch.bfloat16, True
    ).row()
    sizes = [
        cudnn.first_plan(row, "forward", gpu.name, deterministic=False, without_tf32=False)
        for gpu in (H100, A100)
    ]
    assert [plan and plan.workspace_bytes for plan in sizes] == [131, 0]
