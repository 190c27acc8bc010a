"""The layers that FSDP wraps: which classes a plan means, and which modules of a model they are.

One place for both sides: a prediction divides these modules, and a measured run wraps them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from memest.errors import PlanError
from memest.plan import TrainingPlan


def wrap_class_names(model: nn.Module, plan: TrainingPlan) -> tuple[str, ...]:
    """Class names of the layers to wrap: the plan's, or what the model says must not be split.

    `_no_split_modules` is the union over the model and the models inside it, as transformers 5
    collects it in `post_init`; names that no module has are left out, sorted.

    Raises:
        PlanError: a class that the plan names matches no module, or the model names none.
    """
    present = {type(module).__name__ for module in model.modules()}
    if plan.wrap_classes:
        _check_present("wrap_classes", plan.wrap_classes, present, model)
        return plan.wrap_classes
    named: set[str] = set()
    for module in model.modules():
        named.update(getattr(module, "_no_split_modules", None) or ())
    found = tuple(sorted(named & present))
    if not found:
        raise PlanError(
            f"`{plan.model_name}` does not say which layers FSDP shall wrap",
            hint=f"name them with `wrap_classes`; {_layer_hint(model)}",
        )
    return found


def checkpointed_class_names(model: nn.Module, plan: TrainingPlan) -> tuple[str, ...]:
    """`activation_checkpointing_policy`, each of which must be there.

    Raises:
        PlanError: a class matches no module.
    """
    names = plan.activation_checkpointing_policy
    present = {type(module).__name__ for module in model.modules()}
    _check_present("activation_checkpointing_policy", names, present, model)
    return names


def stop_caching(model: nn.Module) -> None:
    """Keep no keys and values for generation, as `gradient_checkpointing_enable` of transformers.

    A checkpointed layer that runs again would add to the cache a second time, and fail.
    """
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", None):
            config.use_cache = False  # type: ignore[union-attr]


def classes_named(model: nn.Module, names: Iterable[str]) -> set[type[nn.Module]]:
    """The classes themselves, looked up in the model."""
    wanted = set(names)
    return {type(module) for module in model.modules() if type(module).__name__ in wanted}


def modules_named(model: nn.Module, names: Iterable[str]) -> list[tuple[str, nn.Module]]:
    """Modules of these classes with their names: in module order, an inner before its outer one."""
    wanted = set(names)
    found: list[tuple[str, nn.Module]] = []
    _collect(model, "", wanted, set(), found)
    return found


def shard_size(plan: TrainingPlan) -> int:
    """GPUs that share one copy under `HYBRID_SHARD`: the plan's, or the 8 of a node, or all."""
    return plan.shard_size or min(8, plan.world_size)


def layer_class_names(model: nn.Module) -> tuple[str, ...]:
    """Classes of what the model keeps in lists of layers, sorted."""
    lists = (m for m in model.modules() if isinstance(m, nn.ModuleList))
    return tuple(sorted({type(layer).__name__ for layers in lists for layer in layers}))


def _collect(
    module: nn.Module,
    name: str,
    wanted: set[str],
    seen: set[int],
    found: list[tuple[str, nn.Module]],
) -> None:
    if id(module) in seen:
        return
    seen.add(id(module))
    for child_name, child in module.named_children():
        _collect(child, f"{name}.{child_name}" if name else child_name, wanted, seen, found)
    if type(module).__name__ in wanted:
        found.append((name, module))


def _check_present(key: str, names: Sequence[str], present: set[str], model: nn.Module) -> None:
    for name in names:
        if name not in present:
            raise PlanError(
                f"`{key}` names `{name}`, which no module of `{type(model).__name__}` is",
                hint=_layer_hint(model),
            )


def _layer_hint(model: nn.Module) -> str:
    listed = ", ".join(f"`{name}`" for name in layer_class_names(model))
    return f"its layer classes: {listed or 'none'}"
