"""Keys of a training plan, such as `batch_size`: accepted values, command-line flags, other names.

`keys.json` has a row for each key, by section; types and defaults are those of `TrainingPlan`.
The checks, command-line options, the command for a plan and docs/plan.md are made from them.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memest.errors import PlanError, shown
from memest.plan.reading import read_limited, read_table
from memest.units import GIB, parse_bytes

if TYPE_CHECKING:
    from memest.plan.training_plan import TrainingPlan

PRECISIONS = ("32-true", "bf16-true", "bf16-mixed", "16-true", "16-mixed")

LOOPS = ("lightning", "transformers", "plain")  # Trainers of two libraries, and a user's own
LOGGING = (
    "logging_steps", "logging_strategy", "logging_first_step", "logging_nan_inf_filter",
)  # fmt: skip
"""Logging keys of `TrainingArguments`, allowed in `trainer_options`: they allocate GPU scalars."""

CLIPPING = ("norm", "value")

STRATEGIES = (
    "auto", "ddp", "ddp_find_unused_parameters_true", "fsdp", "fsdp2",
    "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3",
    "deepspeed_stage_1_offload", "deepspeed_stage_2_offload", "deepspeed_stage_3_offload",
)  # fmt: skip
"""Names of Lightning 2.6: `fsdp` is FSDPStrategy, `fsdp2` ModelParallelStrategy."""

SHARDINGS = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD")
"""Sharding of FSDP1; FSDP2 has all except `NO_SHARD`."""

FLASH_ATTENTION_2 = "flash_attention_2"
ATTENTIONS = ("sdpa", "eager", FLASH_ATTENTION_2)

QUANTISATIONS = ("nf4", "int8")

FROM_PRETRAINED, IN_PLACE = "from_pretrained", "in_place"
QUANT_LOADS = (FROM_PRETRAINED, IN_PLACE)
"""Ways of quantisation. `from_pretrained(quantization_config=...)` quantises each weight while it
is loaded. In place, linear layers of a model on the GPU in 16 bits are replaced one by one.
"""

LORA_BIASES = ("none", "all", "lora_only")

ALL_LINEAR = "all-linear"  # value of `lora_target_modules`: all except the output head
OTHER_NAMES: Mapping[str, Sequence[str]] = read_table(__file__, "other_names.json")
"""Names in files that are no keys of a plan.

