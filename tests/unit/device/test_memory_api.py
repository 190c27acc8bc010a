"""What scripts ask `torch.cuda` and `torch.accelerator` of memory."""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Iterator

import pytest
import torch

from memest.errors import PlanError, UnsupportedError
from memest.estimator.allocator.blocks import Block
from memest.estimator.allocator.caching import OutOfMemory
from memest.estimator.allocator.statistics import CountingAllocator, Stat
from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.virtual_gpu import VirtualGpu

MIB = 1 << 20


@pytest.fixture
def gpu() -> Iterator[VirtualGpu]:
    with VirtualGpu(find_gpu("h100-80gb")) as virtual:
        yield virtual


class Reference:
    """Counts by looking at every block after every event."""

    def __init__(self, allocator: CountingAllocator) -> None:
        self.allocator = allocator
        self.live: list[Block] = []
        self.pending: list[Block] = []
        self.before: dict[tuple[str, str], int] = {}
        self.stats: dict[tuple[str, str], Stat] = {}

    def look(self) -> None:
        now: dict[tuple[str, str], int] = dict.fromkeys(self.before, 0)

        def add(name: str, block: Block, amount: int) -> None:
            for pool in ("all", "small_pool" if block.is_small else "large_pool"):
                now[name, pool] = now.get((name, pool), 0) + amount

        for first in self.allocator.segments(self.live):
            block: Block | None = first
            add("segment", first, 1)
            while block is not None:
                add("reserved_bytes", block, block.num_bytes)
                if not block.is_free:
                    add("active", block, 1)
                    add("active_bytes", block, block.num_bytes)
                    add("requested_bytes", block, block.requested_bytes)
                    if block not in self.pending:
                        add("allocation", block, 1)
                        add("allocated_bytes", block, block.num_bytes)
                elif block.previous is not None or block.next is not None:
                    add("inactive_split", block, 1)
                    add("inactive_split_bytes", block, block.num_bytes)
                block = block.next
        for key, value in now.items():
            self.stats.setdefault(key, Stat()).change(value - self.before.get(key, 0))
        self.before = now


@pytest.mark.parametrize("limit_bytes", [None, 300 * MIB])
@pytest.mark.parametrize("seed", range(2))
def test_every_figure_is_what_looking_at_all_blocks_gives(
    seed: int, limit_bytes: int | None
) -> None:
    """Frees wait for other streams where there is no limit, and requests fail where there is."""
    draw = random.Random(seed)
    allocator = CountingAllocator(limit_bytes)
    reference = Reference(allocator)
    live, pending = reference.live, reference.pending
    sizes = (1, 700, 40_000, MIB, MIB + 1, 3 * MIB, 11 * MIB, 30 * MIB)
    for _ in range(1500):
        what = draw.random()
        if what < 0.5:
            with contextlib.suppress(OutOfMemory):
                live.append(allocator.malloc(draw.choice(sizes), draw.choice((0, 0, 0, 3))))
        elif what < 0.9 and live:
            block = live.pop(draw.randrange(len(live)))
            if block in pending:
                pending.remove(block)
                allocator.complete(block)
            else:
                allocator.free(block)
        elif what < 0.99 and live and limit_bytes is None:
            block = draw.choice(live)
            if block not in pending:
                pending.append(block)
                allocator.defer(block)
        elif what > 0.99 and not pending:
            allocator.empty_cache()
        reference.look()

    stats = allocator.memory_stats()

    for (name, pool), stat in reference.stats.items():
        found = stats[name][pool]
        assert (found["current"], found["peak"]) == (stat.current, stat.peak), (name, pool)
        assert found["allocated"] - found["freed"] == found["current"]
    assert allocator.allocated_bytes == stats["allocated_bytes"]["all"]["current"]
    assert allocator.peak_reserved_bytes == stats["reserved_bytes"]["all"]["peak"]
    assert (stats["num_ooms"] > 0) == (stats["num_alloc_retries"] > 0) == (limit_bytes is not None)


