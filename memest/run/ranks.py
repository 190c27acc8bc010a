"""A script as `torchrun` would start it: some of its ranks, each in a process of its own.

The first and the last rank run at the same time, with all ranks that they exchange messages with.
If they differ, the others of a small world run too.
A collective gives each rank what it would get if the other ranks had the same values.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from memest.child import SILENT, Child, DiedError, Terminated, signals_once, submit, wait_any
from memest.errors import MemestError, PlanError, UnsupportedError
from memest.estimator.gpu.worlds import Mailbox, Rank
from memest.report import Ending, Interval, Outcome, RankRow, RunReport
from memest.run.session import RunResult

MAX_RANKS = 1 << 14  # limit on ranks, as in plans
MAX_TOGETHER = 64  # most ranks that run at the same time; each takes about 0.5 GB of this machine
MAX_ALL = 8  # largest world whose ranks all run if the first and the last differ
POLL_SECONDS = 0.05  # interval between polls for ranks that other ranks have requested, seconds
_FROM_BEST_TO_WORST = (Outcome.FITS, Outcome.MAY, Outcome.OOM)


def chosen_ranks(num_local: int | None, num_nodes: int, numbers: str = "") -> list[Rank]:
    """Return the ranks to simulate. `numbers` is `all`, or a list such as `0,5`. If `numbers` is
    empty, the ranks are the first and the last.

    Each of `num_nodes` nodes has `num_local` ranks. None stands for a script that starts without a
    launcher: each node has one rank.

    Raises:
        PlanError: too many ranks, or a number that is no rank.
    """
    size = (num_local or 1) * num_nodes
    if size > MAX_RANKS:
        raise PlanError(f"{size} ranks are too many", hint=f"simulate at most {MAX_RANKS}")
    mailbox = Mailbox()
    mailbox.open()
    first = Rank(
        rank=0, world_size=size, num_local=num_local or 1,
        is_launched=num_local is not None or num_nodes > 1, mailbox=mailbox,
    )  # fmt: skip
    return [replace(first, rank=rank) for rank in _parse_ranks(numbers, size)]


def _parse_ranks(numbers: str, size: int) -> list[int]:
    if not numbers:
        return sorted({0, size - 1})
    try:
        ranks = set(range(size) if numbers == "all" else map(int, numbers.split(",")))
    except ValueError:
        ranks = {-1}  # no rank, and refused as one
    if not ranks <= set(range(size)):
        hint = "`all`, or a list of numbers: " + ",".join(map(str, sorted({0, size - 1})))
        raise PlanError(f"`--ranks {numbers}` does not name ranks of 0 to {size - 1}", hint=hint)
    if len(ranks) > MAX_TOGETHER:
        hint = f"name at most {MAX_TOGETHER}: all of them run at the same time"
        raise PlanError(f"{len(ranks)} ranks are too many", hint=hint)
    return sorted(ranks)


def other_ranks(results: Sequence[tuple[Rank, RunResult]]) -> list[list[Rank]]:
    """Return the ranks still to run, in groups of two that can run at the same time. `results` are
    those of the ranks that have run. If their peaks are equal, or the first rank failed, no rank is
    left to run: return [].

    Peaks differ if ranks have different data, uneven shards, or memory that a rank holds for
    another one. Each simulated rank takes memory of this machine. So the result is also [] for a
    world of more than `MAX_ALL` ranks.
    """
    first, first_result = results[0]
    peaks = {_peaks(result.report) for _, result in results if result.report}
    if first_result.exit_code or len(peaks) < 2 or first.world_size > MAX_ALL:
        return []
    numbers = {rank.rank for rank, _ in results}
    ranks = [replace(first, rank=rank) for rank in range(first.world_size) if rank not in numbers]
    return [ranks[start : start + 2] for start in range(0, len(ranks), 2)]


def _peaks(report: RunReport) -> tuple[int, int]:
    return report.peak_reserved_bytes, report.peak_allocated_bytes


def environment(rank: Rank) -> dict[str, str]:
    """Return the environment variables of `rank` that `torchrun` sets, with `OMP_NUM_THREADS`."""
    variables = rank.environment()
    if "OMP_NUM_THREADS" not in os.environ and rank.num_local > 1:  # launcher/api.py of torch
        variables["OMP_NUM_THREADS"] = "1"
    return variables


def run_rank(rank: Rank, run: Callable[[Rank], RunResult], *, is_silent: bool = False) -> RunResult:
    """Return `run(rank)`, called alone in a child process; `is_silent` hides its output."""
    ((_, result),) = run_together([rank], run, is_silent=is_silent, has_peers=False)
    return result


def run_together(
    ranks: Sequence[Rank], run: Callable[[Rank], RunResult], *, is_silent: bool = False,
    has_peers: bool = True,
) -> list[tuple[Rank, RunResult]]:  # fmt: skip
    """Call `run` for each of `ranks` in a process, at the same time; return (rank, result) pairs.

    A rank may exchange messages with a rank that is not in `ranks`. Then that rank runs too, and is
    in the result, unless `has_peers` is False. `is_silent` hides all output. Otherwise the output
    of the first rank appears at once, and the output of the others at the end. If the first rank
    fails before any message, the others are ended, and only the first has a result.

    Raises:
        MemestError: a process ended without a result.
        UnsupportedError: more than `MAX_TOGETHER` ranks wait for each other.
    """
    first, *later = ranks
    mailbox = first.mailbox
    mailbox.join([rank.rank for rank in ranks])
    pending = list(ranks)
    running: dict[Child, Rank] = {}
    begun_numbers = {rank.rank for rank in ranks}
    results: list[tuple[Rank, RunResult]] = []
    with TemporaryDirectory(prefix="memest-output-") as folder:
        numbers = [] if is_silent else [rank.rank for rank in later]
        outputs = {n: (f"{folder}/{n}.out", f"{folder}/{n}.err") for n in numbers}
        try:
            while pending or running:
                for rank in pending:
                    output = SILENT if is_silent else outputs.get(rank.rank)
                    running[submit(partial(_run_as, rank, run), output=output)] = rank
                for child in wait_any(running, POLL_SECONDS):
                    rank = running.pop(child)
                    results.append((rank, _rank_result(rank, child)))
                requested = mailbox.requested() if has_peers else set()
                failed = [(r, result) for r, result in results if r is first and result.exit_code]
                if failed and not requested:
                    return failed
                pending = [replace(first, rank=rank) for rank in sorted(requested - begun_numbers)]
                begun_numbers |= requested
                if len(running) + len(pending) > MAX_TOGETHER:
                    raise UnsupportedError(
                        f"more than {MAX_TOGETHER} ranks send to each other",
                        hint="simulate fewer: all of them run at the same time",
                    )
        except (KeyboardInterrupt, Terminated) as error:
            results += _interrupted(running, error)
            if not results:
                raise
        finally:
            for child in running:
                child.kill()
        for output in outputs.values():
            _print_output(output)
    return sorted(results, key=_rank_number)


def _rank_number(pair: tuple[Rank, Any]) -> int:
    rank, _ = pair
    return rank.rank


def _print_output(output: tuple[str, str]) -> None:
    for path, stream in zip(output, (sys.stdout, sys.stderr), strict=True):
        with suppress(FileNotFoundError):
            stream.write(Path(path).read_text(encoding="utf-8", errors="replace"))
        stream.flush()


def _interrupted(
    running: Mapping[Child, Rank], error: KeyboardInterrupt | Terminated
) -> Iterator[tuple[Rank, RunResult]]:
    """Send the signal that raised `error` to the ranks in `running`; yield (rank, its result so
    far). A rank without a result is left out: it had not begun, or a second Ctrl-C ended it."""
    for child in running:
        child.send(signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT)
    for child, rank in running.items():
        with suppress(MemestError):
            yield rank, _rank_result(rank, child)


def _run_as(rank: Rank, run: Callable[[Rank], RunResult]) -> RunResult:
    os.environ.update(environment(rank))
    with signals_once(signal.SIGINT, signal.SIGTERM):
        return run(rank)


def _rank_result(rank: Rank, child: Child) -> RunResult:
    try:
        result: RunResult = child.answer()
    except DiedError as error:
        raise MemestError(
            f"rank {rank.rank} ended with {error}", hint="is there memory enough on this machine?"
        ) from error
    finally:
        rank.mailbox.end(rank.rank)
    return result


def open_verdict(report: RunReport, decides: str) -> RunReport:
    """Return `report` with the verdict `may` on its own GPU: the run may or may not fit. The run
    fits if some memory blocks are freed early enough, which depends on time. `decides` is text that
    describes the blocks."""
    verdict = replace(report.verdicts[report.gpu], verdict=Outcome.MAY, decides=decides)
    verdicts = {**report.verdicts, report.gpu: verdict}
    return replace(report, verdict=Outcome.MAY, verdicts=verdicts)


def merge_ranks(reports: Sequence[tuple[Rank, RunReport]]) -> RunReport:
    """Return the report of the worst rank, with a row for each rank and the worst verdict per GPU.

    A rank out of memory is the worst, otherwise the rank that reserved most. If none is out of
    memory, the ending and the error are those of the first rank that was cut short.
    """

    def need(pair: tuple[Rank, RunReport]) -> tuple[int, int, int]:
        _, report = pair
        return _FROM_BEST_TO_WORST.index(report.verdict), *_peaks(report)

    worst_rank, worst = max(reports, key=need)
    rows = tuple(rows_of(reports))
    size = worst_rank.world_size
    others = [f"rank {rank.rank}" for rank, _ in reports if rank.rank != worst_rank.rank]
    note = (
        f"the figures are those of rank {worst_rank.rank} of {size}; also run: "
        f"{', '.join(others) or 'none'}; collectives gave each rank what it would get if all ranks"
        " had the same values"
    )
    if len({_peaks(report) for _, report in reports}) > 1 and len(reports) < size:
        note += "; ranks differ, and one that was not run may need more: `--ranks` names others"
    ending, error = worst.ending, worst.error
    if ending is not Ending.OOM:
        for rank, report in reports:
            if report.is_cut_short:
                ending, error = report.ending, f"{report.error} (rank {rank.rank})"
                break
    rank_intervals = [report.intervals for _, report in reports if report.intervals]
    intervals = {
        name: Interval(
            low_bytes=min(by_name[name].low_bytes for by_name in rank_intervals),
            high_bytes=max(by_name[name].high_bytes for by_name in rank_intervals),
        )
        for name in worst.intervals
    }
    verdicts = {
        name: max(
            (r.verdicts[name] for _, r in reports if name in r.verdicts),
            key=lambda verdict: (_FROM_BEST_TO_WORST.index(verdict.verdict), verdict.needs_bytes),
        )
        for name in worst.verdicts
    }
    return replace(
        worst, rank=worst_rank.rank, ranks=rows, intervals=intervals, notes=(note, *worst.notes),
        warnings=tuple(dict.fromkeys(line for _, report in reports for line in report.warnings)),
        verdicts=verdicts, ending=ending, error=error,
    )  # fmt: skip


def rows_of(reports: Sequence[tuple[Rank, RunReport]]) -> Iterator[RankRow]:
    """Yield a row of figures for each rank that was run, in the order of their numbers."""
    for rank, report in sorted(reports, key=_rank_number):
        figures = {field.name: getattr(report, field.name) for field in fields(RankRow)}
        yield RankRow(**{**figures, "rank": rank.rank})
