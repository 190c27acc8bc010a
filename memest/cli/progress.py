"""What a command shows while it computes: on a terminal, on stderr, gone when it is done."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from memest.errors import MemestError
from memest.estimator.search.processes import Event, watched
from memest.render.answer import WORDS
from memest.report import Outcome, Prediction
from memest.units import format_gib

_EVERY = 0.5
"""Seconds between two looks at the clock."""

_DELAY = 1.0
"""Seconds after which there is something to see."""

_FORMAT = "{n_fmt}/{total_fmt} {bar:24} {elapsed}, about {remaining} left  {desc}"
_UNCOUNTED = "{desc}  {elapsed}"


@contextmanager
def shown(what: str = "reading the libraries", *, with_results: bool = True) -> Iterator[None]:
    """Within the block a terminal shows what is under way, what is done and the time left.

    Args:
        what: is under way until a task begins.
        with_results: whether a line of each result stays.
    """
    if not sys.stderr.isatty():
        yield
        return
    with _Display(what, with_results=with_results) as display, watched(display.tell):
        yield


class _Display:
    """A line that is overwritten, and above it a line for each result."""

    def __init__(self, what: str, *, with_results: bool) -> None:
        from tqdm import tqdm

        tqdm.set_lock(threading.RLock())  # the other processes write nothing
        self._bar: Any = tqdm(
            total=None, file=sys.stderr, leave=False, delay=_DELAY, dynamic_ncols=True,
            bar_format=_UNCOUNTED, desc=what,
        )  # fmt: skip
        self._has_lines = with_results
        self._running: list[str] = []
        self._ended = threading.Event()
        self._clock = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> _Display:
        self._clock.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._clock.join()
        self._bar.close()

    def _tick(self) -> None:
        self._ended.wait(_DELAY)
        while not self._ended.wait(_EVERY):
            self._bar.refresh()

    def tell(self, event: Event) -> None:
        """Of a task that begins or has ended."""
        bar = self._bar
        if not event.is_done:
            if not self._running and bar.n >= (bar.total or 0):  # the first of its kind
                bar.total = (bar.total or 0) + event.total
                bar.bar_format = _FORMAT if bar.total > 1 else _UNCOUNTED
            self._running.append(event.label)
        elif event.label in self._running:
            self._running.remove(event.label)
        bar.set_description_str(", ".join(self._running) or "all predicted", refresh=False)
        if event.is_done:
            for line in result_lines(event.result) if self._has_lines and bar.total > 1 else ():
                bar.write(line, file=sys.stderr)
            bar.update(event.weight)


def result_lines(result: Any) -> list[str]:
    """A line for each prediction that a task has made."""
    results = result if isinstance(result, list) else [result]
    lines = []
    for each in results:
        if isinstance(each, Prediction):
            is_oom = each.verdict is Outcome.OOM
            need = each.unlimited_reserved_bytes if is_oom else each.peak_reserved_bytes
            word = WORDS[each.verdict]
            lines.append(f"{word:4}  {format_gib(need):>10}  {each.name} on {each.gpu}")
        elif isinstance(each, MemestError):
            lines.append(f"not predicted: {each}")
    return lines
