"""Measures on a GPU what memest/estimator/hardware/speed.py takes time to be.

    python scripts/measure_pace.py [--steps-only]

- `LAUNCH_US`: the host's time for an operator, of GPT-2 on so few tokens that the GPU waits for it;
- `LOAD_US`: by how much the first step of AdamW takes longer than the second, by its operators;
- `SEGMENT_US`: the host's time for a `cudaMalloc`, by its size;
- `LAUNCH_QUEUE`: after how many launches that the GPU has not run the host waits;
- how many times as long as at the peak rates training steps and optimizers take (`SLOWEST` and
  `BEST_SHARE` of memest/estimator/gpu/), of models whose kernels the GPU is never without.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from memest.estimator.hardware.gpus import match_device
from memest.estimator.hardware.speed import kernel_us, speed_of

NUM_STEPS = 10
SEGMENTS_MIB = (2, 32, 64, 256, 512, 1024, 4096, 8192)
NUM_SEGMENTS = 11
SLEEP_CYCLES = 400_000_000
"""A fifth of a second."""


class Peak(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators that launch something, and their time at the peak rates."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        found = match_device(torch.cuda.get_device_name(), torch.cuda.mem_get_info()[1])
        if found is None:
            sys.exit("this GPU is not in the catalogue: its peak rates are not known")
        self.gpu = found
        self.num_ops, self.us = 0, 0.0
        self.operators: set[Any] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.num_ops += not func.is_view
        self.operators |= set() if func.is_view else {func}
        speed = speed_of(self.gpu)
        self.us += kernel_us(self.gpu, speed, func, args, kwargs or {}, out)
        return out


def main() -> None:
    """Print all of it."""
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    if "--steps-only" not in sys.argv:
        loads()
        launches()
        segments()
        queue()
    steps()


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
    with Peak() as peak:
        optimizer.step()
    more_us = 1e6 * (taken[0] - taken[1])
    print(f"the first step of AdamW takes {1e-3 * more_us:.1f} ms longer than the second,")
    print(f"  {more_us / len(peak.operators):.0f} us for each of {len(peak.operators)} operators")


def launches() -> None:
    """The host's time for an operator."""
    step, _ = training(GPT2LMHeadModel(GPT2Config()), torch.bfloat16, 1, 32)
    with Peak() as peak:
        step()
    host_s, whole_s = timed(step)
    print(f"{peak.num_ops} operators a step, {1e3 * host_s:.2f} ms of the host")
    print(f"{1e6 * host_s / peak.num_ops:.1f} us an operator; a step takes {1e3 * whole_s:.2f} ms")


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


def steps() -> None:
    """Of training steps, how many times as long as at the peak rates."""
    small = LlamaConfig(hidden_size=1024, intermediate_size=2816, num_hidden_layers=8,
                        num_attention_heads=16, vocab_size=32000)  # fmt: skip
    large = LlamaConfig(hidden_size=2048, intermediate_size=5632, num_hidden_layers=12,
                        num_attention_heads=16, vocab_size=32000)  # fmt: skip
    for name, make, dtype, batch, tokens in (
        ("gpt2, 8 x 512, 32 bits", lambda: GPT2LMHeadModel(GPT2Config()), torch.float32, 8, 512),
        ("gpt2, 16 x 1024, bf16", lambda: GPT2LMHeadModel(GPT2Config()), torch.bfloat16, 16, 1024),
        ("llama 160M, 8 x 512, bf16", lambda: LlamaForCausalLM(small), torch.bfloat16, 8, 512),
        ("llama 740M, 2 x 512, 32 bits", lambda: LlamaForCausalLM(large), torch.float32, 2, 512),
        ("llama 740M, 8 x 512, bf16", lambda: LlamaForCausalLM(large), torch.bfloat16, 8, 512),
    ):
        backward, update = training(make(), dtype, batch, tokens)
        for what, action in (("step", backward), ("optimizer", update)):
            with Peak() as peak:
                action()
            host_s, whole_s = timed(action)
            behind = "" if whole_s > 1.05 * host_s else ", but the GPU waits for the host"
            print(
                f"{name}, {what}: {1e3 * whole_s:.2f} ms, {1e6 * whole_s / peak.us:.2f} times as"
                f" long as at the peak rates; {1e3 * host_s:.2f} ms of the host for {peak.num_ops}"
                f" operators{behind}"
            )


def training(
    model: torch.nn.Module, dtype: torch.dtype, batch: int, tokens: int
) -> tuple[Callable[[], None], Callable[[], None]]:
    """A whole training step, and the optimizer's part of it."""
    model = model.to("cuda", dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, 1000, (batch, tokens), device="cuda")

    def step() -> None:
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    for _ in range(3):
        step()
    return step, lambda: optimizer.step() and None


def timed(action: Callable[[], None]) -> tuple[float, float]:
    """Seconds of the host, and until the GPU has done it too, each of one time."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(NUM_STEPS):
        action()
    host_s = time.perf_counter() - started
    torch.cuda.synchronize()
    return host_s / NUM_STEPS, (time.perf_counter() - started) / NUM_STEPS


if __name__ == "__main__":
    main()
