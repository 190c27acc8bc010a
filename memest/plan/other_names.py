"""Names that Lightning and `TrainingArguments` of transformers have for the keys of plans.

Source: transformers 5.17, training_args.py; Lightning 2.6, pytorch/trainer/trainer.py.
"""

from collections.abc import Mapping
from typing import Any

from memest.errors import PlanError, UnsupportedError, shown
from memest.plan.keys import LOGGING, OTHER_NAMES, Key

VAL_BATCHES = 2  # assumed number of validation batches if none is given
_OFF: tuple[Any, ...] = (None, False, 0, 0.0, "", "no", "none", "None", [], {})

_NOT_MODELLED = frozenset(OTHER_NAMES["not_modelled"])  # names that are refused if turned on

_OTHERS = frozenset(LOGGING).union(
    OTHER_NAMES["not_modelled"], OTHER_NAMES["passed_over"], OTHER_NAMES["converted"]
)
"""Names in `TrainingArguments` that no key has as another name."""

_CUDA = ("gpu", "cuda", "auto", None)


def other_names(rows: Mapping[str, Key]) -> frozenset[str]:
    """Return the names that `read_other_names` reads or refuses; `rows`: plan keys by name."""
    return _OTHERS | {*_synonyms(rows), "accelerator"}


def _synonyms(rows: Mapping[str, Key]) -> dict[str, str]:
    """Return {name in `TrainingArguments`: plan key with the same meaning}. `rows` are the keys of
    plans by name."""
    return {other: name for name, row in rows.items() for other in row.other_names}


def read_other_names(
    values: Mapping[str, Any], rows: Mapping[str, Key]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return (`values` with other libraries' names replaced by plan keys, notes on assumptions).
    `rows` are the plan keys by name.

    Raises:
        PlanError: two values contradict each other, or the device is not a CUDA GPU.
        UnsupportedError: a setting affects memory, and plans do not support it.
    """
    config = dict(values)
    notes: list[str] = []
    synonyms = _synonyms(rows)
    names = [key for key in config if key in _OTHERS or key in synonyms]
    for key in names:
        if key in _NOT_MODELLED and config[key] not in _OFF:
            raise UnsupportedError(
                f"`{key}` of TrainingArguments affects memory, and plans do not support it",
                hint="`memest run` takes a script that uses it, or leave it out",
            )
    _read_lightning(config, notes)
    if "loop" not in config and any(key in config for key in (*synonyms, "bf16", "fp16")):
        config["loop"] = "transformers"
        notes.append("keys of TrainingArguments: the Trainer of transformers runs")
    logging = {key: config.pop(key) for key in LOGGING if key in config}
    if logging and config.get("loop") == "transformers":
        config["trainer_options"] = {**dict(config.get("trainer_options", {})), **logging}
    _read_precision(config)
    _read_evaluation(config, notes)
    options = config.pop("gradient_checkpointing_kwargs", None) or {}
    if options not in ({}, {"use_reentrant": False}):
        raise UnsupportedError(
            f"`gradient_checkpointing_kwargs` is {shown(options)}, and plans use"
            " `use_reentrant=False`",
            hint="leave it out, or run the script by `memest run`",
        )
    for name, key in synonyms.items():
        if name in config:
            value = config.pop(name)
            if key in config and config[key] != value:
                raise PlanError(
                    f"`{name}` is {shown(value)} and `{key}` is {shown(config[key])}: they are one",
                    hint="leave one of them out",
                )
            if value is not None:
                config[key] = value
    for key in names:
        config.pop(key, None)
    return config, tuple(notes)


def _read_lightning(config: dict[str, Any], notes: list[str]) -> None:
    accelerator = config.pop("accelerator", None)
    uses_cpu = config.pop("use_cpu", False)
    if accelerator not in _CUDA or uses_cpu is True:
        device = accelerator if accelerator not in _CUDA else "cpu"
        raise PlanError(
            f"`accelerator` is {shown(device)}, and memest predicts the memory of CUDA GPUs only",
            hint="use `gpu`, or leave it out",
        )
    if config.get("devices") == "auto":
        config["devices"] = 1
        notes.append("`devices: auto` is taken as one GPU: give the number of the node")
    if isinstance(share := config.get("limit_val_batches"), float):
        config["limit_val_batches"] = VAL_BATCHES if share else 0
        if share:
            text = f"a share of the validation's batches is taken as {VAL_BATCHES}: they are alike"
            notes.append(text)
    if isinstance(share := config.get("val_check_interval"), float):
        config["val_check_interval"] = None
        if share:
            notes.append("validation at a share of the epoch is taken to be at the end")
    if not config.get("limit_val_batches") and "val_check_interval" in config:
        del config["val_check_interval"]  # in a config without validation


def _read_precision(config: dict[str, Any]) -> None:
    flags = {key: config.pop(key) for key in ("bf16", "fp16") if key in config}
    for key, value in flags.items():
        if not isinstance(value, bool | None):
            raise PlanError(f"`{key}` is {shown(value)}", hint="give `true` or `false`")
    active = [key for key, value in flags.items() if value]
    if len(active) > 1:
        raise PlanError("`bf16` and `fp16` are both on", hint="choose one of them")
    if flags and not active:
        config.setdefault("precision", "32-true")
    for key in active:
        precision = {"bf16": "bf16-mixed", "fp16": "16-mixed"}[key]
        if config.setdefault("precision", precision) != precision:
            raise PlanError(
                f"`{key}` means `precision` `{precision}`, which is {shown(config['precision'])}",
                hint="leave one of them out",
            )


def _read_evaluation(config: dict[str, Any], notes: list[str]) -> None:
    strategy = config.pop("eval_strategy", "no")
    steps = config.pop("eval_steps", None)
    config.pop("eval_accumulation_steps", None)
    if strategy in _OFF:
        config.pop("per_device_eval_batch_size", None)
        return
    if "limit_val_batches" not in config:
        config["limit_val_batches"] = VAL_BATCHES
        notes.append(f"an evaluation of {VAL_BATCHES} batches: set `limit_val_batches`")
    if strategy == "steps" and isinstance(steps, int) and not isinstance(steps, bool):
        micro_batches = config.get(
            "gradient_accumulation_steps", config.get("accumulate_grad_batches", 1)
        )
        interval = steps * micro_batches
        if interval <= config.get("steps", 2) * micro_batches:
            config.setdefault("val_check_interval", interval)
