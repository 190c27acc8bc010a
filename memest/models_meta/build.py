"""Transformers modules from configs, on the meta device."""

import copy
import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memest.errors import PlanError, UnsupportedError, closest
from memest.models_meta.registry import ModelConfig, dtype_keyword, error_text, quiet_transformers
from memest.plan.keys import FLASH_ATTENTION_2
from memest.plan.reading import read_table

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def set_tied_embeddings(model: Any, tied: bool) -> None:
    """Give the output head the embeddings' weight if `tied`, or else a weight of its own.

    A config cannot turn tying off for T5: transformers 5.17 always builds T5 tied
    (models/t5/configuration_t5.py), while the published flan-t5 checkpoints load untied.

    Raises:
        PlanError: the model has no output head, or one of another shape.
    """
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or embeddings is None or head.weight.shape != embeddings.weight.shape:
        raise PlanError(
            f"`tie_word_embeddings` does not apply to `{type(model).__name__}`",
            hint="leave it out: the model has no output head of the embeddings' shape",
        )
    weight = embeddings.weight
    head.weight = weight if tied else nn.Parameter(torch.empty_like(weight))


_FAMILIES: dict[str, list[str]] = read_table(__file__, "families.json")
"""Model families (`model_type`) by trait.

- `auto_classes`: a config without `architectures` gets the first that maps its `model_type`.
  Masked before causal: the BERT family is in both, and is fine-tuned as the former.
- `relative_positions`, `alibi_positions`: attention uses distances instead of positions, by buckets
  or by ALiBi, so text length is unlimited. Mirrors transformers 5.17.
- `offset_positions`: the position table starts counting after the padding index (fairseq's
  convention), so `max_position_embeddings` has `pad_token_id + 1` rows that no text can use.
"""

DYNAMIC_IMAGE_SIZE = 448  # assumed pixels a side for images of any size (Qwen2-VL): 256 tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltModel:
    """A module, and notes for the report on the decisions made while it was built."""

    module: Any  # module of transformers, whose `config` is a copy of the given one
    notes: tuple[str, ...] = ()  # assumptions for the report


def build_model(
    config: ModelConfig, *, dtype: torch.dtype, attn_implementation: str | None = None,
    device: torch.device | str = "meta",
) -> BuiltModel:  # fmt: skip
    """Build the model class of `config` in training mode, with all parameters in one `dtype`.

    Weights are not initialised. `attn_implementation` None is transformers' default, `sdpa`; a
    class without it gets `eager`, and `notes` reports that. Two changes that `from_pretrained`
    makes at loading are not made here. Under float16, `from_pretrained` keeps T5's `wo` in float32.
    It also unties a head that the checkpoint stores untied.

    Raises:
        PlanError: the class rejects the sizes in its config.
        UnsupportedError: the class needs a package that is not installed.
    """
    notes: list[str] = []
    pretrained = copy.deepcopy(config.pretrained)
    cls = _model_class(config, notes)
    # transformers' default is sdpa wherever a (sub-)model has it, else eager. Requesting sdpa by
    # name would be an error where a sub-model lacks it.
    requested = None if attn_implementation == "sdpa" else attn_implementation
    with quiet_transformers():
        options = {dtype_keyword(): dtype, "attn_implementation": requested}
        module = _instantiate(config, cls, pretrained, device, options)
    module.train()
    notes += _attn_notes(module, attn_implementation)
    notes += _count_notes(config, sum(parameter.numel() for parameter in module.parameters()))
    return BuiltModel(module=module, notes=tuple(notes))


def _model_class(config: ModelConfig, notes: list[str]) -> Any:
    """Return the class that builds the model. For remote code it is an Auto class of transformers,
    such as `AutoModelForCausalLM`. Otherwise it is the class that `architectures` in the config
    names. Without `architectures`, it is the class to which an Auto class maps the config. `notes`
    gets a note on the class, unless `architectures` names it."""
    import transformers

    if config.remote_code:
        auto_map = getattr(config.pretrained, "auto_map", None) or {}
        for auto in _FAMILIES["auto_classes"]:
            if auto in auto_map:
                notes.append(f"the model class is the code of `{config.remote_code}` ({auto})")
                return getattr(transformers, auto)
        raise PlanError(
            f"`auto_map` of `{config.name}` names no model class",
            hint=f"memest looks for {', '.join(_FAMILIES['auto_classes'])}",
        )
    if config.architecture:
        return getattr(transformers, config.architecture)
    for auto in _FAMILIES["auto_classes"]:
        mapping = getattr(transformers, auto)._model_mapping
        if type(config.pretrained) in mapping:
            classes = mapping[type(config.pretrained)]
            cls = classes[0] if isinstance(classes, tuple) else classes
            notes.append(f"`architectures` is missing: {cls.__name__} taken, from {auto}")
            return cls
    raise PlanError(
        f"`{config.name}` has no `architectures`, and `{config.model_type}` has no model class",
        hint='name the class, such as "architectures": ["LlamaForCausalLM"]',
    )