def test_a_split_counts_as_inactive_until_its_segment_is_whole_again() -> None:
    allocator = CountingAllocator()
    first = allocator.malloc(3 * MIB)
    second = allocator.malloc(4 * MIB)
    split = allocator.memory_stats()
    allocator.free(first)
    two = allocator.memory_stats()
    allocator.free(second)
    whole = allocator.memory_stats()

    assert split["inactive_split_bytes"]["large_pool"]["current"] == 13 * MIB
    assert two["inactive_split"]["all"]["current"] == 2
    assert whole["inactive_split_bytes"]["all"] == {
        "current": 0, "peak": 17 * MIB, "allocated": 20 * MIB, "freed": 20 * MIB,
    }  # fmt: skip


def test_a_block_that_another_stream_uses_is_active_and_not_allocated() -> None:
    allocator = CountingAllocator()
    block = allocator.malloc(5 * MIB)
    allocator.defer(block)
    stats = allocator.memory_stats()

    assert stats["allocated_bytes"]["all"]["current"] == 0
    assert stats["active_bytes"]["all"]["current"] == 5 * MIB
    assert stats["requested_bytes"]["all"]["current"] == 5 * MIB


def test_memory_stats_has_the_keys_of_torch(gpu: VirtualGpu) -> None:
    stats = torch.cuda.memory_stats()
    arrays = (
        "allocation", "segment", "active", "inactive_split", "allocated_bytes", "reserved_bytes",
        "active_bytes", "inactive_split_bytes", "requested_bytes",
    )  # fmt: skip
    metrics = ("current", "peak", "allocated", "freed")
    expected = {
        f"{a}.{p}.{m}" for a in arrays for p in ("all", "small_pool", "large_pool") for m in metrics
    }
    expected |= {f"oversize_{a}.{m}" for a in ("allocations", "segments") for m in metrics}
    expected |= {
        "num_alloc_retries", "num_ooms", "num_oom_rejections", "num_sync_all_streams",
        "num_device_alloc", "num_device_free", "max_split_size",
    }  # fmt: skip

    assert set(stats) == expected
    assert stats["max_split_size"] == -1


def test_requested_bytes_are_what_tensors_ask_for(gpu: VirtualGpu) -> None:
    held = torch.empty(1001, dtype=torch.uint8, device="cuda")
    stats = torch.cuda.memory_stats()

    assert stats["requested_bytes.all.current"] == held.numel()
    assert stats["allocated_bytes.small_pool.current"] == 1024
    assert stats["reserved_bytes.small_pool.current"] == 2 * MIB
    assert "1024 B" in torch.cuda.memory_summary(abbreviated=True)


def test_peaks_begin_anew_for_the_script_and_not_for_the_report(gpu: VirtualGpu) -> None:
    del_me = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    del del_me
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_accumulated_memory_stats()

    assert torch.cuda.max_memory_allocated() == 0
    assert torch.cuda.max_memory_reserved() == torch.cuda.memory_reserved() == 30 * MIB
    assert torch.cuda.memory_stats()["allocated_bytes.all.allocated"] == 0
    assert gpu.peak_allocated_bytes == 30 * MIB
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0
    assert torch.cuda.memory_stats()["num_device_free"] == 1


def test_accelerator_says_the_same(gpu: VirtualGpu) -> None:
    held = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    accelerator = torch.accelerator

    assert accelerator.memory_stats() == torch.cuda.memory_stats()
    assert accelerator.memory_allocated() == held.numel() == torch.cuda.memory_allocated("cuda")
    assert accelerator.max_memory_reserved() == torch.cuda.max_memory_reserved(0)
    accelerator.reset_peak_memory_stats()
    del held
    accelerator.empty_cache()
    assert accelerator.memory_reserved() == 0


def test_the_fraction_is_of_all_memory_and_never_above_what_the_gpu_leaves(
    gpu: VirtualGpu,
) -> None:
    total = gpu.gpu.memory_bytes
    assert torch.cuda.get_per_process_memory_fraction() == 1.0
    torch.cuda.set_per_process_memory_fraction(0.25)
    quarter = gpu.allocator.limit_bytes
    torch.cuda.set_per_process_memory_fraction(1.0)

    assert quarter == int(0.25 * total)
    assert gpu.allocator.limit_bytes == gpu.gpu.limit_bytes
    with pytest.raises(ValueError, match="Allowed range: 0~1"):
        torch.cuda.set_per_process_memory_fraction(1.5)


