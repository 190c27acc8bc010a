"""Measures what changes the speed of the host: `host_speed.py`. Needs a GPU.

Prints microseconds of a fixed loop of Python and of a launch, for each core and round, and then
milliseconds of the forward of a model: with small and large inputs, and with a busy GPU.
"""

import gc
import os
import statistics
import time

import torch
import transformers

NUM_ROUNDS = 3
NUM_LAUNCHES = 400


class Pair:
    """An object with two attributes, which the loop reads."""

    def __init__(self):
        self.a, self.b = 1, {"x": 2}


PAIRS = [Pair() for _ in range(200)]


def python_us():
    """Return microseconds of a fixed loop of Python."""
    started, total = time.perf_counter(), 0
    for _ in range(10):
        for pair in PAIRS:
            total += pair.a + pair.b["x"]
    return 1e6 * (time.perf_counter() - started)


def launch_us(x):
    """Return microseconds of one of `NUM_LAUNCHES` launches, which the queue holds."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(NUM_LAUNCHES):
        x.add_(1)
    us = 1e6 * (time.perf_counter() - started) / NUM_LAUNCHES
    torch.cuda.synchronize()
    return us


def by_core():
    """Print the loop and a launch on each core."""
    x, cores = torch.ones(64, 64, device="cuda"), os.sched_getaffinity(0)
    for _ in range(NUM_ROUNDS):
        for core in sorted(cores):
            os.sched_setaffinity(0, {core})
            loop = statistics.median(python_us() for _ in range(5))
            print(f"core {core:3}  loop {loop:6.1f} us  launch {launch_us(x):6.2f} us")
    os.sched_setaffinity(0, cores)


def forward_ms(model, ids, before):
    """Return the host's median milliseconds for a forward, and the loop's microseconds."""
    taken, loops = [], []
    for _ in range(12):
        torch.cuda.synchronize()
        loops.append(python_us())
        before()
        started = time.perf_counter()
        loss = model(ids).last_hidden_state.float().mean()
        taken.append(1e3 * (time.perf_counter() - started))
        loss.backward()
        model.zero_grad()
    return statistics.median(taken), statistics.median(loops)


def by_load():
    """Print the forward of BERT: small, large, with a busy GPU, without collections of garbage."""
    model = transformers.BertModel(transformers.BertConfig()).cuda().train()
    small, large = (torch.randint(1, 1000, (b, t), device="cuda") for b, t in ((1, 16), (16, 128)))
    side = torch.cuda.Stream()

    def busy():
        with torch.cuda.stream(side):
            torch.cuda._sleep(300_000_000)

    cases = {
        "small": (small, lambda: None),
        "large": (large, lambda: None),
        "small, busy GPU": (small, busy),
        "large, no garbage": (large, gc.disable),
    }
    for _ in range(NUM_ROUNDS):
        for name, (ids, before) in cases.items():
            ms, loop = forward_ms(model, ids, before)
            gc.enable()
            print(f"{name:20} forward {ms:6.2f} ms  loop {loop:6.1f} us")


by_core()
by_load()