def _attn_notes(module: nn.Module, requested: str | None) -> list[str]:
    """Return a list of one note on sub-models that use eager attention because they lack sdpa. It
    is empty if there are none, or if `requested` (the plan's attention or None) is `eager`."""
    if requested == "eager":
        return []
    eager = {
        type(part).__name__
        for part in module.modules()
        if getattr(getattr(part, "config", None), "_attn_implementation", None) == "eager"
        and getattr(part, "_supports_sdpa", True) is False
    }
    names = ", ".join(sorted(eager))
    return [f"no sdpa attention in transformers, eager used: {names}"] if names else []


def _instantiate(
    config: ModelConfig, cls: Any, pretrained: Any, device: Any, options: dict[str, Any]
) -> Any:
    try:
        from transformers.initialization import no_init_weights
    except ImportError:  # before transformers 5
        no_init_weights = import_module("transformers.modeling_utils").no_init_weights
    attention = options["attn_implementation"]
    try:
        with torch.device(device), no_init_weights():
            if config.remote_code:
                module = cls.from_config(pretrained, trust_remote_code=True, **options)
            else:
                module = cls._from_config(pretrained, **options)
        # `no_init_weights` also skips the tying, which ends the initialisation of a class.
        module.tie_weights()
        return module.to(device)
    except ImportError as error:
        hint = "install it, or choose a model of another family"
        if attention == FLASH_ATTENTION_2:
            hint += ", or leave `attn_implementation` out"
        raise UnsupportedError(
            f"`{cls.__name__}` needs a package that is not installed: {error_text(error)}",
            hint=hint,
        ) from error
    except Exception as error:  # a class may raise any error for incompatible sizes
        if "does not support Flash Attention" in str(error):
            raise PlanError(
                f"`{str(error).split()[0]}` has no `{attention}` in transformers",
                hint="leave `attn_implementation` out, which takes what the model has",
            ) from error
        raise PlanError(
            f"`{cls.__name__}` cannot be built from the config of `{config.name}`: "
            f"{error_text(error)}",
            hint="check the sizes in the config: width, heads, layers and vocabulary",
        ) from error


def _count_notes(config: ModelConfig, num_params: int) -> list[str]:
    if config.entry is None:
        return []
    notes = []
    if num_params != config.entry.num_params:
        notes.append(
            f"{num_params:,} parameters, where the bundled file records "
            f"{config.entry.num_params:,}: the installed transformers builds another model"
        )
    if config.entry.num_params != config.entry.num_params_published:
        notes.append(config.entry.note)
    return notes


def num_positions(config: "PretrainedConfig") -> int | None:
    """Return the maximal number of text tokens; None if unlimited (T5, ALiBi) or not known."""
    text = text_config(config)
    if text.model_type in _FAMILIES["relative_positions"] + _FAMILIES["alibi_positions"]:
        return None
    for name in ("max_target_positions", "max_position_embeddings", "n_positions"):
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            has_offset = text.model_type in _FAMILIES["offset_positions"]
            offset = (text.pad_token_id or 0) + 1 if has_offset else 0
            return value - offset
    return None


def default_image_size(config: "PretrainedConfig") -> int | None:
    """Return the size of the model's images, in pixels a side: 448 if the model takes any size,
    None if it takes no images."""
    vision = vision_config(config)
    size = getattr(vision if vision is not None else config, "image_size", None)
    if isinstance(size, Sequence) and size:
        size = size[0]
    if isinstance(size, int) and size > 0:
        return size
    return DYNAMIC_IMAGE_SIZE if vision is not None else None


def text_config(config: Any) -> Any:
    """Return the config of the text part (the decoder's, if there are two), or else `config`."""
    from transformers import PretrainedConfig

    try:
        text = config.get_text_config(decoder=True)
    except ValueError:
        return config
    # A config class keeps unknown keys as they are, so a stray `text_config` may be anything.
    return text if isinstance(text, PretrainedConfig) else config


def vision_config(config: Any) -> Any:
    """Return the config of the vision part of `config`; None if there is none."""
    from transformers import PretrainedConfig

    vision = getattr(config, "vision_config", None)
    return vision if isinstance(vision, PretrainedConfig) else None


def freeze(module: nn.Module, patterns: Sequence[str]) -> int:
    """Freeze the parameters that `patterns` match; return the number of elements that this froze.

    A pattern is a shell glob over parameter names (`vision_model.*`, `*.layers.[0-9].*`), or a
    module name for all parameters in it. A tied parameter matches by each of its names.

    >>> freeze(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 5)), ["0"])
    9

    Raises:
        PlanError: a pattern matches no parameter.
    """
    parameters = list(module.named_parameters(remove_duplicate=False))
    num_frozen = 0
    for pattern in patterns:
        matches = [
            parameter
            for name, parameter in parameters
            if fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"{pattern}.*")
        ]
        if not matches:
            near = closest(pattern, [name for name, _ in module.named_modules() if name])
            children = ", ".join(f"`{name}`" for name, _ in module.named_children())
            suggestion = f"; closest: {', '.join(f'`{name}`' for name in near)}" if near else ""
            raise PlanError(
                f"`freeze` pattern `{pattern}` matches no parameter of the model",
                hint=f"its modules are {children}{suggestion}",
            )
        for parameter in matches:
            num_frozen += parameter.numel() if parameter.requires_grad else 0
            parameter.requires_grad_(False)
    return num_frozen
