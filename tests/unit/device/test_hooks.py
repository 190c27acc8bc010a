"""Communication hooks of DDP, and what collectives keep that nobody waits for."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from memest.estimator.gpu.timeline import STREAMS_PER_POOL, WATCHDOG_US
from memest.estimator.virtual_gpu import VirtualGpu
from tests.ranks import gpu_of_rank

MIB = 1 << 20
WIDTH = 1024
WEIGHT = 4 * WIDTH * WIDTH
"""Bytes of the only parameter, in 32 bits: 4 MiB, a bucket by itself."""

WORKSPACE = 32 * MIB
"""Of cuBLAS, for each thread and stream."""


@pytest.fixture
def rank() -> Iterator[VirtualGpu]:
    """The first of two, in its group."""
    with gpu_of_rank(0, 2) as virtual:
        dist.init_process_group("nccl", rank=0, world_size=2)
        yield virtual


def wrapped(**options: Any) -> DistributedDataParallel:
    layer = nn.Linear(WIDTH, WIDTH, bias=False).cuda()
    return DistributedDataParallel(layer, device_ids=[0], **options)


def backward(model: nn.Module) -> int:
    """Bytes allocated after one, but for workspaces."""
    model(torch.ones(2, WIDTH, device="cuda")).sum().backward()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated() // MIB * MIB


def pass_time(virtual: VirtualGpu, microseconds: float) -> None:
    virtual.mode.timeline.advance_host(microseconds, microseconds)


def test_a_compressed_bucket_is_kept_until_the_watchdog_has_looked(rank: VirtualGpu) -> None:
    model = wrapped()
    model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    usual = 3 * WEIGHT  # itself, its bucket, its gradient

    held = [backward(model)]
    dist.barrier()
    held.append(torch.cuda.memory_allocated() // MIB * MIB)
    pass_time(rank, WATCHDOG_US)
    held.append(torch.cuda.memory_allocated() // MIB * MIB)
    dist.barrier()
    held.append(torch.cuda.memory_allocated() // MIB * MIB)

    assert held == [usual + WEIGHT // 2] * 3 + [usual]


def test_nothing_is_kept_of_a_collective_that_somebody_waits_for(rank: VirtualGpu) -> None:
    before = torch.cuda.memory_allocated()
    tensor = torch.ones(WIDTH, WIDTH, device="cuda")
    dist.all_reduce(tensor, async_op=True).wait()
    del tensor

    assert torch.cuda.memory_allocated() == before


@pytest.mark.usefixtures("rank")
def test_a_hook_of_ones_own_gets_every_bucket_and_says_what_it_comes_to() -> None:
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))).cuda()
    model = DistributedDataParallel(layers, device_ids=[0], bucket_cap_mb=4)
    seen: list[tuple[int, int, int, bool]] = []

    def hook(state: str, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        assert state == "state"
        shapes = [gradient.shape for gradient in bucket.gradients()]
        assert shapes == [parameter.shape for parameter in bucket.parameters()]
        seen.append((bucket.index(), bucket.buffer().numel(), len(shapes), bucket.is_last()))
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer() * 2)
        return future

    model.register_comm_hook("state", hook)
    for _ in range(2):
        backward(model)
    results = backward(model) - 2 * 3 * WEIGHT - 3 * WEIGHT

    count = WIDTH * WIDTH
    assert seen[0] == (0, 3 * count, 3, True)  # all share one in the first step
    assert seen[-3:] == [(0, count, 1, False), (1, count, 1, False), (2, count, 1, True)]
    assert results == 3 * WEIGHT  # which live until the next


@pytest.mark.parametrize("options", [{"static_graph": True}, {"gradient_as_bucket_view": True}])
@pytest.mark.usefixtures("rank")
def test_a_hook_runs_once_for_each_bucket_and_step(options: dict[str, bool]) -> None:
    model = wrapped(**options)
    steps: list[int] = []

    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        steps.append(bucket.index())
        return default_hooks.allreduce_hook(dist.group.WORLD, bucket)

    model.register_comm_hook(None, hook)
    for _ in range(3):
        backward(model)

    assert steps == [0, 0, 0]
    assert model.module.weight.grad is not None


@pytest.mark.usefixtures("rank")
def test_what_follows_a_collective_has_another_stream_and_its_own_workspace() -> None:
    model = wrapped()
    state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook)
    reserved = []
    for _ in range(4):
        model(torch.ones(2, WIDTH, device="cuda")).sum().backward()
        reserved.append(torch.cuda.memory_reserved())

    assert reserved[0] == reserved[1]
    assert reserved[3] - reserved[2] >= 2 * WORKSPACE  # of two streams, with a product on each


@pytest.mark.usefixtures("rank")
def test_the_streams_of_the_pool_come_again() -> None:
    first, *others = [torch.cuda.Stream() for _ in range(STREAMS_PER_POOL + 1)]

    assert others[-1] == first
    assert len(set(others)) == STREAMS_PER_POOL
    assert torch.cuda.Stream(priority=-1) not in others


def no_future(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    future: Any = torch.futures.Future()
    future.set_result("nothing")
    return future


def too_few(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    future: Any = torch.futures.Future()
    future.set_result(bucket.buffer()[:3])
    return future


@pytest.mark.usefixtures("rank")
@pytest.mark.parametrize(
    ("hook", "message"),
    [(no_future, "Unable to cast nothing to Tensor"), (too_few, "gave 3 elements")],
)
def test_a_hook_that_gives_no_bucket_back_fails(hook: Callable[..., Any], message: str) -> None:
    model = wrapped()
    model.register_comm_hook(None, hook)

    with pytest.raises(RuntimeError, match=message):
        backward(model)


@pytest.mark.usefixtures("rank")
def test_there_is_one_hook() -> None:
    model = wrapped()
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    assert backward(model) > 3 * WEIGHT

    with pytest.raises(RuntimeError, match="can only be called once"):
        model.register_comm_hook(None, default_hooks.allreduce_hook)
