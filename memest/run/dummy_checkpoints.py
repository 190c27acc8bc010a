"""Dummy checkpoints: folders of kilobytes that scripts load as a model, without weight values."""

import itertools
import json
import shutil
import string
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from memest.errors import PlanError, UnsupportedError, closest, shown
from memest.estimator.torch_api.files.checkpoints import Placeholder
from memest.models_meta.build import build_model
from memest.models_meta.registry import find_entry, quiet_transformers, resolve_config
from memest.plan.reading import read_table
from memest.run.target import INSTALLED_BY

NEEDED = ("transformers",)  # package that reads configs; the rest of `PLANS` trains
MARKER = "STAND-IN.md"  # file that a dummy checkpoint has and a real one does not
_HEAD = "# Not a model: a dummy checkpoint written by memest"
_FILE = "- "
PIECE_LETTERS = 6  # 5 gives 3.9 characters per token of English prose, 7 gives 4.5
LETTERS = {"a": "aeiou", "c": "bcdfghjklm", "s": "npqrstvwxyz"}
"""Letters that a letter represents: three letters give 1,092 patterns of up to six."""

SIGNS = string.digits + string.punctuation
MAX_BLANKS = 16  # longest run of blanks with its own token, as for indented code
TOKENIZERS: dict[str, Any] = read_table(__file__, "tokenizers.json")
"""Facts about tokenizers of transformers and LitGPT.

Either of the first two `files` is sufficient. `special` has the texts of special tokens; tokens in
`extra` are not written as settings. `token_before` and `token_after` have families (transformers'
`model_type`) whose tokenizers put a token before or after each text.
"""

LITGPT_DTYPE = torch.bfloat16  # dtype of a model that memest does not bundle


@contextmanager
def dummy_folder(folder: Path, about: str) -> Iterator[None]:
    """Empty `folder` for a new dummy checkpoint, which the block writes.

    After the block, add the file `MARKER`, which marks the folder as written by memest. It has the
    text `about` and the names of the other files. The block gets no value.

    Raises:
        PlanError: `folder` has files that memest has not written, or it cannot be written to.
    """
    try:
        check_folder(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            path.unlink()
        try:
            yield
        finally:  # an incomplete folder is a dummy checkpoint too
            names = sorted(path.name for path in folder.iterdir() if path.name != MARKER)
            files = "".join(f"{_FILE}{name}\n" for name in names)
            text = f"{_HEAD}\n\n{about}\n\nFiles:\n\n{files}"
            (folder / MARKER).write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlanError(
            f"{shown(str(folder))} cannot be written: {error.strerror or error}",
            hint="name a folder that you may write to",
        ) from error


def check_folder(folder: Path) -> None:
    """Raise a `PlanError` if `folder` is a file, or has files that memest has not written."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise PlanError(f"{shown(str(folder))} is a file", hint="name a folder")
    marker = folder / MARKER
    text = marker.read_text(encoding="utf-8", errors="replace") if marker.is_file() else ""
    head, *lines = text.splitlines() or [""]
    listed = {line.removeprefix(_FILE) for line in lines if line.startswith(_FILE)}
    present = {path.name for path in folder.iterdir()}
    foreign = sorted(present - {MARKER} - (listed if head == _HEAD else set()))
    if foreign:
        raise PlanError(
            f"{shown(str(folder))} holds {shown(foreign[0])}, which is not of a dummy checkpoint: "
            "nothing was written",
            hint="name a new or an empty folder",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """Facts about a model's vocabulary, from which a dummy tokenizer is made. `family` is
    transformers' `model_type`, and `ids` has ids of special tokens by name, such as `bos`."""

    size: int  # rows of the embedding; every id is below
    family: str  # transformers' `model_type` of the language model
    max_length: int  # tokens of the longest text
    ids: Mapping[str, int] = field(default_factory=dict)  # of the config: `bos`, `image`, ...


def vocabulary_of(config: Any) -> Vocabulary | None:
    """Return the vocabulary of a transformers `config`; None if the model has no text input."""
    text = config.get_text_config()
    size = getattr(text, "vocab_size", None)
    if not isinstance(size, int) or size < 1:
        return None
    ids: dict[str, int] = {}
    for name in ("bos", "eos", "pad", "image", "video"):
        keys = (f"{name}_token_id", f"{name}_token_index")
        for owner, key in itertools.product((text, config), keys):
            value = getattr(owner, key, None)
            token_id = value[0] if isinstance(value, list) and value else value
            if isinstance(token_id, int) and 0 <= token_id < size:
                ids.setdefault(name, token_id)
    length = getattr(text, "max_position_embeddings", None) or 512
    return Vocabulary(size=size, family=str(text.model_type), max_length=length, ids=ids)


def write_tokenizer(vocabulary: Vocabulary, folder: Path) -> None:
    """Write a dummy tokenizer to `folder`: `tokenizer.json` and `tokenizer_config.json`."""
    special = _special_tokens(vocabulary)
    tokens = _token_ids(vocabulary, special)
    has_bos = vocabulary.family in TOKENIZERS["token_before"]
    has_eos = vocabulary.family in TOKENIZERS["token_after"]
    tokenizer = _fast_tokenizer(tokens, special, has_bos=has_bos, has_eos=has_eos)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    standard_tokens = {k: token for k, token in special.items() if k not in TOKENIZERS["extra"]}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": vocabulary.max_length,
        "add_bos_token": has_bos,
        "add_eos_token": has_eos,
        "clean_up_tokenization_spaces": False,
        "chat_template": TOKENIZERS["chat_template"],
        **{f"{name}_token": token for name, token in standard_tokens.items()},
    }
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


