"""What a trace is made of: storages, what each is held for, and where it was born."""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum, StrEnum


class MemKind(StrEnum):
    """What a byte is held for."""

    PARAMS = "params"
    BUFFERS = "buffers"
    GRADS = "grads"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    BATCH = "batch"
    WORKSPACE = "workspace"
    BUCKETS = "buckets"
    """Copies of gradients that are summed over the GPUs."""

    GATHERED = "gathered"
    """Parameters that were gathered from the GPUs that share them."""


class Returns(Enum):
    """When blocks come back whose return depends on how fast the GPU is."""

    LATEST = "at the latest moment"
    AT_ONCE = "as they die"
    AT_ONCE_AT_FIRST = "as they die in the first step, and then at the latest moment"
    """The host loads kernels in the first step, so that the GPU waits for it there."""

    def at_once(self, step: int) -> bool:
        """Whether blocks that die in `step` are back at once."""
        return self is Returns.AT_ONCE or (self is Returns.AT_ONCE_AT_FIRST and step == 0)


death_of = operator.invert
"""The event at which a storage dies, by its id, which is the event of its birth; and the id, by
that event. A negative number: streams of events are packed.
"""

RETURNED = -(1 << 40)
"""Events up to this one are returns."""


def return_of(index: int) -> int:
    """The event at which a block whose free was deferred returns to its pool, at the latest (at the
    earliest that is its death), by the storage's id; and the id, by that event.
    """
    return RETURNED - index


EMPTIED = -(1 << 60)
"""The event at which the script has the cache emptied."""


@dataclass(frozen=True, slots=True)
class Site:
    """Where a storage was born."""

    op: str
    module: str
    phase: str
    line: str = ""
    """Line of the user's script, as `train.py:12`; "" if no line is known. During a backward, the
    line whose forward made the running node.
    """

    caller: str = ""
    """During a backward, the line that called it, if that is not `line`."""

    @property
    def where(self) -> str:
        """The line that allocated the storage; during a backward also the line of the forward.

        >>> Site("aten.mm", "", "backward", "train.py:15", "train.py:16").where
        'train.py:16, backward of train.py:15'
        """
        return f"{self.caller}, backward of {self.line}" if self.caller else self.line


@dataclass(slots=True)
class StorageTable:
    """All storages of a trace; an id is an index into the lists."""

    num_bytes: list[int] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)
    kinds: list[MemKind] = field(default_factory=list)
    streams: dict[int, int] = field(default_factory=dict)
    """The stream in whose pool a storage lies, where it is not the main one."""

    deferred: set[int] = field(default_factory=set)
    """Storages whose blocks return to their pool later than they are freed."""

    shelved: set[int] = field(default_factory=set)
    """Storages that a collective may keep beyond their death, until the event `return_of`."""

    tried: set[int] = field(default_factory=set)
    """Storages that a library does without, or with less, where there is no memory for them."""

    @property
    def depends_on_time(self) -> bool:
        """Whether how fast the GPU is decides when a block comes back."""
        return bool(self.deferred or self.shelved)

    unused: list[int] = field(default_factory=list)
    """Ids that were forgotten and serve again."""

    def add(self, num_bytes: int, site: Site, kind: MemKind) -> int:
        """Add a storage; returns its id."""
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
        """Let the id of a dead storage serve again."""
        self.streams.pop(index, None)
        self.deferred.discard(index)
        self.shelved.discard(index)
        self.tried.discard(index)
        self.unused.append(index)


@dataclass(slots=True)
class Coverage:
    """How much of what ran is modelled."""

    num_ops: int = 0
    unmodelled: Counter[str] = field(default_factory=Counter)
