"""The report of a script as a user sees it. Rewritten by `pytest --update-golden`."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from pathlib import Path

import memest
from memest.report.text import render_text

Golden = Callable[[str, str], None]

SCRIPT = """\
import torch
from torch import nn

model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(6)), nn.Linear(1024, 10)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(4):
    inputs = torch.randn(256, 1024).cuda()
    labels = torch.randint(0, 10, (256,)).cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if loss.item() < 0.1:
        break
model.eval()
with torch.no_grad():
    model(inputs.repeat(8, 1))
"""


def test_text_report_of_a_script(tmp_path: Path, golden: Golden) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    code = compile(SCRIPT, str(script), "exec")
    module = types.FunctionType(code, {"__name__": "__main__", "__builtins__": __builtins__})
    with memest.virtual_gpu("a100-40gb", memory_limit="1GiB") as gpu:
        module()
    of_this_machine = {
        "elapsed_s": 0.0,
        "versions": {},
        "times": {},
    }  # the host's own work is timed
    report = dataclasses.replace(gpu.report(), name="train.py", **of_this_machine)

    golden("run.txt", render_text(report) + "\n")
