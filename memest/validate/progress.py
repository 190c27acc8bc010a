"""The live table of a suite as plain text."""

from __future__ import annotations

from memest.report import Measurement, Outcome
from memest.units import format_gib
from memest.validate.results import SKIPPED
from memest.validate.runner import Progress

_NAME_WIDTH = 34


def header() -> str:
    """The head of the table."""
    return (
        f"{'':>7}  {'experiment':<{_NAME_WIDTH}}  {'verdict':<7}"
        f"  {'allocated':>10}  {'reserved':>10}  {'process':>10}  {'host':>10}  {'time':>7}"
    )


def running_line(progress: Progress) -> str:
    """Of an experiment under way: a bar over the suite, the name and the seconds."""
    width = 20
    filled = width * (progress.number - 1) // progress.total
    bar = "#" * filled + "." * (width - filled)
    return (
        f"[{progress.number:>2}/{progress.total:>2}]  {progress.name:<{_NAME_WIDTH}}  "
        f"{bar}  {progress.elapsed_s:.0f} s"
    )


def finished_line(progress: Progress) -> str:
    """A row of the table."""
    found = progress.measurement
    assert found is not None
    start = f"[{progress.number:>2}/{progress.total:>2}]  {progress.name:<{_NAME_WIDTH}}"
    if found.verdict is Outcome.FAILED:
        word = "skipped" if found.note.startswith(SKIPPED) else "failed"
        return f"{start}  {word:<7}  {found.note.removeprefix(SKIPPED)[:200]}"
    cells = "".join(f"  {format_gib(n):>10}" for n in _totals(found))
    when = "before" if progress.was_done else f"{progress.elapsed_s:.1f} s"
    return f"{start}  {found.verdict:<7}{cells}  {when:>7}"


def _totals(found: Measurement) -> tuple[int, int, int, int]:
    return (
        found.peak_allocated_bytes,
        found.peak_reserved_bytes,
        found.process_bytes,
        found.host_bytes,
    )
