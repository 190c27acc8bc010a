"""Measures on a GPU the host times of memest/estimator/gpu/timeline.py: `measure_pace.py`.

- `LOAD_US`: by how much the first step of AdamW takes longer than the second, by its operators;
- `SEGMENT_US`: the host's time for a `cudaMalloc`, by its size;
- `LAUNCH_QUEUE`: after how many launches that the GPU has not run the host waits.
"""

from __future__ import annotations

import statistics
import time

import torch

from memest.validate.pace import Observer

SEGMENTS_MIB = (2, 32, 64, 256, 512, 1024, 4096, 8192)
NUM_SEGMENTS = 11
SLEEP_CYCLES = 400_000_000
"""A fifth of a second."""


def main() -> None:
    """Print all of it."""
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    loads()
    segments()
    queue()


def loads() -> None:
    """The host's time for the first launch of an operator; nothing else has run before."""
    parameter = torch.nn.Parameter(torch.zeros(1 << 20, device="cuda"))
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.zeros_like(parameter)
    torch.cuda.synchronize()
    taken = []
    for _ in range(2):
        started = time.perf_counter()
        optimizer.step()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - started)
    with Observer() as observer:
        optimizer.step()
    num = len(observer.found)
    more_us = 1e6 * (taken[0] - taken[1])
    print(f"the first step of AdamW takes {1e-3 * more_us:.1f} ms longer than the second,")
    print(f"  {more_us / num:.0f} us for each of its {num} calls")


def segments() -> None:
    """The host's time for a segment."""
    for mib in SEGMENTS_MIB:
        taken = []
        for _ in range(NUM_SEGMENTS):
            torch.cuda.synchronize()
            started = time.perf_counter()
            address = torch.cuda.caching_allocator_alloc(mib << 20)
            taken.append(1e6 * (time.perf_counter() - started))
            torch.cuda.caching_allocator_delete(address)
            torch.cuda.empty_cache()
        median = statistics.median(taken)
        print(f"a segment of {mib} MiB: {min(taken):.0f} us (median {median:.0f})")


def queue() -> None:
    """How many launches the host is ahead of a GPU that sleeps."""
    value = torch.zeros(1, device="cuda")
    value.add_(1)
    for num_streams in (1, 2):
        streams = [torch.cuda.Stream() for _ in range(num_streams)]
        torch.cuda.synchronize()
        for stream in streams:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(SLEEP_CYCLES)
        count, took = 0, 0.0
        while took < 5e-3 and count < 100_000:
            with torch.cuda.stream(streams[count % num_streams]):
                started = time.perf_counter()
                value.add_(1)
                took = time.perf_counter() - started
            count += 1
        print(f"{num_streams} streams: launch {count} waited {1e3 * took:.1f} ms")
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
