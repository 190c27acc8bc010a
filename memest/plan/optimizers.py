"""Optimizers that plans can name, and the classes that measured runs and predictions construct.

A plan may also name a class of `torch.optim` or `bitsandbytes.optim` by its own name (`AdamW`,
`bitsandbytes.optim.Lion8bit`), and by the spelling of `TrainingArguments` (`adamw_torch_fused`).

Source: torch 2.11 (torch/optim), bitsandbytes 0.50.2 (bitsandbytes/optim), transformers 5.17
(`OptimizerNames` in training_args.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memest.errors import PlanError, UnsupportedError, closest, shown
from memest.plan.reading import read_table

TORCH, BITSANDBYTES, DEEPSPEED = "torch", "bitsandbytes", "deepspeed"


@dataclass(frozen=True, slots=True)
class OptimizerRow:
    """An optimizer that plans can name, constructed by `class_name(params, lr=..., **options)`."""

    library: str
    class_name: str
    options: tuple[tuple[str, Any], ...] = ()  # options in addition to the plan's
    transformers: str = ""  # name of the same optimizer in `TrainingArguments.optim`

    @property
    def has_momentum(self) -> bool:
        """True if the class has the option `momentum`."""
        return self.class_name.rstrip("0123456789bit") in ("SGD", "RMSprop", "LARS", "Muon")

    @property
    def needs_momentum(self) -> bool:
        """True if `momentum` may not be 0 (bitsandbytes 0.50, `optim/sgd.py`, `lars.py`)."""
        return self.library == BITSANDBYTES and self.class_name.startswith(("SGD", "LARS"))

    @property
    def has_nesterov(self) -> bool:
        """True if the class has the option `nesterov`."""
        return self.library == TORCH and self.class_name in ("SGD", "Muon")


_TABLE: Mapping[str, Mapping[str, Any]] = read_table(__file__, "optimizers.json")
"""`rows` of optimizers by a plan's name, and other names.

Names with `_single` work on one tensor at a time, where others take their multi-tensor path. Only
Adafactor takes its single-tensor path when `foreach` is left open. `aliases` are other spellings.
`elsewhere` has prefixes of names and their packages, `not_for_plans` reasons.
"""

OPTIMIZERS: Mapping[str, OptimizerRow] = {
    name: OptimizerRow(**row | {"options": tuple(row.get("options", {}).items())})
    for name, row in _TABLE["rows"].items()
}
"""Rows of optimizers by a plan's name."""

_BY_CLASS = {
    (row.library, row.class_name): name
    for name, row in reversed(list(OPTIMIZERS.items()))
    if not row.options
}
_ALIASES = {row.transformers: name for name, row in OPTIMIZERS.items() if row.transformers}
_ALIASES |= _TABLE["aliases"]


def optimizer_name(given: str) -> str:
    """Return the key in `OPTIMIZERS` for `given`: this key, the name of a class, or a value of
    `optim` in `TrainingArguments`.

    Raises:
        PlanError: no optimizer has this name.
        UnsupportedError: the optimizer exists, but plans do not support it.
    """
    if given in OPTIMIZERS:
        return given
    prefix, _, class_name = given.rpartition(".")
    for library, prefixes in (
        (TORCH, ("", "torch.optim")),
        (BITSANDBYTES, ("", "bitsandbytes.optim", "bnb.optim")),
    ):
        if prefix in prefixes and (library, class_name) in _BY_CLASS:
            return _BY_CLASS[library, class_name]
    key = class_name.casefold().replace("-", "_")
    if key in OPTIMIZERS and key not in _TABLE["not_for_plans"]:
        return key
    if key in _ALIASES:
        return _ALIASES[key]
    hint = "`memest run` takes a script that uses it"
    for name, reason in _TABLE["not_for_plans"].items():
        if key in (name, name.replace("_", "")):
            raise UnsupportedError(f"optimizer {shown(given)} {reason}", hint=hint)
    compact_key = key.replace("_", "")
    for name, package in _TABLE["elsewhere"].items():
        if key.startswith(name) or compact_key.startswith(name.replace("_", "")):
            raise UnsupportedError(
                f"optimizer {shown(given)} is of package `{package}`, which plans do not support",
                hint=hint,
            )
    near = closest(key, OPTIMIZERS)
    raise PlanError(
        f"`optim` cannot be {shown(given)}",
        hint=f"allowed: {', '.join(f'`{k}`' for k in near or OPTIMIZERS)}, or the name of a class"
        " of `torch.optim` or `bitsandbytes.optim`",
    )
