"""Copies between GPUs, of which there is one: `nn.DataParallel` on a single device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from memest.errors import UnsupportedError
from memest.estimator.device.patches import Patches
from memest.estimator.device.tensors import CARD


def install(patches: Patches) -> None:
    """Let what `torch.nn.parallel.comm` asks of C++ be there for one device."""

    def scatter(tensor: Tensor, devices: Sequence[int], *options: Any) -> list[Tensor]:
        _only_one(devices)
        return [tensor.to(CARD.device)]

    def broadcast(tensor: Tensor, devices: Sequence[int]) -> list[Tensor]:
        _only_one(devices)
        return [tensor]

    def broadcast_coalesced(
        tensors: Sequence[Tensor], devices: Sequence[int], buffer_size: int
    ) -> list[list[Tensor]]:
        _only_one(devices)
        return [[*tensors]]

    def gather(tensors: Sequence[Tensor], dim: int, destination: int | None = None) -> Tensor:
        return torch.cat([*tensors], dim)

    patches.set(torch._C, "_scatter", scatter)
    patches.set(torch._C, "_gather", gather)
    patches.set(torch._C, "_broadcast", broadcast)
    patches.set(torch._C, "_broadcast_coalesced", broadcast_coalesced)


def _only_one(devices: Sequence[int]) -> None:
    if len(devices) > 1:
        raise UnsupportedError(
            f"`nn.DataParallel` on {len(devices)} GPUs cannot be simulated",
            hint="run the script on one device",
        )
