"""Tensors that are neither dense nor in coordinate format (`sparse`): refused by name.

A sparse or nested tensor has no storage of its own but several, and kernels of their own; C++ looks
for a CUDA device as soon as a nested one is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memest.errors import UnsupportedError
from memest.estimator.device.patches import Patches
from memest.estimator.device.tensors import on_gpu, tensors_in

_HINT = "use tensors that are dense and padded"
_MAKERS = ("nested_tensor", "as_nested_tensor", "nested_tensor_from_jagged", "narrow")


def dense(out: Any, func: Any, where: Callable[[], str]) -> Any:
    """`out`, which `func` has made on the card; `where` names the script's line.

    Raises:
        UnsupportedError: it is not dense.
    """
    if not isinstance(out, Tensor) or out.layout is torch.strided:
        return out
    raise refused(func, str(out.layout).removeprefix("torch."), where())


def refused(func: Any, kind: str, line: str) -> UnsupportedError:
    """Of a call about a tensor of this layout."""
    name = str(func).removesuffix(".default")
    return UnsupportedError(
        f"{line or 'the script'}: `{name}` with a tensor of layout {kind} cannot be simulated",
        hint=_HINT,
    )


def install(patches: Patches, where: Callable[[], str]) -> None:
    """Let the makers of nested tensors refuse the card; `where` names the script's line."""
    for name in _MAKERS:
        patches.set(torch.nested, name, _on_host(getattr(torch.nested, name), name, where))


def _on_host(make: Callable[..., Any], name: str, where: Callable[[], str]) -> Callable[..., Any]:
    def refusing(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        is_for_card = device is not None and torch.device(device).type == "cuda"
        if is_for_card or (
            device is None and any(map(on_gpu, tensors_in((*args, *kwargs.values()))))
        ):
            raise UnsupportedError(
                f"{where() or 'the script'}: `torch.nested.{name}` on the GPU cannot be simulated",
                hint=_HINT,
            )
        return make(*args, **kwargs)

    return refusing
