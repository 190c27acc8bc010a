"""Measures `LAUNCH_US` of memest/estimator/hardware/speed.py on a GPU: host time of an operator.

    python scripts/measure_launch.py

Trains GPT-2 on so few tokens that the GPU waits for the host, and divides the time of a step by
the operators that it dispatches, views left out.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel

NUM_STEPS = 20
NUM_TOKENS = 32


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that launch something."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_ops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.num_ops += not func.is_view
        return func(*args, **(kwargs or {}))


def main() -> None:
    """Print the figure."""
    device = torch.device("cuda")
    model = GPT2LMHeadModel(GPT2Config()).to(device, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, 1000, (1, NUM_TOKENS), device=device)

    def step() -> None:
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    for _ in range(3):
        step()
    with Counter() as counter:
        step()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(NUM_STEPS):
        step()
    host_s = time.perf_counter() - started
    torch.cuda.synchronize()
    whole_s = time.perf_counter() - started
    per_op = 1e6 * host_s / NUM_STEPS / counter.num_ops
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{counter.num_ops} operators a step, {1e3 * host_s / NUM_STEPS:.2f} ms of the host")
    print(f"{per_op:.1f} us an operator; the GPU ends {1e3 * (whole_s - host_s):.1f} ms later")


if __name__ == "__main__":
    main()
