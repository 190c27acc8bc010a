"""A stand-in checkpoint: a folder of kilobytes that scripts take for a model."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from memest.errors import PlanError, shown
from memest.run.stand_ins.folder import check_folder, stand_in_folder
from memest.run.stand_ins.models import hugging_face_model, litgpt_model
from memest.run.stand_ins.tokenizer import TOKENIZER_FILES, write_tokenizer

FORMATS = {"litgpt": litgpt_model, "hf": hugging_face_model}
"""`litgpt download` makes the first layout, transformers' `save_pretrained` the second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """What was written."""

    folder: Path
    model: str
    num_tensors: int
    num_bytes: int
    """Of all files, on the disk."""

    stands_for_bytes: int
    """Of the weights that a real checkpoint would hold."""


def write_checkpoint(
    name: str, folder: Path, *, layout: str, tokenizer: Path | None = None
) -> Written:
    """Write a stand-in for `name`: names, shapes and dtypes of its weights, no values.

    Each tensor is one zero with strides of 0. Plain torch reads it as zeros; on a virtual GPU it
    takes what the real one takes.

    Args:
        name: a model as `memest predict` takes it; for LitGPT also one of LitGPT's own names.
        folder: new, empty, or a stand-in that is to be replaced.
        layout: a name in `FORMATS`.
        tokenizer: a folder whose tokenizer is copied; without it the tokenizer stands in, too.

    Raises:
        PlanError: `folder` holds something else, or LitGPT does not know the model.
        UnknownModelError: nothing has this name.
        UnsupportedError: LitGPT is not installed.
    """
    check_folder(folder)
    if tokenizer is not None and not any((tokenizer / f).is_file() for f in TOKENIZER_FILES[:2]):
        raise PlanError(
            f"{shown(str(tokenizer))} has no tokenizer",
            hint=f"it should hold `{TOKENIZER_FILES[0]}` or `{TOKENIZER_FILES[1]}`",
        )
    model = FORMATS[layout](name)
    with stand_in_folder(folder, _about(model.name, name, layout, tokenizer)):
        if tokenizer is not None:
            _copy_tokenizer(tokenizer, folder)
        elif model.vocabulary is not None:
            write_tokenizer(model.vocabulary, folder)
        model.write(folder)
    return Written(
        folder=folder,
        model=model.name,
        num_tensors=len(model.weights),
        num_bytes=sum(path.stat().st_size for path in folder.iterdir()),
        stands_for_bytes=sum(t.numel() * t.itemsize for t in model.weights.values()),
    )


def _about(model: str, name: str, layout: str, tokenizer: Path | None) -> str:
    text = (
        f"`memest checkpoint {name} --format {layout}` wrote this folder. It holds the names, "
        f"shapes and dtypes\nof the weights of {model}, and none of their values: one number of "
        "storage per tensor.\nScripts load it under `memest run`, which says what memory they "
        "take. There is nothing in it to train or ask."
    )
    if tokenizer is not None:
        return f"{text}\n\nThe tokenizer is that of {tokenizer.absolute()}."
    return text + (
        "\n\nA tokenizer in it stands in, too: it makes about as many tokens of English as "
        "published ones do.\nFor the exact length of a text, `--tokenizer FOLDER` takes the "
        "model's own."
    )


def _copy_tokenizer(source: Path, folder: Path) -> None:
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
