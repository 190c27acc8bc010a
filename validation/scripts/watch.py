"""Runs a training script and writes what torch.cuda says of it: on a GPU, or on a virtual one.

watch.py [--out FILE] [--limit GIB] SCRIPT ARGS...
watch.py [--out FILE] [--limit GIB] -m MODULE ARGS...

The file holds, in bytes, the peaks, what was allocated at the end, and after each of the first
twelve optimizer steps `[allocated, peak allocated, reserved]`. `step_seconds` has the time from one
of these steps to the next, to the end of its kernels. Where torchrun starts it, each rank
writes its own, with its number before the suffix: `figures.1.json`.
"""

import argparse
import json
import os
import runpy
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

NUM_STEPS_KEPT = 12


def main():
    """Run what is asked for; exit with 1 where it failed by anything but lack of memory."""
    options = _options()
    if options.limit:
        total_bytes = torch.cuda.get_device_properties().total_memory
        torch.cuda.set_per_process_memory_fraction(options.limit * 2**30 / total_bytes)
    steps, ends = [], []
    register_optimizer_step_post_hook(lambda *_: _note(steps, ends))
    started = time.perf_counter()
    status, error = _run(options)
    figures = {
        "status": status,
        "error": error,
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "end_allocated_bytes": torch.cuda.memory_allocated(),
        "steps": steps,
        "step_seconds": _seconds_between(ends),
        "sm_clock_mhz": _clock(),
        "seconds": round(time.perf_counter() - started, 1),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    if options.out:
        _place(options.out).write_text(json.dumps(figures), encoding="utf-8")
    print(json.dumps({key: value for key, value in figures.items() if key != "steps"}))
    if status == "failed":
        sys.exit(1)


def _options():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", help="where the figures go")
    parser.add_argument("--limit", type=float, help="GiB that the allocator may reserve")
    parser.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is a module")
    parser.add_argument("script")
    parser.add_argument("args", nargs=argparse.REMAINDER)
    return parser.parse_args()


def _place(out):
    rank = os.environ.get("RANK")
    path = Path(out)
    return path if rank is None else path.with_suffix(f".{rank}{path.suffix}")


def _note(steps, ends):
    if len(steps) < NUM_STEPS_KEPT:
        cuda = torch.cuda
        steps.append([cuda.memory_allocated(), cuda.max_memory_allocated(), cuda.memory_reserved()])
        end = cuda.Event(enable_timing=True)
        end.record()
        ends.append(end)


def _seconds_between(ends):
    torch.cuda.synchronize()
    return [round(a.elapsed_time(b) / 1e3, 5) for a, b in pairwise(ends)]


def _clock():
    """Clock of the multiprocessors at the end, MHz; None without nvidia-ml-py."""
    try:
        return torch.cuda.clock_rate()
    except (ModuleNotFoundError, RuntimeError):
        return None


def _run(options):
    """`fits`, `oom` or `failed`, and why; nothing of the script is alive afterwards."""
    sys.argv = [options.script, *options.args]
    try:
        if options.is_module:
            runpy.run_module(options.script, run_name="__main__")
        else:
            sys.path.insert(0, str(Path(options.script).resolve().parent))
            runpy.run_path(options.script, run_name="__main__")
    except torch.OutOfMemoryError as error:
        return "oom", str(error)[:200]
    except SystemExit as error:
        if error.code:
            return "failed", f"exit code {error.code}"
    except Exception as error:
        return "failed", f"{type(error).__name__}: {error}"[:400]
    return "fits", ""


if __name__ == "__main__":
    main()
