"""The installed cuDNN as a source of workspaces: found, filtered, and compared with an H100's."""

from __future__ import annotations

import ctypes
import json
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from memest import TrainingPlan, predict
from memest.estimator.hardware.gpus import Gpu, custom_gpu, find_gpu, list_gpus
from memest.estimator.ops import convolution, cudnn_library
from memest.estimator.ops.convolution import (
    ANY_KERNELS,
    Workspace,
    answers_of,
    describe_source,
    has_same_workspaces,
    workspace,
)
from memest.estimator.ops.cudnn_library import (
    DOWN_CONVERTS,
    MEASURED,
    NONDETERMINISTIC,
    TENSOR_CORES,
    CudnnError,
    Kernels,
    Library,
    Plan,
    device_properties,
    library,
)
from memest.estimator.ops.cudnn_rules import ConvolutionShapes, is_product, workspace_bytes
from tests.convolutions import of_row

DIRECTIONS = ("forward", "input", "weight")

H100, A100, T4 = find_gpu("h100-80gb"), find_gpu("a100-80gb"), find_gpu("t4")
BLOCK_BYTES = 512
WORKSPACES = Path(__file__).parents[1] / "data" / "cudnn_workspaces.json"
PLAIN = ConvolutionShapes(
    (3, 17, 301, 203), (29, 17, 3, 3), (3, 29, 299, 201), (1, 1), (0, 0), (1, 1), 1,
    torch.float32, False,
)  # fmt: skip
IMAGE = (32, 64, 56, 56)
HALF_LAST = ConvolutionShapes(
    IMAGE, (64, 64, 3, 3), IMAGE, (1, 1), (1, 1), (1, 1), 1, torch.bfloat16, True
)


class Stub:
    """An installed cuDNN with one plan for every call."""

    version = MEASURED[0]

    def __init__(self, plan: Plan | Exception | None) -> None:
        self.plan = plan
        self.num_calls = 0

    def supports(self, gpu: Any) -> bool:
        return device_properties(gpu.chip) is not None

    is_measured = Library.is_measured

    def fingerprint(self, gpu: str) -> str:
        return f"stub-{gpu}"

    def first_plan(self, *args: Any, **kwargs: Any) -> Plan | None:
        self.num_calls += 1
        if isinstance(self.plan, Exception):
            raise self.plan
        return self.plan


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for cached in (library, workspace, answers_of):
        cached.cache_clear()
    yield
    for cached in (library, workspace, answers_of):
        cached.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, plan: Plan | Exception | None) -> Stub:
    stub = Stub(plan)
    monkeypatch.setattr(convolution, "library", lambda: stub)
    return stub


def test_the_installed_cudnn_answers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = install(monkeypatch, Plan(12345, frozenset()))
    for _ in range(2):
        found = workspace(PLAIN, "forward", H100)
        assert (found.num_bytes, found.is_by_library) == (12345, True)
        workspace.cache_clear()
    assert stub.num_calls == 1, "the second answer is stored"


def test_more_convolutions_than_the_file_holds_are_answered_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(convolution, "MAX_ANSWERS", 4)
    stub = install(monkeypatch, Plan(12345, frozenset()))
    calls = [replace(PLAIN, groups=n) for n in range(1, 11)]

    def answer() -> None:
        assert {workspace(c, "forward", H100).num_bytes for c in calls} == {12345}

    answer()
    workspace.cache_clear()
    answer()
    assert stub.num_calls == 10, "the process keeps every answer"
    answers_of(stub, H100.name).write()  # type: ignore[arg-type]
    for cached in (workspace, answers_of):
        cached.cache_clear()
    answer()
    assert stub.num_calls == 16, "the file keeps the latest four"


@pytest.mark.parametrize("answer", [CudnnError("refused"), None])
def test_a_refused_call_is_estimated(
    monkeypatch: pytest.MonkeyPatch, answer: CudnnError | None
) -> None:
    install(monkeypatch, answer)
    found = workspace(PLAIN, "forward", H100)
    assert found.num_bytes == workspace_bytes(PLAIN, "forward") > 0
    assert not found.is_by_library


def test_a_report_names_the_cudnn_that_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = install(monkeypatch, None)
    monkeypatch.setenv("MEMEST_TORCH", "2.11")
    assert "by the heuristics of cuDNN 9.19.0, which run without a GPU;" in describe_source(H100)
    assert describe_source(H100).endswith("; those of 1x1 products by cuBLASLt are estimated")
    stub.version = 92405
    assert "cuDNN 9.24.5" in describe_source(A100)
    assert describe_source(A100).endswith("; torch 2.11 has 9.19.0")
    assert "properties of b200" in describe_source(find_gpu("b200"))
    monkeypatch.setattr(convolution, "library", lambda: None)
    assert "pip install 'memest-gpu[cudnn]'" in describe_source(H100)
    assert "pip install" not in describe_source(find_gpu("b200"))


