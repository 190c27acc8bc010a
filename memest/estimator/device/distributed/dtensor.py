"""DTensor: which shape an operator gives is asked of tensors without data, which no recorder sees.

torch asks FakeTensors that say "cuda"; a build without CUDA has none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from memest.estimator.device.patches import Patches
from memest.estimator.device.tensors import META


def install(patches: Patches) -> None:
    """Let shapes be propagated on the meta device."""
    from torch.distributed.tensor import _op_schema, _sharding_prop

    def bare(spec: Any) -> Tensor:
        meta = spec.tensor_meta
        return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=META)

    patches.set(_sharding_prop, "FakeTensorMode", _disable_current_modes)
    patches.set(_sharding_prop, "detect_fake_mode", lambda *args: None)
    patches.set(_op_schema, "_rebuild_tensor_from_dtensor_meta", bare)
