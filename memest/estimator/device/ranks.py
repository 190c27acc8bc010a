"""Which rank of a run on several GPUs is simulated."""

from __future__ import annotations

from dataclasses import dataclass, field

from memest.estimator.device.broadcasts import Broadcasts
from memest.estimator.hardware.libraries import COMMUNICATOR_BYTES, COMMUNICATOR_OF_ONE_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """One rank of a process group that sends nothing; the other ranks do what this one does."""

    rank: int = 0
    world_size: int = 1
    num_local: int = 1
    """GPUs, and with them ranks, of each host."""

    is_launched: bool = False
    """`torchrun` starts it. One rank, too, may join a group, and waits for its collectives."""

    broadcasts: Broadcasts = field(default_factory=Broadcasts, compare=False, repr=False)
    """What ranks that were run before have said, and this one says."""

    @property
    def may_wait(self) -> bool:
        """Whether when blocks come back may depend on collectives."""
        return self.world_size > 1 or self.is_launched

    @property
    def communicator_bytes(self) -> int:
        """Of NCCL on each GPU, for the group of all ranks; a script's others are left out."""
        if self.world_size > 1:
            return COMMUNICATOR_BYTES
        return COMMUNICATOR_OF_ONE_BYTES if self.is_launched else 0

    @property
    def local_rank(self) -> int:
        """Of the ranks of its host."""
        return self.rank % self.num_local


ALONE = Ranks()
"""A run on one GPU."""
