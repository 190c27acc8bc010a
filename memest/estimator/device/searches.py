"""Workspaces that a library tries for, and does without where the card has no room."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from memest.estimator.allocator.caching import CachingAllocator
from memest.estimator.device.history import History
from memest.estimator.device.messages import BENCHMARK
from memest.estimator.hardware.gpus import Gpu


class _Recorder(Protocol):
    gpu: Gpu
    allocator: CachingAllocator
    history: History
    num_ooms: int

    def settle(self) -> None:
        """Give back what has died."""

    def note(self, text: str) -> None:
        """Let the report say `text`, once."""


def search(recorder: _Recorder, num_bytes: int, passes: Callable[[int], object]) -> bool:
    """As `generate_and_filter_plans` of Conv_v8.cpp (torch 2.11), and the emptied cache after it.

    Args:
        recorder: of the card.
        num_bytes: of the largest workspace.
        passes: makes one of so many bytes and frees it.

    Returns:
        Whether the card has so much that it does not use. It is halved where a setting allows less.
    """
    recorder.settle()
    recorder.note(BENCHMARK)
    if num_bytes > recorder.gpu.limit_bytes - recorder.allocator.reserved_bytes:
        return False
    num_ooms = recorder.num_ooms
    while num_bytes:
        try:
            passes(num_bytes)
            break
        except torch.OutOfMemoryError:
            num_bytes //= 2
    recorder.num_ooms = num_ooms
    recorder.settle()
    recorder.allocator.empty_cache()
    recorder.history.emptied()
    return True
