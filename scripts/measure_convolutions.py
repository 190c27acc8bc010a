"""Measures on a GPU what workspaces cuDNN's convolutions take, for `fit_convolutions.py`.

    python scripts/measure_convolutions.py OUT.npz [--of FILE] [--every N] [--first I] [--plans]
        [--seconds S]

Runs the calls of convolutions.npz in memest/estimator/kernels/, or of FILE, which
`common_convolutions.py` has written, one by one, each forward and backward alone, and reads the
workspace in the allocator's recorded events; 60 calls a second. N processes that start at I = 0
... N - 1 share the work. `OUT.npz` has the columns of that file:

- `calls` (n, 25), kept number by number: what `ConvolutionShapes.row` gives;
- `workspaces` (n, 3): bytes for the output, the gradient of the input and that of the weight;
- `is_common`: whether the call is one of common networks (residual and dense nets, VGG, MobileNet,
  ConvNeXt, U-Nets, diffusion, GANs, autoencoders, detectors, speech, video, patches) or random;
- `kept_aside`: whether the fit does not see it;
- `tried` (n, 3, 2): the largest workspace of all kernels that cuDNN offers, and where it is over 1
  GiB the next smaller one; -1 where cuDNN was not asked. `--plans` asks it (`cudnn_plans`), 30
  to 80 calls a second, and takes as the workspace that of the first kernel, without a run;
- `deterministic` (n, 3): how many bytes more (or fewer) the first deterministic kernel takes,
  `without_tf32` the first that does not use tensor cores, for float32, and
  `deterministic_without_tf32` the first that is both, than the latter; made by `--plans`.

A call that torch refuses, or that is out of memory, is left out.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cudnn_plans import Cudnn

from memest.estimator.kernels.cudnn_convolution import (
    DIRECTIONS,
    DTYPES,
    MEASURED,
    SPATIAL,
    read,
    write,
)

aten = torch.ops.aten

MOST_RESERVED = 8 << 30

COLUMNS = 7

LARGE = 1 << 30
"""A larger workspace may find no room."""


def tensors(row: list[int]) -> tuple[torch.Tensor, torch.Tensor, tuple[Any, ...]]:
    """Input, weight and the other arguments of a call."""
    dtype, is_last, dims, groups, samples, inputs, outputs = row[:COLUMNS]
    extents = [row[i : i + SPATIAL][SPATIAL - dims :] for i in range(COLUMNS, len(row), SPATIAL)]
    image, _, window, stride, padding, dilation = extents
    last = {2: torch.channels_last, 3: torch.channels_last_3d}.get(dims)
    layout = last if is_last and last else torch.contiguous_format
    shapes = (samples, inputs, *image), (outputs, inputs // groups, *window)
    tensor, weight = (
        torch.empty(s, dtype=DTYPES[dtype], device="cuda", memory_format=layout).zero_()
        for s in shapes
    )
    return tensor, weight, (stride, padding, dilation, False, [0] * dims, groups)


def largest_temporary(call: Callable[[], Any]) -> int:
    """Bytes of the largest allocation of a call that is not one of its outputs."""
    torch.cuda.memory._record_memory_history(None)
    torch.cuda.memory._record_memory_history(context=None, stacks="python")
    found = call()
    kept = {
        t.data_ptr() for t in (found if isinstance(found, tuple) else (found,)) if t is not None
    }
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    if any(e["action"] == "oom" for e in events):
        raise torch.OutOfMemoryError
    sizes = [e["size"] for e in events if e["action"] == "alloc" and e["addr"] not in kept]
    return max(sizes, default=0)


def measure(row: list[int]) -> list[int]:
    """The three workspaces of a call, in bytes."""
    tensor, weight, rest = tensors(row)
    grad = torch.empty_like(aten.convolution(tensor, weight, None, *rest)).zero_()
    backward = (
        lambda mask=mask: aten.convolution_backward(grad, tensor, weight, None, *rest, mask)
        for mask in ([True, False, False], [False, True, False])
    )
    forward = (lambda: aten.convolution(tensor, weight, None, *rest),)
    return [largest_temporary(call) for call in (*forward, *backward)]


def plans_of(row: list[int], cudnn: Cudnn) -> dict[str, list[Any]]:
    """Columns of a call, for each direction, in bytes."""
    found: dict[str, list[Any]] = defaultdict(list)
    offered, is_float32 = cudnn.plans(row), row[0] == DTYPES.index(torch.float32)
    for plans in map(offered.__getitem__, DIRECTIONS):
        sizes = sorted({plan.workspace_bytes for plan in plans}, reverse=True)
        found["tried"].append([sizes[0], sizes[1] if sizes[0] > LARGE and len(sizes) > 1 else 0])
        steady = [plan for plan in plans if plan.is_deterministic]
        exact = [plan for plan in plans if not (is_float32 and plan.uses_tensor_cores)]
        both = [plan for plan in steady if plan in exact]
        first = [kept[0].workspace_bytes for kept in (plans, steady, exact, both)]
        found["workspaces"].append(first[0])
        found["deterministic"].append(first[1] - first[0])
        found["without_tf32"].append(first[2] - first[0])
        found["deterministic_without_tf32"].append(first[3] - first[2] if is_float32 else 0)
    return found


def main() -> None:
    """Measure every so many calls."""
    options = argparse.ArgumentParser()
    options.add_argument("out", type=Path)
    options.add_argument("--of", type=Path, default=MEASURED)
    options.add_argument("--every", type=int, default=1)
    options.add_argument("--first", type=int, default=0)
    options.add_argument("--plans", action="store_true")
    options.add_argument("--seconds", type=float, default=float("inf"), help="then it stops")
    chosen = options.parse_args()
    columns = {name: v[chosen.first :: chosen.every] for name, v in read(chosen.of).items()}
    torch.backends.cudnn.version()  # loads the library
    cudnn = Cudnn()
    end = time.monotonic() + chosen.seconds
    is_measured = np.zeros(len(columns["calls"]), dtype=bool)
    for i, row in enumerate(columns["calls"].tolist()):
        if time.monotonic() > end:
            break
        try:
            if chosen.plans:
                for name, values in plans_of(row, cudnn).items():
                    columns[name][i] = values
            else:
                columns["workspaces"][i] = measure(row)
            is_measured[i] = True
        except RuntimeError as error:
            print(f"{row}: {str(error).splitlines()[0] if str(error) else 'out of memory'}")
        if torch.cuda.memory_reserved() > MOST_RESERVED:
            torch.cuda.empty_cache()
    kept = {name: values[is_measured] for name, values in columns.items()}
    write(chosen.out, kept)
    print(f"{chosen.out}: {is_measured.sum()} of {len(is_measured)} calls")


if __name__ == "__main__":
    main()
