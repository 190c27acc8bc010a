"""Memory of NCCL after each of a sequence of collectives and messages, on several GPUs.

    torchrun --nproc-per-node 4 nccl_memory.py all_reduce scatter all_to_all
    torchrun --nproc-per-node 4 nccl_memory.py all_reduce all:all_reduce:64 own:all_reduce

A word is an operation, after `all:`, `half:` or `own:` on a new group of all ranks, of half of them
or of each rank alone, and before `:N` on N MiB (1). Prints for each rank the MiB that the process
holds besides what torch has reserved, at the start and after each operation. Needs nvidia-ml-py.
`estimator/hardware/gpus.py` has its constants from here.
"""

import os
import sys

import pynvml
import torch
from torch import Tensor, distributed

OPERATIONS = (
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "scatter", "gather", "all_to_all",
    "ring",
)  # fmt: skip


def main() -> None:
    """Run the operations of the command line, and print the memory after each."""
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    distributed.init_process_group("nccl")
    rank, size = distributed.get_rank(), distributed.get_world_size()
    pynvml.nvmlInit()
    device = pynvml.nvmlDeviceGetHandleByIndex(local)
    groups = {
        "all": distributed.new_group(),
        "half": _own_of([range(size // 2), range(size // 2, size)], rank),
        "own": _own_of([[other] for other in range(size)], rank),
    }
    torch.ones(8, 8, device="cuda").sum().item()
    rows = [f"start {_used_mib(device)}"]
    for word in sys.argv[1:]:
        *group, name = word.rstrip("0123456789").rstrip(":").split(":")
        if name not in OPERATIONS or not set(group) <= set(groups):
            sys.exit(f"`{word}`: not one of {', '.join(OPERATIONS)}, on {', '.join(groups)}")
        mib = int(word.rpartition(":")[2]) if word[-1].isdigit() else 1
        _run(name, groups[group[0]] if group else None, mib << 18)
        rows.append(f"{word} {_used_mib(device)}")
    print(f"rank {rank} of {size}: {', '.join(rows)}", flush=True)
    distributed.barrier()
    distributed.destroy_process_group()


def _own_of(parts: list, rank: int) -> distributed.ProcessGroup | None:
    """Make a group of each part, as all ranks must; return the one that has `rank`."""
    groups = [distributed.new_group(list(part)) for part in parts]
    return next(group for part, group in zip(parts, groups, strict=True) if rank in part)


def _used_mib(device: object) -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    processes = pynvml.nvmlDeviceGetComputeRunningProcesses(device)
    used = next(each.usedGpuMemory for each in processes if each.pid == os.getpid())
    return (used - torch.cuda.memory_reserved()) >> 20


def _run(name: str, group: distributed.ProcessGroup | None, numel: int) -> None:
    """Run an operation on float32 tensors of `numel` elements per rank."""
    rank, size = distributed.get_rank(group), distributed.get_world_size(group)
    part, whole = _ones(numel), _ones(numel * size)
    parts = list(whole.split(numel)) if rank == 0 else None
    if name == "all_reduce":
        distributed.all_reduce(part, group=group)
    elif name == "all_gather":
        distributed.all_gather_into_tensor(whole, part, group=group)
    elif name == "reduce_scatter":
        distributed.reduce_scatter_tensor(part, whole, group=group)
    elif name == "broadcast":
        distributed.broadcast(part, group_src=0, group=group)
    elif name == "scatter":
        distributed.scatter(part, parts, group_src=0, group=group)
    elif name == "gather":
        distributed.gather(part, parts, group_dst=0, group=group)
    elif name == "all_to_all":
        distributed.all_to_all_single(_ones(numel * size), whole, group=group)
    else:
        to, source = (rank + 1) % size, (rank - 1) % size
        messages = [
            distributed.P2POp(distributed.isend, part, group=group, group_peer=to),
            distributed.P2POp(distributed.irecv, _ones(numel), group=group, group_peer=source),
        ]
        for work in distributed.batch_isend_irecv(messages):
            work.wait()


def _ones(numel: int) -> Tensor:
    return torch.ones(numel, device="cuda")


if __name__ == "__main__":
    main()
