"""Messages between ranks: broadcasts reach later ranks, peers run together."""

from __future__ import annotations

from pathlib import Path

import pytest

from memest import virtual_gpu
from memest.estimator.gpu.worlds import Mailbox, PeerEnded, Rank
from memest.estimator.hardware.gpus import find_gpu
from memest.run.ranks import chosen_ranks, run_rank, run_together
from memest.run.session import RunResult, Session, run_target
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


@pytest.fixture(scope="module", autouse=True)
def tables() -> None:
    """Fill tables of operators and of Dynamo, which each copy of this process would fill."""
    import torch._dynamo

    with virtual_gpu() as gpu:
        torch.ones(1, device="cuda")
    gpu.report()


def run(rank: Rank, path: Path) -> RunResult:
    target = find_script(str(path), ())

    def one(rank: Rank) -> RunResult:
        return run_target(target, Session(find_gpu("h200"), rank=rank, is_immediate=True))

    return run_rank(rank, one, is_silent=True)


def test_the_last_rank_hears_what_the_first_has_said(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT, encoding="utf-8")

    for rank in chosen_ranks(3, 1):
        ran = run(rank, path)

        assert ran.error_text == ""


def test_messages_are_numbered_by_key() -> None:
    mailbox = Mailbox()
    for value in ("one", None, "three"):
        mailbox.post("all", value)
    mailbox.post("some", "other")
    mailbox.begin_rank(1)

    assert [mailbox.fetch("all", 0) for _ in range(4)] == ["one", None, "three", None]
    assert mailbox.fetch("some", 0) == "other"
    assert mailbox.fetch("none", 0) is None


def test_a_value_that_cannot_be_pickled_is_not_known() -> None:
    mailbox = Mailbox()
    mailbox.post("all", lambda: None)
    mailbox.begin_rank(1)

    assert mailbox.fetch("all", 0) is None


def test_a_rank_does_not_wait_for_a_peer_that_has_ended() -> None:
    mailbox = Mailbox()
    mailbox.meet(1)
    mailbox.end(1)

    assert mailbox.requested() == {1}
    with pytest.raises(PeerEnded, match="rank 1 ended before it sent or took"):
        mailbox.fetch("all", 1)


UNPAIRED = """
import torch
from torch import distributed as dist
dist.init_process_group("nccl")
x = torch.zeros(8, device="cuda")
peer = 1 - dist.get_rank()
ops = [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, x, peer)]
for work in dist.batch_isend_irecv(ops):
    work.wait()
if dist.get_rank() == 0:
    dist.{name}(x, 1)
"""


