"""LoRA adapters, put on a model by peft."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from memest.errors import PlanError
from memest.plan import TrainingPlan


def apply_lora(
    model: nn.Module, plan: TrainingPlan, target_modules: Sequence[str] | str | None
) -> nn.Module:
    """Put the plan's LoRA adapters on the targets of `model`, freeze everything else, and return
    the `PeftModel`.

    peft casts 16-bit adapters to fp32 (`autocast_adapter_dtype`). Adapter layers cast their input
    to fp32 and cast their sum back. A later cast of the model to 16 bits also casts the adapters.

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
        adapted = get_peft_model(model, config)
    except ValueError as error:
        names = linear_names(model)
        wanted = f"`{targets}`" if isinstance(targets, str | None) else _quoted(targets)
        raise PlanError(
            f"`lora_target_modules` {wanted} does not fit `{type(model).__name__}`: {error}",
            hint=f"its linear layers are called {_quoted(names) or 'nothing: it has none'}",
        ) from error
    _check_saved(adapted, plan.lora_modules_to_save)
    return adapted


def _check_saved(adapted: nn.Module, names: Sequence[str]) -> None:
    """Raise for names in `modules_to_save` that no module has; peft ignores them."""
    from peft.utils import ModulesToSaveWrapper

    saved = [n for n, m in adapted.named_modules() if isinstance(m, ModulesToSaveWrapper)]
    for name in names:
        if not any(path == name or path.endswith(f".{name}") for path in saved):
            raise PlanError(
                f"`lora_modules_to_save` names `{name}`, which the model does not have",
                hint="give the last parts of names of modules, such as `lm_head`",
            )


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
