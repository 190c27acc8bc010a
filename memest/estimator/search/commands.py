"""A plan as text to paste: the command that predicts it, the lines of the training script."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any

from memest.plan import TrainingPlan
from memest.units import GIB

_FLAGS = {
    "model_name": "--model", "batch_size": "--bs", "accumulate_grad_batches": "--acc",
    "precision": "--precision", "optim": "--optim", "momentum": "--momentum",
    "lora_r": "--lora-r", "lora_alpha": "--lora-alpha", "lora_dropout": "--lora-dropout",
    "lora_target_modules": "--lora-target", "quant_skip": "--quant-skip",
    "strategy": "--strategy", "devices": "--devices", "sharding_strategy": "--sharding",
    "shard_size": "--shard-size", "wrap_classes": "--wrap", "seq_len": "--seq-len",
    "activation_checkpointing_policy": "--ckpt-policy", "bucket_cap_mb": "--bucket-cap-mb",
    "reduce_bucket_size": "--reduce-bucket-size", "host_memory": "--host-memory",
    "allgather_bucket_size": "--allgather-bucket-size",
    "lora_modules_to_save": "--lora-save", "lora_bias": "--lora-bias", "quant": "--quant",
    "image_size": "--image-size", "attn_implementation": "--attn", "freeze": "--freeze",
    "gpu": "--gpu", "gpu_memory": "--gpu-memory", "memory_limit": "--memory-limit",
    "steps": "--steps", "loop": "--loop", "weight_decay": "--weight-decay",
    "gradient_clip_val": "--clip", "gradient_clip_algorithm": "--clip-algorithm",
    "num_nodes": "--num-nodes", "limit_val_batches": "--val-batches", "val_batch_size": "--val-bs",
    "val_check_interval": "--val-interval", "alloc_conf": "--alloc-conf",
    "optim_options": "--optim-options", "lengths": "--lengths", "quant_load": "--quant-load",
}  # fmt: skip
_SWITCHES = {
    "act_ckpt": ("--act-ckpt", "--no-act-ckpt"),
    "use_lora": ("--lora", "--no-lora"),
    "use_qlora": ("--qlora", "--no-qlora"),
    "use_rslora": ("--rslora", "--no-rslora"),
    "use_dora": ("--dora", "--no-dora"),
    "nesterov": ("--nesterov", "--no-nesterov"),
    "double_quant": ("--double-quant", "--no-double-quant"),
    "kbit_ckpt": ("--kbit-ckpt", "--no-kbit-ckpt"),
    "padded": ("--padded", "--no-padded"),
    "gradient_as_bucket_view": ("--bucket-view", "--no-bucket-view"),
    "tie_word_embeddings": ("--tie-embeddings", "--untie-embeddings"),
}
_ALWAYS = ("model_name", "batch_size", "precision", "optim")
"""Keys that a reader wants to see, be they defaults or not."""

_OPTIMIZER_CALLS = {
    "adamw_fused": ("torch.optim.AdamW", ", fused=True"),
    "adam_fused": ("torch.optim.Adam", ", fused=True"),
    "sgd": ("torch.optim.SGD", ""),
    "adam_8bit": ("bitsandbytes.optim.Adam8bit", ""),
    "adamw_8bit": ("bitsandbytes.optim.AdamW8bit", ""),
    "paged_adam_8bit": ("bitsandbytes.optim.PagedAdam8bit", ""),
    "paged_adamw_8bit": ("bitsandbytes.optim.PagedAdamW8bit", ""),
    "deepspeed_cpu": ("deepspeed.ops.adam.DeepSpeedCPUAdam", ""),
}
_STRATEGIES = {"fsdp2": "ModelParallelStrategy()"}
"""By their names in a plan, where Lightning has none; `configure_model` shards by `fully_shard`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """What advice needs to know of a model beside its prediction."""

    class_name: str
    vision_modules: tuple[str, ...]
    """Names of the modules that are the vision tower; empty where there is none."""

    lora_targets: tuple[str, ...]
    """The modules that get adapters where the plan names none; empty is peft's own choice."""

    seq_len: int
    """Tokens per sample that the prediction of the plan used."""

    image_size: int | None


def predict_command(plan: TrainingPlan) -> str:
    """The `memest predict` that predicts `plan`; its name and `trainer_options` have no flag.

    >>> predict_command(TrainingPlan(model_name="gpt2", act_ckpt=True, gpu=("t4",)))
    'memest predict --model gpt2 --bs 1 --precision bf16-true --optim adamw --act-ckpt --gpu t4'
    """
    defaults = TrainingPlan(model_name=plan.model_name).to_dict()
    words = ["memest", "predict"]
    for key, value in plan.to_dict().items():
        if value == defaults[key] and key not in _ALWAYS:
            continue
        if key in _SWITCHES:
            words.append(_SWITCHES[key][0 if value else 1])
        elif key in _FLAGS:
            is_repeated = isinstance(value, list) and key != "lengths"
            for item in value if is_repeated else [value]:
                words += [_FLAGS[key], _text(key, item)]
    return shlex.join(words)


def _text(key: str, value: Any) -> str:
    if key in ("gpu_memory", "memory_limit", "host_memory") and value % GIB == 0:
        return f"{value // GIB}GiB"
    if key == "lengths":
        return ",".join(map(str, value))
    if key == "optim_options":
        return ",".join(f"{name}={option}" for name, option in value.items())
    return str(value)


