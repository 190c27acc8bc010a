"""What random draws ask for beside their results.

Sources (torch 2.11, `aten/src/ATen/native`): cuda/Randperm.cu, TensorFactories.cpp,
Distributions.cpp, DistributionTemplates.h, cuda/MultinomialKernel.cu, cuda/Distributions.cpp.
Evidence: the allocator's events of each draw, recorded on an H100.
"""

from __future__ import annotations

from math import ceil, log, log2
from typing import Any

import torch
from torch._ops import OpOverload

from memest.estimator.hardware.gpus import Gpu
from memest.estimator.kernels.cub import radix_sort_bytes, scan_bytes
from memest.estimator.kernels.reductions import reduce_bytes
from memest.estimator.kernels.scratch import Events, EventsFn, outputs, passing, temporaries

aten = torch.ops.aten

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

_KEPT = 0.9
"""Odds at least of no two equal keys, which `randperm` draws as many bits for as that takes."""


def randperm_bits(num_items: int) -> int:
    """Bits of the random keys that `randperm` sorts (Randperm.cu)."""
    number = float(num_items)
    return min(64, ceil(log2(number - (6 * number * number + 1) / (12 * log(_KEPT)))))


def randperm_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """`randperm` (Randperm.cu): a scalar that checks the range, the numbers in order, keys before
    and after the sort, of 4 bytes where 32 bits are enough, and the sort's storage.
    """
    count = out.numel()
    events = outputs({0: count * out.itemsize}) + passing(out.itemsize)
    if count < 2:
        return tuple(events)
    bits = randperm_bits(count)
    key_bytes = 4 if bits <= 32 else 8
    sort = radix_sort_bytes(count, gpu, num_bits=bits, key_bytes=key_bytes)
    return tuple(events + passing(count * out.itemsize, *(count * key_bytes,) * 2, sort))


def randperm_is_modelled(func: OpOverload, args: Args, kwargs: Kwargs, gpu: Gpu) -> bool:
    """Whether the numbers are int64, as the tunings of the sort are known for."""
    return kwargs.get("dtype") in (None, torch.int64)


def _samples(args: Args, kwargs: Kwargs) -> tuple[int, bool]:
    num: int = args[1] if len(args) > 1 else kwargs["num_samples"]
    replaced = args[2] if len(args) > 2 else kwargs.get("replacement", False)
    return num, bool(replaced)


def multinomial_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """`multinomial` (native/Distributions.cpp) without replacement, or of one sample.

    The largest and smallest probability are checked, then the sum of each row, whose verdicts are
    kept; exponential noise divides the probabilities; of several samples `topk` gives the values,
    too.
    """
    probabilities = args[0]
    item = probabilities.itemsize
    num, replaced = _samples(args, kwargs)
    if replaced and num > 1:
        return _with_replacement(args, out)
    rows = probabilities.shape[0] if probabilities.dim() > 1 else 1
    noise = probabilities.numel() * item
    extreme = passing(
        *reduce_bytes(
            probabilities, (), gpu, dtype=probabilities.dtype, out_dtype=probabilities.dtype,
            accumulator_bytes=item,
        )
    )  # fmt: skip
    sums = temporaries(rows * item, rows, 1, -rows, -rows * item)
    if probabilities.dim() == 1:
        sums = temporaries(item, 1, -item)
    values = passing(rows * num * item) if num > 1 else []
    kept = 1, 1
    return tuple(
        outputs({0: out.numel() * out.itemsize})
        + temporaries(item)
        + extreme
        + temporaries(1, item)
        + extreme
        + temporaries(1, 1, -1, -item, -1, -item)
        + sums
        + passing(1)
        + temporaries(noise)
        + values
        + temporaries(-noise, *(-n for n in kept))
    )


def _with_replacement(args: Args, out: Any) -> Events:
    """Normalised and summed up probabilities (MultinomialKernel.cu), and a copy to sum up; of one
    row the scan goes over blocks.
    """
    given = args[0]
    size = given.numel() * given.itemsize
    scan = passing(scan_bytes(given.numel(), value_bytes=4)) if given.dim() == 1 else []
    return tuple(
        outputs({0: out.numel() * out.itemsize})
        + temporaries(size, size, size)
        + scan
        + temporaries(-size, -size, -size)
    )


def multinomial_is_modelled(func: OpOverload, args: Args, kwargs: Kwargs, gpu: Gpu) -> bool:
    """Whether `topk` finds the samples within a block, and those drawn with replacement come from
    several rows, or from one of float32.
    """
    num, replaced = _samples(args, kwargs)
    if replaced and num > 1:
        return bool(args[0].dim() > 1 or args[0].dtype == torch.float32)
    return num <= 1024


def bernoulli_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """`bernoulli` of probabilities (cuda/Distributions.cpp), those of 16 bits cast to float32."""
    probabilities = args[0]
    cast = probabilities.numel() * 4 if probabilities.itemsize == 2 else 0
    return tuple(outputs({0: out.numel() * out.itemsize}) + passing(cast))


def normal_events(args: Args, kwargs: Kwargs, out: Any, gpu: Gpu) -> Events:
    """`normal` of deviations in a tensor (DistributionTemplates.h): that the smallest is not
    negative is checked before the result is made, and again; a number as the mean is a tensor.
    """
    mean, deviations = args[:2]
    item = deviations.itemsize
    smallest = reduce_bytes(
        deviations, (), gpu, dtype=deviations.dtype, out_dtype=deviations.dtype,
        accumulator_bytes=item,
    )  # fmt: skip
    check = temporaries(item) + passing(*smallest) + passing(1) + temporaries(-item)
    number = [] if isinstance(mean, torch.Tensor) else passing(out.itemsize)
    return tuple(check + outputs({0: out.numel() * out.itemsize}) + check + number)


DRAW_EVENTS: dict[OpOverload, EventsFn] = {
    aten.randperm.default: randperm_events,
    aten.multinomial.default: multinomial_events,
    aten.bernoulli.default: bernoulli_events,
    aten.normal.Tensor_Tensor: normal_events,
    aten.normal.float_Tensor: normal_events,
}
"""What each draw asks for, in order."""

DRAWS_MODELLED_WHERE = {
    aten.randperm.default: randperm_is_modelled,
    aten.multinomial.default: multinomial_is_modelled,
}
