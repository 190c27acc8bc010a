"""What starts several processes: as many as there are ranks, of which this is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp

from memest.errors import UnsupportedError
from memest.estimator.device.patches import Patches
from memest.estimator.device.ranks import Ranks


def install(patches: Patches, ranks: Ranks) -> None:
    """Let the functions of `torch.multiprocessing` that start processes call this rank's."""

    def spawn(
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        nprocs: int = 1,
        *_: Any,
        **options: Any,
    ) -> None:
        """As `torch.multiprocessing.spawn`: the call of this rank itself."""
        if nprocs != ranks.num_local:
            raise UnsupportedError(
                f"`torch.multiprocessing` is asked for {nprocs} processes, and"
                f" {ranks.num_local} {'is' if ranks.num_local == 1 else 'are'} simulated",
                hint=f"simulate as many: `memest run --nproc-per-node {nprocs} ...`",
            )
        fn(ranks.local_rank, *args)

    patches.set(mp, "spawn", spawn)
    patches.set(mp, "start_processes", spawn)
