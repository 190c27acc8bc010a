"""The values that the keys of a plan can take."""

from __future__ import annotations

PRECISIONS = ("32-true", "bf16-true", "bf16-mixed", "16-true", "16-mixed")

PRECISION_ALIASES = {"32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed"}
"""As Lightning 2.6 reads its short forms (`fabric/connector.py`)."""

LOOPS = ("lightning", "transformers", "plain")
"""Lightning's Trainer, the Trainer of transformers, and a loop of a user's own."""

LOGGING = (
    "logging_steps", "logging_strategy", "logging_first_step", "logging_nan_inf_filter",
)  # fmt: skip
"""What of `TrainingArguments` makes scalars on the GPU: `trainer_options`."""

CLIPPING = ("norm", "value")

STRATEGIES = (
    "auto", "ddp", "ddp_find_unused_parameters_true", "fsdp", "fsdp2",
    "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3",
    "deepspeed_stage_1_offload", "deepspeed_stage_2_offload", "deepspeed_stage_3_offload",
)  # fmt: skip
"""As Lightning 2.6 registers them; `fsdp` is its FSDPStrategy (FSDP1), `fsdp2` its
ModelParallelStrategy with `fully_shard`."""

SHARDINGS = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD")
"""Of FSDP1; FSDP2 knows all but `NO_SHARD`."""

FLASH_ATTENTION_2 = "flash_attention_2"
ATTENTIONS = ("sdpa", "eager", FLASH_ATTENTION_2)

QUANTISATIONS = ("nf4", "int8")

FROM_PRETRAINED, IN_PLACE = "from_pretrained", "in_place"
QUANT_LOADS = (FROM_PRETRAINED, IN_PLACE)
"""`from_pretrained(quantization_config=...)` quantises each weight as it is loaded. In place,
linear layers of a model that is on the GPU in 16 bits are replaced one by one."""

LORA_BIASES = ("none", "all", "lora_only")

ALL_LINEAR = "all-linear"
"""In place of names in `lora_target_modules`: every linear layer but the output head."""

IGNORED_KEYS = frozenset(
    """
    lr learning_rate betas eps num_workers max_epochs max_steps min_epochs num_epochs epochs
    limit_train_batches log_every_n_steps seed shuffle pin_memory persistent_workers lr_scheduler
    scheduler warmup_steps warmup_ratio experiment_name project run_name output_dir save_dir logger
    log_dir enable_checkpointing enable_progress_bar dataset dataset_name data_dir train_size
    val_size note expected
    """.split()
)
"""Keys of lab configs that do not touch the memory of a step: a test runs each with and without."""
