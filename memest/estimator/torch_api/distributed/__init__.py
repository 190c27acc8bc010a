"""One rank of a process group: nothing is sent.

- `process_group` makes groups of torch's `fake` backend under the name of the requested one.
- `ddp` lets torch's own reducer of `DistributedDataParallel` run on tensors without data.
- `fsdp` records storages that FSDP frees and allocates again, and propagates shapes of DTensors.
"""

from dataclasses import replace
from typing import Any

from torch import distributed

from memest.estimator.gpu.imports import ImportHooks
from memest.estimator.gpu.mode import CudaSimMode
from memest.estimator.gpu.worlds import Rank
from memest.estimator.tensors.patches import Patches
from memest.estimator.torch_api.distributed import ddp, fsdp, process_group

check = process_group.check


def install(patches: Patches, mode: CudaSimMode, hooks: ImportHooks, rank: Rank) -> None:
    """Install the other ranks of the group of `rank`."""
    if not distributed.is_available():
        return
    process_group.install(patches, mode, rank)
    ddp.install(patches, mode)
    hooks.after("torch.distributed.tensor", lambda module: fsdp.install_dtensors(patches, mode))
    hooks.after("torch.distributed.fsdp", lambda module: fsdp.install(patches, mode))
    if rank.world_size > 1:
        planner = "torch.distributed.checkpoint.default_planner"
        hooks.after(planner, lambda module: _accept_plans(patches, module))


def _accept_plans(patches: Patches, planner: Any) -> None:
    """Accept distributed checkpoints in which all simulated ranks have the same shards.

    Rank 0 writes its shards, where `dedup_save_plans` spreads equal ones over the ranks.
    """

    def of_first(plans: list[Any], *args: Any) -> list[Any]:
        return [plans[0], *(replace(plan, items=[]) for plan in plans[1:])]

    accepted = planner._validate_global_plan([], planner.Metadata({}))  # True, or no errors
    patches.set(planner, "_validate_global_plan", lambda plan, metadata: accepted)
    patches.set(planner, "dedup_save_plans", of_first)
