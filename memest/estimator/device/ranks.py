"""Which rank of a run on several GPUs is simulated."""

from __future__ import annotations

from dataclasses import dataclass, field

from memest.estimator.device.broadcasts import Broadcasts


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """One rank of a process group that sends nothing; the other ranks do what this one does."""

    rank: int = 0
    world_size: int = 1
    num_local: int = 1
    """GPUs, and with them ranks, of each host."""

    broadcasts: Broadcasts = field(default_factory=Broadcasts, compare=False, repr=False)
    """What ranks that were run before have said, and this one says."""

    @property
    def local_rank(self) -> int:
        """Of the ranks of its host."""
        return self.rank % self.num_local


ALONE = Ranks()
"""A run on one GPU."""
