"""The ladder of the lab: ways to make one fine-tune smaller, and the largest batch of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from memest.engines import find_engine
from memest.errors import MemestError, raise_if_all_failed, result_or_error
from memest.estimator.hardware.gpus import Gpu
from memest.estimator.search.largest import Largest, largest
from memest.plan import TrainingPlan

TECHNIQUES: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "32-true"},
    "mixed bf16": {"precision": "bf16-mixed"},
    "bf16": {"precision": "bf16-true"},
    "bf16, ckpt": {"precision": "bf16-true", "act_ckpt": True},
    "bf16, sgd": {"precision": "bf16-true", "optim": "sgd"},
    "bf16, adam_8bit": {"precision": "bf16-true", "optim": "adam_8bit"},
    "bf16, adam_8bit, ckpt": {"precision": "bf16-true", "optim": "adam_8bit", "act_ckpt": True},
    "LoRA fp32": {"precision": "32-true", "use_lora": True},
    "LoRA bf16": {"precision": "bf16-true", "use_lora": True},
    "LoRA bf16, ckpt": {"precision": "bf16-true", "use_lora": True, "act_ckpt": True},
    "QLoRA fp32": {"precision": "32-true", "use_qlora": True},
    "QLoRA bf16": {"precision": "bf16-true", "use_qlora": True},
    "QLoRA bf16, no ckpt": {"precision": "bf16-true", "use_qlora": True, "kbit_ckpt": False},
}
"""Rows of the lab's tables on one GPU, from the baseline on, and their combinations; AdamW where no
optimizer is named. QLoRA checkpoints activations by default, as peft does.
"""

_DECIDED = {
    "precision", "optim", "momentum", "nesterov", "act_ckpt", "use_lora", "use_qlora",
    "double_quant", "quant", "kbit_ckpt",
}  # fmt: skip
"""Keys of a plan that a technique sets."""

_OF_ADAPTERS = {
    "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_modules_to_save",
    "lora_bias", "use_rslora", "use_dora",
}  # fmt: skip
_OF_QLORA = {"quant_skip", "quant_load"}
_OF_FULL = {"freeze"}


@dataclass(frozen=True, slots=True)
class TechniqueRow:
    """One technique on one GPU."""

    technique: str
    gpu: str
    largest: Largest | None
    error: str = ""  # why there is none: the technique does not go with the model

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        found = {} if self.largest is None else self.largest.to_dict()
        return {"technique": self.technique, "gpu": self.gpu, "error": self.error} | found


def technique_values(plan: TrainingPlan) -> dict[str, dict[str, Any]]:
    """Return the values of `plan` per technique, without keys that a technique ignores."""
    values = {f.name: getattr(plan, f.name) for f in fields(plan) if f.name not in _DECIDED}
    made = {}
    for name, changes in TECHNIQUES.items():
        has_adapters = "use_lora" in changes or "use_qlora" in changes
        unused = _OF_FULL if has_adapters else _OF_ADAPTERS
        unused = unused if "use_qlora" in changes else unused | _OF_QLORA
        kept = {k: v for k, v in values.items() if k not in unused}
        if plan.offloads:  # which works with one optimizer only
            kept["optim"] = plan.optim
        made[name] = kept | changes | {"name": f"{plan.label}: {name}"}
    return made


def largest_of_all(
    plan: TrainingPlan,
    gpus: Sequence[Gpu],
    key: str = "batch_size",
    *,
    jobs: int | None = None,
    trust_remote_code: bool = False,
) -> list[TechniqueRow]:
    """Return the largest value of `key` under every technique on each GPU, technique by technique.

    A technique that cannot be run gives rows with an `error`.

    Raises:
        MemestError: none of the techniques can be run; the error is the first one's.
    """
    one = partial(
        result_or_error, _rows, gpus=tuple(gpus), key=key, trust_remote_code=trust_remote_code
    )
    tasks = list(technique_values(plan).items())
    found = find_engine("local", jobs).map(
        one, tasks, died=lambda task, error: error, label=lambda task: f"{plan.label}, {task[0]}"
    )
    raise_if_all_failed(found)
    rows: list[TechniqueRow] = []
    for (name, _), result in zip(tasks, found, strict=True):
        if isinstance(result, MemestError):
            rows += [TechniqueRow(name, gpu.name, None, str(result)) for gpu in gpus]
        else:
            rows += result
    return rows


def _rows(
    task: tuple[str, Mapping[str, Any]], *, gpus: tuple[Gpu, ...], key: str, trust_remote_code: bool
) -> list[TechniqueRow]:
    name, values = task
    found = largest(TrainingPlan(**values), gpus, key, trust_remote_code=trust_remote_code)
    return [TechniqueRow(name, row.gpu, row) for row in found]