def _special_tokens(vocabulary: Vocabulary) -> dict[str, str]:
    """Return texts of special tokens by name, such as `eos`; names with one id share a text."""
    text_of_id: dict[int, str] = {}
    special, texts = {}, TOKENIZERS["special"]
    for name, index in vocabulary.ids.items():
        special[name] = text_of_id.setdefault(index, texts[name])
    for name in ("eos", "bos", "unk", "mask"):
        special.setdefault(name, texts[name])
    special.setdefault("pad", special["eos"])
    special |= {"cls": special["bos"], "sep": special["eos"]}
    return special


def _token_ids(vocabulary: Vocabulary, special: Mapping[str, str]) -> dict[str, int]:
    """Return a dict from token text to id, with every id of `vocabulary`. `special` has texts of
    special tokens by name, such as `eos`. A special token for which the model's config has an id
    gets that id. Each other special token gets the highest free id. The lowest free ids go to
    ordinary pieces of text."""
    model_ids = {special[name]: index for name, index in vocabulary.ids.items()}
    other_tokens = dict.fromkeys(token for token in special.values() if token not in model_ids)
    free_ids = sorted(set(range(vocabulary.size)) - set(model_ids.values()))
    ids = model_ids | dict(zip(other_tokens, reversed(free_ids), strict=False))
    piece_ids = free_ids[: max(0, len(free_ids) - len(other_tokens))]
    pieces = itertools.chain(_pieces(), (f"<{index}>" for index in itertools.count()))
    return ids | {piece: index for index, piece in zip(piece_ids, pieces, strict=False)}


def _pieces() -> Iterator[str]:
    yield from (f"{blank}{sign}" for blank in ("", " ") for sign in SIGNS)
    yield from ("\n", "\t", *(" " * number for number in range(1, MAX_BLANKS + 1)))
    for length in range(1, PIECE_LETTERS + 1):
        for letters in itertools.product(LETTERS, repeat=length):
            yield "".join(letters)
            yield " " + "".join(letters)


def _fast_tokenizer(
    tokens: dict[str, int], special: Mapping[str, str], *, has_bos: bool, has_eos: bool
) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from tokenizers.processors import TemplateProcessing

    tokenizer: Any = Tokenizer(models.WordLevel(tokens, special["unk"]))
    letters = [
        normalizers.Replace(Regex(f"[{group}{group.upper()}]"), letter)
        for letter, group in LETTERS.items()
    ]
    tokenizer.normalizer = normalizers.Sequence(letters)
    piece = rf" ?[A-Za-z]{{1,{PIECE_LETTERS}}}| ?[0-9]| ?[^\sA-Za-z0-9]| {{1,{MAX_BLANKS}}}|\s"
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(piece), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(dict.fromkeys(special.values())))
    bos, eos = special["bos"], special["eos"]
    if has_bos or has_eos:
        tail = [eos] if has_eos else []
        single = [bos, "$A", *tail] if has_bos else ["$A", *tail]
        pair = [*single, *(f"{part}:1" for part in ("$B", *tail))]  # `:1` is the second text
        ends = [(token, tokens[token]) for token in dict.fromkeys((bos, eos))]
        tokenizer.post_processor = TemplateProcessing(single=single, pair=pair, special_tokens=ends)
    return tokenizer


