"""Which GPU a process would run on, by a stand-in for NVML."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from memest.estimator.hardware.gpus import find_gpu
from memest.run import device_at_hand as module
from memest.run.device_at_hand import DeviceAtHand, device_at_hand

GIB = 1 << 30
H100 = find_gpu("h100-80gb")
FIRMWARE = 550 << 20


class Nvml:
    """NVML of a machine: of each card its name, what others use of it, and whether it is sliced."""

    def __init__(self, cards: Sequence[tuple[str, int, bool]]) -> None:
        self.cards = cards
        self.is_open = False

    def nvmlInit_v2(self) -> int:
        self.is_open = True
        return 0

    def nvmlShutdown(self) -> int:
        self.is_open = False
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self.cards)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:
        handle._obj.value = index + 1
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        if not uuid.startswith(b"GPU-"):
            return 6
        return self.nvmlDeviceGetHandleByIndex_v2(int(uuid[4:]), handle)

    def nvmlDeviceGetName(self, handle: Any, name: Any, size: int) -> int:
        name.value = self.cards[handle.value - 1][0].encode()
        return 0

    def nvmlDeviceGetMemoryInfo_v2(self, handle: Any, memory: Any) -> int:
        found = memory._obj
        assert found.version == 40 | 2 << 24
        found.total, found.reserved = H100.memory_bytes + FIRMWARE, FIRMWARE
        found.used = self.cards[handle.value - 1][1]
        found.free = found.total - found.reserved - found.used
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = 9, 0
        return 0

    def nvmlDeviceGetMigMode(self, handle: Any, current: Any, pending: Any) -> int:
        is_sliced = self.cards[handle.value - 1][2]
        current._obj.value = int(is_sliced)
        return 0


def machine(
    monkeypatch: pytest.MonkeyPatch, *cards: tuple[str, int, bool], asked: Any = None
) -> Nvml:
    made = Nvml(cards)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: made)
    monkeypatch.setattr(module, "_of_another_process", lambda: asked)
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


def test_without_nvml_and_driver_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    monkeypatch.setattr(module, "_of_another_process", lambda: ASKED)

    assert device_at_hand({}) is None


def test_another_process_answers_by_json(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = 'a warning\n["NVIDIA H200", 150109880320, 9, 0, 1000000000]\n'
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: SimpleNamespace(stdout=answer))

    found = module._of_another_process()

    assert found is not None
    assert found.gpu.name == "h200"
    assert found.room_bytes == 1000000000  # its own context is taken off


def test_another_process_may_see_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **options: Any) -> Any:
        raise subprocess.CalledProcessError(1, "python")

    monkeypatch.setattr(subprocess, "run", fails)

    assert module._of_another_process() is None


def test_what_this_process_has_cached_is_free() -> None:
    properties = SimpleNamespace(name="NVIDIA H200", total_memory=150109880320, major=9, minor=0)
    torch = SimpleNamespace(
        cuda=SimpleNamespace(
            get_device_properties=lambda index: properties,
            mem_get_info=lambda index: (90 * GIB, 150109880320),
            memory_reserved=lambda index: 10 * GIB,
        )
    )

    assert module._of_this_process(torch).room_bytes == 100 * GIB


@pytest.mark.parametrize("has_context", [True, False])
def test_torch_is_asked_where_it_has_a_context_already(
    has_context: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = SimpleNamespace(
        cuda=SimpleNamespace(is_initialized=lambda: True),
        _C=SimpleNamespace(_cuda_hasPrimaryContext=lambda index: has_context),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(module, "_of_this_process", lambda torch: ASKED)
    machine(monkeypatch, H100_FREE)

    found = device_at_hand({})

    assert found is not None
    assert (found is ASKED) == has_context


def test_a_gpu_that_the_catalogue_lacks_is_like_the_nearest() -> None:
    found = DeviceAtHand("NVIDIA GeForce RTX 4080", 16 * GIB, (8, 9), 16 * GIB)

    assert not found.is_known
    assert found.gpu.capability == (8, 9)
    assert found.room_bytes == 16 * GIB - found.gpu.context_bytes
