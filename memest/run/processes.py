"""What starts several processes or joins several GPUs: refused, where one will not do."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import distributed

from memest.errors import UnsupportedError
from memest.estimator.device.patches import Patches
from memest.run.target import SEVERAL_GPUS_HINT

FAKE = "fake"
"""torch's own backend that sends nothing; a group of one process needs no other."""


def install(patches: Patches) -> None:
    """Let a script start one process, which is this one, and join a group of its own."""
    patches.set(mp, "spawn", _spawn)
    patches.set(mp, "start_processes", _spawn)
    if distributed.is_available():
        join = distributed.init_process_group
        group = _joining(join)
        patches.set(distributed, "init_process_group", group)
        patches.set(distributed.distributed_c10d, "init_process_group", group)
    patches.set(torch.nn.parallel.DistributedDataParallel, "__init__", _wrap)


def _spawn(
    fn: Callable[..., Any], args: tuple[Any, ...] = (), nprocs: int = 1, *_: Any, **options: Any
) -> None:
    """As `torch.multiprocessing.spawn`, for a single process: the call itself."""
    if nprocs != 1:
        raise _several(f"`torch.multiprocessing` is asked for {nprocs} processes")
    fn(0, *args)


def _wrap(*args: Any, **kwargs: Any) -> None:
    raise UnsupportedError(
        "`DistributedDataParallel` is not simulated yet by `memest run`, on one GPU neither",
        hint="run the script without it; `memest predict --strategy ddp` predicts a plan with it",
    )


def _joining(join: Callable[..., Any]) -> Callable[..., Any]:
    def init_process_group(
        backend: str | None = None,
        init_method: str | None = None,
        timeout: Any = None,
        world_size: int = -1,
        rank: int = -1,
        store: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        size = world_size
        if size < 0:
            size = int(os.environ.get("WORLD_SIZE", "1"))
        if size != 1:
            raise _several(f"`init_process_group` is asked for {size} processes")
        from torch.testing._internal.distributed.fake_pg import FakeStore

        join(backend=FAKE, rank=0, world_size=1, store=FakeStore())

    return init_process_group


def _several(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"several GPUs are not simulated yet by `memest run`: {what}", hint=SEVERAL_GPUS_HINT
    )
