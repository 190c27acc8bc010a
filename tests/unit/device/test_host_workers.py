"""Threads simulate, processes do not."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, random_split

from memest.estimator.gpu.processes import IN_CHILD
from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.virtual_gpu import VirtualGpu


@pytest.fixture
def gpu() -> Iterator[VirtualGpu]:
    with VirtualGpu(find_gpu("h100-80gb")) as virtual:
        yield virtual


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for i in range(8):
            yield torch.full((600, 600), float(i))


class OnGpu(Dataset[Any]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        try:
            return torch.ones(3).cuda()
        except RuntimeError as error:
            return str(error)


def tensors() -> TensorDataset:
    without_data = nn.Linear(400, 64).weight.detach()
    return TensorDataset(torch.randn(64, 3, 8, 8), torch.arange(64), without_data)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_workers_give_real_batches_and_batches_without_data(
    gpu: VirtualGpu, num_workers: int
) -> None:
    loader = DataLoader(
        tensors(),
        batch_size=16,
        num_workers=num_workers,
        pin_memory=True,
        persistent_workers=num_workers > 0,
    )
    for _ in range(2):
        seen = 0
        for images, labels, rows in loader:
            assert images.is_pinned()
            assert images.cuda(non_blocking=True).shape == (16, 3, 8, 8)
            assert rows.cuda().shape == (16, 400)
            seen += int(labels.sum())
        assert seen == sum(range(64))


def test_an_iterable_data_set_keeps_its_values(gpu: VirtualGpu) -> None:
    batches = [int(batch[1, 0, 0]) for batch in DataLoader(Stream(), 4, num_workers=1)]
    assert batches == [1, 5]
    first, second = random_split(range(8), [0.75, 0.25])  # type: ignore[arg-type]
    assert (len(first), len(second)) == (6, 2)


def test_a_forked_worker_has_no_gpu(gpu: VirtualGpu) -> None:
    assert list(DataLoader(OnGpu(), num_workers=1)) == [[IN_CHILD]] * 2
    assert all(batch.is_cuda for batch in DataLoader(OnGpu()))


def test_a_forked_process_computes_as_ever(gpu: VirtualGpu) -> None:
    child = os.fork()
    if child == 0:
        result = 1
        try:
            result = int((torch.ones(10) * 2).sum().item())
        finally:
            os._exit(result)  # whatever happens, pytest runs on in the parent alone
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 20
    assert torch.ones(2, device="cuda").is_cuda


def train(seed: int) -> torch.device:
    model = nn.Linear(100, 100).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(10):
        model(torch.randn(4, 100, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.weight.device


def test_loops_in_threads_leave_nothing_behind(gpu: VirtualGpu) -> None:
    async def together() -> list[torch.device]:
        return await asyncio.gather(*(asyncio.to_thread(train, i) for i in range(3)))

    train(0)
    gc.collect()
    before = torch.cuda.memory_allocated()
    with ThreadPoolExecutor(4) as pool:
        assert all(device.type == "cuda" for device in pool.map(train, range(6)))
    assert len(asyncio.run(together())) == 3
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + 2 * 8_519_680  # a workspace a thread at most
