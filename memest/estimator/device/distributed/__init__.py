"""One rank of a process group, alone in its process: nothing is sent.

- `process_group` lets `init_process_group` make a group of torch's own `fake` backend, which says
  who is who, and calls it what the script asked for.
- `ddp` lets torch's own reducer of `DistributedDataParallel` run on tensors without data.
- `dtensor` lets a DTensor's operators be looked at without FakeTensors.
- `fsdp` tells of the storages that FSDP frees and takes again.
"""

from __future__ import annotations

from torch import distributed

from memest.estimator.device.distributed import ddp, dtensor, fsdp, process_group
from memest.estimator.device.imports import ImportHooks
from memest.estimator.device.mode import CudaSimMode
from memest.estimator.device.patches import Patches
from memest.estimator.device.ranks import Ranks

check = process_group.check


def install(patches: Patches, mode: CudaSimMode, hooks: ImportHooks, ranks: Ranks) -> None:
    """Let the script find the other ranks of `ranks`."""
    if not distributed.is_available():
        return
    process_group.install(patches, mode, ranks)
    ddp.install(patches, mode)
    hooks.after("torch.distributed.tensor", lambda module: dtensor.install(patches))
    hooks.after("torch.distributed.fsdp", lambda module: fsdp.install(patches, mode))
