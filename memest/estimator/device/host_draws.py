"""Random numbers of the host that weights without data would have taken.

A script that seeds, makes its model on the host and then shuffles its data shuffles by the numbers
that come after those of the weights. So where weights without data are drawn, the host's generator
moves on as far as the real ones would have moved it; when something real is drawn next, or the
state is asked for, since most scripts that make large models never do.

Source: counted on torch 2.11.0, whose numbers are in the tests. A number is one draw of 32 bits,
two where it is a float64; normal ones are made in blocks of 16, of which the last is drawn again
where it would not be whole (aten/src/ATen/native/cpu/DistributionTemplates.h, `normal_fill`).
Torch 2.13 draws blocks of 16-bit numbers whole instead. Other distributions are left out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from memest.estimator.device.jumps import advance
from memest.estimator.device.patches import Patches

aten = torch.ops.aten

MANY_DRAWS = 1 << 26
"""So many are not drawn: the generator jumps (`jumps`), in 0.1 s however far; each drawn takes 2 to
3 ns.
"""

BLOCK = 16
"""Of normal numbers (`normal_fill`)."""

_UNIFORM = frozenset((
    aten.uniform_.default, aten.rand.default, aten.rand.generator, aten.rand_like.default,
))  # fmt: skip
_NORMAL = frozenset((
    aten.normal_.default, aten.randn.default, aten.randn.generator, aten.randn_like.default,
    aten.normal.float_float,
))  # fmt: skip


def num_draws(func: Any, tensor: Tensor) -> int:
    """Draws of 32 bits that `func` takes to fill a contiguous `tensor` on the host."""
    count = tensor.numel()
    if func in _NORMAL and count % BLOCK:
        count += BLOCK
    is_drawn = func in _UNIFORM or func in _NORMAL
    return count * (2 if tensor.dtype is torch.float64 else 1) * is_drawn


class HostDraws:
    """Draws that the host's default generator has still to make."""

    def __init__(self) -> None:
        self.num_waiting = 0

    def skip(self, func: Any, tensor: Tensor, generator: torch.Generator | None) -> None:
        """`func` would have filled `tensor`, which has no data."""
        if func in _NORMAL and tensor.numel() < BLOCK:  # made in pairs, of which one is kept
            self.settle()
            with _disable_current_modes():
                torch.empty(tensor.numel(), dtype=tensor.dtype).normal_(generator=generator)
        elif generator is None or generator is torch.default_generator:
            self.num_waiting += num_draws(func, tensor)
        else:
            self._draw(num_draws(func, tensor), generator)

    def settle(self) -> None:
        """Make the draws that wait."""
        count, self.num_waiting = self.num_waiting, 0
        if count:
            self._draw(count, None)

    def _draw(self, count: int, generator: torch.Generator | None) -> None:
        if count > MANY_DRAWS:
            with _disable_current_modes():
                advance(generator or torch.default_generator, count)
            return
        with _disable_current_modes():
            scratch = torch.empty(min(count, 1 << 20), dtype=torch.uint8)
            while count:
                part = scratch[:count]
                part.random_(generator=generator)
                count -= len(part)

    def install(self, patches: Patches) -> None:
        """Let torch's functions that read or set the state of the default generator know.

        They make no container for their arguments: those move when Python collects its garbage.
        """
        get_state, set_state = torch.get_rng_state, torch.set_rng_state
        seed_by, seed = torch.manual_seed, torch.seed

        def get_rng_state() -> Tensor:
            self.settle()
            return get_state()

        def set_rng_state(new_state: Tensor) -> None:
            self.num_waiting = 0
            set_state(new_state)

        def manual_seed(seed: int) -> torch.Generator:
            self.num_waiting = 0
            return seed_by(seed)

        def seed_anew() -> int:
            self.num_waiting = 0
            return seed()

        for name, function in (
            ("get_rng_state", get_rng_state), ("set_rng_state", set_rng_state),
            ("manual_seed", manual_seed), ("seed", seed_anew),
        ):  # fmt: skip
            patches.set(torch, name, function)
            patches.set(torch.random, name, function)
