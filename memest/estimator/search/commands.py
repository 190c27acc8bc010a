"""A plan as text to paste: the command that predicts it, and the lines of the training script."""

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from memest.plan import TrainingPlan
from memest.plan.optimizers import BITSANDBYTES, DEEPSPEED, OPTIMIZERS, TORCH
from memest.plan.training_plan import PLAN_KEYS

_PATHS = {TORCH: "torch.optim", BITSANDBYTES: "bitsandbytes.optim", DEEPSPEED: "deepspeed.ops.adam"}
_STRATEGIES = {"fsdp2": "ModelParallelStrategy()"}  # strategies without a name in Lightning
_QLORA_KEYS = ("use_qlora", "quant", "double_quant", "precision")  # of `BitsAndBytesConfig`


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """Facts about a model that its training script needs, such as the names of its modules."""

    class_name: str
    vision_modules: tuple[str, ...]  # names of the modules of the vision tower; empty without one
    lora_targets: tuple[str, ...]  # modules that get adapters if the plan names none; or peft's
    seq_len: int  # tokens per sample in the prediction of the plan
    image_size: int | None


def predict_command(plan: TrainingPlan) -> str:
    """Return the `memest predict` command of `plan`, without keys that have no flag (`name`).

    >>> predict_command(TrainingPlan(model_name="gpt2", act_ckpt=True, gpu=("t4",)))
    'memest predict --model gpt2 --bs 1 --precision bf16-true --optim adamw --act-ckpt --gpu t4'
    """
    defaults = TrainingPlan(model_name=plan.model_name).to_dict()
    args = ["memest", "predict"]
    for name, value in plan.to_dict().items():
        row = PLAN_KEYS[name]
        if row.flag and (row.is_always_written or value != defaults[name]):
            args += row.words(value)
    return shlex.join(args)


def training_lines(before: TrainingPlan, after: TrainingPlan, facts: ModelFacts) -> tuple[str, ...]:
    """Return the lines to change in a Lightning script of `before`, so that it runs `after`. They
    are in the order of the script; `facts` has names of the model's modules. API names are those of
    lightning 2.6, transformers 5.17, peft 0.21 and bitsandbytes 0.50."""
    lines = []
    if after.alloc_conf != before.alloc_conf:
        setting = f'os.environ["PYTORCH_ALLOC_CONF"] = "{after.alloc_conf}"'
        lines.append(f"{setting}  # before torch is imported")
    lines += [*_loading_lines(before, after, facts), *_adapter_lines(before, after, facts)]
    patterns = set(after.freeze) - set(before.freeze)
    frozen_modules = (name for name in facts.vision_modules if f"{name}.*" in patterns)
    lines += [f"model.{name}.requires_grad_(False)" for name in frozen_modules]
    if after.optim != before.optim:
        row = OPTIMIZERS[after.optim]
        options = "".join(f", {name}={value}" for name, value in row.options)
        trained = "(p for p in model.parameters() if p.requires_grad)"
        constructor = f"{_PATHS[row.library]}.{row.class_name}"
        lines.append(f"optimizer = {constructor}({trained}, lr=lr{options})")
    return (*lines, *_input_lines(before, after), *_trainer_lines(before, after))


def _loading_lines(before: TrainingPlan, after: TrainingPlan, facts: ModelFacts) -> Iterator[str]:
    arguments = ["name"]
    if after.attn_implementation != before.attn_implementation:
        arguments.append(f'attn_implementation="{after.attn_implementation}"')
    if after.use_qlora and _differ(before, after, *_QLORA_KEYS):
        if after.quant == "int8":
            options = "load_in_8bit=True"
        else:
            dtype = "torch.float16" if after.precision.startswith("16") else "torch.bfloat16"
            options = 'load_in_4bit=True, bnb_4bit_quant_type="nf4", '
            options += f"bnb_4bit_compute_dtype={dtype}"
            if after.double_quant:
                options += ", bnb_4bit_use_double_quant=True"
        if after.quant_skip:
            options += f", llm_int8_skip_modules={json.dumps(after.quant_skip)}"
        yield f"quantization = BitsAndBytesConfig({options})"
        arguments.append("quantization_config=quantization")
    if len(arguments) > 1:
        yield f"model = {facts.class_name}.from_pretrained({', '.join(arguments)})"


def _differ(before: TrainingPlan, after: TrainingPlan, *keys: str) -> bool:
    return any(getattr(before, key) != getattr(after, key) for key in keys)


def _adapter_lines(before: TrainingPlan, after: TrainingPlan, facts: ModelFacts) -> Iterator[str]:
    if after.use_qlora and _differ(before, after, *_QLORA_KEYS, "kbit_ckpt"):
        off = "" if after.kbit_checkpoints else ", use_gradient_checkpointing=False"
        yield f"model = prepare_model_for_kbit_training(model{off})"
    if after.uses_adapters and not before.uses_adapters:
        targets = after.lora_target_modules or facts.lora_targets
        option = f", target_modules={json.dumps(targets)}" if targets else ""
        yield (
            f"model = get_peft_model(model, LoraConfig(r={after.lora_r}, "
            f"lora_alpha={after.lora_alpha:g}, lora_dropout={after.lora_dropout:g}{option}))"
        )
    is_changed = _differ(before, after, "act_ckpt", "uses_adapters")
    if after.act_ckpt and is_changed and not after.kbit_checkpoints:
        yield "model.gradient_checkpointing_enable()"
        if after.uses_adapters:
            yield "model.enable_input_require_grads()"


def _input_lines(before: TrainingPlan, after: TrainingPlan) -> Iterator[str]:
    if after.seq_len != before.seq_len:
        yield f"tokenizer(texts, truncation=True, max_length={after.seq_len})"
    if after.image_size != before.image_size:
        size = after.image_size
        yield f'processor(images=images, size={{"height": {size}, "width": {size}}})'
        yield "model(**batch, interpolate_pos_encoding=True)  # where its forward takes it"
    if after.batch_size != before.batch_size:
        yield f"DataLoader(dataset, batch_size={after.batch_size})"


def _trainer_lines(before: TrainingPlan, after: TrainingPlan) -> Iterator[str]:
    arguments = []
    for name in ("accumulate_grad_batches", "precision", "devices", "strategy"):
        value = getattr(after, name)
        if value != getattr(before, name):
            arguments.append(f"{name}={_STRATEGIES.get(value) or json.dumps(value)}")
    if arguments:
        yield f"L.Trainer({', '.join(arguments)})"
