"""Where the memory of a process besides torch's allocator grows: context, NCCL, loaded kernels.

    torchrun --nproc-per-node 4 memory_growth.py OUT SCRIPT ARGS...
    torchrun --nproc-per-node 4 memory_growth.py OUT -m MODULE ARGS...

A thread compares what the driver reports of the GPU with what torch has reserved. OUT.RANK.json has
a row for each change of more than 15 MiB: the second, MiB in all, MiB more, and the last calls of
the script. No other process may use the GPU.
"""

import json
import os
import runpy
import sys
import threading
import time
import traceback

import torch

LEAST_MIB = 15
PERIOD_S = 0.004
NUM_CALLS = 14


def main() -> None:
    """Run the script while a thread watches; write the rows even if the script fails."""
    out, *command = sys.argv[1:]
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    torch.cuda.set_device(rank)
    rows: list = []
    watch = threading.Thread(target=_watch, args=(rank, threading.get_ident(), rows), daemon=True)
    watch.start()
    try:
        if command[0] == "-m":
            sys.argv = command[1:]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = command
            runpy.run_path(command[0], run_name="__main__")
    finally:
        with open(f"{out}.{rank}.json", "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=0)


def _watch(rank: int, script: int, rows: list) -> None:
    torch.cuda.set_device(rank)
    last = 0.0
    while True:
        free, total = torch.cuda.mem_get_info(rank)
        now = (total - free - torch.cuda.memory_reserved(rank)) / 2**20
        if abs(now - last) > LEAST_MIB:
            calls = traceback.extract_stack(sys._current_frames()[script])[-NUM_CALLS:]
            lines = [f"{os.path.basename(c.filename)}:{c.lineno} {c.name}" for c in calls]
            rows.append([round(time.time(), 2), round(now), round(now - last), lines])
            last = now
        time.sleep(PERIOD_S)


if __name__ == "__main__":
    main()