@pytest.mark.parametrize("name", ["recv", "send"])
def test_a_rank_that_waits_for_ever_is_named_with_its_line(name: str, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(UNPAIRED.replace("{name}", name), encoding="utf-8")

    def one(rank: Rank) -> RunResult:
        target = find_script(str(path), ())
        return run_target(target, Session(find_gpu("h200"), rank=rank, is_immediate=True))

    ran = [ran for _, ran in run_together(chosen_ranks(2, 1)[:1], one)]

    assert "script.py:11: rank 1 ended before" in str(ran[0].refusal)
    assert (ran[1].refusal, ran[1].error_text) == (None, "")


TO_ITSELF = """
import torch
from torch import distributed as dist
dist.init_process_group("nccl")
rank, x = dist.get_rank(), torch.zeros(8, device="cuda")
ops = [dist.P2POp(op, x, peer) for peer in (rank, 1 - rank) for op in (dist.isend, dist.irecv)]
for work in dist.batch_isend_irecv(ops):
    work.wait()
"""


def test_a_rank_may_send_to_itself(tmp_path: Path) -> None:
    """Pipeline schedules in the form of a V do so before the first step."""
    path = tmp_path / "script.py"
    path.write_text(TO_ITSELF, encoding="utf-8")

    def one(rank: Rank) -> RunResult:
        target = find_script(str(path), ())
        return run_target(target, Session(find_gpu("h200"), rank=rank, is_immediate=True))

    ran = [ran for _, ran in run_together(chosen_ranks(2, 1)[:1], one)]

    assert [(one.refusal, one.error_text) for one in ran] == [(None, "")] * 2


STAGES = """
import sys
import torch
from torch import distributed as dist
dist.init_process_group("nccl")
rank, size = dist.get_rank(), dist.get_world_size()
x = torch.zeros(1 << 20, device="cuda")
count = torch.tensor([0])
if rank > 0:
    objects = [None]
    dist.recv_object_list(objects, src=rank - 1)
    dist.recv(count, src=rank - 1)
    assert objects == [f"stage {rank - 1}"] and count.item() == rank, (objects, count)
if rank < size - 1:
    dist.send_object_list([f"stage {rank}"], dst=rank + 1)
    if len(sys.argv) > 1 and rank == 1:
        raise ValueError("stage 1 is broken")
    dist.send(count + 1, dst=rank + 1)
    dist.recv(x, src=rank + 1)
if rank > 0:
    dist.send(x, dst=rank - 1)
"""


def stages(path: Path, *args: str) -> dict[int, RunResult]:
    path.write_text(STAGES, encoding="utf-8")
    target = find_script(str(path), args)

    def one(rank: Rank) -> RunResult:
        return run_target(target, Session(find_gpu("h200"), rank=rank, is_immediate=True))

    return {rank.rank: ran for rank, ran in run_together(chosen_ranks(4, 1)[:1], one)}


def test_ranks_that_send_to_each_other_run_together(tmp_path: Path) -> None:
    ran = stages(tmp_path / "script.py")

    assert [(rank, ran[rank].error_text) for rank in ran] == [(rank, "") for rank in range(4)]


def test_a_rank_that_fails_ends_those_that_wait_for_it(tmp_path: Path) -> None:
    ran = stages(tmp_path / "script.py", "--broken")

    assert "stage 1 is broken" in ran[1].error_text
    assert isinstance(ran[2].refusal, PeerEnded)
    assert "rank 1 ended before it sent or took" in str(ran[2].refusal)


@pytest.mark.parametrize("size", [2, 5])
def test_the_ranks_that_are_run_share_them(size: int) -> None:
    first, last = chosen_ranks(size, 1)

    assert first.mailbox is last.mailbox
    assert (first.rank, last.rank) == (0, size - 1)


TOGETHER = """
import os, sys, time, torch
from pathlib import Path
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
folder = Path(sys.argv[1])
dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)
model = DistributedDataParallel(torch.nn.Linear(8, 8).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if rank == 0:
    time.sleep(0.5)
    (folder / "data").touch()
dist.barrier()
assert (folder / "data").exists()
is_resumed = (folder / "checkpoint").exists()
{body}
if rank == 0:
    (folder / "checkpoint").touch()
"""
TRAINED = """
if rank == 0:
    print("rank 0 ends")
else:
    print(f"rank {rank} begins")
for _ in range(2 if is_resumed else 3):
    model(torch.zeros(2, 8, device="cuda")).sum().backward()
    if rank:
        time.sleep(0.2)
    optimizer.step()
"""
MISSED = """
if rank == 0:
    dist.barrier()
else:
    dist.distributed_c10d._get_default_store().get("never set")
"""
FAILED = """
if rank == 0:
    raise ValueError("rank 0 fails")
time.sleep(600)
"""


def together(path: Path, body: str) -> dict[int, RunResult]:
    path.write_text(TOGETHER.replace("{body}", body), encoding="utf-8")

    def one(rank: Rank) -> RunResult:
        target = find_script(str(path), (str(path.parent),))
        return run_target(target, Session(find_gpu("h200"), rank=rank, is_immediate=True))

    return {rank.rank: ran for rank, ran in run_together(chosen_ranks(3, 1), one)}


def test_the_first_and_the_last_rank_share_their_files_as_they_make_them(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ran = together(tmp_path / "script.py", TRAINED)

    assert [ended.error_text for ended in ran.values()] == ["", ""]
    assert [ended.report.num_steps for ended in ran.values() if ended.report] == [3, 3]
    assert capfd.readouterr().out.split("\n")[:2] == ["rank 0 ends", "rank 2 begins"]


def test_ranks_that_wait_for_different_things_go_on(tmp_path: Path) -> None:
    ran = together(tmp_path / "script.py", MISSED)

    assert ran[0].error_text == ""
    assert "this rank waits for `never set` of the store" in str(ran[2].refusal)


def test_the_last_rank_ends_without_a_result_when_the_first_fails(tmp_path: Path) -> None:
    ran = together(tmp_path / "script.py", FAILED)

    assert list(ran) == [0]
    assert "rank 0 fails" in ran[0].error_text
