"""FSDP2 sharding and layer checkpointing of a model, as Lightning's users write it.

A prediction runs this on the meta device, a measured run on a GPU.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper

from memest.errors import PlanError
from memest.models_meta.assemble import half_dtype
from memest.plan import TrainingPlan

try:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
except ImportError:  # torch 2.5
    from torch.distributed._composable.fsdp import (  # type: ignore[attr-defined]
        MixedPrecisionPolicy,
        fully_shard,
    )


class States:
    """Parameters, gradients and optimizer state of a sharded model, for counting their bytes.

    Create a `States` between steps. Within a step, FSDP2 gathers the parameters of a layer. The
    layer's module then has full parameters in place of shards, and their full size would count.
    """

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self._flats = _flat_parameters(model)
        self._parameters: list[Any] = [] if self._flats else list(model.parameters())
        self._optimizer = optimizer

    def params(self) -> Iterator[Tensor]:
        """Yield the parameters that this rank stores between steps. They are FSDP1's shards of flat
        parameters with padding, FSDP2's local tensors, or ZeRO-3's partitions (`ds_tensor`)."""
        yield from (getattr(flat, "_local_shard", flat) for flat in self._flats)
        yield from (_local(getattr(p, "ds_tensor", p)) for p in self._parameters)

    def grads(self) -> Iterator[Tensor]:
        """Yield the stored gradients: `.grad` of each parameter, and those of the strategy.

        FSDP1 has gradients of flat parameters. ZeRO 1 and 2 have averaged and accumulated gradients
        of this rank's partition, ZeRO-3 a flat buffer of partitions.
        """
        gradients: list[Any] = [p.grad for p in self._parameters]
        for flat in self._flats:
            gradients += [flat.grad, getattr(flat, "_saved_grad_shard", None)]
        if hasattr(self._optimizer, "averaged_gradients"):  # ZeRO's optimizer around the plan's
            for name in ("averaged_gradients", "all_grad_tensors"):
                groups = getattr(self._optimizer, name, None) or {}
                gradients += [grad for grads in groups.values() for grad in grads or ()]
            gradients.append(getattr(self._optimizer, "grad_partitions_flat_buffer", None))
            gradients += [getattr(p, "grad_accum", None) for p in self._parameters]
        return _distinct(_local(t) for t in gradients if isinstance(t, Tensor))

    def optimizer(self) -> Iterator[Tensor]:
        """Yield the tensors of the optimizer's state, and DeepSpeed's master copies of parameters.
        A master copy that shares its memory with a parameter's partition does not count."""
        inner = self._optimizer
        while hasattr(inner, "optimizer"):
            inner = inner.optimizer
        values = [v for s in inner.state.values() for v in s.values() if isinstance(v, Tensor)]
        yield from (_local(v) for v in values)
        if inner is not self._optimizer:
            addresses = {_address(t) for t in self.params()}
            masters = [p for group in inner.param_groups for p in group["params"]]
            masters += getattr(self._optimizer, "fp32_partitioned_groups_flat", [])  # stage 3
            yield from (p for p in _distinct(iter(masters)) if _address(p) not in addresses)


def _flat_parameters(model: nn.Module) -> list[Any]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    units = (m for m in model.modules() if isinstance(m, FullyShardedDataParallel))
    handles: list[Any] = [unit._handle for unit in units]
    return [handle.flat_param for handle in handles if handle is not None]


def _local(tensor: Any) -> Tensor:
    """Return the local part of `tensor` if that is a DTensor; any other tensor unchanged."""
    return getattr(tensor, "_local_tensor", tensor)


