"""The values that the keys of a plan can take."""

from __future__ import annotations

PRECISIONS = ("32-true", "bf16-true", "bf16-mixed", "16-true", "16-mixed")

PRECISION_ALIASES = {"32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed"}
"""As Lightning 2.6 reads its short forms (`fabric/connector.py`)."""

OPTIMIZERS = (
    "adamw", "adamw_fused", "adamw_single", "adam", "adam_fused", "adam_single",
    "sgd", "sgd_fused", "sgd_single", "rmsprop", "rmsprop_single", "adagrad", "adagrad_single",
    "adafactor", "adafactor_foreach",
    "adam_8bit", "adamw_8bit", "paged_adam_8bit", "paged_adamw_8bit", "paged_adamw_32bit",
    "lion_8bit", "lion_32bit", "paged_lion_8bit", "paged_lion_32bit", "deepspeed_cpu",
)  # fmt: skip

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

LORA_BIASES = ("none", "all", "lora_only")

ALL_LINEAR = "all-linear"
"""In place of names in `lora_target_modules`: every linear layer but the output head."""

IGNORED_KEYS = frozenset(
    """
    lr learning_rate weight_decay betas eps num_workers max_epochs max_steps min_epochs num_epochs
    epochs limit_train_batches limit_val_batches log_every_n_steps val_check_interval seed shuffle
    pin_memory persistent_workers lr_scheduler scheduler warmup_steps warmup_ratio experiment_name
    project run_name output_dir save_dir logger log_dir enable_checkpointing enable_progress_bar
    dataset dataset_name data_dir train_size val_size accelerator note expected
    """.split()
)
"""Keys of lab configs that do not touch the memory of the training step."""
