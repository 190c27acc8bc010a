"""LoRA adapters, put by peft itself on a model of the meta device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import model as lora_model
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.utils import ModulesToSaveWrapper, integrations, quantization_utils
from torch import Tensor, nn

from memest.errors import PlanError
from memest.models_meta.quantized.int8 import Int8Params, Linear8bitLt, dequantize_int8
from memest.models_meta.quantized.nf4 import Linear4bit, Params4bit, dequantize_4bit


def _autocast_is_on() -> bool:
    """Whether CUDA's autocast is on, or the CPU's, under which a meta step stands in for it."""
    return torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")


class LoraLinear8bit(LoraLinear):
    """`peft.tuners.lora.bnb.Linear8bitLt`, which cannot be imported without bitsandbytes.

    It differs from the plain layer in its temporaries: outside autocast the adapter's output is
    cast before it is added, not after.
    Source: peft 0.21.0, tuners/lora/bnb.py.
    """

    clones = False
    """Whether the base layer's output is cloned first."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The base layer's output plus the adapters'."""
        result: Tensor = self.base_layer(x, *args, **kwargs)
        if self.clones:
            result = result.clone()
        for name in self.active_adapters:
            if name not in self.lora_A:
                continue
            lora_a, lora_b = self.lora_A[name], self.lora_B[name]
            assert isinstance(lora_a, nn.Linear)
            converts = not _autocast_is_on()
            base_dtype = result.dtype
            if converts:
                x = self._cast_input_dtype(x, lora_a.weight.dtype)
            if name in self.lora_variant:  # DoRA
                result = self.lora_variant[name].forward(
                    self, active_adapter=name, x=x, result=result, **kwargs
                )
                if converts:
                    result = result.to(base_dtype)
                continue
            output = lora_b(lora_a(self.lora_dropout[name](x))) * self.scaling[name]
            if converts:
                output = output.to(base_dtype)
            result = result + output
        return result


class LoraLinear4bit(LoraLinear8bit):
    """`peft.tuners.lora.bnb.Linear4bit`: the same on a clone of the base layer's output."""

    clones = True


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
    is_meta: bool = True,
) -> nn.Module:
    """`model` with LoRA adapters on its targets, everything else frozen: a `PeftModel`.

    Adapters are fp32 whatever the base is, since peft casts 16-bit ones up
    (`autocast_adapter_dtype`); their layers cast their input to fp32 and their sum back. A model
    that is cast to 16 bits afterwards takes them along.

    Args:
        model: quantised or not.
        r: rank.
        alpha: numerator of the scale `alpha / r`.
        dropout: before the first adapter matrix; 0 makes no mask.
        target_modules: the last parts of module names, a regular expression of whole names,
            `all-linear`, or None for what peft knows of the model's type.
        bias: which biases train: `none`, `all` or `lora_only`.
        is_meta: whether `model` is on the meta device, its 4-bit layers mirrors; else peft does
            all by itself, with bitsandbytes where it needs it.

    Raises:
        PlanError: nothing matches `target_modules`, or what matches cannot carry an adapter.
    """
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
    if is_meta:
        config._register_custom_module({Linear4bit: LoraLinear4bit, Linear8bitLt: LoraLinear8bit})
    try:
        with ExitStack() as stack:
            if is_meta:
                stack.enter_context(_without_bitsandbytes())
                stack.enter_context(_in_the_dtype_of_the_base())
                stack.enter_context(torch.device("meta"))
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
    """peft passes over names in `modules_to_save` that no module has."""
    saved = [n for n, m in adapted.named_modules() if isinstance(m, ModulesToSaveWrapper)]
    for name in names:
        if not any(path == name or path.endswith(f".{name}") for path in saved):
            raise PlanError(
                f"`lora_modules_to_save` names `{name}`, which the model does not have",
                hint="give the last parts of names of modules, such as `lm_head`",
            )


def linear_names(model: nn.Module) -> list[str]:
    """The distinct last parts of the names of the linear layers in `model`, in order."""
    names = (
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    )
    return list(dict.fromkeys(names))


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


@contextmanager
def _without_bitsandbytes() -> Iterator[None]:
    """Keeps peft from importing bitsandbytes, which would open the GPU."""
    places = [
        (module, name)
        for module in (lora_model, quantization_utils)
        for name in ("is_bnb_available", "is_bnb_4bit_available")
    ]
    originals = [getattr(module, name) for module, name in places]
    for module, name in places:
        setattr(module, name, lambda: False)
    try:
        yield
    finally:
        for (module, name), original in zip(places, originals, strict=True):
            setattr(module, name, original)


@contextmanager
def _in_the_dtype_of_the_base() -> Iterator[None]:
    """Makes each adapter in the dtype of the layer that it is put on.

    peft makes adapters on the host and moves them to the device in that dtype, unless it is one of
    integers; DoRA takes its first norms there, and `autocast_adapter_dtype` casts to fp32 after all
    are made. What is on the meta device it does not move.
    Source: peft 0.21.0, tuners/tuners_utils.py, `_move_adapter_to_device_of_base_layer`.
    """
    place: Any = lora_model.LoraModel
    original = place._create_new_module
    device_and_dtype: Any = LoraLinear._get_base_layer_device_and_dtype

    def create(config: Any, adapter_name: str, target: nn.Module, **kwargs: Any) -> Any:
        base = target.out_proj if isinstance(target, nn.MultiheadAttention) else target
        _, dtype = device_and_dtype(None, base)
        before = torch.get_default_dtype()
        if dtype is not None and dtype.is_floating_point:
            torch.set_default_dtype(dtype)
        try:
            return original(config, adapter_name, target, **kwargs)
        finally:
            torch.set_default_dtype(before)

    place._create_new_module = staticmethod(create)
    try:
        yield
    finally:
        place._create_new_module = staticmethod(original)


def _dequantize(weight: Any, state: Any = None) -> Any:
    """`peft.utils.integrations.dequantize_bnb_weight` for the mirrors too; DoRA calls it."""
    if isinstance(weight, Params4bit):
        return dequantize_4bit(weight)
    if isinstance(weight, Int8Params):
        return dequantize_int8(weight, state.SCB)
    return _dequantize_of_peft(weight, state=state)


_dequantize_of_peft = integrations.dequantize_bnb_weight
integrations.dequantize_bnb_weight = _dequantize
