"""One process per GPU: started with the environment that `torchrun` gives, and ended together.

Lightning finds its processes created by others (`TorchElasticEnvironment`) and starts none. A rank
that has its report waits until all have theirs: what it still holds, others may still read.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from memest.report import Measurement, Outcome

POLL_S = 0.02
_OF_EACH_RANK = (
    "setup_peak_allocated_bytes", "setup_peak_reserved_bytes", "host_samples", "event_marks",
)  # fmt: skip
"""What a rank's report has in `device`, and the merged one in `ranks`."""

OOM_GRACE_S = 2.0
"""How long the others may take to report once one rank is out of memory; they may hang instead."""


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """As `torchrun` sets it on one node."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "memest",
    }


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run_ranks(
    num_ranks: int,
    fork: Callable[[], int],
    run: Callable[[Path], NoReturn],
    read: Callable[[Path], Measurement | None],
    folder: Path,
) -> list[Measurement]:
    """The reports of all ranks, or of those that had one when a rank was out of memory.

    An empty list if a rank ended without one; its output is then on stderr. None is left running.

    Args:
        num_ranks: processes.
        fork: starts one, as `os.fork`.
        run: what each does; writes its report to the path and does not return.
        read: a report, or None where there is none yet.
        folder: for reports and output.
    """
    port = free_port()
    pids: list[int] = []
    paths = [folder / f"rank{rank}.json" for rank in range(num_ranks)]
    try:
        for rank in range(num_ranks):
            pid = fork()
            if not pid:
                try:
                    _become(rank, num_ranks, port, folder)
                    run(paths[rank])
                finally:
                    os._exit(70)  # nothing of the parent's may run in the child
            pids.append(pid)
        return _collect(pids, paths, read, folder)
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


def wait_for_the_end() -> NoReturn:
    """Of a rank that has its report."""
    while True:
        signal.pause()


def merge(measured: Sequence[Measurement]) -> Measurement:
    """The report of the worst rank: out of memory first, then by reserved, then by allocated.

    `host_bytes` is the sum over the ranks, each of which holds its own. Each rank's own figures are
    in `ranks`.
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
    return {
        "rank": _rank(measured),
        "verdict": str(measured.verdict),
        "peak_allocated_bytes": measured.peak_allocated_bytes,
        "peak_reserved_bytes": measured.peak_reserved_bytes,
        "process_bytes": measured.process_bytes,
        "host_bytes": measured.host_bytes,
        **{key: measured.device[key] for key in _OF_EACH_RANK if key in measured.device},
    }


def _become(rank: int, num_ranks: int, port: int, folder: Path) -> None:
    """Rank 0 writes to the experiment's log; the others to files, shown where they fail."""
    os.environ.update(rank_environment(rank, num_ranks, port))
    if rank:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        descriptor = os.open(_output(folder, rank), flags, 0o600)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)


def _output(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.log"


def _collect(
    pids: Sequence[int],
    paths: Sequence[Path],
    read: Callable[[Path], Measurement | None],
    folder: Path,
) -> list[Measurement]:
    deadline = float("inf")
    found: dict[int, Measurement] = {}
    while True:
        for rank, path in enumerate(paths):
            if rank not in found and (measured := read(path)) is not None:
                found[rank] = measured
        if len(found) == len(paths) or time.monotonic() >= deadline:
            return list(found.values())
        if deadline == float("inf") and any(m.verdict is Outcome.OOM for m in found.values()):
            deadline = time.monotonic() + OOM_GRACE_S
        for rank, pid in enumerate(pids):
            if rank in found or _is_running(pid):
                continue
            if read(paths[rank]) is not None:
                continue  # it wrote the report in between
            if deadline == float("inf"):
                time.sleep(POLL_S)  # for those whose peer it was, or that were its peers
                ended = [r for r, pid in enumerate(pids) if r == rank or not _is_running(pid)]
                for each in ended:
                    if read(paths[each]) is None:
                        _tell(each, folder)
                return []
        time.sleep(POLL_S)


def _is_running(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG) == (0, 0)
    except ChildProcessError:
        return False


def _tell(rank: int, folder: Path) -> None:
    if rank:
        with suppress(OSError):
            sys.stderr.write(_output(folder, rank).read_text(encoding="utf-8", errors="replace"))
    sys.stderr.write(f"rank {rank} ended without a report\n")
    sys.stderr.flush()
