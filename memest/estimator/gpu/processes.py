"""Child processes of the script: its ranks, and those that do not simulate, such as workers.

Tensors without data cross between processes as placeholders (`torch_api/files/checkpoints.py`).
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor
from torch import distributed as dist

from memest.errors import UnsupportedError
from memest.estimator.gpu.worlds import Rank
from memest.estimator.tensors.patches import Patches
from memest.estimator.tensors.placement import is_meta

IN_CHILD = (
    "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must "
    "use the 'spawn' start method"
)
"""Message of `torch.cuda._lazy_init`."""


def install(patches: Patches, note: Callable[[str], object], rank: Rank) -> None:
    """Patch `multiprocessing`: the child process of the simulated `rank` runs in this process.

    Processes of other ranks do not run. A child process that is not a rank is started, without a
    GPU. Such a process can get tensors without data. When it starts, `note(text)` is called to
    report the process. Processes that torch or `multiprocessing` starts for itself, such as the
    workers of a data loader, are not reported.
    """
    ranks: list[Any] = []  # processes of the script that are ranks, in the order of their start

    @patches.wrap(BaseProcess, "start")
    def noted_start(start: Any, self: Any) -> None:
        """Run the simulated rank in this process; skip other ranks; start all other processes."""
        target = getattr(self, "_target", None) or type(self).run
        package = str(getattr(target, "__module__", "")).partition(".")[0]
        if package in ("torch", "multiprocessing", "concurrent"):  # workers, servers and pools
            start(self)
        elif rank.num_local == 1 or self.daemon or (dist.is_initialized() and not ranks):
            name = getattr(target, "__qualname__", target)
            note(
                f"the script starts processes of its own (`{name}`): they have no GPU here, and"
                " what they would allocate is not in the report; ranks are simulated by"
                " `--nproc-per-node`"
            )
            start(self)
        else:
            ranks.append(self)
            if len(ranks) > rank.num_local:
                raise _other_number(len(ranks), rank)
            if len(ranks) == rank.local_rank + 1:
                self.run()

    def of_process(value: Any, method: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        """Replace `method`, the original `join`, `is_alive`, `close` or `exitcode` of a process. If
        the process `self` is a rank, return `value`. It is the result of `method` after the end of
        a process, such as 0 for `exitcode`. For any other process, call `method`."""
        return value if self in ranks else method(self, *args, **kwargs)

    for name, value in (("join", None), ("is_alive", False), ("close", None)):
        patches.wrap(BaseProcess, name)(partial(of_process, value))
    exitcode: Any = BaseProcess.exitcode
    patches.set(BaseProcess, "exitcode", property(partial(of_process, 0, exitcode.fget)))
    for name in ("spawn", "start_processes"):
        patches.set(mp, name, partial(_spawn, rank))
    pickler: Any = ForkingPickler
    reducers = pickler._extra_reducers
    new_reducers = dict(reducers)
    for kind in (Tensor, torch.nn.Parameter):
        new_reducers[kind] = partial(_between_processes, reducers[kind])
    patches.set(pickler, "_extra_reducers", new_reducers)
    from torch.utils.data._utils import collate

    collate_tensors: Any = collate.collate_tensor_fn

    def collate_tensor_fn(batch: Any, *, collate_fn_map: Any = None) -> Any:
        if is_meta(batch[0]):  # a worker would put it into shared memory
            return torch.stack(batch)
        return collate_tensors(batch, collate_fn_map=collate_fn_map)

    collate_map = {**collate.default_collate_fn_map, Tensor: collate_tensor_fn}
    patches.set(collate, "default_collate_fn_map", collate_map)


def _spawn(
    rank: Rank, fn: Any, args: Any = (), nprocs: int = 1, join: bool = True, *_: Any, **__: Any
) -> Any:
    """Call `fn(local_rank, *args)` for the simulated rank alone, not in `nprocs` processes. Return
    None, or without `join` an object whose `join` returns True: the call has ended."""
    if nprocs != rank.num_local:
        raise _other_number(nprocs, rank)
    fn(rank.local_rank, *args)
    return None if join else SimpleNamespace(processes=[], join=lambda *_: True)


def _other_number(number: int, rank: Rank) -> UnsupportedError:
    return UnsupportedError(
        f"`torch.multiprocessing` starts {number} processes, and"
        f" {rank.num_local} {'is' if rank.num_local == 1 else 'are'} simulated",
        hint=f"simulate as many: `memest run --nproc-per-node {number} ...`",
    )


def refuse_in_child(kwargs: dict[str, Any]) -> None:
    """Raise torch's error for CUDA in a forked process if an operator's `kwargs` name a GPU."""
    device = kwargs.get("device")
    if device is not None and device.type == "cuda":
        raise RuntimeError(IN_CHILD)


_sent: deque[Any] = deque(maxlen=256)  # placeholders, kept until the receiver has started


def _between_processes(reduce: Any, tensor: Any) -> Any:
    if not is_meta(tensor):
        return reduce(tensor)
    placeholder = tensor.detach().__reduce_ex__(2)
    _sent.append(placeholder)
    return placeholder
