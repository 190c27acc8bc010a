"""LoRA adapters, put on a model by peft."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from memest.errors import PlanError


def apply_lora(
    model: nn.Module,
    *,
    r: int,
    alpha: int,
    dropout: float,
    target_modules: Sequence[str] | str | None,
    bias: str = "none",
    modules_to_save: Sequence[str] = (),
    use_rslora: bool = False,
    use_dora: bool = False,
) -> nn.Module:
    """Put LoRA adapters on the targets of `model`, freeze everything else, and return the
    `PeftModel`.

    peft casts 16-bit adapters to fp32 (`autocast_adapter_dtype`). Adapter layers cast their input
    to fp32 and cast their sum back. A later cast of the model to 16 bits also casts the adapters.

    Args:
        model: quantised or not.
        r: rank.
        alpha: numerator of the scale `alpha / r`.
        dropout: before the first adapter matrix; 0 makes no mask.
        target_modules: the last parts of module names, a regular expression of whole names,
            `all-linear`, or None for peft's default for the model's type.
        bias: biases that train: `none`, `all` or `lora_only`.

    Raises:
        PlanError: nothing matches `target_modules`, or a match cannot carry an adapter.
    """
    from peft import LoraConfig, get_peft_model  # takes a second

    if r < 1:
        raise PlanError(f"`lora_r` is {r}", hint="give a rank of at least 1")
    targets = target_modules if isinstance(target_modules, str | None) else list(target_modules)
    config = LoraConfig(
        r=r,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=targets,
        bias=bias,  # type: ignore[arg-type]
        modules_to_save=list(modules_to_save) or None,
        use_rslora=use_rslora,
        use_dora=use_dora,
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
    _check_saved(adapted, modules_to_save)
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
