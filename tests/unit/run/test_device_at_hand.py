"""Which GPU a process would run on, by a stub of nvidia-ml-py."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from memest.estimator.hardware.gpus import find_gpu
from memest.run import preflight as module
from memest.run.preflight import DeviceAtHand, device_at_hand

GIB = 1 << 30
H100 = find_gpu("h100-80gb")
FIRMWARE = 550 << 20


class Nvml:
    """`pynvml`, and name, used memory and slicing of each GPU of a machine."""

    NVMLError = type("NVMLError", (Exception,), {})
    NVMLError_NotSupported = type("NVMLError_NotSupported", (NVMLError,), {})
    nvmlMemory_v2 = 2

    def __init__(self, gpus: Sequence[tuple[str, int, bool]]) -> None:
        self.gpus = gpus
        self.is_open = False

    def nvmlInit(self) -> None:
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> tuple[str, int, bool]:
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> tuple[str, int, bool]:
        if not uuid.startswith("GPU-"):
            raise self.NVMLError
        return self.gpus[int(uuid[4:])]

    def nvmlDeviceGetName(self, handle: tuple[str, int, bool]) -> str:
        return handle[0]

    def nvmlDeviceGetMemoryInfo(self, handle: tuple[str, int, bool], version: int) -> Any:
        assert version == 2
        total = H100.memory_bytes + FIRMWARE
        return SimpleNamespace(total=total, reserved=FIRMWARE, used=handle[1])

    def nvmlDeviceGetCudaComputeCapability(self, handle: tuple[str, int, bool]) -> list[int]:
        return [9, 0]

    def nvmlDeviceGetMigMode(self, handle: tuple[str, int, bool]) -> list[int]:
        if handle[0] == "Tesla T4":
            raise self.NVMLError_NotSupported
        return [int(handle[2]), 0]


def machine(
    monkeypatch: pytest.MonkeyPatch, *gpus: tuple[str, int, bool], asked: Any = None
) -> Nvml:
    made = Nvml(gpus)
    monkeypatch.setitem(sys.modules, "pynvml", made)
    monkeypatch.setattr(module, "_has_driver", lambda: True)
    monkeypatch.setattr(module, "_gpu_of_another_process", lambda: asked)
    return made


H100_FREE = (H100.label, 0, False)


def test_an_empty_gpu_is_that_of_the_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = machine(monkeypatch, H100_FREE)

    found = device_at_hand({})

    assert found is not None
    assert found.gpu == H100
    assert found.is_known
    assert found.room_bytes == H100.limit_bytes
    assert found.others_bytes == 0
    assert not nvml.is_open


def test_what_others_use_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, (H100.label, 30 * GIB, False))

    found = device_at_hand({})

    assert found is not None
    assert found.others_bytes == 30 * GIB
    assert found.room_bytes == H100.limit_bytes - 30 * GIB


@pytest.mark.parametrize(
    ("visible", "used"), [("1", 2 * GIB), ("1,0", 2 * GIB), ("GPU-1", 2 * GIB), ("0", 0)]
)
def test_the_first_visible_gpu_is_meant(
    visible: str, used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, H100_FREE, (H100.label, 2 * GIB, False))

    found = device_at_hand({"CUDA_VISIBLE_DEVICES": visible})

    assert found is not None
    assert found.others_bytes == used


@pytest.mark.parametrize("visible", ["", " ", "-1", "-1,0", "2"])
def test_there_may_be_none(visible: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, H100_FREE, asked="not to be asked")

    assert device_at_hand({"CUDA_VISIBLE_DEVICES": visible}) is None


ASKED = DeviceAtHand("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 40 * GIB, (9, 0), 39 * GIB)


@pytest.mark.parametrize(
    ("cards", "environment"),
    [
        ([(H100.label, 0, True)], {}),
        ([H100_FREE], {"CUDA_VISIBLE_DEVICES": "MIG-1"}),
        ([H100_FREE, ("Tesla T4", 0, False)], {}),
    ],
    ids=["a sliced card", "a slice", "cards of two kinds"],
)
def test_where_nvml_cannot_tell_another_process_asks_torch(
    cards: list[tuple[str, int, bool]],
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine(monkeypatch, *cards, asked=ASKED)

    assert device_at_hand(environment) is ASKED


def test_gpus_of_two_kinds_in_the_order_of_their_slots_need_no_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine(monkeypatch, H100_FREE, ("Tesla T4", 0, False), asked=ASKED)

    found = device_at_hand({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})

    assert found is not None
    assert found.name == H100.label


def test_without_nvidia_ml_py_another_process_asks_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, H100_FREE, asked=ASKED)
    monkeypatch.setitem(sys.modules, "pynvml", None)

    assert device_at_hand({}) is ASKED


def test_without_a_driver_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    monkeypatch.setattr(module, "_gpu_of_another_process", lambda: ASKED)

    assert device_at_hand({}) is None


def test_another_process_answers_by_json(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = 'a warning\n["NVIDIA H200", 150109880320, 9, 0, 1000000000]\n'
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: SimpleNamespace(stdout=answer))

    found = module._gpu_of_another_process()

    assert found is not None
    assert found.gpu.name == "h200"
    assert found.room_bytes == 1000000000  # its own context is taken off


def test_another_process_may_see_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **options: Any) -> Any:
        raise subprocess.CalledProcessError(1, "python")

    monkeypatch.setattr(subprocess, "run", fails)

    assert module._gpu_of_another_process() is None


def test_what_this_process_has_cached_is_free() -> None:
    properties = SimpleNamespace(name="NVIDIA H200", total_memory=150109880320, major=9, minor=0)
    torch = SimpleNamespace(
        cuda=SimpleNamespace(
            get_device_properties=lambda index: properties,
            mem_get_info=lambda index: (90 * GIB, 150109880320),
            memory_reserved=lambda index: 10 * GIB,
        )
    )

    assert module._gpu_of_this_process(torch).room_bytes == 100 * GIB


@pytest.mark.parametrize("has_context", [True, False])
def test_torch_is_asked_where_it_has_a_context_already(
    has_context: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = SimpleNamespace(
        cuda=SimpleNamespace(is_initialized=lambda: True),
        _C=SimpleNamespace(_cuda_hasPrimaryContext=lambda index: has_context),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(module, "_gpu_of_this_process", lambda torch: ASKED)
    machine(monkeypatch, H100_FREE)

    found = device_at_hand({})

    assert found is not None
    assert (found is ASKED) == has_context


def test_a_gpu_that_the_catalogue_lacks_is_like_the_nearest() -> None:
    found = DeviceAtHand("NVIDIA GeForce RTX 4080", 16 * GIB, (8, 9), 16 * GIB)

    assert not found.is_known
    assert found.gpu.capability == (8, 9)
    assert found.room_bytes == 16 * GIB - found.gpu.context_bytes
