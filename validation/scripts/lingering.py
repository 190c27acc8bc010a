"""How long DistributedDataParallel's first buckets live, and how much time NCCL's watchdog had.

torchrun --nproc-per-node 1 lingering.py SCRIPT ARGS...

Runs a script of DistributedDataParallel on one GPU, where its buckets live as long as on several,
and prints two times in ms: from the end of the backward that summed gradients first to the forward
that makes the buckets anew, and from there to the moment at which the old ones were freed.
"""

import runpy
import sys
import time

import torch
from torch.nn.parallel import DistributedDataParallel


def main():
    """Run the script, then print what was seen."""
    marks = []
    _watch(torch.Tensor, "backward", marks, "backward", is_after=True)
    _watch(DistributedDataParallel, "_pre_forward", marks, "forward", is_after=False)
    torch.cuda.memory._record_memory_history(stacks="python", context=None)
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    first = next(when for name, when in marks if name == "forward")
    freed = _end_of_the_largest(trace, first)
    forwards = [when for name, when in marks if name == "forward" and first < when]
    anew = max((when for when in forwards if when <= freed), default=first)
    before = max(when for name, when in marks if name == "backward" and when < anew)
    print(f"{1e3 * (anew - before):.0f} ms, and {1e3 * (freed - anew):.0f} ms after it")


def _watch(owner, name, marks, mark, *, is_after):
    run = getattr(owner, name)

    def watched(*args, **kwargs):
        if not is_after:
            marks.append((mark, time.time()))
        result = run(*args, **kwargs)
        if is_after:
            marks.append((mark, time.time()))
        return result

    setattr(owner, name, watched)


def _end_of_the_largest(trace, first):
    """When the largest block was freed that was there before `first` and not for long after it."""
    alive, largest = {}, (0, 0.0)
    for event in trace:
        when = event["time_us"] / 1e6
        if event["action"] == "alloc":
            alive[event["addr"]] = event["size"], when
        elif event["action"] == "free_requested" and event["addr"] in alive:
            size, born = alive.pop(event["addr"])
            if born < first < when:
                largest = max(largest, (size, when))
    return largest[1]


if __name__ == "__main__":
    main()
