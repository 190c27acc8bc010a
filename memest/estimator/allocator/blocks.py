"""The pieces that the caching allocator works with: blocks, pools of free ones, and their sizes.

Sizes and thresholds are those of `c10/core/AllocatorConfig.h` (torch 2.11 and 2.13); a test reads
them from the installed headers.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

ROUND_BYTES = 512
"""`kMinBlockSize`: every request is rounded up to a multiple of it."""

SMALL_REQUEST_BYTES = 1 << 20
"""`kSmallSize`: requests up to it come from the small pool."""

SMALL_SEGMENT_BYTES = 2 << 20
"""`kSmallBuffer`: the segments of the small pool."""

LARGE_SEGMENT_BYTES = 20 << 20
"""`kLargeBuffer`: the segment fetched for a large request below `MIN_OWN_SEGMENT_BYTES`."""

MIN_OWN_SEGMENT_BYTES = 10 << 20
"""`kMinLargeAlloc`: from here on a request gets a segment of its own size."""

SEGMENT_ROUND_BYTES = 2 << 20
"""`kRoundLarge`: own segments are rounded up to a multiple of it."""


@dataclass(eq=False, slots=True)
class Block:
    """A piece of a segment; neighbours are linked in address order."""

    address: int
    num_bytes: int
    is_small: bool
    is_free: bool = False
    previous: Block | None = None
    next: Block | None = None
    stream: int = 0
    requested_bytes: int = field(init=False, repr=False)
    """What was asked for; set by `CountingAllocator` alone."""


def round_request(num_bytes: int) -> int:
    """The block size that serves a request.

    >>> round_request(1), round_request(512), round_request(513)
    (512, 512, 1024)
    """
    return max(ROUND_BYTES, -(-num_bytes // ROUND_BYTES) * ROUND_BYTES)


def segment_bytes(block_bytes: int) -> int:
    """The segment that `cudaMalloc` is asked for when no cached block serves a rounded request.

    >>> [segment_bytes(size) >> 20 for size in (512, 3 << 20, (10 << 20) + 512)]
    [2, 20, 12]
    """
    if block_bytes <= SMALL_REQUEST_BYTES:
        return SMALL_SEGMENT_BYTES
    if block_bytes < MIN_OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-block_bytes // SEGMENT_ROUND_BYTES) * SEGMENT_ROUND_BYTES


ADDRESS_BITS = 48
"""Of a key of `FreeBlocks`; addresses of the card are below 2**47."""


class FreeBlocks:
    """The free blocks of one pool in the order of the allocator's search: by size, then address.

    A key is both in one number, which is quicker to compare than a pair. `CachingAllocator` works
    on `keys` and `by_key` itself where every call counts.
    """

    __slots__ = ("by_key", "keys")

    def __init__(self) -> None:
        self.keys: list[int] = []
        self.by_key: dict[int, Block] = {}

    def discard(self, block: Block) -> None:
        """Take `block` out, which is in the pool."""
        key = block.num_bytes << ADDRESS_BITS | block.address
        del self.keys[bisect_left(self.keys, key)]
        del self.by_key[key]

    def blocks(self) -> list[Block]:
        """Every block, in no order."""
        return list(self.by_key.values())
