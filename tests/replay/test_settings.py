"""Recorded on an H100 with settings of the allocator: it grows and gives back as CUDA's did."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memest.estimator.allocator.blocks import AddressSpace, Block
from memest.estimator.allocator.settings import parse_settings
from memest.estimator.allocator.statistics import CountingAllocator, allow_share
from memest.estimator.hardware.gpus import find_gpu

FOLDER = Path(__file__).parent / "settings"
MANIFEST: dict[str, dict[str, Any]] = json.loads((FOLDER / "manifest.json").read_text())
ALLOC, FREE, SEGMENT_ALLOC, SEGMENT_FREE, _, SEGMENT_MAP, SEGMENT_UNMAP = range(7)
GPU = find_gpu("h100-80gb")

Events = list[tuple[int, int, int]]


def recorded(name: str) -> Events:
    with gzip.open(FOLDER / f"{name}.npy.gz") as file:
        table = np.load(file, allow_pickle=False)
    return [(action, address, size) for action, address, size in table.T.tolist()]


class RecordedAddresses(AddressSpace):
    """Segments where the driver put them."""

    def __init__(self, events: Events) -> None:
        super().__init__()
        self._next = iter([e for e in events if e[0] == SEGMENT_ALLOC])

    def take(self, num_bytes: int) -> int:
        _, address, size = next(self._next)
        assert size == num_bytes
        return address

    def give_back(self, address: int, num_bytes: int) -> None:
        pass


class Watched(CountingAllocator):
    """Writes down what it does with segments, as a recording has it."""

    def __init__(self, name: str, addresses: AddressSpace | None) -> None:
        self.done: list[tuple[int, int]] = []
        settings = parse_settings(MANIFEST[name]["settings"])
        super().__init__(GPU.limit_bytes)
        self.addresses = addresses or self.addresses
        self.use(settings)
        if settings.memory_fraction < 1:
            allow_share(self, settings.memory_fraction, GPU.memory_bytes, GPU.limit_bytes)

    def count_segment(self, block: Block) -> None:
        super().count_segment(block)
        self.done.append((SEGMENT_ALLOC, block.num_bytes))

    def release(self, block: Block) -> None:
        super().release(block)
        self.done.append((SEGMENT_FREE, block.num_bytes))

    def count_mapped(self, address: int, num_bytes: int, block: Block) -> None:
        super().count_mapped(address, num_bytes, block)
        self.done.append((SEGMENT_MAP, num_bytes))

    def count_unmapped(self, address: int, num_bytes: int, block: Block) -> None:
        super().count_unmapped(address, num_bytes, block)
        self.done.append((SEGMENT_UNMAP, num_bytes))


def run(events: Events, allocator: Watched) -> set[tuple[bool, int]]:
    """Apply the requests; how far blocks lie from where they lay, by pool."""
    live: dict[int, Block] = {}
    shifts = set()
    for action, address, size in events:
        if action == ALLOC:
            block = live[address] = allocator.malloc(size)
            shifts.add((block.is_small, block.address - address))
        elif action == FREE:
            allocator.free(live.pop(address))
    return shifts


@pytest.mark.parametrize("name", MANIFEST)
def test_segments_come_and_go_as_recorded_and_blocks_lie_where_they_lay(name: str) -> None:
    events = recorded(name)
    allocator = Watched(name, RecordedAddresses(events))

    shifts = run(events, allocator)

    of_segments = (SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP)
    assert allocator.done == [(action, size) for action, _, size in events if action in of_segments]
    assert len(shifts) == len({is_small for is_small, _ in shifts})  # one of each pool
    assert allocator.peak_allocated_bytes == MANIFEST[name]["peak_allocated_bytes"]
    assert allocator.peak_reserved_bytes == MANIFEST[name]["peak_reserved_bytes"]


@pytest.mark.parametrize("name", MANIFEST)
def test_reserved_is_as_recorded_wherever_the_driver_maps_segments(name: str) -> None:
    allocator = Watched(name, None)

    run(recorded(name), allocator)

    assert allocator.peak_reserved_bytes == MANIFEST[name]["peak_reserved_bytes"]
