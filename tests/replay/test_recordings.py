"""Real runs, event by event, through the simulated allocator: it reserves what CUDA reserved."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from memest.estimator.allocator.blocks import AddressSpace, Block
from memest.estimator.allocator.caching import CachingAllocator

ALLOC, FREE, SEGMENT_ALLOC, SEGMENT_FREE = range(4)
RECORDINGS = {
    "blip2-opt-2.7b-bf16-bs4-2steps": (37721826304, 39778779136),
    "tinyllama-bf16-bs2-seq512-3steps": (11446588928, 12039749632),
}
"""What torch gave for these runs: `max_memory_allocated` and `max_memory_reserved`."""

Events = list[tuple[int, int, int]]


def recorded(name: str) -> Events:
    with gzip.open(Path(__file__).parent / f"{name}.npy.gz") as file:
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


def run(events: Events, allocator: CachingAllocator, check_addresses: bool = False) -> None:
    """Apply the requests; a run of `segment_free` events is one `empty_cache`."""
    live: dict[int, Block] = {}
    before = None
    for action, address, size in events:
        if action == ALLOC:
            live[address] = allocator.malloc(size)
            assert not check_addresses or live[address].address == address
        elif action == FREE:
            allocator.free(live.pop(address))
        elif action == SEGMENT_FREE and before != SEGMENT_FREE:
            allocator.empty_cache()
        before = action


def recorded_peaks(events: Events) -> tuple[int, int]:
    """Peak of the bytes in segments, and of those requested and not freed."""
    reserved = requested = peak_reserved = peak_requested = 0
    sizes: dict[int, int] = {}
    for action, address, size in events:
        if action == SEGMENT_ALLOC:
            reserved += size
        elif action == SEGMENT_FREE:
            reserved -= size
        elif action == ALLOC:
            sizes[address] = size
            requested += size
        else:
            requested -= sizes.pop(address)
        peak_reserved = max(peak_reserved, reserved)
        peak_requested = max(peak_requested, requested)
    return peak_reserved, peak_requested


@pytest.mark.parametrize("name", RECORDINGS)
def test_the_peaks_are_those_of_torch(name: str) -> None:
    """To the byte, with the simulation's own addresses."""
    events = recorded(name)
    allocator = CachingAllocator()

    run(events, allocator)

    peaks = (allocator.peak_allocated_bytes, allocator.peak_reserved_bytes)
    assert peaks == RECORDINGS[name]
    assert recorded_peaks(events)[0] == RECORDINGS[name][1]


@pytest.mark.parametrize("name", RECORDINGS)
def test_every_block_lies_where_cuda_put_it(name: str) -> None:
    """Given the driver's segments, each request gets the very address that it got on the GPU."""
    events = recorded(name)

    run(events, CachingAllocator(addresses=RecordedAddresses(events)), check_addresses=True)


@pytest.mark.parametrize("name", RECORDINGS)
def test_a_recording_asks_for_less_than_it_allocates(name: str) -> None:
    """Rounding and unsplit blocks only add: requested <= allocated <= reserved."""
    events = recorded(name)
    allocator = CachingAllocator()

    run(events, allocator)

    assert recorded_peaks(events)[1] <= allocator.peak_allocated_bytes
    assert allocator.peak_allocated_bytes <= allocator.peak_reserved_bytes


KINDS = sorted(p.name.removesuffix(".npy.gz") for p in Path(__file__).parent.glob("kinds/*.gz"))


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_of_run_gets_the_addresses_and_the_peak_that_it_got(name: str) -> None:
    events = recorded(f"kinds/{name}")
    allocator = CachingAllocator(addresses=RecordedAddresses(events))

    run(events, allocator, check_addresses=True)

    assert allocator.peak_reserved_bytes == recorded_peaks(events)[0]


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_of_run_has_its_peak_wherever_the_driver_maps_segments(name: str) -> None:
    events = recorded(f"kinds/{name}")
    allocator = CachingAllocator()

    run(events, allocator)

    assert allocator.peak_reserved_bytes == recorded_peaks(events)[0]


def test_there_is_a_recording_of_each_kind() -> None:
    assert len(KINDS) == 18
