"""One rival over all cases, several at a time, each plan in a process of its own.

For a rival that can take long or end its process. Rows come as they are made, so that a run which
is cut short leaves what it had.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from rivals.case import Case
from rivals.worker import answer_of

Row = dict[str, Any]

TOO_LONG = "not done within"
"""How a refusal begins that more time may undo."""


def rows(name: str, cases: Sequence[Case], *, jobs: int, timeout_s: float) -> Iterator[Row]:
    """The answer of each case with its `key`; `refused` where it took longer than `timeout_s`.

    Runs of one plan are asked in one process, the first of them timed for all.
    """
    context = _context()
    waiting = list(_by_plan(cases))[::-1]
    running: dict[Connection, tuple[Any, list[Case], float]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            group = waiting.pop()
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(name, group, sender))
            process.start()
            sender.close()
            running[receiver] = process, group, time.monotonic() + timeout_s
        soonest = min(until for _, _, until in running.values())
        ready = wait(list(running), timeout=max(0.0, soonest - time.monotonic()))
        for receiver, (process, group, until) in list(running.items()):
            if receiver not in ready and time.monotonic() < until:
                continue
            del running[receiver]
            yield from _finish(process, receiver, group, timeout_s)


def is_final(row: Row) -> bool:
    """Whether more time would not change the answer."""
    return not str(row.get("refused", "")).startswith(TOO_LONG)


def work_of(case: Case) -> tuple[int, int]:
    """Grows with the time that a case takes: the size of the model, then passes over it."""
    return case.num_params, case.plan["accumulate_grad_batches"] * (1 + bool(case.plan["act_ckpt"]))


def _context() -> Any:
    """A way to start processes: `fork`, which keeps what is imported, unless CUDA forbids it."""
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=_leave_if_cuda_is_lost)
    process.start()
    process.join()
    return multiprocessing.get_context("spawn") if process.exitcode else fork


def _leave_if_cuda_is_lost() -> None:
    import torch

    sys.exit(int(torch.cuda._is_in_bad_fork()))


def _by_plan(cases: Sequence[Case]) -> Iterator[list[Case]]:
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(json.dumps(case.plan_alone, sort_keys=True), []).append(case)
    return iter(groups.values())


def _work(name: str, group: list[Case], sender: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    found = [{"key": case.key, **answer_of(name, case)} for case in group]
    first = found[0].get("seconds")
    sender.send([row | {"seconds": first} if "seconds" in row else row for row in found])


def _finish(
    process: Any, receiver: Connection, group: list[Case], timeout_s: float
) -> Iterator[Row]:
    """Its rows, or the reason that there are none."""
    reason = f"{TOO_LONG} {timeout_s:g} s"
    if receiver.poll():
        reason = "ends its process"
        try:
            yield from receiver.recv()
            reason = ""
        except EOFError:
            pass
    if reason:
        process.kill()
        yield from ({"key": case.key, "refused": reason} for case in group)
    process.join()
    receiver.close()