def test_another_cudnn_estimates_the_workspaces_of_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its descriptors are not written to, so its heuristics lack the clusters."""
    stub = install(monkeypatch, Plan(12345, frozenset()))
    stub.version = 92400
    assert workspace(PLAIN, "forward", H100) == Workspace(12345, is_by_library=False)
    assert workspace(PLAIN, "forward", A100) == Workspace(12345, is_by_library=True)
    assert "estimates, since answers about Hopper" in describe_source(H100)
    assert "clusters" not in describe_source(A100)


def test_filters_follow_the_settings_of_torch() -> None:
    def kept(*notes: int) -> list[bool]:
        plan = Plan(0, frozenset(notes))
        return [
            plan.is_allowed(Kernels(deterministic, without_tf32))
            for deterministic in (False, True)
            for without_tf32 in (False, True)
        ]

    assert kept() == [True] * 4
    assert kept(TENSOR_CORES) == [True, False, True, False]
    assert kept(NONDETERMINISTIC) == [True, True, False, False]
    assert kept(DOWN_CONVERTS) == [False] * 4


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


def at(monkeypatch: pytest.MonkeyPatch, folder: Path, *, has_cublaslt: bool = True) -> None:
    monkeypatch.setattr(cudnn_library, "_folders", lambda: iter([folder]))
    if has_cublaslt:
        monkeypatch.setattr(cudnn_library, "_load_cublaslt", lambda folder: True)


def test_a_file_that_is_no_library_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "libcudnn_graph.so.9").write_bytes(b"no library")
    at(monkeypatch, tmp_path)
    assert library() is None


def loaded(version: int) -> SimpleNamespace:
    call = SimpleNamespace

    def get_version() -> int:
        return version

    return SimpleNamespace(
        cudnnGetVersion=get_version, cudnnBackendSetAttribute=call(),
        cudnnBackendGetAttribute=call(), cudnnBackendFinalize=call(),
        cudnnBackendDestroyDescriptor=call(), cudnnSetCallback=call(),
    )  # fmt: skip


def test_cudnn_older_than_9_8_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "libcudnn_graph.so.9").touch()
    at(monkeypatch, tmp_path)
    for version, is_used in ((90701, False), (90800, True)):
        monkeypatch.setattr(ctypes, "CDLL", lambda path, v=version: loaded(v))
        library.cache_clear()
        found = library()
        assert (found is not None) is is_used
        if found is not None:
            assert found.supports(A100)
            assert found.is_measured(A100)
            assert found.supports(H100)
            assert not found.is_measured(H100), "the layout of its descriptors is not known"
            assert not found.supports(find_gpu("b200")), "its properties are not known"


def test_cudnn_without_cublaslt_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """cuDNN aborts the process if it cannot load cuBLASLt."""
    (tmp_path / "libcudnn_graph.so.9").touch()
    at(monkeypatch, tmp_path, has_cublaslt=False)

    def load(path: str) -> SimpleNamespace:
        if "cublasLt" in path:
            raise OSError(path)
        return loaded(MEASURED[0])

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert library() is None


def test_the_library_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cudnn_library.FOLDER, "0")
    assert library() is None


def test_a_folder_with_cudnn_can_be_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "nvidia/cudnn/lib").mkdir(parents=True)
    monkeypatch.setenv(cudnn_library.FOLDER, str(tmp_path))
    assert list(cudnn_library._folders()) == [tmp_path / "nvidia/cudnn/lib"]


def test_rejected_engines_and_their_reasons_are_read_from_the_log() -> None:
    text = (
        b'call:\n engineConfig: val={"engineId":58,"smVersion":900};\n Warning: A; Reason: x\n'
        b' engineConfig: val={"engineId":5};\n Warning: B; Reason: y\n Warning: C; Reason: z\n'
    )
    found = cudnn_library.REJECTED.findall(text)
    assert [engine for engine, _ in found] == [b"58", b"5"]
    assert b"Reason: x" in found[0][1]
    assert b"Reason: y" not in found[0][1]
    assert b"Reason: z" in found[1][1]


# --- against the library


def installed() -> Library:
    found = library()
    if found is None or not found.is_measured(H100):
        pytest.skip("cuDNN 9.19 is not installed: pip install 'memest-gpu[cudnn]'")
    return found


def in_blocks(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES)


Row = tuple[ConvolutionShapes, list[int], list[int], list[int], list[int]]


@cache
def measured() -> list[Row]:
    """Calls with workspaces of any kernel, of deterministic ones, without TF32, and tried ones."""
    return [(of_row(row), *rest) for row, *rest in json.loads(WORKSPACES.read_text())["calls"]]


def share_right(
    direction: str, rows: list[Row], column: int = 1, *, within: int = 0, **settings: bool
) -> float:
    """Share of calls of which cuDNN's first plan has the measured workspace, in blocks."""
    cudnn, place = installed(), DIRECTIONS.index(direction)
    right = 0
    for row in rows:
        plan = cudnn.first_plan(row[0], direction, H100.name, Kernels(**settings))
        size = row[column][place]
        right += plan is not None and (
            in_blocks(plan.workspace_bytes) == in_blocks(size)
            or abs(plan.workspace_bytes - size) <= within
        )
    return right / len(rows)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_cudnn_is_right_about_convolutions_that_are_no_products(direction: str) -> None:
    rows = [row for row in measured() if not is_product(row[0])]
    assert len(rows) > 250
    assert share_right(direction, rows) >= 0.995


