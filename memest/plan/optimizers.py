"""Optimizers of plans, one row each, from which measured runs and predictions make them.

A plan may also name a class of `torch.optim` or `bitsandbytes.optim` by its own name (`AdamW`,
`bitsandbytes.optim.Lion8bit`), and by the spelling of `TrainingArguments` (`adamw_torch_fused`).

Source: torch 2.11 (torch/optim), bitsandbytes 0.50.2 (bitsandbytes/optim), transformers 5.17
(`OptimizerNames` in training_args.py).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from memest.errors import PlanError, UnsupportedError, closest, shown
from memest.plan.reading import read_table

TORCH, BITSANDBYTES, DEEPSPEED = "torch", "bitsandbytes", "deepspeed"


@dataclass(frozen=True, slots=True)
class OptimizerRow:
    """An optimizer that plans can name; it is made by `class_name(params, lr=..., **options)`."""

    library: str
    class_name: str
    options: tuple[tuple[str, Any], ...] = ()  # options in addition to the plan's
    transformers: str = ""  # name of the same optimizer in `TrainingArguments.optim`

    @property
    def has_momentum(self) -> bool:
        """True if `momentum` is an option."""
        return self.class_name.rstrip("0123456789bit") in ("SGD", "RMSprop", "LARS", "Muon")

    @property
    def needs_momentum(self) -> bool:
        """True if it requires momentum (bitsandbytes 0.50, `optim/sgd.py`, `lars.py`)."""
        return self.library == BITSANDBYTES and self.class_name.startswith(("SGD", "LARS"))

    @property
    def has_nesterov(self) -> bool:
        """True if `nesterov` is an option."""
        return self.library == TORCH and self.class_name in ("SGD", "Muon")


_FOREACH = (
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop",
    "SGD",
)  # fmt: skip
"""Optimizers that take their multi-tensor path by default."""

_FUSED = ("Adam", "AdamW", "SGD")  # optimizers with fused kernels for CUDA
_8_AND_32_BITS = (
    "Adagrad", "Adam", "AdamW", "AdEMAMix", "LARS", "Lion", "RMSprop", "SGD",
)  # fmt: skip
_PAGED = ("Adam", "AdamW", "AdEMAMix", "Lion")

_NAMES: Mapping[str, Mapping[str, str]] = read_table(__file__, "optimizers.json")
"""Names of optimizers in other places.

`trainer` has the spelling of `TrainingArguments` for a plan's name, `aliases` are other spellings.
`elsewhere` has prefixes of names and their packages, `not_for_plans` reasons.
"""


def _rows() -> Iterator[tuple[str, OptimizerRow]]:
    def row(name: str, library: str, class_name: str, **options: Any) -> tuple[str, OptimizerRow]:
        spelling = _NAMES["trainer"].get(name, "")
        return name, OptimizerRow(library, class_name, tuple(options.items()), spelling)

    for name in _FOREACH:
        yield row(name.lower(), TORCH, name)
        unfused = {"fused": False} if name in _FUSED else {}
        yield row(f"{name.lower()}_single", TORCH, name, foreach=False, **unfused)
    for name in _FUSED:
        yield row(f"{name.lower()}_fused", TORCH, name, fused=True)
    # Only Adafactor takes its single-tensor path when `foreach` is left open.
    yield row("adafactor", TORCH, "Adafactor")
    yield row("adafactor_foreach", TORCH, "Adafactor", foreach=True)
    yield row("muon", TORCH, "Muon")
    for name in _8_AND_32_BITS:
        for bits in ("8bit", "32bit"):
            if (name, bits) != ("LARS", "8bit"):
                yield row(f"{name.lower()}_{bits}", BITSANDBYTES, f"{name}{bits}")
            if name in _PAGED and (name, bits) != ("AdEMAMix", "32bit"):
                yield row(f"paged_{name.lower()}_{bits}", BITSANDBYTES, f"Paged{name}{bits}")
    yield row("deepspeed_cpu", DEEPSPEED, "DeepSpeedCPUAdam")


OPTIMIZERS: Mapping[str, OptimizerRow] = dict(_rows())  # a plan's name of an optimizer -> its row
_BY_CLASS = {
    (row.library, row.class_name): name
    for name, row in reversed(list(OPTIMIZERS.items()))
    if not row.options
}
_ALIASES = {spelling: name for name, spelling in _NAMES["trainer"].items()}
_ALIASES.update(_NAMES["aliases"])


def optimizer_name(given: str) -> str:
    """Return the name in `OPTIMIZERS` of the optimizer `given` by any of its names.

    Raises:
        PlanError: no optimizer has this name.
        UnsupportedError: it exists, but not for plans.
    """
    if given in OPTIMIZERS:
        return given
    library, _, class_name = given.rpartition(".")
    for of, prefixes in (
        (TORCH, ("", "torch.optim")),
        (BITSANDBYTES, ("", "bitsandbytes.optim", "bnb.optim")),
    ):
        if library in prefixes and (of, class_name) in _BY_CLASS:
            return _BY_CLASS[of, class_name]
    plain = class_name.casefold().replace("-", "_")
    if plain in OPTIMIZERS and plain not in _NAMES["not_for_plans"]:
        return plain
    if plain in _ALIASES:
        return _ALIASES[plain]
    script = "`memest run` takes a script that uses it"
    for name, reason in _NAMES["not_for_plans"].items():
        if plain in (name, name.replace("_", "")):
            raise UnsupportedError(f"optimizer {shown(given)} {reason}", hint=script)
    squeezed = plain.replace("_", "")
    for name, package in _NAMES["elsewhere"].items():
        if plain.startswith(name) or squeezed.startswith(name.replace("_", "")):
            raise UnsupportedError(
                f"optimizer {shown(given)} is of package `{package}`, which plans do not support",
                hint=script,
            )
    near = closest(plain, OPTIMIZERS)
    raise PlanError(
        f"`optim` cannot be {shown(given)}",
        hint=f"allowed: {', '.join(f'`{k}`' for k in near or OPTIMIZERS)}, or the name of a class"
        " of `torch.optim` or `bitsandbytes.optim`",
    )
