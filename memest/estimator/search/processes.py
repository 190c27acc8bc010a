"""The same question of many plans, over several processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def over_processes(
    one: Callable[[T], R], tasks: Sequence[T], num_processes: int, *, chunksize: int = 1
) -> list[R]:
    """`one` of each task, in their order; one process is this one, more are fresh ones."""
    if num_processes == 1:
        return [one(task) for task in tasks]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, mp_context=context) as pool:
        return list(pool.map(one, tasks, chunksize=chunksize))
