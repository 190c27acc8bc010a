"""A tokenizer that stands in for a model's own: its vocabulary size, and about as many tokens.

What a text costs is how many tokens it has. Published tokenizers make one of about four characters
of English (OpenAI's help page "What are tokens and how to count them?" gives four). This one cuts
words into pieces of up to six letters, each with the blank before it, and makes one token of each
digit, sign and new line: 4.1 to 4.2 characters per token of English prose. Pieces with the same
pattern of vowels and consonants share an id, so a text cannot be read back from its tokens.
"""

from __future__ import annotations

import itertools
import json
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PIECE_LETTERS = 6
"""Letters of a piece: 5 gives 3.9 characters per token of English prose, 7 gives 4.5."""

LETTERS = {"a": "aeiou", "c": "bcdfghjklm", "s": "npqrstvwxyz"}
"""The letters that stand for others: with three there are 1,092 patterns of up to six."""

SIGNS = string.digits + string.punctuation
MAX_BLANKS = 16
"""Runs of up to so many blanks have a token each, as indentations of code do."""

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
    "vocab.json", "merges.txt", "added_tokens.json", "chat_template.jinja",
)  # fmt: skip
"""Where tokenizers of transformers and LitGPT lie; either of the first two is one."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)

BEFORE = frozenset((
    "llama", "mistral", "mixtral", "gemma", "gemma2", "gemma3", "gemma3_text", "opt", "bert",
    "roberta", "clip", "clip_text_model",
))  # fmt: skip
"""Families (transformers' `model_type`) whose tokenizers put a token before each text."""

AFTER = frozenset(("t5", "mt5", "umt5", "bert", "roberta", "clip", "clip_text_model"))
"""Those that put one after it. Both as in transformers' tokenizers of these families."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """What of a model its tokenizer has to know."""

    size: int
    """Rows of the embedding; every id is below."""

    family: str
    """transformers' `model_type` of the language model."""

    max_length: int
    """Tokens of the longest text."""

    ids: Mapping[str, int] = field(default_factory=dict)
    """Ids that the config gives: `bos`, `eos`, `pad`, `image`, ..."""


def vocabulary_of(config: Any) -> Vocabulary | None:
    """The vocabulary of a config of transformers; None for models without text."""
    text = config.get_text_config()
    size = getattr(text, "vocab_size", None)
    if not isinstance(size, int) or size < 1:
        return None
    ids: dict[str, int] = {}
    for name in ("bos", "eos", "pad", "image", "video"):
        for owner, key in itertools.product(
            (text, config), (f"{name}_token_id", f"{name}_token_index")
        ):
            found = getattr(owner, key, None)
            first = found[0] if isinstance(found, list) and found else found
            if isinstance(first, int) and 0 <= first < size:
                ids.setdefault(name, first)
    length = getattr(text, "max_position_embeddings", None) or 512
    return Vocabulary(size=size, family=str(text.model_type), max_length=length, ids=ids)


def write_tokenizer(vocabulary: Vocabulary, folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` of the stand-in to `folder`."""
    special = _special_tokens(vocabulary)
    tokens = _tokens(vocabulary, special)
    has_bos, has_eos = vocabulary.family in BEFORE, vocabulary.family in AFTER
    made = _fast_tokenizer(tokens, special, has_bos=has_bos, has_eos=has_eos)
    made.save(str(folder / "tokenizer.json"), pretty=False)
    names = {f"{name}_token": token for name, token in special.items() if name not in _EXTRA}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": vocabulary.max_length,
        "add_bos_token": has_bos,
        "add_eos_token": has_eos,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
        **names,
    }
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


_EXTRA = ("image", "video")
_WRITTEN = {
    "bos": "<s>", "eos": "</s>", "pad": "<pad>", "unk": "<unk>", "mask": "<mask>",
    "image": "<image>", "video": "<video>",
}  # fmt: skip


def _special_tokens(vocabulary: Vocabulary) -> dict[str, str]:
    """The name of each special token to how it is written; those with one id are one token."""
    written: dict[int, str] = {}
    special = {}
    for name, index in vocabulary.ids.items():
        special[name] = written.setdefault(index, _WRITTEN[name])
    for name in ("eos", "bos", "unk", "mask"):
        special.setdefault(name, _WRITTEN[name])
    special.setdefault("pad", special["eos"])
    special |= {"cls": special["bos"], "sep": special["eos"]}
    return special


def _tokens(vocabulary: Vocabulary, special: Mapping[str, str]) -> dict[str, int]:
    """Every token to its id: the special ones where the config has them, the others around."""
    taken = {special[name]: index for name, index in vocabulary.ids.items()}
    others = dict.fromkeys(token for token in special.values() if token not in taken)
    free = sorted(set(range(vocabulary.size)) - set(taken.values()))
    found = taken | dict(zip(others, reversed(free), strict=False))
    rest = free[: max(0, len(free) - len(others))]
    pieces = itertools.chain(_pieces(), (f"<{index}>" for index in itertools.count()))
    return found | {piece: index for index, piece in zip(rest, pieces, strict=False)}


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

    made: Any = Tokenizer(models.WordLevel(tokens, special["unk"]))
    letters = [
        normalizers.Replace(Regex(f"[{group}{group.upper()}]"), letter)
        for letter, group in LETTERS.items()
    ]
    made.normalizer = normalizers.Sequence(letters)
    piece = rf" ?[A-Za-z]{{1,{PIECE_LETTERS}}}| ?[0-9]| ?[^\sA-Za-z0-9]| {{1,{MAX_BLANKS}}}|\s"
    made.pre_tokenizer = pre_tokenizers.Split(Regex(piece), "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens(list(dict.fromkeys(special.values())))
    bos, eos = special["bos"], special["eos"]
    single = [*([bos] if has_bos else ()), "$A", *([eos] if has_eos else ())]
    if len(single) > 1:
        ends = [(token, tokens[token]) for token in dict.fromkeys((bos, eos))]
        pair = [*single, *(f"{part}:1" for part in ("$B", *([eos] if has_eos else ())))]
        made.post_processor = TemplateProcessing(single=single, pair=pair, special_tokens=ends)
    return made
