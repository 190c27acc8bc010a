"""QLoRA's base: layers that bitsandbytes quantises, while they are loaded or in place."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from memest.errors import PlanError
from memest.plan import TrainingPlan
from memest.plan.keys import IN_PLACE

THRESHOLD = 6.0  # `llm_int8_threshold`, the default of transformers' `BitsAndBytesConfig`
ASSUMPTION = (
    f"LLM.int8: no activation reaches {THRESHOLD}, so no column is kept in 16 bit; those of trained"
    " checkpoints do, and so can products of a gated MLP with random weights, which costs their"
    " columns of input and weight in 16 bit"
)


def compute_dtype(plan: TrainingPlan) -> torch.dtype:
    """Return the 16-bit dtype in which a 4-bit layer multiplies (`bnb_4bit_compute_dtype`)."""
    return torch.float16 if plan.precision.startswith("16") else torch.bfloat16


def quantization_config(plan: TrainingPlan) -> Any:
    """Return the `BitsAndBytesConfig` of `plan`."""
    import transformers

    config: Any = transformers.BitsAndBytesConfig
    skip = list(plan.quant_skip) or None
    if plan.quant == "int8":
        return config(load_in_8bit=True, llm_int8_skip_modules=skip)
    return config(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute_dtype(plan),
        bnb_4bit_use_double_quant=plan.double_quant, llm_int8_skip_modules=skip,
    )  # fmt: skip


def skipped_modules(model: Any, plan: TrainingPlan) -> list[str]:
    """Return the names of modules that stay unquantised, as `Bnb4BitHfQuantizer` collects them."""
    from transformers.quantizers.base import HfQuantizer

    fp32_modules = None if plan.quant_load == IN_PLACE else model._keep_in_fp32_modules
    names: list[str] = HfQuantizer.get_modules_to_not_convert(
        model, list(plan.quant_skip) or None, fp32_modules
    )
    return sorted(names)


def layers_to_quantize(model: nn.Module, skip: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """Return (name, layer) of each layer that transformers quantises (`replace_with_bnb_linear`).

    `skip` has patterns of names of modules to leave out. The list keeps all original layers alive
    until a loop over it ends.

    Raises:
        PlanError: no layer is left to quantise.
    """
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers import quantizers_utils

    layers: list[tuple[str, nn.Module]] = [
        (name, module)
        for name, module in model.named_modules()
        if type(module) is nn.Linear or isinstance(module, Conv1D)
    ]
    converts = getattr(quantizers_utils, "should_convert_module", None)
    if converts is None:  # before transformers 5 `_replace_with_bnb_linear` had the test inside
        converts = lambda name, skip: not any(f"{k}." in name or k == name for k in skip)  # noqa: E731
    matches = [(name, module) for name, module in layers if converts(name, list(skip))]
    if not matches:
        raise _nothing_to_quantize(model, [name for name, _ in layers])
    return matches


def _nothing_to_quantize(model: nn.Module, skipped: Sequence[str]) -> PlanError:
    classes = sorted({type(m).__name__ for m in model.modules() if isinstance(m, nn.Linear)})
    classes = [name for name in classes if name != "Linear"]
    if skipped:
        why = f"its only linear layers stay unquantised: {', '.join(f'`{n}`' for n in skipped[:3])}"
    elif classes:
        why = f"transformers converts no {', '.join(f'`{name}`' for name in classes)}"
    else:
        why = "bitsandbytes quantises `nn.Linear` and the `Conv1D` of transformers"
    return PlanError(
        f"`{type(model).__name__}` has no linear layer to quantise",
        hint=f"{why}; leave `use_qlora` out, or train adapters on the whole base with `use_lora`",
    )


def quantize(model: nn.Module, plan: TrainingPlan, skip: Sequence[str] = ()) -> None:
    """Replace the linear layers of `model` by bitsandbytes' `Linear4bit` (nf4) or `Linear8bitLt`.

    `skip` has patterns of names of modules to leave alone. All original layers stay alive until the
    end, as in transformers' loop.

    Raises:
        PlanError: no layer is left to quantise.
    """
    original: Any
    for name, original in layers_to_quantize(model, skip):
        layer = _quantize_layer(original, plan)
        if original.bias is not None:
            layer.bias = nn.Parameter(original.bias.detach(), requires_grad=False)
        layer.train(original.training)
        model.set_submodule(name, layer)
        del layer
    model.__dict__["is_loaded_in_8bit" if plan.quant == "int8" else "is_loaded_in_4bit"] = True


def _quantize_layer(original: Any, plan: TrainingPlan) -> Any:
    """Return a bitsandbytes layer with the quantised weight of `original`, without its bias."""
    import bitsandbytes.nn as bnb

    # transformers' Conv1D stores the weight as (in_features, out_features)
    weight = original.weight.data if isinstance(original, nn.Linear) else original.weight.data.T
    rows, columns = weight.shape
    options: dict[str, Any] = {"bias": original.bias is not None, "device": "meta"}
    if plan.quant == "int8":
        layer = bnb.Linear8bitLt(
            columns, rows, has_fp16_weights=False, threshold=THRESHOLD, **options
        )
        source = weight.to("cpu")  # transformers quantises int8 through the host
        packed = bnb.Int8Params(source, requires_grad=False, has_fp16_weights=False)
    else:
        form: dict[str, Any] = {"compress_statistics": plan.double_quant, "quant_type": "nf4"}
        layer = bnb.Linear4bit(columns, rows, compute_dtype=compute_dtype(plan), **form, **options)
        packed = bnb.Params4bit(weight, requires_grad=False, module=layer, **form)
    layer.weight = packed.to(weight.device)
    return layer


def quant_state_tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the scales and codes of the quantised weights of `model`, which are no parameters: the
    nested `quant_state` of `Params4bit`, and the `SCB` of `Int8Params`."""
    for module in model.modules():
        weight = module._parameters.get("weight")
        state = getattr(weight, "quant_state", None)
        while state is not None:
            tensors = (state.absmax, state.code, state.offset)
            yield from (tensor for tensor in tensors if isinstance(tensor, torch.Tensor))
            state = state.state2
        scales = getattr(weight, "SCB", None)
        if isinstance(scales, torch.Tensor):
            yield scales
