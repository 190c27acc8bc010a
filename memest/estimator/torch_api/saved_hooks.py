"""Host time of checkpointing, of hooks of saved tensors, and of libraries of parallelism."""

from collections.abc import Callable
from functools import partial, wraps
from importlib import import_module
from typing import Any

from torch.autograd.graph import saved_tensors_hooks

from memest.estimator.gpu.imports import ImportHooks
from memest.estimator.hardware.work import CHOICE, HOOK, LIBRARIES, REGION, WorkLog
from memest.estimator.tensors.patches import Patches


def install(patches: Patches, hooks: ImportHooks, work: WorkLog) -> None:
    """Patch torch so that `work` logs calls of saved-tensor hooks and of checkpointing, which take
    host time. `hooks` do the same to libraries of parallelism when they are imported."""
    make = saved_tensors_hooks.__init__

    def init(hooks: Any, pack_hook: Any, unpack_hook: Any) -> None:
        # partial functions, since few containers change when Python collects garbage
        make(hooks, partial(_call, work, HOOK, pack_hook), partial(_call, work, HOOK, unpack_hook))

    patches.set(saved_tensors_hooks, "__init__", init)
    checkpoint: Any = import_module("torch.utils.checkpoint")  # torch.utils has a function of it
    get_states = checkpoint.get_device_states  # a region calls it once
    patches.set(checkpoint, "get_device_states", partial(_call, work, REGION, get_states))
    for mode in (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode):
        patches.set(mode, "__torch_dispatch__", _counted(work, CHOICE, mode.__torch_dispatch__))
    for library, names in LIBRARIES.items():
        hooks.after(library, partial(_count, patches, work, names))


def _call(work: WorkLog, kind: str, function: Callable[..., Any], *args: Any) -> Any:
    work.run_python(kind)
    return function(*args)


def _count(patches: Patches, work: WorkLog, names: dict[str, str], module: Any) -> None:
    """Make `work` log each call of the functions in `names`, which take host time. `names` is
    {function in `module`: kind}. A function is written as `clip_grad_norm_`, or as
    `Redistribute.forward` in a class. The kind is a key of `IN_LAUNCHES`, such as `clip`."""
    for name, kind in names.items():
        owner, _, attribute = name.rpartition(".")
        parent = getattr(module, owner) if owner else module
        original = vars(parent)[attribute]
        call = _counted(work, kind, getattr(original, "__func__", original))
        wrapper = staticmethod(call) if isinstance(original, staticmethod) else call
        patches.set(parent, attribute, wrapper)


def _counted(work: WorkLog, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        work.run_python(kind)
        return function(*args, **kwargs)

    return call