@dataclass(frozen=True, slots=True)
class DummyModel:
    """Model for which a dummy checkpoint can be written: `write` writes the files into a folder.
    `vocabulary` is None if the model has no text input. `weights` are meta tensors by name."""

    name: str
    vocabulary: Vocabulary | None  # None for a model without text
    weights: Mapping[str, Tensor]  # names, shapes and dtypes of its state dict, on meta
    write: Callable[[Path], None]  # function that writes the files of the layout into a folder


def litgpt_model(name: str) -> DummyModel:
    """Return LitGPT's model `name`; its `write` adds weights and two files of settings.

    Raises:
        UnsupportedError: LitGPT is not installed.
        PlanError: LitGPT does not have the model.
    """
    if find_spec("litgpt") is None:
        raise UnsupportedError(
            "LitGPT is not installed, and its checkpoints are made of its own model",
            hint=INSTALLED_BY["litgpt"],
        )
    entry = find_entry(name)
    config = _litgpt_config(name, entry.hub_id if entry is not None else name)
    from litgpt.model import GPT
    from litgpt.utils import save_config

    dtype = LITGPT_DTYPE
    vocabulary = Vocabulary(size=config.vocab_size, family="", max_length=config.block_size)
    if entry is not None:  # from the file alone, since LitGPT does not need transformers
        raw = json.loads(entry.path.read_text(encoding="utf-8"))["config"]
        dtype = getattr(torch, raw.get("torch_dtype") or raw.get("dtype") or "float32")
        defaults = {"max_position_embeddings": config.block_size, "vocab_size": config.vocab_size}
        text = SimpleNamespace(**{**defaults, **raw.get("text_config", raw)})
        raw_config = SimpleNamespace(**raw, get_text_config=lambda: text)
        vocabulary = vocabulary_of(raw_config) or vocabulary
    with torch.device("meta"):
        model = GPT(config)
    weights = {key: tensor.to(dtype) for key, tensor in model.state_dict().items()}

    def write(folder: Path) -> None:
        save_weights(weights, folder / "lit_model.pth")
        save_config(config, folder)
        ids = {f"{key}_token_id": vocabulary.ids.get(key) for key in ("bos", "eos")}
        _write_json(
            folder / "generation_config.json", {k: v for k, v in ids.items() if v is not None}
        )

    return DummyModel(config.name, vocabulary, weights, write)


def _litgpt_config(name: str, hub_id: str) -> Any:
    from litgpt.config import Config, configs

    for entry in configs:
        source = entry["hf_config"]
        names = entry["name"], source["name"], f"{source['org']}/{source['name']}"
        if hub_id in names or name in names:
            return Config(**entry)
    matches = ", ".join(f"`{match}`" for match in closest(name, [row["name"] for row in configs]))
    hint = f"closest: {matches}" if matches else "`litgpt download` lists all"
    raise PlanError(f"LitGPT has no config of {shown(name)}", hint=hint)


def hugging_face_model(name: str) -> DummyModel:
    """Return transformers' model `name`; its `write` adds weights, `config.json`, processors."""
    config = resolve_config(name, packages=NEEDED)
    module = build_model(config, dtype=config.saved_dtype).module
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

    return DummyModel(config.name, vocabulary_of(config.pretrained), weights, write)


def _write_processors(config: Any, folder: Path) -> None:
    """Write to `folder` default processors of images and sounds for a transformers `config`."""
    from transformers import PreTrainedTokenizerFast
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    parts: dict[str, Any] = {}
    for part, module, mapping in (
        ("image_processor", "image_processing_auto", "IMAGE_PROCESSOR_MAPPING"),
        ("feature_extractor", "feature_extraction_auto", "FEATURE_EXTRACTOR_MAPPING"),
    ):
        # Use the full name: the package hides the first of them without torchvision.
        auto = import_module(f"transformers.models.auto.{module}")
        processor = _default_processor(getattr(auto, mapping), config)
        if processor is not None:
            processor.save_pretrained(folder)
            parts[part] = processor
    processor_class: Any = PROCESSOR_MAPPING.get(type(config), None)
    if not parts or processor_class is None or not (folder / "tokenizer.json").is_file():
        return
    parts["tokenizer"] = PreTrainedTokenizerFast.from_pretrained(folder)
    try:
        processor_class(**parts).save_pretrained(folder)
    except (TypeError, ValueError, AttributeError):
        return  # the processor needs more than its parts; the parts are written