def training_lines(before: TrainingPlan, after: TrainingPlan, facts: ModelFacts) -> tuple[str, ...]:
    """The lines of a Lightning script that turn `before` into `after`, in the order of a script.

    Names are those of lightning 2.6, transformers 5.17, peft 0.21 and bitsandbytes 0.50; `name`,
    `model` and `dataset` stand for the reader's own.
    """
    return (
        *_allocator_lines(before, after),
        *_loading_lines(before, after, facts),
        *_adapter_lines(before, after, facts),
        *_checkpointing_lines(before, after),
        *_freezing_lines(before, after, facts),
        *_optimizer_lines(before, after),
        *_input_lines(before, after),
        *_trainer_lines(before, after),
    )


def _allocator_lines(before: TrainingPlan, after: TrainingPlan) -> list[str]:
    if after.alloc_conf == before.alloc_conf:
        return []
    return [f'os.environ["PYTORCH_ALLOC_CONF"] = "{after.alloc_conf}"  # before torch is imported']


def _loading_lines(before: TrainingPlan, after: TrainingPlan, facts: ModelFacts) -> list[str]:
    arguments = ["name"]
    if after.attn_implementation != before.attn_implementation:
        arguments.append(f'attn_implementation="{after.attn_implementation}"')
    lines = []
    if after.use_qlora and _qlora_keys(after) != _qlora_keys(before):
        half = "torch.float16" if after.precision.startswith("16") else "torch.bfloat16"
        double = ", bnb_4bit_use_double_quant=True" if after.double_quant else ""
        kind = 'load_in_4bit=True, bnb_4bit_quant_type="nf4", '
        kind += f"bnb_4bit_compute_dtype={half}{double}"
        if after.quant == "int8":
            kind = "load_in_8bit=True"
        if after.quant_skip:
            kind += f", llm_int8_skip_modules={_list(after.quant_skip)}"
        lines.append(f"quantization = BitsAndBytesConfig({kind})")
        arguments.append("quantization_config=quantization")
    if len(arguments) > 1:
        lines.append(f"model = {facts.class_name}.from_pretrained({', '.join(arguments)})")
    return lines


def _qlora_keys(plan: TrainingPlan) -> tuple[Any, ...]:
    return plan.use_qlora, plan.quant, plan.double_quant, plan.precision


def _adapter_lines(before: TrainingPlan, after: TrainingPlan, facts: ModelFacts) -> list[str]:
    lines = []
    if after.use_qlora and (_qlora_keys(after), after.kbit_ckpt) != (
        _qlora_keys(before),
        before.kbit_ckpt,
    ):
        off = "" if after.kbit_checkpoints else ", use_gradient_checkpointing=False"
        lines.append(f"model = prepare_model_for_kbit_training(model{off})")
    if after.uses_adapters and not before.uses_adapters:
        targets = after.lora_target_modules or facts.lora_targets
        named = f", target_modules={_list(targets)}" if targets else ""
        lines.append(
            f"model = get_peft_model(model, LoraConfig(r={after.lora_r}, "
            f"lora_alpha={after.lora_alpha:g}, lora_dropout={after.lora_dropout:g}{named}))"
        )
    return lines


def _checkpointing_lines(before: TrainingPlan, after: TrainingPlan) -> list[str]:
    changed = (after.act_ckpt, after.uses_adapters) != (before.act_ckpt, before.uses_adapters)
    if not after.act_ckpt or after.kbit_checkpoints or not changed:
        return []
    lines = ["model.gradient_checkpointing_enable()"]
    return [*lines, "model.enable_input_require_grads()"] if after.uses_adapters else lines


def _freezing_lines(before: TrainingPlan, after: TrainingPlan, facts: ModelFacts) -> list[str]:
    added = set(after.freeze) - set(before.freeze)
    return [
        f"model.{name}.requires_grad_(False)"
        for name in facts.vision_modules
        if f"{name}.*" in added
    ]


def _optimizer_lines(before: TrainingPlan, after: TrainingPlan) -> list[str]:
    if after.optim == before.optim:
        return []
    call, option = _OPTIMIZER_CALLS[after.optim]
    trained = "(p for p in model.parameters() if p.requires_grad)"
    return [f"optimizer = {call}({trained}, lr=lr{option})"]


def _input_lines(before: TrainingPlan, after: TrainingPlan) -> list[str]:
    lines = []
    if after.seq_len != before.seq_len:
        lines.append(f"tokenizer(texts, truncation=True, max_length={after.seq_len})")
    if after.image_size != before.image_size:
        size = after.image_size
        lines.append(f'processor(images=images, size={{"height": {size}, "width": {size}}})')
        lines.append("model(**batch, interpolate_pos_encoding=True)  # where its forward takes it")
    if after.batch_size != before.batch_size:
        lines.append(f"DataLoader(dataset, batch_size={after.batch_size})")
    return lines


def _trainer_lines(before: TrainingPlan, after: TrainingPlan) -> list[str]:
    arguments = []
    if after.accumulate_grad_batches != before.accumulate_grad_batches:
        arguments.append(f"accumulate_grad_batches={after.accumulate_grad_batches}")
    if after.precision != before.precision:
        arguments.append(f'precision="{after.precision}"')
    if after.devices != before.devices:
        arguments.append(f"devices={after.devices}")
    if after.strategy != before.strategy:
        known = _STRATEGIES.get(after.strategy, f'"{after.strategy}"')
        arguments.append(f"strategy={known}")
    return [f"L.Trainer({', '.join(arguments)})"] if arguments else []


def _list(names: tuple[str, ...]) -> str:
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"
