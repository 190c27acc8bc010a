"""Scripts on two GPUs: each request and free, its size and its stream, in the recorded order."""

from __future__ import annotations

import gc
import gzip
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memest.estimator.gpu.worlds import Rank
from memest.estimator.hardware.gpus import find_gpu
from memest.run.ranks import run_rank
from memest.run.session import RunResult, Session, run_target
from memest.run.summary import record_run_of
from memest.run.target import find_script
from tests import forked

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "scripts"
RESULTS = ROOT / "validation" / "scripts"
RECORDED = sorted(path.name.removesuffix(".npy.gz") for path in FOLDER.iterdir())
BLOCK_BYTES = 512


def recorded(name: str) -> list[tuple[int, int]]:
    """Bytes of each block that was requested, negative where it was freed, and its stream."""
    with gzip.open(FOLDER / f"{name}.npy.gz") as file:
        return [tuple(row) for row in np.load(file).tolist()]


def simulate(case: str, rank: int, out: Path) -> RunResult:
    """Run the script as a rank of two; what it requests and frees is written to `out`."""
    given = json.loads((RESULTS / "measured_ranks.json").read_text(encoding="utf-8"))
    arguments = given["cases"][case]
    target = find_script(str(RESULTS / arguments["script"]), tuple(arguments["args"]))

    def run(rank: Rank) -> RunResult:
        gpu = find_gpu("h100-80gb")
        session = Session(gpu, name=case, roots=target.roots, rank=rank, is_immediate=True)
        ran = run_target(target, session)
        assert ran.report is not None, ran.error_text
        out.write_bytes(pickle.dumps(requests(session, ran.report)))
        return ran

    return run_rank(Rank(rank=rank, world_size=2, num_local=2), run, is_silent=True)


def requests(session: Session, report: Any) -> list[tuple[int, int]]:
    """As `recorded`, of a run on the virtual GPU; streams are numbered as they come."""
    recording = record_run_of(session.virtual, report)
    storages, numbers, found = session.virtual.mode.memory.storages, {0: 0}, []
    for action in recording.actions:
        if action.action not in ("alloc", "free_requested"):
            continue
        num_bytes = -(-storages.num_bytes[action.stack] // BLOCK_BYTES) * BLOCK_BYTES
        stream = storages.streams.get(action.stack, 0)
        number = numbers.setdefault(stream, len(numbers))
        found.append((num_bytes if action.action == "alloc" else -num_bytes, number))
    return found


def simulate_and_keep(case: str, rank: int, out: Path) -> None:
    """Run in a process of its own, without Python's garbage collection.

    The moment of a collection depends on what else is imported. The recorded runs had none.
    """
    gc.disable()
    out.with_suffix(".code").write_text(str(simulate(case, rank, out).exit_code), encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("name", RECORDED)
def test_a_rank_requests_and_frees_as_the_recorded_one(name: str, tmp_path: Path) -> None:
    case, _, rank = name.rpartition(".rank")
    out = tmp_path / "requests"
    code = "from tests.replay.test_scripts import simulate_and_keep, Path\n"
    code += f"simulate_and_keep({case!r}, {rank}, Path({str(out)!r}))"
    forked.run([sys.executable, "-c", code], cwd=ROOT, check=True, imports=("accelerate",))

    ours, theirs = pickle.loads((tmp_path / "requests").read_bytes()), recorded(name)

    assert out.with_suffix(".code").read_text(encoding="utf-8") == "0"
    assert [pair for pair in zip(ours, theirs, strict=False) if pair[0] != pair[1]] == []
    assert len(ours) == len(theirs)
