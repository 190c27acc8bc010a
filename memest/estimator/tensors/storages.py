"""Storages of a simulated run: their kinds, and where they were allocated."""

import math
import operator
from collections import Counter
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum


class MemKind(StrEnum):
    """Purpose for which memory is allocated."""

    PARAMS = "params"
    BUFFERS = "buffers"
    GRADS = "grads"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    BATCH = "batch"
    WORKSPACE = "workspace"
    BUCKETS = "buckets"  # copies of gradients that are summed over the GPUs
    GATHERED = "gathered"  # parameters that were gathered from the GPUs that share them


class FreeTiming(Enum):
    """Assumed time of the free of a block that another stream or a collective uses."""

    LATEST = "at the latest moment"
    IMMEDIATE = "immediately"
    IMMEDIATE_IN_STEP_1 = "immediately in the first step, and then at the latest moment"
    """Immediate in step 1, where the host is slow because it loads kernels."""

    def is_immediate(self, step: int) -> bool:
        """Return whether blocks are freed immediately in `step` (0 is the first)."""
        return self is FreeTiming.IMMEDIATE or (
            self is FreeTiming.IMMEDIATE_IN_STEP_1 and step == 0
        )


free_of = operator.invert  # encode or decode the free of a storage: the bitwise inverse of its id
RETURNED = -(1 << 40)  # largest event that encodes the return of a deferred block


def return_of(index: int) -> int:
    """Return the event at which a deferred block returns to the allocator; `index` is the id of its
    storage. A block is deferred if it returns later than its storage is freed, since another stream
    or a collective still uses it. An event is an integer. The function is its own inverse: for an
    event, it returns the id."""
    return RETURNED - index


EMPTIED = -(1 << 60)  # event at which the script empties the cache
FIRST_KERNEL = EMPTIED - 1  # event at which the process launches its first kernel
NEW_HANDLE = EMPTIED - 2  # event at which cuBLAS creates a handle


@dataclass(frozen=True, slots=True)
class Site:
    """Module, phase, operator and line of the script that allocated a storage."""

    op: str
    module: str
    phase: str
    line: str = ""
    """Line of the user's script, as `train.py:12`; "" if no line is known. During a backward, the
    line whose forward made the running node."""

    caller: str = ""  # during a backward, the line that called it, if that is not `line`

    @property
    def where(self) -> str:
        """The line that allocated the storage; during a backward also the line of the forward.

        >>> Site("aten.mm", "", "backward", "train.py:15", "train.py:16").where
        'train.py:16, backward of train.py:15'
        """
        return f"{self.caller}, backward of {self.line}" if self.caller else self.line


@dataclass(slots=True)
class StorageTable:
    """Table of all storages of a run: lists of their sizes, sites and purposes, whose indices are
    storage ids. Sets and dicts by id hold what is true of few storages."""

    num_bytes: list[int] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)
    kinds: list[MemKind] = field(default_factory=list)
    streams: dict[int, int] = field(default_factory=dict)  # stream or pool, if not the main one
    deferred: set[int] = field(default_factory=set)  # blocks return later than freed
    stashed: set[int] = field(default_factory=set)  # held by a collective until `return_of`
    tried: set[int] = field(default_factory=set)  # omitted or shrunk if memory lacks
    shares: dict[int, tuple[float, int]] = field(default_factory=dict)
    """Storages sized by the GPU, by id: share of the GPU's memory, and bytes to subtract."""

    def on(self, gpu_bytes: int) -> "StorageTable":
        """Return the table for a GPU with `gpu_bytes` of memory. Storages in `shares`, such as the
        KV cache of vLLM, are sized by the GPU's memory. Their sizes are computed again for this
        GPU."""
        if not self.shares:
            return self
        sizes = list(self.num_bytes)
        for index, (share, less) in self.shares.items():
            sizes[index] = max(0, math.ceil(share * gpu_bytes) - less)
        return replace(self, num_bytes=sizes)

    @property
    def depends_on_time(self) -> bool:
        """True if the speed of the GPU decides when some blocks are freed."""
        return bool(self.deferred or self.stashed)

    unused: list[int] = field(default_factory=list)  # ids of forgotten storages, for reuse

    def add(self, num_bytes: int, site: Site, kind: MemKind) -> int:
        """Add a storage of `num_bytes`, requested at `site` for purpose `kind`; return its id."""
        if not self.unused:
            self.num_bytes.append(num_bytes)
            self.sites.append(site)
            self.kinds.append(kind)
            return len(self.num_bytes) - 1
        index = self.unused.pop()
        self.num_bytes[index] = num_bytes
        self.sites[index] = site
        self.kinds[index] = kind
        return index

    def forget(self, index: int) -> None:
        """Drop the freed storage with id `index`, so that `add` can use the id again."""
        self.streams.pop(index, None)
        self.deferred.discard(index)
        self.stashed.discard(index)
        self.tried.discard(index)
        self.shares.pop(index, None)
        self.unused.append(index)


@dataclass(slots=True)
class Coverage:
    """Number of operator calls of a run, and for each operator the number of those not modelled."""

    num_ops: int = 0
    unmodelled: Counter[str] = field(default_factory=Counter)
    has_convolutions: bool = False