def test_a_cap_stops_what_is_reserved_and_the_observer_hears_of_it(gpu: VirtualGpu) -> None:
    heard: list[tuple[int, ...]] = []
    torch._C._cuda_attach_out_of_memory_observer(lambda *what: heard.append(what))
    torch.cuda.set_per_process_memory_fraction(100 * MIB / gpu.gpu.memory_bytes)
    held = torch.empty(90 * MIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.cuda.OutOfMemoryError, match=re.escape("Tried to allocate 11.00 MiB")):
        torch.empty(11 * MIB, dtype=torch.uint8, device="cuda")

    stats = torch.cuda.memory_stats()
    assert (stats["num_ooms"], stats["num_alloc_retries"]) == (1, 1)
    assert heard[0][:2] == (0, 11 * MIB)
    assert heard[0][2] == pytest.approx(100 * MIB, abs=1)
    assert torch.cuda.memory_allocated() == held.numel()


def test_what_is_free_is_less_by_the_context_and_by_what_is_reserved(gpu: VirtualGpu) -> None:
    held = torch.empty(1, device="cuda")
    free, total = torch.cuda.mem_get_info()

    assert total == gpu.gpu.memory_bytes == torch.cuda.get_device_properties(0).total_memory
    assert free == gpu.gpu.limit_bytes - 2 * MIB
    assert torch.accelerator.get_memory_info() == (free, total)
    assert torch.cuda.cudart().cudaMemGetInfo(held.device) == (free, total)


def test_blocks_without_tensors_count(gpu: VirtualGpu) -> None:
    address = torch.cuda.caching_allocator_alloc(5 * MIB)
    taken = torch.cuda.memory_allocated()
    torch.cuda.caching_allocator_delete(address)

    assert taken == 5 * MIB
    assert torch.cuda.memory_allocated() == 0
    with pytest.raises(RuntimeError, match="invalid device pointer"):
        torch.cuda.caching_allocator_delete(address)


def test_pinned_memory_is_never_in_use(gpu: VirtualGpu) -> None:
    assert set(torch.cuda.host_memory_stats().values()) == {0}


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_deprecated_names_still_answer(gpu: VirtualGpu) -> None:
    held = torch.empty(1, device="cuda")

    assert torch.cuda.memory_cached() == torch.cuda.max_memory_cached() == 2 * MIB
    torch.cuda.reset_max_memory_allocated()
    assert torch.cuda.max_memory_allocated() == 512 * held.numel()


@pytest.mark.parametrize(
    "name",
    ["CUDAPluggableAllocator", "change_current_allocator"],
)
def test_other_allocators_are_refused_by_name(gpu: VirtualGpu, name: str) -> None:
    for owner in (torch.cuda, torch.cuda.memory):
        with pytest.raises(UnsupportedError, match=f"torch.cuda.{name} cannot be simulated"):
            getattr(owner, name)()


def test_a_pool_of_the_script_has_segments_of_its_own(gpu: VirtualGpu) -> None:
    def block() -> torch.Tensor:
        return torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")

    pool, weight = torch.cuda.MemPool(), torch.ones(MIB, device="cuda", requires_grad=True)
    assert hasattr(torch.cuda.use_mem_pool, "__wrapped__")  # Dynamo of torch 2.14 reads it
    with torch.cuda.use_mem_pool(pool):
        inside = block()
        (weight * 2).sum().backward()  # its thread does not use the pool
    before = torch.cuda.memory_reserved()
    del inside
    outside = block()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() >= before + outside.nbytes - 24 * MIB
    held = torch.cuda.memory_reserved()
    segments = pool.snapshot()
    assert {segment["segment_pool_id"] for segment in segments} == {pool.id}
    assert outside.nbytes in [segment["total_size"] for segment in segments]
    assert not torch.cuda.MemPool().snapshot()
    assert {s["segment_pool_id"] for s in torch.cuda.memory_snapshot()} == {(0, 0), pool.id}
    with torch.cuda.use_mem_pool(pool):
        again = block()
    assert (torch.cuda.memory_reserved(), pool.use_count()) == (held, 1)
    del again, pool
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= held - 64 * MIB
    for options in ({"allocator": object()}, {"no_split": True}):
        with pytest.raises(UnsupportedError, match=r"torch\.cuda\.MemPool\("):
            torch.cuda.MemPool(**options)


