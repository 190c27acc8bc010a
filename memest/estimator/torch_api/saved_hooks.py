"""Host time of checkpointing and of hooks of saved tensors."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from torch.autograd.graph import saved_tensors_hooks

from memest.estimator.hardware.work import CHOICE, HOOK, REGION, WorkLog
from memest.estimator.tensors.patches import Patches


def install(patches: Patches, work: WorkLog) -> None:
    """Record host time of checkpointed regions, selective checkpointing and hooks in `work`."""
    make = saved_tensors_hooks.__init__

    def init(hooks: Any, pack_hook: Any, unpack_hook: Any) -> None:
        # partial functions, since few containers change when Python collects garbage
        make(hooks, partial(_call, work, HOOK, pack_hook), partial(_call, work, HOOK, unpack_hook))

    patches.set(saved_tensors_hooks, "__init__", init)
    checkpoint: Any = import_module("torch.utils.checkpoint")  # torch.utils has a function of it
    get_states = checkpoint.get_device_states  # a region calls it once
    patches.set(checkpoint, "get_device_states", partial(_call, work, REGION, get_states))
    for mode in (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode):
        patches.set(mode, "__torch_dispatch__", _chosen(work, mode.__torch_dispatch__))


def _call(work: WorkLog, kind: str, function: Callable[..., Any], *args: Any) -> Any:
    work.run_python(kind)
    return function(*args)


def _chosen(work: WorkLog, dispatch: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        work.run_python(CHOICE)
        return dispatch(*args, **kwargs)

    return call
