"""Other processes of the script, such as the workers of a DataLoader: they do not simulate.

A forked worker runs on real tensors and, where the data set holds one, on tensors without data,
which cross between processes as stand-ins (`checkpoints`).
"""

from __future__ import annotations

from collections import deque
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor

from memest.estimator.device.patches import Patches
from memest.estimator.device.tensors import is_meta

IN_CHILD = (
    "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must "
    "use the 'spawn' start method"
)
"""As `torch.cuda._lazy_init` words it."""


def install(patches: Patches) -> None:
    """Let tensors without data go to other processes and come from them."""
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
    """A forked process has no GPU.

    Raises:
        RuntimeError: it asks for one, as torch words it.
    """
    device = kwargs.get("device")
    if device is not None and device.type == "cuda":
        raise RuntimeError(IN_CHILD)


_sent: deque[Any] = deque(maxlen=256)
"""The stand-ins sent last: one must live until the process that it is for has started."""


def _between_processes(reduce: Any) -> Any:
    def reduced(tensor: Any) -> Any:
        if not is_meta(tensor):
            return reduce(tensor)
        made = tensor.detach().__reduce_ex__(2)
        _sent.append(made)
        return made

    return reduced