def _address(tensor: Tensor) -> tuple[Any, Any]:
    """Return (storage, offset) of a tensor, which identify its data also on the meta device."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset()


def _distinct(tensors: Iterator[Tensor]) -> Iterator[Tensor]:
    seen: set[tuple[Any, Any]] = set()
    for tensor in tensors:
        address = _address(tensor)
        if tensor.numel() and address not in seen:
            seen.add(address)
            yield tensor


def wrap_class_names(model: nn.Module, plan: TrainingPlan) -> tuple[str, ...]:
    """Return the class names of layers that FSDP wraps: the plan's, or the model's own, sorted.

    The model's own are in `_no_split_modules` of the model and its sub-models. Names that no module
    has are left out.

    Raises:
        PlanError: a class that the plan names matches no module, or the model names none.
    """
    if plan.wrap_classes:
        _check_present("wrap_classes", plan.wrap_classes, model)
        return plan.wrap_classes
    present = {type(module).__name__ for module in model.modules()}
    class_names: set[str] = set()
    for module in model.modules():
        class_names.update(getattr(module, "_no_split_modules", None) or ())
    names = tuple(sorted(class_names & present))
    if not names:
        raise PlanError(
            f"`{plan.model_name}` does not define which layers FSDP wraps",
            hint=f"name them with `wrap_classes`; {_layer_hint(model)}",
        )
    return names


def checkpointed_class_names(model: nn.Module, plan: TrainingPlan) -> tuple[str, ...]:
    """Return the class names of layers to checkpoint: the plan's `activation_checkpointing_policy`.

    Raises:
        PlanError: the model has no module of one of the classes.
    """
    names = plan.activation_checkpointing_policy
    _check_present("activation_checkpointing_policy", names, model)
    return names


def stop_caching(model: nn.Module) -> None:
    """Turn the generation cache off, as `gradient_checkpointing_enable` of transformers does. A
    checkpointed layer that runs again would add to the cache a second time, and fail."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", None):
            config.use_cache = False  # type: ignore[union-attr]


def classes_named(model: nn.Module, names: Iterable[str]) -> set[type[nn.Module]]:
    """Return the classes of modules in `model` whose class name is one of `names`."""
    class_names = set(names)
    return {type(module) for module in model.modules() if type(module).__name__ in class_names}


def modules_named(model: nn.Module, names: Iterable[str]) -> list[tuple[str, nn.Module]]:
    """Return (name, module) of each module whose class has one of `names`, inner before outer."""
    class_names, seen = set(names), set[nn.Module]()

    def within(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
        if module in seen:
            return
        seen.add(module)
        for child_name, child in module.named_children():
            yield from within(child, f"{name}.{child_name}" if name else child_name)
        if type(module).__name__ in class_names:
            yield name, module

    return list(within(model, ""))


def _check_present(key: str, names: Sequence[str], model: nn.Module) -> None:
    present = {type(module).__name__ for module in model.modules()}
    for name in names:
        if name not in present:
            raise PlanError(
                f"`{key}` names `{name}`, which no module of `{type(model).__name__}` is",
                hint=_layer_hint(model),
            )


def _layer_hint(model: nn.Module) -> str:
    lists = (m for m in model.modules() if isinstance(m, nn.ModuleList))
    names = sorted({type(layer).__name__ for layers in lists for layer in layers})
    text = ", ".join(f"`{name}`" for name in names)
    return f"its layer classes: {text or 'none'}"


def hybrid_shape(plan: TrainingPlan) -> tuple[int, int] | None:
    """Return (number of replicas, GPUs per replica) under `HYBRID_SHARD`; None without it. By
    default, a replica has the 8 GPUs of a node, or all GPUs if there are fewer."""
    if plan.sharding_strategy != "HYBRID_SHARD":
        return None
    shard_size = plan.shard_size or min(8, plan.world_size)  # a node has 8 GPUs
    return plan.world_size // shard_size, shard_size


def fully_shard_layers(model: nn.Module, plan: TrainingPlan, mesh: Any) -> None:
    """Apply FSDP2's `fully_shard` to each layer to wrap, then to the model, in place.

    Layers to checkpoint get torch's `checkpoint_wrapper` before. For `*-mixed`, parameters are
    gathered in 16 bits and gradients summed in 32, as in Lightning's example. `mesh` has one axis;
    under `HYBRID_SHARD` it is (replicas, shards).

    Raises:
        PlanError: no module has a class to wrap or to checkpoint.
    """
    layers = modules_named(model, wrap_class_names(model, plan))
    if names := checkpointed_class_names(model, plan):
        stop_caching(model)
        classes = tuple(classes_named(model, names))
        checkpoint_wrapper.apply_activation_checkpointing(
            model, check_fn=lambda module: isinstance(module, classes)
        )
    options: dict[str, Any] = {"mesh": mesh}
    if plan.precision.endswith("-mixed"):
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=half_dtype(plan), reduce_dtype=torch.float32
        )
    if plan.sharding_strategy == "SHARD_GRAD_OP":
        options["reshard_after_forward"] = False
    for name, _ in layers:  # find by name, since a checkpointed layer is in its wrapper now
        fully_shard(model.get_submodule(name), **options)
    fully_shard(model, **options)
