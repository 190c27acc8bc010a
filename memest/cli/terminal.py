"""Colours and width of the terminal, and progress of a command."""

import os
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from time import monotonic
from typing import Any, TextIO

from memest.engines import Event, watched
from memest.errors import MemestError
from memest.report import Prediction
from memest.units import gib_or_mib

_REFRESH_SECONDS = 0.5  # seconds between two updates
_DELAY_SECONDS = 1.0  # seconds before the first output
_COUNTED = "{n_fmt}/{total_fmt} {bar:24} {elapsed}, about {remaining} left  {desc}"
_UNCOUNTED = "{desc}  {elapsed}"
LOG_SECONDS = 30.0  # seconds between two lines of a log


def has_colour() -> bool:
    """Return whether to print colours: stdout is a terminal, `TERM` is not `dumb`, and `NO_COLOR`
    is unset or empty (https://no-color.org)."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb":
        return False
    return sys.stdout.isatty()


def print_any_text(out: TextIO) -> None:
    r"""Make `out` print an escape such as `\xe9` for a character that its encoding lacks."""
    if isinstance(out, TextIOWrapper) and out.errors == "strict":
        out.reconfigure(errors="backslashreplace")


def folded(text: str, out: TextIO | None = None) -> str:
    """Return `text`, wrapped to the terminal's width if `out` (None: stdout) is a terminal."""
    from memest.report.text import fold

    out = out or sys.stdout
    return fold(text, shutil.get_terminal_size().columns) if out.isatty() else text


@contextmanager
def progress_bar(
    what: str = "reading the libraries", *, with_results: bool = True
) -> Iterator[None]:
    """Show on the terminal which tasks of an engine run in the block, how many are done, and the
    time left. The text `what` is shown until a task begins. `with_results` adds a line for each
    result. If stderr is no terminal, write a log line every half minute instead."""
    if not sys.stderr.isatty():
        with watched(_ProgressLog().show):
            yield
        return
    with _ProgressLine(what, with_results=with_results) as display, watched(display.show):
        yield


class _ProgressLog:
    """Progress as lines of a log: how many tasks are done, and the time left."""

    def __init__(self) -> None:
        self._started = self._last = monotonic()
        self._num_done = self._num_running = self._total = 0

    def show(self, event: Event) -> None:
        """Count a task that begins or has ended; write a line if half a minute has passed."""
        if not event.total:
            if monotonic() - self._last >= LOG_SECONDS:
                self._last = monotonic()
                print(event.label, file=sys.stderr, flush=True)
            return
        if not event.is_done:
            if not self._num_running and self._num_done >= self._total:  # a new group
                self._total += event.total
            self._num_running += 1
            return
        self._num_running -= 1
        self._num_done += event.weight
        now = monotonic()
        if now - self._last >= LOG_SECONDS and self._num_done < self._total:
            self._last = now
            eta = (now - self._started) * (self._total - self._num_done) / self._num_done
            text = f"{self._num_done}/{self._total} done, about {max(1, round(eta / 60))} min left"
            print(text, file=sys.stderr, flush=True)


class _ProgressLine:
    """Progress on a terminal: a line that is overwritten. It shows `what` until a task begins. With
    `with_results`, there is a line for each result above it."""

    def __init__(self, what: str, *, with_results: bool) -> None:
        from tqdm import tqdm

        tqdm.set_lock(threading.RLock())  # worker processes write nothing
        self._bar: Any = tqdm(
            total=None, file=sys.stderr, leave=False, delay=_DELAY_SECONDS, dynamic_ncols=True,
            bar_format=_UNCOUNTED, desc=what,
        )  # fmt: skip
        self._has_lines = with_results
        self._running: list[str] = []
        self._ended = threading.Event()
        self._clock = threading.Thread(target=self._refresh_clock, daemon=True)

    def __enter__(self) -> "_ProgressLine":
        self._clock.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._clock.join()
        self._bar.close()

    def _refresh_clock(self) -> None:
        self._ended.wait(_DELAY_SECONDS)
        while not self._ended.wait(_REFRESH_SECONDS):
            self._bar.refresh()

    def show(self, event: Event) -> None:
        """Show the task of `event`, which begins or has ended."""
        bar = self._bar
        if not event.total:
            bar.set_description_str(", ".join([*self._running, event.label]))
            return
        if not event.is_done:
            if not self._running and bar.n >= (bar.total or 0):  # the first task of a new group
                bar.total = (bar.total or 0) + event.total
                bar.bar_format = _COUNTED if bar.total > 1 else _UNCOUNTED
            self._running.append(event.label)
        elif event.label in self._running:
            self._running.remove(event.label)
        bar.set_description_str(", ".join(self._running) or "all predicted", refresh=False)
        if event.is_done:
            for line in result_lines(event.result) if self._has_lines and bar.total > 1 else ():
                bar.write(line, file=sys.stderr)
            bar.update(event.weight)


def result_lines(result: Any) -> list[str]:
    """Return a line of text for each prediction or error in `result`, which a task returned."""
    results = result if isinstance(result, list) else [result]
    lines = []
    for item in results:
        if isinstance(item, Prediction):
            word, needs = item.verdicts[item.gpu].word, gib_or_mib(item.needs_bytes)
            lines.append(f"{word:5}  {needs:>10}  {item.name} on {item.gpu}")
        elif isinstance(item, MemestError):
            lines.append(f"not predicted: {item}")
    return lines
