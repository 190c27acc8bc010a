"""`torch.Generator` on the card, and the functions of `torch.cuda` that know its default one."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from memest.estimator.device.card_draws import CardDraws, CardGenerator
from memest.estimator.device.patches import Patches
from memest.estimator.device.tensors import resolve


def _place(generator: Any) -> int:
    """Where it lies: what operators are given is another object of Python's."""
    found: int = generator._cdata
    return found


class Generator(torch.Generator):
    """`torch.Generator`, for the virtual GPU as well."""

    draws: ClassVar[CardDraws]
    on_card: CardGenerator | None

    def __new__(cls, device: Any = "cpu") -> Generator:  # noqa: D102
        made: Generator = super().__new__(cls)
        where = torch.device(resolve(device))
        made.__dict__["_device"] = where
        made.on_card = CardGenerator() if where.type == "cuda" else None
        cls.draws.of_script.pop(_place(made), None)
        if made.on_card is not None:
            cls.draws.of_script[_place(made)] = made.on_card
        return made

    def __init__(self, device: Any = "cpu") -> None:
        pass

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where it draws."""
        found: torch.device = self.__dict__["_device"]
        return found

    def manual_seed(self, seed: int) -> Generator:
        """Begin anew."""
        if self.on_card is None:
            super().manual_seed(seed)
        else:
            self.on_card.manual_seed(seed)
        return self

    def seed(self) -> int:
        """Begin anew from a seed that is drawn."""
        drawn = super().seed()
        self.manual_seed(drawn)
        return drawn

    def initial_seed(self) -> int:
        """From which it began."""
        return super().initial_seed() if self.on_card is None else self.on_card.seed

    def get_state(self) -> torch.Tensor:
        """For `set_state`."""
        return super().get_state() if self.on_card is None else self.on_card.state()

    def set_state(self, state: torch.Tensor) -> Generator:
        """Go on from there."""
        if self.on_card is None:
            super().set_state(state)
        else:
            self.on_card.set_state(state)
        return self


def install(patches: Patches, draws: CardDraws) -> None:
    """Let generators be those of the virtual GPU."""
    default = draws.default
    generator: Any = type("Generator", (Generator,), {"draws": draws, "__module__": "torch"})
    of_card = generator("cuda")
    of_card.on_card = draws.of_script[_place(of_card)] = default

    def seed() -> None:
        default.manual_seed(torch.initial_seed())

    def set_state(state: Any, device: Any = "cuda") -> None:
        default.set_state(state)

    functions: dict[str, Any] = {
        "manual_seed": default.manual_seed,
        "manual_seed_all": default.manual_seed,
        "seed": seed,
        "seed_all": seed,
        "initial_seed": lambda: default.seed,
        "get_rng_state": lambda device="cuda": default.state(),
        "set_rng_state": set_state,
        "get_rng_state_all": lambda: [default.state()],
        "set_rng_state_all": lambda new: set_state(new[0]) if len(new) else None,
    }
    for name, function in functions.items():
        patches.set(torch.cuda, name, function)
        patches.set(torch.cuda.random, name, function)
    patches.set(torch, "Generator", generator)
    patches.set(torch.cuda, "default_generators", (of_card,))
