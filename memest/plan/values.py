"""Values of plan keys, and the syntax of `lengths`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from memest.errors import PlanError, shown
from memest.plan.reading import read_limited

PRECISIONS = ("32-true", "bf16-true", "bf16-mixed", "16-true", "16-mixed")

PRECISION_ALIASES = {"32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed"}
"""Short forms of Lightning 2.6 (`fabric/connector.py`)."""

LOOPS = ("lightning", "transformers", "plain")  # Trainers of two libraries, and a user's own
LOGGING = (
    "logging_steps", "logging_strategy", "logging_first_step", "logging_nan_inf_filter",
)  # fmt: skip
"""Keys of `TrainingArguments` that make scalars on the GPU: `trainer_options`."""

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

ALL_LINEAR = "all-linear"  # in `lora_target_modules`: all except the output head
IGNORED_KEYS = frozenset(
    """
    lr learning_rate betas eps num_workers max_epochs max_steps min_epochs num_epochs epochs
    limit_train_batches log_every_n_steps seed shuffle pin_memory persistent_workers lr_scheduler
    scheduler warmup_steps warmup_ratio experiment_name project run_name output_dir save_dir logger
    log_dir enable_checkpointing enable_progress_bar dataset dataset_name data_dir train_size
    val_size note expected
    """.split()
)
"""Keys of lab configs that do not affect the memory of a step, as a test checks."""

MAX_LENGTHS = 10_000  # largest number of micro-batches, each of which is run
_MAX_FILE_BYTES = 1 << 20


def read_lengths(value: Any) -> tuple[int, ...]:
    """Return the numbers of a list, of a text such as `512,96`, or of a file: JSON, or one per
    line.

    Raises:
        PlanError: it is none of these, or a number is not positive.
    """
    items = value
    if isinstance(value, str | Path):
        text = str(value)
        if not re.fullmatch(r"[-+\d,\s]+", text):
            text = read_limited(Path(text), _MAX_FILE_BYTES, what="a list of lengths")
        items = _numbers(text)
    if isinstance(items, int) and not isinstance(items, bool):
        items = [items]
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
    """Return the optimizer steps for which there are lengths; at least one."""
    is_count = isinstance(num_micro_batches, int) and num_micro_batches > 0
    return max(1, len(lengths) // (num_micro_batches if is_count else 1))


def _numbers(text: str) -> list[Any]:
    if text.lstrip().startswith("["):
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        return found if isinstance(found, list) else [text[:40]]
    words = text.replace(",", " ").split()
    return [int(word) if word.lstrip("+-").isdigit() else word for word in words]
