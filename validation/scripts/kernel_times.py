"""Measures the time of all kernels in a step of `field/steady.py`: `kernel_times.py NAME...`.

Prints the seconds by `torch.profiler`, the mean of three steps after six. Needs a GPU.
Cases with Lightning or the Trainer have loops of their own and are left out.
"""

import json
import runpy
import sys
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

STEADY = Path(__file__).with_name("field") / "steady.py"
ANNOTATIONS = ("Optimizer.", "Torch-Compiled", "CompiledFxGraph", "## Call", "ProfilerStep")
NUM_STEPS, NUM_BEFORE = 3, 6


def loop(params, step, opt=None, accum=1, scaler=None, clip=None):
    """Train as `loop` of steady.py does, and profile the last steps."""
    opt = opt or torch.optim.AdamW(params, lr=1e-4)

    def train(count):
        for _ in range(count):
            for _ in range(accum):
                loss = step() / accum
                (scaler.scale(loss) if scaler else loss).backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(params, clip)
            if scaler:
                scaler.step(opt)
                scaler.update()
            else:
                opt.step()
            opt.zero_grad(set_to_none=True)
        torch.cuda.synchronize()

    train(NUM_BEFORE)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        train(NUM_STEPS)
    kernels = [e for e in profiled.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    times = [e.device_time_total for e in kernels if not e.name.startswith(ANNOTATIONS)]
    FOUND[NAME] = round(1e-6 * sum(times) / NUM_STEPS, 6)


FOUND = {}
names, sys.argv = sys.argv[1:], [str(STEADY), "list"]
cases = runpy.run_path(str(STEADY))
for NAME in names:
    cases[NAME].__globals__["loop"] = loop
    cases[NAME]()
print(json.dumps(FOUND))
