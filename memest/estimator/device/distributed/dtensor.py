"""DTensor: which shape an operator gives is asked of tensors without data, which no mode sees.

torch asks FakeTensors that say "cuda"; a build without CUDA has none. And the state of the GPU's
random numbers, which each rank is to use from another offset on, has no offset here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from memest.estimator.device.patches import Patches
from memest.estimator.device.tensors import META


def install(patches: Patches) -> None:
    """Let shapes be propagated on the meta device."""
    from torch.distributed.tensor import _op_schema, _sharding_prop

    def bare(spec: Any) -> Tensor:
        meta = spec.tensor_meta
        return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=META)

    patches.set(_sharding_prop, "FakeTensorMode", _on_meta)
    patches.set(_sharding_prop, "detect_fake_mode", lambda *args: None)
    patches.set(_op_schema, "_rebuild_tensor_from_dtensor_meta", bare)
    _install_random(patches)


def _install_random(patches: Patches) -> None:
    """Let each rank draw as it likes: nothing is drawn here."""
    from torch.distributed.tensor import _dispatch, _random

    def draw(start: Any, end: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    def region(*args: Any, **kwargs: Any) -> Any:
        return nullcontext()

    if hasattr(_dispatch, "run_dtensor_rng_op"):
        patches.set(_dispatch, "run_dtensor_rng_op", draw)
    patches.set(_random.OffsetBasedRNGTracker, "_distribute_region", region)


class _OnMeta(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Factories make tensors without data, whatever device they are asked for."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": META}
        return func(*args, **kwargs)


@contextmanager
def _on_meta() -> Iterator[None]:
    with _disable_current_modes(), _OnMeta():  # type: ignore[no-untyped-call]
        yield
