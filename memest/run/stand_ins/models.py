"""What a stand-in checkpoint holds beside its tokenizer, in the layouts that scripts read."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memest.errors import PlanError, UnsupportedError, closest, shown
from memest.estimator.device.files.checkpoints import StandIn
from memest.models_meta.build import build_model
from memest.models_meta.registry import ModelConfig, find_entry, quiet_transformers, resolve_config
from memest.run.stand_ins.tokenizer import Vocabulary, vocabulary_of

INSTALL_LITGPT = "`pip install 'memest[litgpt]'`, then `pip install --no-deps litgpt==0.5.13`"
"""In two steps, since LitGPT asks for a huggingface_hub that transformers 5 is too new for."""

LITGPT_DTYPE = torch.bfloat16
"""Of a model that memest does not bundle; a bundled config says what its checkpoint is saved in."""


@dataclass(frozen=True, slots=True)
class StandInModel:
    """A model of which a stand-in can be written."""

    name: str
    vocabulary: Vocabulary | None
    """None where the model knows no text."""

    weights: Mapping[str, Tensor]
    """The names, shapes and dtypes of its state dict, on meta."""

    write: Callable[[Path], None]
    """Writes the files of the layout, given the folder."""


def litgpt_model(name: str) -> StandInModel:
    """A model that LitGPT knows: `lit_model.pth`, `model_config.yaml`, `generation_config.json`.

    Raises:
        UnsupportedError: LitGPT is not installed.
        PlanError: it does not know the model.
    """
    if find_spec("litgpt") is None:
        raise UnsupportedError(
            "LitGPT is not installed, and its checkpoints are made of its own model",
            hint=INSTALL_LITGPT,
        )
    entry = find_entry(name)
    known = resolve_config(name) if entry is not None else None
    config = _litgpt_config(name, known)
    from litgpt.model import GPT
    from litgpt.utils import save_config

    dtype = _saved_dtype(known) if known is not None else LITGPT_DTYPE
    with torch.device("meta"):
        model = GPT(config)
    weights = {key: tensor.to(dtype) for key, tensor in model.state_dict().items()}
    found = vocabulary_of(known.pretrained) if known is not None else None
    vocabulary = found or Vocabulary(
        size=config.vocab_size, family="", max_length=config.block_size
    )

    def write(folder: Path) -> None:
        save_weights(weights, folder / "lit_model.pth")
        save_config(config, folder)
        ids = {f"{key}_token_id": vocabulary.ids.get(key) for key in ("bos", "eos")}
        _write_json(
            folder / "generation_config.json", {k: v for k, v in ids.items() if v is not None}
        )

    return StandInModel(config.name, vocabulary, weights, write)


def _litgpt_config(name: str, known: ModelConfig | None) -> Any:
    from litgpt.config import Config, configs

    hub_id = known.entry.hub_id if known is not None and known.entry is not None else name
    for given in configs:
        source = given["hf_config"]
        names = given["name"], source["name"], f"{source['org']}/{source['name']}"
        if hub_id in names or name in names:
            return Config(**given)
    near = closest(name, [given["name"] for given in configs])
    hint = (
        f"closest: {', '.join(f'`{n}`' for n in near)}" if near else "`litgpt download` lists all"
    )
    raise PlanError(f"LitGPT has no config of {shown(name)}", hint=hint)


def hugging_face_model(name: str) -> StandInModel:
    """A model of transformers: `config.json`, `pytorch_model.bin`, its processor.

    Raises:
        UnknownModelError: nothing has this name.
    """
    config = resolve_config(name)
    module = build_model(config, dtype=_saved_dtype(config)).module
    tied = getattr(module, "all_tied_weights_keys", {})
    weights = {
        key: tensor
        for key, tensor in module.state_dict().items()
        if isinstance(tensor, Tensor) and key not in tied
    }

    def write(folder: Path) -> None:
        if config.entry is not None:
            raw = json.loads(config.entry.path.read_text(encoding="utf-8"))["config"]
            _write_json(folder / "config.json", raw)
        else:
            config.pretrained.save_pretrained(folder)
        save_weights(weights, folder / "pytorch_model.bin")
        with quiet_transformers():
            _write_processors(config.pretrained, folder)

    return StandInModel(config.name, vocabulary_of(config.pretrained), weights, write)


def _write_processors(config: Any, folder: Path) -> None:
    """What makes tensors of images and sounds, in the settings that transformers has for them."""
    from transformers import PreTrainedTokenizerFast
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    parts: dict[str, Any] = {}
    for part, module, mapping in (
        ("image_processor", "image_processing_auto", "IMAGE_PROCESSOR_MAPPING"),
        ("feature_extractor", "feature_extraction_auto", "FEATURE_EXTRACTOR_MAPPING"),
    ):
        # By its full name: the package hides the first of them where torchvision is missing.
        auto = import_module(f"transformers.models.auto.{module}")
        made = _default_of(getattr(auto, mapping), config)
        if made is not None:
            made.save_pretrained(folder)
            parts[part] = made
    processor: Any = PROCESSOR_MAPPING.get(type(config), None)
    if not parts or processor is None or not (folder / "tokenizer.json").is_file():
        return
    parts["tokenizer"] = PreTrainedTokenizerFast.from_pretrained(folder)
    try:
        processor(**parts).save_pretrained(folder)
    except (TypeError, ValueError, AttributeError):
        return  # one that asks for more than its parts; they are there, each by itself


def _default_of(mapping: Any, config: Any) -> Any:
    """The preprocessor that `mapping` has for `config`, with its image size."""
    found: Any = mapping.get(type(config), None)
    if isinstance(found, dict):
        found = tuple(found.values())
    classes = found if isinstance(found, tuple) else (found,)
    side = getattr(getattr(config, "vision_config", config), "image_size", None)
    for cls in classes:
        if cls is None:
            continue
        try:
            made = cls()
            size = getattr(made, "size", None)
            if isinstance(side, int) and size is not None and "height" in size:
                made = cls(size={"height": side, "width": side})
        except (ImportError, TypeError, ValueError):
            continue
        return made
    return None


def save_weights(weights: Mapping[str, Tensor], path: Path) -> None:
    """Write a state dict of stand-ins for `weights`, which need no data, as `torch.save` does."""
    torch.save(OrderedDict((name, StandIn(tensor)) for name, tensor in weights.items()), path)


def _saved_dtype(config: ModelConfig) -> torch.dtype:
    """What the published weights are saved in, as far as the config says."""
    found = getattr(config.pretrained, "dtype", None)
    return found if isinstance(found, torch.dtype) else torch.float32


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