def _default_processor(mapping: Any, config: Any) -> Any:
    """Return a processor of inputs for a model with `config`, or None. `mapping` has, for each
    class of configs, the class of processors or several to try. The first one that can be made is
    returned. If the config has the size of images, the processor has that size."""
    choice: Any = mapping.get(type(config), None)
    if isinstance(choice, dict):
        choice = tuple(choice.values())
    classes = choice if isinstance(choice, tuple) else (choice,)
    side = getattr(getattr(config, "vision_config", config), "image_size", None)
    for cls in classes:
        if cls is None:
            continue
        try:
            processor = cls()
            size = getattr(processor, "size", None)
            if isinstance(side, int) and size is not None and "height" in size:
                processor = cls(size={"height": side, "width": side})
        except (ImportError, TypeError, ValueError):
            continue
        return processor
    return None


def save_weights(weights: Mapping[str, Tensor], path: Path) -> None:
    """Write a state dict to `path` with the shapes and dtypes of `weights`, without values."""
    torch.save(OrderedDict((name, Placeholder(tensor)) for name, tensor in weights.items()), path)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


FORMATS = {"litgpt": litgpt_model, "hf": hugging_face_model}  # `litgpt download`, `save_pretrained`


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """Facts about a dummy checkpoint that was written, for a message. `num_bytes` is its size on
    disk; `stands_for_bytes` is the size of the real weights."""

    folder: Path
    model: str
    num_tensors: int
    num_bytes: int  # bytes of all files on disk
    stands_for_bytes: int  # bytes of the weights that a real checkpoint would hold


def write_checkpoint(
    name: str, folder: Path, *, layout: str, tokenizer: Path | None = None
) -> Written:
    """Write a dummy checkpoint of `name`: names, shapes and dtypes of its weights, no values.

    Each tensor is one zero with strides of 0. Plain torch reads it as zeros; on a virtual GPU it
    takes the memory of the real one.

    Args:
        name: a model as `memest predict` takes it; for LitGPT also one of LitGPT's own names.
        folder: new, empty, or a dummy checkpoint to replace.
        layout: file format: `hf`, as of transformers, or `litgpt`.
        tokenizer: a folder whose tokenizer is copied; without it a dummy tokenizer is written.

    Raises:
        PlanError: `folder` holds other files, `tokenizer` has none, or LitGPT lacks the model.
        UnknownModelError: there is no model `name`.
        UnsupportedError: LitGPT is not installed.
    """
    check_folder(folder)
    files = TOKENIZERS["files"]
    if tokenizer is not None and not any((tokenizer / f).is_file() for f in files[:2]):
        raise PlanError(
            f"{shown(str(tokenizer))} has no tokenizer",
            hint=f"it should hold `{TOKENIZERS['files'][0]}` or `{TOKENIZERS['files'][1]}`",
        )
    model = FORMATS[layout](name)
    with dummy_folder(folder, _about(model.name, name, layout, tokenizer)):
        if tokenizer is not None:
            for file in filter(Path.is_file, map(tokenizer.joinpath, files)):
                shutil.copyfile(file, folder / file.name)
        elif model.vocabulary is not None:
            write_tokenizer(model.vocabulary, folder)
        model.write(folder)
    return Written(
        folder=folder, model=model.name, num_tensors=len(model.weights),
        num_bytes=sum(path.stat().st_size for path in folder.iterdir()),
        stands_for_bytes=sum(t.numel() * t.itemsize for t in model.weights.values()),
    )  # fmt: skip


def _about(model: str, name: str, layout: str, tokenizer: Path | None) -> str:
    text = (
        f"`memest checkpoint {name} --format {layout}` wrote this folder. It holds the names, "
        f"shapes and dtypes\nof the weights of {model}, and none of their values: one number of "
        "storage per tensor.\nScripts load it under `memest run`, which reports the memory they "
        "take. It cannot be trained or used."
    )
    if tokenizer is not None:
        return f"{text}\n\nThe tokenizer is that of {tokenizer.absolute()}."
    return text + (
        "\n\nIts tokenizer is a dummy, too: it makes about as many tokens of English as "
        "published ones do.\nFor the exact length of a text, `--tokenizer FOLDER` takes the "
        "model's own."
    )
