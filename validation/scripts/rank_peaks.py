"""Peaks of each rank of a script under `torchrun`, on GPUs or simulated.

    torchrun --nproc-per-node 4 rank_peaks.py FOLDER SCRIPT ARGS...
    memest run --nproc-per-node 4 rank_peaks.py FOLDER SCRIPT ARGS...

FOLDER gets `RANK.json`: the most bytes allocated and reserved, and the most that the driver had
given. The host waits for the GPU after each optimizer step.
"""

import json
import os
import runpy
import sys
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


def main():
    """Run the script with its own arguments."""
    folder, script = Path(sys.argv[1]), sys.argv[2]
    sys.argv = sys.argv[2:]
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    peaks = [0, 0, 0]

    def note(*_):
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        now = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), total - free
        peaks[:] = map(max, peaks, now)  # torchtitan resets those of torch after each step
        (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(peaks), encoding="utf-8")

    register_optimizer_step_post_hook(note)
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
