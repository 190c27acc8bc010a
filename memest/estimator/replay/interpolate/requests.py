"""Requests of a call by its numbers, from the kernel tables of a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from memest.estimator.gpu.kernel_calls import Recipe, recipe_of
from memest.estimator.hardware.gpus import Gpu
from memest.estimator.ops.matmul import CublasWorkspaces
from memest.estimator.ops.registry import op_of
from memest.estimator.ops.temporaries import OLDEST
from memest.estimator.replay.interpolate.call_log import (
    Template,
    count_numbers,
    is_plain,
    on_gpu,
    put_numbers,
    storage_bytes,
)


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests of one call to the allocator."""

    form: Form
    """Order of the requests, without bytes; calls with equal forms make the same stream of events.
    """

    num_bytes: tuple[int, ...]
    """Bytes of each storage that the call allocates, in order of allocation."""


class Form(NamedTuple):
    """The requests of a call, in order, without their bytes."""

    requests: tuple[int | tuple[int] | None, ...]
    """Position of an output made here, (n,) for a free of temporary n, or None to make one."""

    num_copies: int
    """Contiguous operands of a matrix product: temporaries after the outputs."""

    num_cublas: int
    """Workspaces that it needs: that of the handle, then that of cuBLASLt."""

    is_partial: bool


class Evaluator:
    """Evaluates kernel rules: the requests of a call with given numbers."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def requests(self, template: Template, numbers: Sequence[int]) -> Requests:
        """The requests of one call."""
        items = template.shape.items
        start = sum(map(count_numbers, items[:3]))
        own = storage_bytes(items[3], iter(numbers[start:]))
        op = op_of(items[0])
        if is_plain(op):
            positions = [i for i, is_made in enumerate(on_gpu(items[3])) if is_made]
            form = Form(tuple(positions), 0, 0, False)
            return Requests(form, tuple(own[i] for i in positions))
        func, args, kwargs, out, more = put_numbers(template, numbers)
        recipe = recipe_of(self.gpu, op, args, kwargs, out, more)
        cublas: tuple[int, ...] = ()
        copies: tuple[int, ...] = ()
        if op.takes_handle:
            fresh = CublasWorkspaces(self.gpu.capability)
            cublas, copies = fresh.bytes_for(func, args, kwargs, ("main", 0))
        requests, num_bytes = _requests(recipe, own)
        form = Form(requests, len(copies), len(cublas), recipe.is_partial)
        return Requests(form, (*num_bytes, *copies, *cublas))


def _requests(
    recipe: Recipe, own: Sequence[int]
) -> tuple[tuple[int | tuple[int] | None, ...], list[int]]:
    """Return the order of a recipe's requests, and the bytes of each allocation."""
    requests: list[int | tuple[int] | None] = []
    num_bytes: list[int] = []
    temporary: list[tuple[int, int]] = []  # (ordinal, bytes)
    for n, position in recipe.events:
        if position is not None and position != OLDEST:
            requests.append(position)
            num_bytes.append(own[position] if n is None else n)
        elif n is not None and n < 0:
            among = temporary if position == OLDEST else reversed(temporary)
            freed = next(t for t in among if t[1] == -n)
            temporary.remove(freed)
            requests.append((freed[0],))
        else:
            assert n is not None
            temporary.append((sum(r is None for r in requests), n))
            requests.append(None)
            num_bytes.append(n)
    return tuple(requests), num_bytes