@pytest.mark.parametrize(
    ("direction", "share", "near"),
    [("forward", 0.62, 0.96), ("input", 0.62, 0.96), ("weight", 0.62, 0.72)],
)
def test_products_by_cublaslt_are_near(direction: str, share: float, near: float) -> None:
    """Right to the block, and within 512 B: some kernels add 272 or 400 bytes."""
    rows = [row for row in measured() if is_product(row[0])]
    assert len(rows) > 80
    assert share_right(direction, rows) >= share
    assert share_right(direction, rows, within=BLOCK_BYTES) >= near


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("column", "settings"), [(2, {"are_deterministic": True}), (3, {"are_without_tf32": True})]
)
def test_filters_choose_the_plans_that_an_h100_chose(
    direction: str, column: int, settings: dict[str, bool]
) -> None:
    rows = [row for row in measured() if not is_product(row[0]) and row[0].dtype == torch.float32]
    assert len(rows) > 100
    assert share_right(direction, rows, column, **settings) >= 0.99


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_largest_workspace_that_is_tried_is_near(direction: str) -> None:
    cudnn, place = installed(), DIRECTIONS.index(direction)
    rows = [row for row in measured() if row[4][place] >= 0][::8]
    largest = [
        max(plan.workspace_bytes for plan in cudnn.all_plans(row[0], direction, H100.name))
        for row in rows
    ]
    near = [
        abs(n - row[4][place]) <= 0.1 * max(row[4][place], 1 << 20)
        for n, row in zip(largest, rows, strict=True)
    ]
    assert len(rows) > 40
    assert sum(near) >= 0.8 * len(rows)


def test_a_descriptor_of_another_layout_is_not_written_to() -> None:
    """It is found by the capability, the driver and 40 figures of a descriptor made from JSON."""
    cudnn = installed()
    found = device_properties(H100.name)
    assert found is not None
    text, clusters = found
    with cudnn._descriptors():
        made = cudnn._make(
            cudnn_library.PROPERTIES, (2702, cudnn_library.CHAR, text.encode() + b"\0")
        )
        other = json.dumps({**json.loads(text), "driverVer": 13001})
        with pytest.raises(CudnnError, match="another layout"):
            cudnn._write_clusters(made, other, clusters)
        cudnn._write_clusters(made, text, clusters)
        with pytest.raises(CudnnError, match="another layout"):
            cudnn._write_clusters(made, text, clusters)


@pytest.mark.parametrize(
    ("samples", "channels", "side", "num_bytes"), [(1, 384, 24, 0), (192, 8, 20, 1769472)]
)
def test_one_of_two_compiled_engines_sums_the_weight_in_parts(
    samples: int, channels: int, side: int, num_bytes: int
) -> None:
    """Measured on an H100: depthwise 3x3 in bfloat16, channels-last."""
    image = (samples, channels, side, side)
    window = (channels, 1, 3, 3)
    call = ConvolutionShapes(
        image, window, image, (1, 1), (1, 1), (1, 1), channels, torch.bfloat16, True
    )
    plan = installed().first_plan(call, "weight", H100.name, ANY_KERNELS)
    assert plan is not None
    assert plan.workspace_bytes == num_bytes


