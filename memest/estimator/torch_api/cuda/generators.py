"""`torch.Generator` on the GPU, and the functions of `torch.cuda` about its default generator."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from memest.estimator.ops.random import GpuDraws, GpuGenerator
from memest.estimator.tensors.patches import Patches
from memest.estimator.tensors.placement import GPU, resolve


def _place(generator: Any) -> int:
    """Return the C++ address; operators get another Python object for the same generator."""
    return generator._cdata


class Generator(torch.Generator):
    """`torch.Generator`, which makes an `OnGpu` for the virtual GPU."""

    draws: ClassVar[GpuDraws]
    kind_on_gpu: ClassVar[type[OnGpu]]

    def __new__(cls, device: Any = "cpu") -> Generator:  # noqa: D102
        is_on_gpu = torch.device(resolve(device)).type == "cuda"
        made: Generator = super().__new__(cls.kind_on_gpu if is_on_gpu else cls)
        cls.draws.of_script.pop(_place(made), None)
        if isinstance(made, OnGpu):
            made.on_gpu = cls.draws.of_script[_place(made)] = GpuGenerator()
        return made

    def __init__(self, device: Any = "cpu") -> None:
        pass


class OnGpu(Generator):
    """`torch.Generator` of the virtual GPU."""

    on_gpu: GpuGenerator

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Device of the generator."""
        return GPU.device

    def manual_seed(self, seed: int) -> OnGpu:
        """Restart from a seed."""
        self.on_gpu.manual_seed(seed)
        return self

    def seed(self) -> int:
        """Restart from a random seed."""
        drawn = super().seed()
        self.on_gpu.manual_seed(drawn)
        return drawn

    def initial_seed(self) -> int:
        """Return the current seed."""
        return self.on_gpu.seed

    def get_state(self) -> torch.Tensor:
        """Return the state for `set_state`."""
        return self.on_gpu.state()

    def set_state(self, state: torch.Tensor) -> OnGpu:
        """Restore a state."""
        self.on_gpu.set_state(state)
        return self

    def clone_state(self) -> Any:
        """Return a generator with a copy of the state."""
        return type(self)(self.device).graphsafe_set_state(self)

    graphsafe_get_state = clone_state

    def graphsafe_set_state(self, state: Any) -> Any:
        """Copy the state of another generator."""
        self.on_gpu.seed, self.on_gpu.offset = state.on_gpu.seed, state.on_gpu.offset
        return self


def install(patches: Patches, draws: GpuDraws) -> None:
    """Install the generators of the virtual GPU."""
    default = draws.default
    generator: Any = type("Generator", (Generator,), {"draws": draws, "__module__": "torch"})
    generator.kind_on_gpu = type("Generator", (OnGpu, generator), {"__module__": "torch"})
    of_gpu = generator("cuda")
    of_gpu.on_gpu = draws.of_script[_place(of_gpu)] = default

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
    patches.set(torch.cuda, "default_generators", (of_gpu,) * GPU.num_visible)
    if hasattr(torch._C, "_accelerator_getDefaultGenerator"):  # since 2.14
        patches.set(torch._C, "_accelerator_getDefaultGenerator", lambda device: of_gpu)
