"""Compares kernels with their estimates by kind: `kernel_kinds.py SCRIPT NAME`. Needs a GPU.

SCRIPT is `unseen` or `fresh` of `field/`. One step is profiled, in which each operator has a label.
Prints milliseconds of the kernels of each kind, measured and estimated.
"""

import importlib
import sys
from collections import defaultdict
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from memest.estimator.hardware.gpus import match_device
from memest.estimator.hardware.pace import table_of
from memest.estimator.hardware.work import work_of

NUM_BEFORE = 6
LABEL = "work "


class Labels(TorchDispatchMode):
    """Labels each operator with the number of its work."""

    def __init__(self):
        super().__init__()
        self.works = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with record_function(f"{LABEL}{len(self.works)}"):
            out = func(*args, **(kwargs or {}))
        self.works.append(work_of(func, args, kwargs or {}, out))
        return out


def labelled_us(events):
    """Return microseconds of kernels by the number of the label around their launch."""
    found = defaultdict(float)
    for event in events:
        us = sum(k.duration for k in event.kernels if not k.name.startswith((LABEL, "Optimizer.")))
        parent = event
        while parent is not None and not parent.name.startswith(LABEL):
            parent = parent.cpu_parent
        if us and parent not in (None, event):
            found[int(parent.name.removeprefix(LABEL))] += us
    return found


def loop(model, step, opt=None, accum=1, scaler=None, clip=None):
    """Train as `loop` of unseen.py does, without a scaler, and profile the last step."""
    params = [p for p in model.parameters() if p.requires_grad]
    opt = opt or torch.optim.AdamW(params, lr=1e-4)

    def train():
        for _ in range(accum):
            (step() / accum).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(params, clip)
        opt.step()
        opt.zero_grad(set_to_none=True)
        torch.cuda.synchronize()

    for _ in range(NUM_BEFORE):
        train()
    labels = Labels()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled, labels:
        train()
    properties = torch.cuda.get_device_properties(0)
    table = table_of(match_device(properties.name, properties.total_memory))
    rows = defaultdict(lambda: [0.0, 0.0])
    for number, us in labelled_us(profiled.events()).items():
        work = labels.works[number]
        rows[work.kind][0] += 1e-3 * us
        rows[work.kind][1] += 1e3 * table.kernel_s(work) if work.kind else 0.0
    for kind, (real, made) in sorted(rows.items(), key=lambda row: -row[1][0]):
        print(f"{kind:45} {real:8.2f} ms  {made:8.2f} ms")
    print(*(f"{sum(column):.2f} ms" for column in zip(*rows.values(), strict=True)))


sys.path.insert(0, str(Path(__file__).with_name("field")))
script, name = sys.argv[1:]
sys.argv = [script, "list"]
importlib.import_module("unseen").loop = loop
cases = importlib.import_module(script)
cases.loop = loop
cases.CASES[name]()
