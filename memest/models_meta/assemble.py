"""Assembly of the module that a plan trains: build, tie, quantise, adapt, freeze, cast, checkpoint.

Measured runs and predictions share this sequence, with peft's and bitsandbytes' own layers.
"""

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from memest.errors import PlanError, UnsupportedError
from memest.models_meta import build, quantized
from memest.models_meta.batch import num_image_tokens, unwrapped
from memest.models_meta.build import BuiltModel, build_model
from memest.models_meta.flash_attention import mark_quantized
from memest.models_meta.registry import ModelConfig
from memest.plan import TrainingPlan
from memest.plan.keys import ALL_LINEAR, FLASH_ATTENTION_2, IN_PLACE

DEFAULT_SEQ_LEN = {"image-text": 25, "text": 512, "audio": 128, "image": 1}
"""Tokens per sample where the plan gives none. 25 for image-text matches published verdicts of the
lab's captions; the others are assumed. Every report prints the value used.
"""


def assemble(
    plan: TrainingPlan, config: ModelConfig, *, device: torch.device | str,
    load: Callable[[BuiltModel], nn.Module] | None = None,
    initialise: Callable[[nn.Module], Any] | None = None,
) -> BuiltModel:  # fmt: skip
    """Build the model of `config`, and quantise, adapt, freeze and cast it as `plan` specifies.

    `load(built)` returns the model `built`, which is on meta, with weights on `device`. It
    quantises them if the plan quantises while loading. If `load` is None, the model is built on
    `device`. `initialise(model)` then sets weights; None leaves them as they are.

    Raises:
        MemestError: the plan's adapters, patterns or options do not fit the model.
    """
    built = build_model(
        config, dtype=load_dtype(plan, config), attn_implementation=plan.attn_implementation,
        device=device if load is None else "meta",
    )  # fmt: skip
    notes = list(built.notes)
    if plan.kbit_checkpoints and not (plan.kbit_ckpt or plan.act_ckpt):
        notes.append(
            "`prepare_model_for_kbit_training` of peft turns activation checkpointing on, which is"
            " its default; `kbit_ckpt: false` leaves it off"
        )
    if plan.use_qlora:  # raise if no layer fits; transformers only logs a warning
        quantized.layers_to_quantize(built.module, quantized.skipped_modules(built.module, plan))
    model = built.module if load is None else load(built)
    if plan.tie_word_embeddings is not None:
        build.set_tied_embeddings(model, plan.tie_word_embeddings)
    if initialise is not None:
        initialise(model)
    if plan.quant_load == IN_PLACE:
        quantized.quantize(model, plan, quantized.skipped_modules(model, plan))
        mark_quantized(model)
    if plan.use_qlora:
        _prepare_for_kbit_training(model, plan)
    if plan.uses_adapters:
        targets: Any = plan.lora_target_modules or lora_targets(model)
        if targets == (ALL_LINEAR,):
            targets = ALL_LINEAR  # which peft expects as text
        model = apply_lora(model, plan, targets)
    if plan.freeze:
        build.freeze(model, plan.freeze)
    if input_dtype(plan) is not None:
        model = model.to(input_dtype(plan))
    model.train()
    if plan.act_ckpt and not plan.kbit_checkpoints:
        _enable_checkpointing(model, plan)
    return BuiltModel(module=model, notes=tuple(notes))


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that the optimizer gets; `PlanError` if there are none."""
    params = [p for p in model.parameters() if p.requires_grad]
    if not params:
        raise PlanError("nothing is left to train", hint="narrow `freeze`")
    return params


def describe_model(model: nn.Module) -> dict[str, Any]:
    """Return `class` (the model's class name), `num_params` and `num_trainable_params` for a
    report. A quantised weight counts by its bytes, so two of 4 bits count as one."""
    return {
        "class": type(unwrapped(model)).__name__,
        "num_params": sum(p.numel() for p in model.parameters()),
        "num_trainable_params": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }


def loss_of(model: nn.Module, inputs: dict[str, Any], output: str) -> Tensor:
    """Run the model on `inputs`. Return its loss if `output` is "loss", else the float32 mean of
    its output field `output`."""
    out = model(**inputs)
    return out.loss if output == "loss" else getattr(out, output).float().mean()


def half_dtype(plan: TrainingPlan) -> torch.dtype:
    """Return bfloat16 if the plan's precision begins with `bf16`, else float16."""
    return torch.bfloat16 if plan.precision.startswith("bf16") else torch.float16


def input_dtype(plan: TrainingPlan) -> torch.dtype | None:
    """Return the dtype to which Lightning casts float inputs: 16 bits for `*-true`, else None."""
    return half_dtype(plan) if plan.precision in ("bf16-true", "16-true") else None


def load_dtype(plan: TrainingPlan, config: ModelConfig) -> torch.dtype:
    """Return the dtype in which the weights are loaded.

    Without QLoRA it is float32, or the 16-bit dtype of a precision such as `bf16-true`. With QLoRA
    it is the dtype of the checkpoint. QLoRA has two exceptions, both with 16 bits: quantisation in
    place, and FlashAttention-2 if the checkpoint is not in 16 bits.
    """
    if not plan.use_qlora:
        return input_dtype(plan) or torch.float32
    is_half = config.saved_dtype in (torch.float16, torch.bfloat16)
    if plan.quant_load == IN_PLACE or (
        plan.attn_implementation == FLASH_ATTENTION_2 and not is_half
    ):
        return input_dtype(plan) or quantized.compute_dtype(plan)
    return config.saved_dtype


def sequence_length(plan: TrainingPlan, config: ModelConfig) -> int:
    """Return the tokens per sample that the plan gives, or else a default.

    The plan gives `seq_len`, or `lengths` if the length changes between micro-batches. The result
    for `lengths` is the longest of them. The default depends on the model's modality, such as text.
    The default is cut to the maximal number of tokens of the model.

    Raises:
        PlanError: the plan gives more tokens than the maximal number of the model.
    """
    positions = build.num_positions(config.pretrained)
    modality = config.entry.modality if config.entry is not None else "text"
    requested = max(plan.lengths, default=plan.seq_len)
    if requested is None:
        default = DEFAULT_SEQ_LEN[modality] + num_image_tokens(config.pretrained, plan.image_size)
        return min(default, positions) if positions else default
    if positions is not None and requested > positions:
        key = "lengths" if plan.lengths else "seq_len"
        raise PlanError(
            f"`{key}` {requested} is beyond the {positions} positions of `{config.name}`",
            hint=f"give at most {positions}",
        )
    return requested


def _prepare_for_kbit_training(model: Any, plan: TrainingPlan) -> None:
    """Freeze the model and cast its unquantised weights to fp32, by peft's function of this name.
    It also turns activation checkpointing on, unless the plan turns that off."""
    from peft import prepare_model_for_kbit_training

    options: dict[str, Any] = {}
    if "auto_clear_cache" in signature(prepare_model_for_kbit_training).parameters:
        # older peft clears nothing; in place, runs were measured without it
        options["auto_clear_cache"] = plan.loads_quantized
    try:
        prepare_model_for_kbit_training(  # type: ignore[no-untyped-call]
            model, use_gradient_checkpointing=plan.kbit_checkpoints, **options
        )
    except ValueError as error:
        raise UnsupportedError(
            "`prepare_model_for_kbit_training` turns activation checkpointing on, which"
            f" `{plan.model_name}` does not offer: {error}",
            hint="add `kbit_ckpt: false` (`--no-kbit-ckpt`)",
        ) from error


def _enable_checkpointing(model: Any, plan: TrainingPlan) -> None:
    try:
        model.gradient_checkpointing_enable()
        if plan.uses_adapters:
            model.enable_input_require_grads()
    except ValueError as error:
        raise UnsupportedError(
            f"`act_ckpt` is not offered by `{plan.model_name}`: {error}",
            hint="leave `act_ckpt` out",
        ) from error


def apply_lora(
    model: nn.Module, plan: TrainingPlan, target_modules: Sequence[str] | str | None
) -> nn.Module:
    """Put the plan's LoRA adapters on the targets of `model`, freeze everything else, and return
    the `PeftModel`.

    peft casts 16-bit adapters to fp32 (`autocast_adapter_dtype`). An adapter layer casts its input
    to fp32 for the adapter. It adds the adapter's output to the output of the base layer, and casts
    the sum to the dtype of the base layer's output. A later cast of the model to 16 bits also casts
    the adapters.

    Args:
        model: quantised or not.
        plan: rank, scale, dropout and other options of the adapters.
        target_modules: the last parts of module names, a regular expression of whole names,
            `all-linear`, or None for peft's default for the model's type.

    Raises:
        PlanError: nothing matches `target_modules`, or a match cannot carry an adapter.
    """
    from peft import LoraConfig, get_peft_model  # takes a second

    targets = target_modules if isinstance(target_modules, str | None) else list(target_modules)
    config = LoraConfig(
        r=plan.lora_r,
        lora_alpha=int(plan.lora_alpha),
        lora_dropout=plan.lora_dropout,
        target_modules=targets,
        bias=plan.lora_bias,  # type: ignore[arg-type]
        modules_to_save=list(plan.lora_modules_to_save) or None,
        use_rslora=plan.use_rslora,
        use_dora=plan.use_dora,
    )
    try:
        peft_model = get_peft_model(model, config)
    except ValueError as error:
        names = linear_names(model)
        patterns = f"`{targets}`" if isinstance(targets, str | None) else _quoted(targets)
        raise PlanError(
            f"`lora_target_modules` {patterns} does not fit `{type(model).__name__}`: {error}",
            hint=f"its linear layers are called {_quoted(names) or 'nothing: it has none'}",
        ) from error
    from peft.utils import ModulesToSaveWrapper

    paths = [n for n, m in peft_model.named_modules() if isinstance(m, ModulesToSaveWrapper)]
    for name in plan.lora_modules_to_save:
        if not any(path == name or path.endswith(f".{name}") for path in paths):
            raise PlanError(
                f"`lora_modules_to_save` names `{name}`, which the model does not have",
                hint="give the last parts of names of modules, such as `lm_head`",
            )
    return peft_model


def linear_names(model: nn.Module) -> list[str]:
    """Return the distinct last parts of the names of the linear layers in `model`, in order."""
    names = (
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    )
    return list(dict.fromkeys(names))


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def lora_targets(model: Any) -> Sequence[str] | None:
    """Return the names of the model's query and value projections, or of one fused projection with
    both. None, for a model without these, leaves the choice to peft."""
    names = set(linear_names(model))
    for pair in (["q_proj", "v_proj"], ["q", "v"], ["query", "value"]):
        if names.issuperset(pair):
            return pair
    for fused in ("qkv_proj", "query_key_value", "c_attn"):  # one projection for q, k and v
        if fused in names:
            return [fused]
    return None
