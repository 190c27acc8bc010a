"""Host time of checkpointing and of hooks of saved tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

from torch.autograd.graph import saved_tensors_hooks

from memest.estimator.hardware.work import CHOICE, HOOK, REGION, WorkLog
from memest.estimator.tensors.patches import Patches


def install(patches: Patches, work: WorkLog) -> None:
    """Add regions, choices of selective checkpointing and calls of hooks to the log of `work`."""

    def counted(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            work.run_python(kind)
            return function(*args, **kwargs)

        return call

    make = saved_tensors_hooks.__init__

    def init(hooks: Any, pack_hook: Any, unpack_hook: Any) -> None:
        make(hooks, counted(HOOK, pack_hook), counted(HOOK, unpack_hook))

    patches.set(saved_tensors_hooks, "__init__", init)
    checkpoint: Any = import_module("torch.utils.checkpoint")  # torch.utils has a function of it
    get_states = checkpoint.get_device_states  # a region calls it once
    patches.set(checkpoint, "get_device_states", counted(REGION, get_states))
    for mode in (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode):
        patches.set(mode, "__torch_dispatch__", counted(CHOICE, mode.__torch_dispatch__))
