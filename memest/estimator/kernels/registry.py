"""Kernels of one's own: what an operator takes from the allocator beside its outputs.

The tables of memest know the operators of torch. A library's or a script's own, made with
`torch.library`, has its outputs from its fake (meta) kernel and is reported as not modelled until
somebody says what its kernel takes:

    @memest.register_kernel("mylib::fused_loss")
    def fused_loss(call):
        logits = call["logits"]
        return memest.Scratch(after=(logits.numel() * 4,))  # the float32 copy
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

from memest.errors import PlanError
from memest.estimator.hardware.gpus import Gpu
from memest.estimator.kernels.scratch import Scratch
from memest.estimator.kernels.tables import SCRATCH


@dataclass(frozen=True, slots=True)
class KernelCall(Mapping[str, Any]):
    """One call of an operator: a mapping of the names of its schema to its arguments."""

    arguments: Mapping[str, Any]
    """Tensors among them have shapes, strides and dtypes, and no values; defaults are filled in."""

    out: Any
    """What it returns: a tensor, or a tuple of them."""

    gpu: Gpu
    """The card that it runs on."""

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.arguments)

    def __len__(self) -> int:
        return len(self.arguments)


KernelRule = Callable[[KernelCall], Scratch | None]


def register_kernel(op: OpOverload | str) -> Callable[[KernelRule], KernelRule]:
    """Say what the kernel of `op` takes from the allocator; a decorator of the rule.

    The rule is given a `KernelCall` and returns a `Scratch`, whose bytes are freed when the
    operator returns; None, or an empty one, means that the outputs are all. It may be called once
    for all calls that are alike. A rule for an operator of torch takes the place of memest's own.

    Args:
        op: an operator, or its name such as `mylib::op` or `mylib::op.overload`.

    Raises:
        PlanError: there is no operator of this name.
    """
    func = _operator(op) if isinstance(op, str) else op
    names = [argument.name for argument in func._schema.arguments]
    defaults = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}

    def register(rule: KernelRule) -> KernelRule:
        def scratch(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, gpu: Gpu) -> Scratch:
            given = defaults | dict(zip(names, args, strict=False)) | kwargs
            return rule(KernelCall(given, out, gpu)) or Scratch()

        SCRATCH[func] = scratch
        return rule

    return register


def _operator(name: str) -> OpOverload:
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    try:
        found: OpOverload = getattr(
            getattr(getattr(torch.ops, namespace), packet), overload or "default"
        )
    except (AttributeError, RuntimeError) as error:
        raise PlanError(
            f"there is no operator `{name}`",
            hint="import what defines it first; the name is `namespace::name` or with `.overload`",
        ) from error
    return found
