"""Which tensors go through one kernel for many: torch groups them by the device that C++ sees.

`torch.nn.utils.clip_grad_norm_` and the optimizers choose their code by the device of a group, so
that tensors of the card must not say "meta" here: one norm for each tensor would run where CUDA
runs one kernel for all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memest.estimator.device.mode import CudaSimMode
from memest.estimator.device.patches import Patches
from memest.estimator.device.tensors import CARD, CPU, META, Place

Lists = list[list[Tensor | None]]


def install(patches: Patches, mode: CudaSimMode) -> None:
    """Let `torch._C._group_tensors_by_device_and_dtype` see where tensors lie."""
    group = torch._C._group_tensors_by_device_and_dtype

    def grouped(lists: Lists, with_indices: bool = False) -> dict[Any, tuple[Lists, list[int]]]:
        found: dict[Any, tuple[Lists, list[int]]] = {}
        for (device, dtype), (members, indices) in group(lists, with_indices).items():
            if device.type != "meta":
                _join(found, (device, dtype), members, indices)
                continue
            positions: dict[Any, list[int]] = {}
            for position, tensor in enumerate(members[0]):
                place = Place.META if tensor is None else mode.host.place(tensor)
                positions.setdefault(_device_at(place), []).append(position)
            for where, chosen in positions.items():
                picked = [[one[i] for i in chosen] if one else one for one in members]
                _join(found, (where, dtype), picked, [indices[i] for i in chosen if indices])
        return found

    patches.set(torch._C, "_group_tensors_by_device_and_dtype", grouped)


def _device_at(place: Place) -> torch.device:
    if place is Place.CARD:
        return CARD.device
    return META if place is Place.META else CPU


def _join(found: dict[Any, Any], key: Any, members: Lists, indices: list[int]) -> None:
    """Real tensors of the host and those without data are one group."""
    if key not in found:
        found[key] = members, indices
        return
    for one, more in zip(found[key][0], members, strict=True):
        one.extend(more)
    found[key][1].extend(indices)
