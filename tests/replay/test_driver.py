"""Scripts recorded on an H100: which free block serves a request depends on the driver's memory.

`manifest.json` has the event before which the first kernel ran, and those at which cuBLAS created
its handles.
"""

from __future__ import annotations

import gzip
import json
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memest.estimator.allocator.blocks import Block
from memest.estimator.allocator.caching import CachingAllocator

FOLDER = Path(__file__).parent / "driver"
RUNS: dict[str, dict[str, Any]] = json.loads((FOLDER / "manifest.json").read_text())
ALLOC, FREE, SEGMENT_ALLOC, SEGMENT_FREE = range(4)


class Noted(CachingAllocator):
    """Allocator that notes its segments in order."""

    def __init__(self) -> None:
        super().__init__()
        self.segments: list[tuple[int, int]] = []

    def count_segment(self, block: Block) -> None:
        self.segments.append((block.num_bytes, block.address))


def replay(name: str) -> tuple[Noted, list[tuple[int, int]]]:
    """Return the allocator after a run, and the recorded segments."""
    with gzip.open(FOLDER / f"{name}.npy.gz") as file:
        events = np.load(file, allow_pickle=False).T.tolist()
    allocator = Noted()
    live: dict[int, Block] = {}
    recorded = []
    for index, (action, address, size) in enumerate(events):
        if index == RUNS[name]["first_kernel"]:
            allocator.addresses.load_first_kernel()
        if index in RUNS[name]["handles"]:
            allocator.addresses.create_cublas_handle()
        if action == ALLOC:
            live[address] = allocator.malloc(size)
        elif action == FREE:
            allocator.free(live.pop(address))
        elif action == SEGMENT_ALLOC:
            recorded.append((size, address))
        else:
            raise AssertionError("none of these scripts empties the cache")
    return allocator, recorded


@pytest.mark.parametrize("name", RUNS)
def test_a_script_has_its_peaks_to_the_byte(name: str) -> None:
    allocator, recorded = replay(name)

    assert allocator.peak_allocated_bytes == RUNS[name]["peak_allocated_bytes"]
    assert allocator.peak_reserved_bytes == RUNS[name]["peak_reserved_bytes"]
    assert sum(size for size, _ in recorded) == allocator.reserved_bytes


def test_segments_are_in_the_order_of_the_recorded_addresses() -> None:
    """All but 2.7 % of the pairs; 45 % are in another order without the driver's memory."""
    num_pairs = num_wrong = 0
    for name in RUNS:
        allocator, recorded = replay(name)
        for (one, other), (like_one, like_other) in zip(
            combinations(allocator.segments, 2), combinations(recorded, 2), strict=True
        ):
            assert (one[0], other[0]) == (like_one[0], like_other[0])
            num_pairs += 1
            num_wrong += (one[1] < other[1]) != (like_one[1] < like_other[1])

    assert num_wrong <= 0.03 * num_pairs
