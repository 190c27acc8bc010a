"""One rank of any world on one real GPU: torch's `fake` process group sends nothing.

python fake_rank.py --rank 0 --world 64 [--local 8] script.py ...

Prints the peaks of each optimizer step and of the whole run as JSON on the last line. The real
caching allocator runs; memory of NCCL and waiting for other ranks do not exist.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
import traceback


def main() -> None:
    """Run the script as the rank, and print what `torch.cuda` counted."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--local", type=int, default=8)
    parser.add_argument("--history", help="file for a snapshot with the history of events")
    parser.add_argument("script", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    local = min(args.local, args.world)
    os.environ.update(
        RANK=str(args.rank),
        WORLD_SIZE=str(args.world),
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE=str(local),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",
    )

    import torch
    from torch import distributed as dist
    from torch.distributed import distributed_c10d
    from torch.optim.optimizer import register_optimizer_step_post_hook
    from torch.testing._internal.distributed.fake_pg import FakeStore

    join = dist.init_process_group

    def fake(backend=None, **kwargs):
        join(backend="fake", rank=args.rank, world_size=args.world, store=FakeStore())

    dist.init_process_group = distributed_c10d.init_process_group = fake
    steps: list[list[int]] = []

    def note(*_) -> None:
        steps.append([torch.cuda.memory_allocated(), torch.cuda.memory_reserved()])

    register_optimizer_step_post_hook(note)
    if args.history:
        torch.cuda.memory._record_memory_history(stacks="python", context=None)
    error = None
    sys.argv = args.script
    try:
        runpy.run_path(args.script[0], run_name="__main__")
    except Exception as exception:
        traceback.print_exc()
        error = f"{type(exception).__name__}: {exception}"[:300]
    if args.history:
        torch.cuda.memory._dump_snapshot(args.history)
    torch.cuda.synchronize()
    print(
        json.dumps(
            {
                "case": args.script[1:],
                "rank": args.rank,
                "world": args.world,
                "allocated": torch.cuda.max_memory_allocated(),
                "reserved": torch.cuda.max_memory_reserved(),
                "steps": steps,
                "error": error,
            }
        )
    )


if __name__ == "__main__":
    main()
