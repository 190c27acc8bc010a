"""Runs a training script and writes what torch.cuda says of it: on a GPU, or on a virtual one.

watch.py [--out FILE] [--limit GIB] [--max-steps N] SCRIPT ARGS...
watch.py [--out FILE] [--limit GIB] [--max-steps N] -m MODULE ARGS...

The file holds, in bytes, the peaks, what was allocated at the end, and after each of the first
twelve optimizer steps `[allocated, peak allocated, reserved]`. `step_seconds` has the time from one
of these steps to the next, to the end of its kernels. `--history FILE` stores the allocator's
events until the third step, as `[action, bytes, address, stream]`. Where torchrun starts it, each
rank writes its own, with its number before the suffix: `figures.1.json`.
"""

import argparse
import gzip
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
NUM_STEPS_RECORDED = 3


def main():
    """Run what is asked for; exit with 1 where it failed by anything but lack of memory."""
    options = _options()
    if "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if options.limit:
        total_bytes = torch.cuda.get_device_properties().total_memory
        torch.cuda.set_per_process_memory_fraction(options.limit * 2**30 / total_bytes)
    steps, ends, peaks = [], [], []
    register_optimizer_step_post_hook(lambda *_: _note(options, steps, ends, peaks))
    if options.history:
        torch.cuda.memory._record_memory_history(context=None, stacks="python")
    started = time.perf_counter()
    status, error = _run(options)
    figures = {
        "status": status,
        "error": error,
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "end_allocated_bytes": torch.cuda.memory_allocated(),
        "steps": steps,
        "reserved_and_used_bytes": peaks,
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
    parser.add_argument("--max-steps", type=int, help="optimizer steps after which the script ends")
    parser.add_argument("--history", help="where the allocator's events go, gzip")
    parser.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is a module")
    parser.add_argument("script")
    parser.add_argument("args", nargs=argparse.REMAINDER)
    return parser.parse_args()


def _place(out):
    rank = os.environ.get("RANK")
    path = Path(out)
    return path if rank is None else path.with_suffix(f".{rank}{path.suffix}")


def _note(options, steps, ends, peaks):
    """Keep the figures after a step: also the peak that was reserved, and what the GPU holds."""
    if len(steps) < NUM_STEPS_KEPT:
        cuda = torch.cuda
        steps.append([cuda.memory_allocated(), cuda.max_memory_allocated(), cuda.memory_reserved()])
        end = cuda.Event(enable_timing=True)
        end.record()
        ends.append(end)
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        peaks.append([torch.cuda.max_memory_reserved(), total_bytes - free_bytes])
    if options.history and len(steps) == NUM_STEPS_RECORDED:
        _write_history(_place(options.history))
    if len(steps) == options.max_steps:
        raise SystemExit(0)


def _write_history(path):
    """Write the events of this process's GPU, and record no more."""
    snapshot = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
    trace = snapshot["device_traces"][torch.cuda.current_device()]
    events = [[e["action"], e["size"], e.get("addr", 0), e["stream"]] for e in trace]
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=4) as file:
        json.dump(events, file)


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
