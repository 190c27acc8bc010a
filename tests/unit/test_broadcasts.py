"""What one rank has said, those that are run after it hear."""

from __future__ import annotations

from pathlib import Path

import pytest

from memest.estimator.device.broadcasts import Broadcasts
from memest.estimator.device.ranks import Ranks
from memest.estimator.hardware.gpus import find_gpu
from memest.run.launcher import Ran, run_target
from memest.run.ranks import chosen_ranks, run_rank
from memest.run.session import Session
from memest.run.target import find_script

SCRIPT = """
import torch
from torch import distributed as dist
dist.init_process_group("nccl")
rank, x = dist.get_rank(), torch.zeros(8, device="cuda")
names = ["run-7", {"lr": 0.1}] if rank == 0 else [None, None]
dist.broadcast_object_list(names, src=0)
order = torch.arange(5, device="cuda") * (3 if rank == 0 else 0)
dist.broadcast(order, src=0)
mine = [None]
dist.scatter_object_list(mine, ["a", "b", "c"] if rank == 0 else None, src=0)
assert names == ["run-7", {"lr": 0.1}], names
assert order.tolist() == [0, 3, 6, 9, 12], order
assert mine == ["abc"[rank]], mine
work = dist.all_reduce(x, async_op=True)
assert [t.shape for t in work.get_future().value()] == [x.shape]
before = torch.cuda.memory_allocated()
del x
assert torch.cuda.memory_allocated() == before  # NCCL keeps it until somebody waits
work.wait()
assert torch.cuda.memory_allocated() == before - 512
"""


def run(ranks: Ranks, path: Path) -> Ran:
    target = find_script(str(path), ())

    def one(ranks: Ranks) -> Ran:
        return run_target(target, Session(find_gpu("h200"), ranks=ranks, is_prompt=True))

    return run_rank(ranks, one, is_silent=True)


def test_the_last_rank_hears_what_the_first_has_said(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT, encoding="utf-8")

    for ranks in chosen_ranks(3, 1):
        ran = run(ranks, path)

        assert ran.error_text == ""


def test_broadcasts_are_told_apart_by_group_source_and_number() -> None:
    broadcasts = Broadcasts()
    for said in ("one", None, "three"):
        broadcasts.says("all", said)
    broadcasts.says("some", "other")
    broadcasts.begin_rank()

    assert [broadcasts.hears("all") for _ in range(4)] == ["one", None, "three", None]
    assert broadcasts.hears("some") == "other"
    assert broadcasts.hears("none") is None


def test_what_cannot_be_sent_is_not_known() -> None:
    broadcasts = Broadcasts()
    broadcasts.says("all", lambda: None)
    broadcasts.begin_rank()

    assert broadcasts.hears("all") is None


@pytest.mark.parametrize("size", [2, 5])
def test_the_ranks_that_are_run_share_them(size: int) -> None:
    first, last = chosen_ranks(size, 1)

    assert first.broadcasts is last.broadcasts
    assert (first.rank, last.rank) == (0, size - 1)
