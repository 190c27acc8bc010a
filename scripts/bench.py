"""How long things take and how much memory they need; prints, asserts nothing.

python scripts/bench.py            # the main command, scripts, the lab's runs, the curve over sizes
python scripts/bench.py --quick    # the main command and the start-up of the rest
python scripts/bench.py --models   # every bundled model at batch 1, the slowest last
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MEMEST = [sys.executable, "-m", "memest"]
MAIN = ["predict", "--model", "blip2-flan-t5-xxl", "--optim", "adam_8bit", "--bs", "2"]
STARTUP = [
    ["--help"],
    ["models"],
    ["gpus"],
    ["predict", "--model", "gpt2", "--bs", "0"],
    ["predict", "--model", "no-such-model"],
    ["predict", "--model", "gpt2", "--optim", "adamv"],
]
SCRIPTS = {
    "memest run: GPT-2, five steps": """
import torch
from transformers import GPT2Config, GPT2LMHeadModel
model = GPT2LMHeadModel(GPT2Config()).to("cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(5):
    ids = torch.randint(0, 50257, (4, 512), device="cuda")
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "memest run: flan-t5-xxl with Lightning, three steps": """
import bitsandbytes, lightning, torch
from transformers import Blip2ForConditionalGeneration

class Lab(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Blip2ForConditionalGeneration.from_pretrained(
            "Salesforce/blip2-flan-t5-xxl", dtype=torch.bfloat16
        )
        self.model.train()

    def training_step(self, ids, index):
        pixels = torch.randn(len(ids), 3, 224, 224, device=self.device, dtype=torch.bfloat16)
        return self.model(pixel_values=pixels, input_ids=ids, labels=ids).loss

    def configure_optimizers(self):
        return bitsandbytes.optim.Adam8bit(self.parameters(), lr=5e-6)

tokens = torch.utils.data.DataLoader(torch.randint(5, 32000, (6, 25)), batch_size=2)
lightning.Trainer(
    accelerator="gpu", devices=1, precision="bf16-true", max_steps=3, logger=False,
    enable_checkpointing=False, enable_progress_bar=False,
).fit(Lab(), tokens)
""",
}
"""What a user would type after `memest run`; neither needs weights."""

CURVE = [
    "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "llama-3.2-1b", "llama-3.1-8b", "llama-2-13b",
    "qwen2.5-32b", "llama-3.1-70b",
]  # fmt: skip
"""From 124 million parameters to 70 billion."""


def main() -> None:
    """Print one line per command: wall seconds (the best of the runs), peak resident memory."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--models", action="store_true")
    args = parser.parse_args()
    print(f"{os.cpu_count()} cores, Python {sys.version.split()[0]}")
    if args.models:
        report_models()
        return
    report("main command", MAIN, runs=3)
    traced = json.loads(run([*MAIN, "--json"])[2])
    print(f"{'  of which the library call':<50} {traced['elapsed_s']:6.2f} s")
    for command in STARTUP:
        report(" ".join(command), command, runs=3)
    if args.quick:
        return
    report_scripts()
    with tempfile.TemporaryDirectory() as folder:
        suite = Path(folder) / "suite.json"
        lines = (
            (ROOT / "validation" / "runs" / "lab-h200.jsonl")
            .read_text(encoding="utf-8")
            .splitlines()
        )
        plans = [{**json.loads(line)["plan"], "name": json.loads(line)["name"]} for line in lines]
        suite.write_text(json.dumps({"experiments": plans}), encoding="utf-8")
        report("26 plans, default GPUs", ["predict", "--suite", str(suite), "--json"], runs=1)
    print("\nbatch 1, each in a process of its own")
    for model in CURVE:
        print(row_of(model)[1], flush=True)


def report_scripts() -> None:
    """The scripts from the shell; an operator's time is that of the run without start-up."""
    with tempfile.TemporaryDirectory() as folder:
        script, out = Path(folder) / "script.py", Path(folder) / "report.json"
        for label, text in SCRIPTS.items():
            script.write_text(text, encoding="utf-8")
            command = ["run", "--gpu", "a100-80gb", "--json", str(out), str(script)]
            report(label, command, runs=1)
            ran = json.loads(out.read_text(encoding="utf-8"))
            num_ops = ran["coverage"]["num_ops"]
            per_op = 1e6 * ran["elapsed_s"] / num_ops
            print(
                f"{'  of which the script itself':<50} {ran['elapsed_s']:6.2f} s"
                f"  {num_ops} operators, {per_op:.0f} us each, imports among it"
            )


def report_models() -> None:
    """Every bundled model from the shell, the slowest last."""
    from memest.models_meta.registry import list_models

    rows = sorted(row_of(entry.name) for entry in list_models())
    print("\n".join(line for _, line in rows))


def row_of(model: str) -> tuple[float, str]:
    """Wall seconds of one prediction, and a line with parameters, operators, seconds, memory."""
    wall, peak_bytes, text = run(["predict", "--model", model, "--gpu", "h200", "--json"])
    report = json.loads(text)
    num_params = report["model"]["num_params"]
    num_ops = report["coverage"]["num_ops"]
    return wall, (
        f"{model:<42} {num_params / 1e9:7.3f}e9 parameters  {num_ops:6} operators"
        f"  {wall:6.2f} s  {peak_bytes / 2**30:5.2f} GiB"
    )


def report(label: str, command: list[str], runs: int) -> None:
    """Run `memest` with `command` and print its figures."""
    found = [run(command) for _ in range(runs)]
    wall, peak_bytes = min(f[0] for f in found), max(f[1] for f in found)
    print(f"{label:<50} {wall:6.2f} s  {peak_bytes / 2**30:5.2f} GiB", flush=True)


def run(command: list[str]) -> tuple[float, int, str]:
    """Wall seconds, the largest resident set of the process itself, and stdout."""
    started = time.perf_counter()
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen([*MEMEST, *command], stdout=out, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        wall = time.perf_counter() - started
        out.seek(0)
        return wall, usage.ru_maxrss * 1024, out.read()


if __name__ == "__main__":
    main()
