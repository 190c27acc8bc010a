"""Log of what the host launches and waits for, step by step; `hardware/pace.py` replays it."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from time import thread_time
from typing import Any, ClassVar

import torch

from memest.estimator.hardware.work import NOTHING, VIEW, Work, dequantized, work_of

MAX_STEPS = 12  # most steps that are kept: the last ones
WAITS = -1  # event of a host that waits for the GPU
CUT = -2  # event between two micro-batches
HOST = -10  # event of an operator on the host that takes `HOST - event` microseconds
MIN_HOST_US = 50  # shortest operator on the host that counts; others are part of a launch's time
LINK = "link"  # kind of a collective
NUM_HOSTS = 3
FORWARD, BACKWARD, OPTIMIZER = range(NUM_HOSTS)  # what Python and C++ run around a launch


class WorkLog:
    """Events of the last steps: `NUM_HOSTS * work + kind of host`, or one of those below 0."""

    library_call: ClassVar[tuple[str, tuple[Any, ...]]] = ("", ())
    """The last function of bitsandbytes' library that was called, which outlives a log."""

    def __init__(self) -> None:
        self.works: list[Work] = []
        self._steps: deque[array[int]] = deque(maxlen=MAX_STEPS)
        self._step = array("q")
        self._stepped: set[int] = set()
        self._starts: deque[int] = deque(maxlen=MAX_STEPS)
        self._start = self._end = 0
        self.is_in_optimizer = False  # True within `Optimizer.step`
        self.has_host = True  # False if operators on the host are not of the training
        self._events = array("q")
        self._index: dict[Work, int] = {}
        self._view = self._index_of(VIEW)

    def launch(self, func: Any, args: Any, kwargs: Any, out: Any, recipe: Any) -> None:
        """Add the kernels of one call; its recipe keeps the number of its work."""
        if recipe.work is None:
            recipe.work = self._index_of(work_of(func, args, kwargs, out))
        if recipe.work >= 0:
            self._add(recipe.work)

    def view(self) -> None:
        """Add a view."""
        self._add(self._view)

    def call_library(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Add the kernel that an operator of bitsandbytes has called."""
        (name, given), WorkLog.library_call = WorkLog.library_call, ("", ())
        if name:
            self.add(dequantized(name, given) or work_of(func, args, kwargs, out))

    def add(self, work: Work) -> None:
        """Add work that no operator describes: a compiled kernel, a collective."""
        self._add(self._index_of(work))

    def copy(self, direction: str, num_bytes: int, *, is_pinned: bool, waits: bool) -> None:
        """Add a copy, `to_gpu` or `to_host`; the host `waits` for it or not."""
        kind = f"{direction}_{'pinned' if is_pinned else 'pageable'}"
        self.add(Work(kind, (num_bytes,), "", 0, num_bytes))
        if waits:
            self.wait()

    def drop_last(self) -> None:
        """Forget the last launch."""
        if self._events:
            self._events.pop()

    def wait(self) -> None:
        """Let the host wait until the GPU is done."""
        if self._events and self._events[-1] != WAITS:
            self._events.append(WAITS)

    @contextmanager
    def host_works(self) -> Iterator[None]:
        """Add the time of what the host computes within the block, as it takes here.

        Threads that load data work at the same time as the script.
        """
        began = thread_time()
        try:
            yield
        finally:
            us = int(1e6 * (thread_time() - began))
            if us >= MIN_HOST_US and self.has_host and current_thread() is main_thread():
                self._events.append(HOST - us)

    def cut(self) -> None:
        """End a micro-batch."""
        self._events.append(CUT)

    def restart(self) -> None:
        """Forget the events since the last step."""
        self._events = array("q")

    def stepped(self, optimizer: int = 0) -> None:
        """End a step of an optimizer, by its number. A training step has one of each optimizer."""
        if optimizer in self._stepped:
            self._steps.append(self._step)
            self._starts.append(self._start)
            self._step, self._stepped, self._start = array("q"), set(), self._end
        self._step.extend(self._events)
        self._end = len(self.works)
        self._stepped.add(optimizer)
        self._events = array("q")

    @property
    def steps(self) -> list[array[int]]:
        """Events of the last training steps."""
        return [*self._steps, *([self._step] if self._stepped else [])]

    @property
    def num_known(self) -> list[int]:
        """Number of works that occurred before each of `steps`."""
        return [*self._starts, *([self._start] if self._stepped else [])]

    def _index_of(self, work: Work) -> int:
        if work is NOTHING:
            return -1
        index = self._index.get(work)
        if index is None:
            index = self._index[work] = len(self.works)
            self.works.append(work)
        return index

    def _add(self, index: int) -> None:
        if torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled():
            host = BACKWARD  # with gradients, Python runs a forward again
        else:
            host = OPTIMIZER if self.is_in_optimizer else FORWARD
        self._events.append(NUM_HOSTS * index + host)
