"""`torch.device(0)`, which a build without an accelerator refuses.

The class is C++'s and can be neither changed nor inherited from; a class that makes its objects,
and is taken for it wherever types are compared, stands in its place.
"""

from __future__ import annotations

from typing import Any

import torch

from memest.estimator.device.patches import Patches

true_class: Any = torch.device


class _LikeTrueClass(type):
    """Of a class whose instances are those of torch's own."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, true_class)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return subclass is cls or issubclass(subclass, true_class)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is true_class

    def __hash__(cls) -> int:
        return hash(true_class)


class device(metaclass=_LikeTrueClass):
    """As `torch.device`; a number alone is that of a CUDA device."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A device of torch's own class."""
        if len(args) == 1 and not kwargs and type(args[0]) is int:
            return true_class("cuda", args[0])
        return true_class(*args, **kwargs)


device.__module__, device.__qualname__ = "torch", "device"


def install(patches: Patches) -> None:
    """Let `torch.device` know of a GPU."""
    patches.set(torch, "device", device)