`ignored` names of lab configs do not affect the memory of a step. Of `TrainingArguments`, the names
`passed_over` do not affect it or are left off, and those `not_modelled` affect it. The names
`converted` become keys of a plan.
"""

IGNORED_KEYS = frozenset(OTHER_NAMES["ignored"])
"""Keys of lab configs that do not affect the memory of a step, as a test checks."""

MAX_LENGTHS = 10_000  # largest number of micro-batches, each of which is run
_MAX_FILE_BYTES = 1 << 20


def read_lengths(value: Any) -> tuple[int, ...]:
    """Return the sequence lengths, in tokens, that `value` gives.

    `value` is a list, a text such as `512,96`, or the path of a file: JSON, or a number per line.

    Raises:
        PlanError: it is none of these, or a length is not a positive whole number.
    """
    items = value
    if isinstance(value, str | Path):
        text = str(value)
        if not re.fullmatch(r"[-+\d,\s]+", text):  # else numbers, not the path of a file
            text = read_limited(Path(text), _MAX_FILE_BYTES, what="a list of lengths")
        items = _numbers(text)
    elif isinstance(value, int) and not isinstance(value, bool):
        items = [value]
    if not isinstance(items, list | tuple):
        raise PlanError(f"`lengths` is {shown(value)}", hint="give a list of numbers, or a file")
    for item in items:
        if not isinstance(item, int) or isinstance(item, bool) or item < 1:
            raise PlanError(
                f"`lengths` has {shown(item)}", hint="give positive whole numbers of tokens"
            )
    if not 1 <= len(items) <= MAX_LENGTHS:
        raise PlanError(f"`lengths` has {len(items)} numbers", hint=f"give 1 to {MAX_LENGTHS}")
    return tuple(items)


def steps_of(lengths: tuple[int, ...], num_micro_batches: Any) -> int:
    """Return the number of whole optimizer steps, at least 1, that `lengths` (one per micro-batch)
    give. A step has `num_micro_batches`; a value that is no positive integer counts as 1."""
    is_count = isinstance(num_micro_batches, int) and num_micro_batches > 0
    divisor: int = num_micro_batches if is_count else 1
    return max(1, len(lengths) // divisor)


def _numbers(text: str) -> list[Any]:
    """Return the numbers in `text`. A word that is no number is returned as text, for an error."""
    if text.lstrip().startswith("["):
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        return value if isinstance(value, list) else [text[:40]]
    words = text.replace(",", " ").split()
    return [int(word) if word.lstrip("+-").isdigit() else word for word in words]


@dataclass(frozen=True, slots=True)
class Bounds:
    """Allowed range of a number, and the hint of the error for a value outside of it."""

    low: float = float("-inf")
    high: float = float("inf")
    hint: str = ""
    without_low: bool = False  # True if `low` itself is not allowed
    without_high: bool = False  # True if `high` itself is not allowed

    def hold(self, value: float) -> bool:
        """Return whether `value` is in the range; False for NaN."""
        is_above = value > self.low if self.without_low else value >= self.low
        is_below = value < self.high if self.without_high else value <= self.high
        return is_above and is_below


@dataclass(frozen=True, slots=True)
class Need:
    """Condition under which a key may differ from its default: `lora_bias` needs adapters."""

    property: str  # property of `TrainingPlan` that has to be true
    error: str  # message, with `{key}` and `{strategy}`
    hint: str
    only_of: str = ""  # prefix of the names of the only strategies that read the key


NEEDS: Mapping[str, Need] = {
    name: Need(**row) for name, row in read_table(__file__, "needs.json").items()
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One key of a plan: its type, default, accepted values, flag and other names."""

    name: str = ""
    type: str = ""  # annotation of the field
    default: Any = None
    flag: str = ""
    """Command-line option; empty if there is none. A switch gives its opposite after a slash if the
    opposite does not begin with `--no-`."""

    help: str = ""  # help of the flag; `{choices}` stands for the values
    section: str = "Plan"  # section of `--help` and of docs/plan.md
    choices: Sequence[str] = ()
    bounds: Bounds | None = None
    need: Need | None = None
    other_names: tuple[str, ...] = ()  # names in `TrainingArguments` with the same meaning
    unset: str = ""  # text for the value if the key is not given; empty if it is `default`
    in_loops: Mapping[str, Any] = field(default_factory=dict)  # default by loop, if not `default`
    sweep: str = ""  # help of the flag of `memest sweep`; if empty, only `--vary` accepts the key
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Short forms of values; those of precisions are Lightning 2.6's (`fabric/connector.py`)."""

    is_size: bool = False  # bytes, which files and flags may give as `24GiB`
    is_always_written: bool = False  # True to write the key in commands even at its default

    @property
    def is_switch(self) -> bool:
        """True if the key is a boolean, whose flag takes no value."""
        return self.type.startswith("bool")

    @property
    def is_repeated(self) -> bool:
        """True if the key is a list of names; the flag is given once per name."""
        return self.type == "tuple[str, ...]"

    @property
    def is_mapping(self) -> bool:
        """True if the key's value is a mapping from names to values."""
        return self.type == "tuple[tuple[str, Any], ...]"

    @property
    def flags(self) -> tuple[str, ...]:
        """Command-line flag of the key; a switch has two flags, which turn it on and off."""
        on, _, off = self.flag.partition("/")
        return (on, off or f"--no-{on[2:]}") if self.is_switch else (on,)

    @property
    def help_text(self) -> str:
        """Help of the flag: `help` with `{choices}` replaced by the accepted values."""
        return self.help.replace("{choices}", ", ".join(self.choices))

    def read(self, value: Any) -> Any:
        """Return `value`, from a file or a flag, as the key's type; `PlanError` if invalid."""
        if self.is_size:
            return parse_bytes(value)
        if self.is_repeated:
            return _names(self.name, value)
        if self.type == "tuple[int, ...]":
            return read_lengths(value) if value else ()
        if self.aliases and isinstance(value, int | str) and not isinstance(value, bool):
            # `shown` also accepts numbers that `str` refuses, with thousands of digits
            text = value if isinstance(value, str) else shown(value).strip("`")
            return self.aliases.get(text, text)
        return value

    def words(self, value: Any) -> list[str]:
        """Return command-line arguments that set the key to `value`, given as in `to_dict`."""
        if self.is_switch:
            return [self.flags[0 if value else 1]]
        if self.is_repeated:
            return [word for item in value for word in (self.flag, item)]
        if self.is_size and value % GIB == 0:
            value = f"{value // GIB}GiB"
        elif isinstance(value, list):
            value = ",".join(map(str, value))
        elif isinstance(value, Mapping):
            value = ",".join(f"{name}={option}" for name, option in value.items())
        return [self.flag, str(value)]