def test_settings_can_change_until_the_first_segment(gpu: VirtualGpu) -> None:
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True,max_split_size_mb:64")
    torch._C._accelerator_setAllocatorSettings("per_process_memory_fraction:0.5")
    held = torch.empty(30 << 20, dtype=torch.uint8, device="cuda")
    with pytest.raises(UnsupportedError, match="allocator's settings after its first segment"):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    torch._C._accelerator_setAllocatorSettings("per_process_memory_fraction:0.5")  # as before
    with pytest.raises(UnsupportedError, match="without a cache"):
        torch.cuda.memory.caching_allocator_enable(False)
    assert torch.cuda.memory_reserved() == 40 << 20
    assert torch.cuda.memory_stats()["max_split_size"] == -1
    assert torch.cuda.get_per_process_memory_fraction() == 0.5
    assert torch.cuda.get_allocator_backend() == "native"
    assert held.numel() == 30 << 20


def test_settings_that_change_nothing_are_taken_at_any_time(gpu: VirtualGpu) -> None:
    held = torch.empty(1, device="cuda")
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    assert torch.cuda.memory_reserved() == 2 * MIB * held.numel()


def test_the_environment_is_read_at_the_first_request(
    gpu: VirtualGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    torch.cuda.memory._record_memory_history()
    held = [torch.empty(30 << 20, dtype=torch.uint8, device="cuda") for _ in range(2)]
    del held[0]
    torch.cuda.empty_cache()
    snapshot = torch.cuda.memory._snapshot()
    actions = [(entry["action"], entry["size"] >> 20) for entry in snapshot["device_traces"][0]]
    assert actions == [
        ("segment_map", 40),
        ("alloc", 30),
        ("segment_map", 20),
        ("alloc", 30),
        ("free_requested", 30),
        ("free_completed", 30),
        ("segment_unmap", 20),
    ]
    (segment,) = snapshot["segments"]
    assert segment["is_expandable"]
    assert [block["size"] >> 20 for block in segment["blocks"]] == [10, 30]
    assert snapshot["allocator_settings"] == {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "expandable_segments": True,
    }


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_settings_that_torch_refuses_are_refused(
    gpu: VirtualGpu, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "expandable_segment:True")
    with pytest.raises(PlanError, match="Unrecognized key 'expandable_segment' in CUDA allocator"):
        torch.empty(1, device="cuda")


def test_a_resized_storage_frees_its_block_after_it_has_another(gpu: VirtualGpu) -> None:
    """memcnn empties the inputs of invertible layers, which the backward computes again."""
    x = torch.empty(1 << 18, device="cuda")
    on_host = torch.zeros(8)

    x.untyped_storage().resize_(0)
    emptied = torch.cuda.memory_allocated(), x.shape, x.device.type
    x.untyped_storage().resize_(MIB)
    x.untyped_storage().resize_(2 * MIB)
    on_host.untyped_storage().resize_(0)

    assert emptied == (0, (1 << 18,), "cuda")
    assert torch.cuda.memory_allocated() == 2 * MIB
    assert torch.cuda.max_memory_allocated() == 3 * MIB
    x.set_(torch.ones(4, device="cuda"))
    assert torch.cuda.memory_allocated() == 512


def test_a_tensor_that_is_enlarged_moves_to_a_larger_block(gpu: VirtualGpu) -> None:
    """cuda/Resize.cpp; measured on an H100: the old block returns after the new one is there."""
    x = torch.rand(1000, 640, device="cuda")
    before = torch.cuda.memory_allocated()
    resized = torch.empty(3, device="cuda").resize_(1000, 640)
    like = torch.empty(0, device="cuda").resize_as_(x)
    written = torch.mul(x, 2, out=torch.empty(0, device="cuda"))
    allocated = torch.cuda.memory_allocated() - before
    counts = torch.arange(3, device="cuda").resize_(4)
    counts[3:] = 7

    assert resized.shape == like.shape == written.shape
    assert allocated == 3 * x.nbytes
    assert counts.tolist() == [0, 1, 2, 7]
