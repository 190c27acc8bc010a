"""Processes of ranks: one per GPU, started with the environment of `torchrun` and ended together.

A rank with a report waits until all have one, because others may still read its memory.
"""

import dataclasses
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from memest.child import CAN_FORK, Child, fork, write_to
from memest.errors import UnsupportedError
from memest.report import Measurement, Outcome

POLL_S = 0.02
_OF_EACH_RANK = (
    "setup_peak_allocated_bytes", "setup_peak_reserved_bytes", "host_samples", "event_marks",
)  # fmt: skip
"""Keys of a rank's `device` that the merged report has in `ranks`."""

OOM_GRACE_S = 2.0  # wait for other ranks after one is out of memory, since they may hang


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the variables that `torchrun` sets on one node; rank 0 itself holds the store."""
    from memest.estimator.gpu.worlds import Rank

    made = Rank(rank=rank, world_size=world_size, num_local=world_size).environment(port)
    return made | {"TORCHELASTIC_USE_AGENT_STORE": "False"}


def run_ranks(num_ranks: int, run: Callable[[Path], NoReturn], folder: Path) -> list[Measurement]:
    """Return the reports of all ranks, or those that exist when a rank was out of memory.

    The list is empty if a rank ended without a report; its output is then on stderr. `run` runs a
    rank, writes its report to a path in `folder`, and does not return.
    """
    if not CAN_FORK:
        raise UnsupportedError(
            "a measured run on several GPUs needs Linux", hint="run `memest validate` on Linux"
        )
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])  # unused
    children: list[Child] = []
    paths = [folder / f"rank{rank}.json" for rank in range(num_ranks)]

    def begin(rank: int) -> None:
        os.environ.update(rank_environment(rank, num_ranks, port))
        if rank:  # rank 0 writes to the experiment's log
            write_to(folder / f"rank{rank}.log")
        run(paths[rank])

    try:
        for rank in range(num_ranks):
            children.append(fork(partial(begin, rank)))
        return _collect(children, paths, folder)
    finally:
        for child in children:
            child.kill()


def wait_for_the_end() -> NoReturn:
    """Wait, as a rank that has its report, until the process is ended."""
    while True:
        time.sleep(POLL_S)


def merge(measured: Sequence[Measurement]) -> Measurement:
    """Return the report of the worst rank: out of memory, then most reserved, then most allocated.

    `host_bytes` is the sum over the ranks; `ranks` has each rank's own figures.
    """
    worst = max(
        measured,
        key=lambda m: (m.verdict is Outcome.OOM, m.peak_reserved_bytes, m.peak_allocated_bytes),
    )
    return dataclasses.replace(
        worst,
        device={k: v for k, v in worst.device.items() if k not in _OF_EACH_RANK},
        host_bytes=sum(m.host_bytes for m in measured),
        ranks=tuple(_figures(m) for m in sorted(measured, key=_rank)),
    )


def _rank(measured: Measurement) -> int:
    return int(measured.device.get("rank", 0))


def _figures(measured: Measurement) -> dict[str, Any]:
    keys = ("peak_allocated_bytes", "peak_reserved_bytes", "process_bytes", "host_bytes")
    return {
        "rank": _rank(measured),
        "verdict": str(measured.verdict),
        **{key: getattr(measured, key) for key in keys},
        **{key: measured.device[key] for key in _OF_EACH_RANK if key in measured.device},
    }


def _collect(children: Sequence[Child], paths: Sequence[Path], folder: Path) -> list[Measurement]:
    deadline = float("inf")
    found: dict[int, Measurement] = {}
    while True:
        ended = {rank for rank, child in enumerate(children) if child.poll() is not None}
        for rank, path in enumerate(paths):  # again, for reports written in the meantime
            if rank not in found and (measured := Measurement.read(path)) is not None:
                found[rank] = measured
        if len(found) == len(paths) or time.monotonic() >= deadline:
            return list(found.values())
        if deadline == float("inf") and any(m.verdict is Outcome.OOM for m in found.values()):
            deadline = time.monotonic() + OOM_GRACE_S
        time.sleep(POLL_S)  # an ended rank may hang its peers
        if deadline == float("inf") and ended - found.keys():
            for rank, child in enumerate(children):
                if child.poll() is not None and Measurement.read(paths[rank]) is None:
                    _print_log(rank, folder)
            return []


def _print_log(rank: int, folder: Path) -> None:
    if rank:
        with suppress(OSError):
            log = folder / f"rank{rank}.log"
            sys.stderr.write(log.read_text(encoding="utf-8", errors="replace"))
    sys.stderr.write(f"rank {rank} ended without a report\n")
    sys.stderr.flush()
