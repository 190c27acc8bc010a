"""A script as `torchrun` would start it: some of its ranks, each in a process of its own.

The ranks that are run are the first and the last. They run one after another, and wait for nobody:
collectives give each the values that the other ranks would have if they had what this one has, and
broadcasts of the first what it has said.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from memest.errors import MemestError, PlanError
from memest.estimator.device.broadcasts import Broadcasts
from memest.estimator.device.ranks import Ranks
from memest.report import Interval, Outcome, RankRow, RunReport
from memest.run.launcher import Ran

MAX_RANKS = 1 << 14
"""As of plans."""

MASTER_PORT = 29500
"""The default of `torchrun`."""


def chosen_ranks(num_local: int | None, num_nodes: int) -> list[Ranks]:
    """The first rank and the last; one that nobody launches where `num_local` is not given.

    Raises:
        PlanError: there are more than make sense.
    """
    is_launched = num_local is not None or num_nodes > 1
    num_local = num_local or 1
    size = num_local * num_nodes
    if size > MAX_RANKS:
        raise PlanError(f"{size} ranks are too many", hint=f"simulate at most {MAX_RANKS}")
    broadcasts = Broadcasts()
    return [
        Ranks(
            rank=rank,
            world_size=size,
            num_local=num_local,
            is_launched=is_launched,
            broadcasts=broadcasts,
        )
        for rank in sorted({0, size - 1})
    ]


def environment(ranks: Ranks) -> dict[str, str]:
    """What `torchrun` tells a process, as torch/distributed/elastic/agent/server/
    local_elastic_agent.py of torch 2.11 does.
    """
    host, size = ranks.rank // ranks.num_local, ranks.world_size
    num_nodes = size // ranks.num_local
    told: dict[str, Any] = {
        "LOCAL_RANK": ranks.local_rank, "RANK": ranks.rank, "GROUP_RANK": host,
        "ROLE_RANK": ranks.rank, "ROLE_NAME": "default", "LOCAL_WORLD_SIZE": ranks.num_local,
        "WORLD_SIZE": size, "GROUP_WORLD_SIZE": num_nodes, "ROLE_WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": MASTER_PORT, "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0, "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }  # fmt: skip
    if "OMP_NUM_THREADS" not in os.environ and ranks.num_local > 1:
        told["OMP_NUM_THREADS"] = 1
    return {name: str(value) for name, value in told.items()}


def run_rank(ranks: Ranks, run: Callable[[Ranks], Ran], *, is_silent: bool = False) -> Ran:
    """`run` in a process of its own, with the environment of the rank."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        if is_silent:
            _be_silent()
        _be_rank(ranks, run, writer)
    os.close(writer)
    try:
        with os.fdopen(reader, "rb") as pipe:
            answer = pipe.read()
    except BaseException:
        os.kill(child, signal.SIGTERM)
        raise
    finally:
        _, status = os.waitpid(child, 0)
    if not answer:
        what = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "no answer"
        raise MemestError(
            f"rank {ranks.rank} ended with {what}", hint="is there memory enough on this machine?"
        )
    ran: Ran | MemestError
    ran, broadcasts = pickle.loads(answer)
    ranks.broadcasts.learn(broadcasts)
    if isinstance(ran, MemestError):
        raise ran
    return ran


def _be_silent() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(nowhere, number)


def open_verdict(report: RunReport, decides: str) -> RunReport:
    """Of a rank that ran out of memory at the latest moment, and did not at the earliest."""
    own = replace(report.verdicts[report.gpu], verdict=Outcome.MAY, decides=decides)
    verdicts = {**report.verdicts, report.gpu: own}
    return replace(report, verdict=Outcome.MAY, verdicts=verdicts)


def _be_rank(ranks: Ranks, run: Callable[[Ranks], Ran], writer: int) -> None:
    """Run, answer and leave: what the parent has open is the parent's."""
    code = 1
    try:
        os.environ.update(environment(ranks))
        ran: Ran | MemestError
        try:
            ran = run(ranks)
        except MemestError as error:
            ran = error
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        with os.fdopen(writer, "wb") as pipe:
            pickle.dump((ran, ranks.broadcasts), pipe)
        code = 0
    except BaseException:  # an error of memest's own, which nobody else would tell of
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def together(reports: Sequence[tuple[Ranks, RunReport]]) -> RunReport:
    """The report of the worst rank, with a row for each that was run.

    The worst is one that ran out of memory; of several, or of none, the one that reserved most.
    """

    def need(pair: tuple[Ranks, RunReport]) -> tuple[int, int, int]:
        report = pair[1]
        is_bad = _BADNESS.index(report.verdict)
        return is_bad, report.peak_reserved_bytes, report.peak_allocated_bytes

    worst_of, worst = max(reports, key=need)
    rows = tuple(rows_of(reports))
    size = worst_of.world_size
    note = (
        f"rank {worst_of.rank} of {size}; of the others {_listed(reports, worst_of)} was run, and"
        " collectives gave each what it would get if all ranks had what it has"
    )
    every = [report.intervals for _, report in reports if report.intervals]
    intervals = {
        name: Interval(
            low_bytes=min(found[name].low_bytes for found in every),
            high_bytes=max(found[name].high_bytes for found in every),
        )
        for name in worst.intervals
    }
    return replace(
        worst, rank=worst_of.rank, ranks=rows, intervals=intervals, notes=(note, *worst.notes)
    )


_BADNESS = (Outcome.FITS, Outcome.MAY, Outcome.OOM)


def _listed(reports: Sequence[tuple[Ranks, RunReport]], worst: Ranks) -> str:
    others = [f"rank {ranks.rank}" for ranks, _ in reports if ranks.rank != worst.rank]
    return " and ".join(others) or "none"


def rows_of(reports: Sequence[tuple[Ranks, RunReport]]) -> Iterator[RankRow]:
    """What a report says of each rank that was run."""
    for ranks, report in reports:
        yield RankRow(
            rank=ranks.rank,
            ending=report.ending,
            num_steps=report.num_steps,
            peak_allocated_bytes=report.peak_allocated_bytes,
            peak_reserved_bytes=report.peak_reserved_bytes,
            process_bytes=report.process_bytes,
            intervals=report.intervals,
        )