def rows_of(plan: type[TrainingPlan]) -> dict[str, Key]:
    """Return {name: `Key`} of `keys.json`, in the order of the fields of the class `plan`."""
    table: Mapping[str, Mapping[str, dict[str, Any]]] = read_table(__file__, "keys.json")
    rows: dict[str, Key] = {}
    for section, fields in table.items():
        rows |= {name: _key_of(section, **values) for name, values in fields.items()}
    return {
        f.name: dataclasses.replace(
            rows[f.name], name=f.name, type=str(f.type),
            default=None if f.default is dataclasses.MISSING else f.default,
        )
        for f in dataclasses.fields(plan) if f.name in rows
    }  # fmt: skip


def _key_of(
    section: str, *, need: str = "", choices: str = "", bounds: Any = None, **rest: Any
) -> Key:
    """Return the `Key` for a row of `keys.json` in `section`; `rest` are its other fields.

    `choices` names a constant of this module, `need` is a key of `NEEDS`; "" is none. `bounds` has
    fields of `Bounds`; None is no bounds. For whole numbers, `bounds` may also be [lowest, highest]
    or [lowest, highest, text]. The text ends the hint of the error for a number out of bounds.
    """
    if isinstance(bounds, list):
        low, high, *hint_end = bounds
        hint = f"give a whole number from {low} to {high}{''.join(hint_end)}"
        bounds = {"low": low, "high": high, "hint": hint}
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in rest.items()}
    return Key(
        section=section, need=NEEDS.get(need), choices=globals()[choices] if choices else (),
        bounds=None if bounds is None else Bounds(**bounds), **values,
    )  # fmt: skip


def read_options(name: str, value: Any) -> tuple[tuple[str, Any], ...]:
    """Return the (name, value) pairs in `value`, the options given for the plan's key `name`.

    `value` is a mapping, a list of pairs, or text such as `amsgrad=true,eps=1`.

    Raises:
        PlanError: it is none of these, or an option is not a boolean, number, text or None.
    """
    options = value
    if isinstance(value, str):
        parts = [part.partition("=") for part in value.split(",") if part.strip()]
        options = {option.strip(): _literal(text.strip()) for option, _, text in parts}
    elif isinstance(value, list | tuple) and all(map(_is_pair, value)):
        options = dict(value)
    types = (bool, int, float, str, type(None))
    if not isinstance(options, Mapping) or not all(
        isinstance(option, str) and option.isidentifier() and isinstance(setting, types)
        for option, setting in options.items()
    ):
        hint = "write `name: value` lines, or `name=value` separated by commas"
        raise PlanError(f"`{name}` is {shown(options)}", hint=hint)
    return tuple(options.items())


def _is_pair(item: Any) -> bool:
    return isinstance(item, list | tuple) and len(item) == 2 and isinstance(item[0], str)


_WORDS = {"true": True, "false": False, "none": None}


def _literal(text: str) -> Any:
    if text.casefold() in _WORDS:
        return _WORDS[text.casefold()]
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def _names(key: str, value: Any) -> tuple[str, ...]:
    items: Sequence[Any] = [value] if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(i, str) and i for i in items):
        raise PlanError(f"`{key}` is {shown(value)}", hint="give a list of names")
    parts = (part.strip() for item in items for part in item.split(","))
    return tuple(part for part in parts if part)