def test_an_a100_takes_other_workspaces_than_an_h100() -> None:
    cudnn = installed()
    plans = [cudnn.first_plan(HALF_LAST, "forward", gpu.name, ANY_KERNELS) for gpu in (H100, A100)]
    assert [plan and plan.workspace_bytes for plan in plans] == [131, 0]


def test_a_t4_has_no_plan_for_bfloat16() -> None:
    cudnn = installed()
    half = replace(HALF_LAST, dtype=torch.float16)
    assert cudnn.first_plan(half, "forward", T4.name, ANY_KERNELS) is not None
    with suppress(CudnnError):
        assert cudnn.first_plan(HALF_LAST, "forward", T4.name, ANY_KERNELS) is None


PATCHES = ConvolutionShapes(
    (16, 3, 224, 224), (1408, 3, 14, 14), (16, 1408, 16, 16), (14, 14), (0, 0), (1, 1), 1,
    torch.float32, False,
)  # fmt: skip


def test_a_plan_has_the_answers_of_cudnn() -> None:
    """`trace_plan` drops the name of the GPU, and not its chip."""
    installed()
    plan = TrainingPlan(model_name="vit-base-patch16-224", gpu=("h100-80gb",), batch_size=2)

    assert predict(plan).coverage["unmodelled"] == {}


@pytest.mark.parametrize("gpu", [H100, custom_gpu(24 << 30, H100), custom_gpu(24 << 30)])
def test_a_gpu_of_another_size_has_the_answers_of_its_chip(gpu: Gpu) -> None:
    """As measured: 36,014,096 bytes forward."""
    installed()
    assert workspace(PATCHES, "forward", gpu) == Workspace(36_014_096, is_by_library=True)


def test_chips_share_a_program_if_cudnn_takes_the_same_workspaces() -> None:
    """The L2 cache decides a call on an H200 and not on an H100."""
    installed()
    shapes = ConvolutionShapes(
        (40, 384, 16, 16), (232, 384, 3, 3), (40, 232, 16, 16), (1, 1), (1, 1), (1, 1), 1,
        torch.bfloat16, True,
    )  # fmt: skip
    patches = {(PATCHES, "forward", Kernels()), (PATCHES, "weight", Kernels())}

    assert has_same_workspaces(patches, H100, find_gpu("h200"))
    assert not has_same_workspaces({(shapes, "forward", Kernels())}, H100, find_gpu("h200"))
    assert has_same_workspaces({(shapes, "forward", None)}, A100, find_gpu("a100-40gb"))
    assert has_same_workspaces(set(), H100, find_gpu("gh200-96gb"))
    assert not has_same_workspaces(patches, H100, find_gpu("gh200-96gb"))


def test_a_hopper_without_clusters_is_an_estimate() -> None:
    gpu = replace(H100, chip="t4")  # its entry has no clusters

    assert not Library.is_measured(cast(Library, Stub(None)), gpu)


@pytest.mark.parametrize("layout", cudnn_library.LAYOUTS)
def test_clusters_are_written_where_a_layout_has_them(layout: tuple[int, ...]) -> None:
    found = device_properties(H100.chip)
    assert found is not None
    text, clusters = found
    properties = json.loads(text)
    head = (7, 7, properties["deviceVer"], properties["driverVer"])
    memory = ctypes.create_string_buffer(cudnn_library.DESCRIPTOR_BYTES)
    struct.pack_into(f"{len(head) + len(layout)}i", memory, 0, *head, *layout)
    made = ctypes.c_void_p(ctypes.addressof(memory))
    stub = cast(Library, SimpleNamespace(version=92400))

    Library._write_clusters(stub, made, text, clusters)

    written = struct.unpack_from(f"{len(head) + len(layout)}i", memory)
    assert written == (*head, *layout[: len(layout) - len(clusters)], *clusters)


def test_a_measured_release_of_another_layout_is_refused() -> None:
    text, clusters = cast(tuple[str, tuple[int, ...]], device_properties(H100.chip))
    memory = ctypes.create_string_buffer(cudnn_library.DESCRIPTOR_BYTES)
    made = ctypes.c_void_p(ctypes.addressof(memory))

    with pytest.raises(CudnnError, match="another layout"):
        Library._write_clusters(
            cast(Library, SimpleNamespace(version=MEASURED[0])), made, text, clusters
        )
    Library._write_clusters(cast(Library, SimpleNamespace(version=99999)), made, text, clusters)
    assert not any(memory.raw)
