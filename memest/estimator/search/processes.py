"""One function over many tasks in several processes, with events for watchers."""

from __future__ import annotations

import gc
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """A task that begins, or that has ended with a result."""

    label: str
    """Name of the task, for people."""

    is_done: bool
    weight: int
    """Number of plans in the task."""

    total: int
    """Number of plans in all tasks."""

    task: Any
    result: Any = None


Watcher = Callable[[Event], None]

_watchers: ContextVar[tuple[Watcher, ...]] = ContextVar("_watchers", default=())


@contextmanager
def watched(by: Watcher) -> Iterator[None]:
    """Call `by` for every event in the block; nested blocks all get the events."""
    token = _watchers.set((*_watchers.get(), by))
    try:
        yield
    finally:
        _watchers.reset(token)


def tell(event: Event) -> None:
    """Send an event to all watchers."""
    for watcher in _watchers.get():
        watcher(event)


def over_processes(
    one: Callable[[T], R],
    tasks: Sequence[T],
    num_processes: int,
    *,
    label: Callable[[T], str] = str,
    weight: Callable[[T], int] = lambda task: 1,
) -> list[R]:
    """Return `one` of each task, in order; one process is this one, several are new ones.

    A process takes the next task when it has finished one. `label` and `weight` are for watchers.
    """
    total = sum(map(weight, tasks))

    def say(task: T, *, is_done: bool, result: R | None = None) -> None:
        tell(
            Event(
                label=label(task), is_done=is_done, weight=weight(task), total=total, task=task,
                result=result,
            )
        )  # fmt: skip

    if num_processes == 1:
        results = []
        for task in tasks:
            say(task, is_done=False)
            results.append(one(task))
            say(task, is_done=True, result=results[-1])
        return results
    context = multiprocessing.get_context("spawn")
    found: dict[int, R] = {}
    pool = ProcessPoolExecutor(num_processes, mp_context=context, initializer=_begin)
    try:
        running: dict[Future[R], int] = {}
        waiting = iter(range(len(tasks)))
        while len(found) < len(tasks):
            for index in waiting:
                say(tasks[index], is_done=False)
                running[pool.submit(one, tasks[index])] = index
                if len(running) >= num_processes:
                    break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                index = running.pop(future)
                found[index] = future.result()
                say(tasks[index], is_done=True, result=found[index])
    except BaseException:
        for process in list((getattr(pool, "_processes", None) or {}).values()):
            process.terminate()  # its work is not needed
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return [found[index] for index in range(len(tasks))]


def _begin() -> None:
    """Ignore interrupts of the terminal, which come to every process; the parent handles them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    collect_seldom()


MADE_BETWEEN_COLLECTIONS = 100_000
"""Objects between collections. Importing torch and transformers makes a million permanent objects,
which Python would scan a thousand times. A run is not affected, and is cleaned up afterwards
(`without_cycles`).
"""


def collect_seldom() -> Callable[[], None]:
    """Collect garbage in cycles less often in this process; return a function that undoes it."""
    before = gc.get_threshold()
    gc.set_threshold(MADE_BETWEEN_COLLECTIONS, *before[1:])
    return partial(gc.set_threshold, *before)
