"""Child processes of the script, which do not simulate, such as DataLoader workers.

Tensors without data cross between processes as placeholders (`torch_api/files/checkpoints.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor

from memest.estimator.tensors.patches import Patches
from memest.estimator.tensors.placement import is_meta

IN_CHILD = (
    "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must "
    "use the 'spawn' start method"
)
"""Message of `torch.cuda._lazy_init`."""


OWN_PROCESS = (
    "the script starts processes of its own (`{name}`): they have no GPU here, and what they would"
    " allocate is not in the report"
)


def install(patches: Patches, note: Callable[[str], object]) -> None:
    """Let tensors without data cross between processes; note processes that may use a GPU."""
    start = BaseProcess.start

    def noted_start(self: Any) -> None:
        """Start the process."""
        target = getattr(self, "_target", None) or type(self).run
        home = str(getattr(target, "__module__", "")).partition(".")[0]
        if home not in ("torch", "multiprocessing", "concurrent"):  # workers, servers and pools
            note(OWN_PROCESS.format(name=getattr(target, "__qualname__", target)))
        start(self)

    patches.set(BaseProcess, "start", noted_start)
    pickler: Any = ForkingPickler
    reducers = pickler._extra_reducers
    changed = dict(reducers)
    for kind in (Tensor, torch.nn.Parameter):
        changed[kind] = _between_processes(reducers[kind])
    patches.set(pickler, "_extra_reducers", changed)
    from torch.utils.data._utils import collate

    collate_tensors: Any = collate.collate_tensor_fn

    def collate_tensor_fn(batch: Any, *, collate_fn_map: Any = None) -> Any:
        if is_meta(batch[0]):  # a worker would put it into shared memory
            return torch.stack(batch)
        return collate_tensors(batch, collate_fn_map=collate_fn_map)

    changed_map = {**collate.default_collate_fn_map, Tensor: collate_tensor_fn}
    patches.set(collate, "default_collate_fn_map", changed_map)


def refuse_in_child(kwargs: dict[str, Any]) -> None:
    """Raise torch's `RuntimeError` in a forked process, which has no GPU."""
    device = kwargs.get("device")
    if device is not None and device.type == "cuda":
        raise RuntimeError(IN_CHILD)


_sent: deque[Any] = deque(maxlen=256)  # placeholders, kept until the receiver has started


def _between_processes(reduce: Any) -> Any:
    def reduced(tensor: Any) -> Any:
        if not is_meta(tensor):
            return reduce(tensor)
        made = tensor.detach().__reduce_ex__(2)
        _sent.append(made)
        return made

    return reduced
