"""Batches of one kind of input: text, images, speech.

Shapes: B batch, T tokens, M mel bins, F audio frames.
"""

from __future__ import annotations

import torch

from memest.errors import UnsupportedError
from memest.models_meta.batch.inputs import IGNORE_INDEX, Batch, Recipe, Request
from memest.models_meta.batch.parts import (
    batch_of,
    class_labels,
    image_inputs,
    random_ids,
    text_inputs,
)


def _text_batch(request: Request) -> Batch:
    """Language models, encoders, encoder-decoders and heads: the class name tells the labels."""
    named = text_inputs(request)
    name = request.class_name
    if "attention_mask" not in request.forward:
        named.pop("attention_mask")
    if name.endswith("ForQuestionAnswering"):
        zeros = torch.zeros(request.batch_size, dtype=torch.int64)
        named |= {"start_positions": zeros, "end_positions": zeros.clone()}
    elif "labels" not in request.forward:
        pass
    elif name.endswith(("ForSequenceClassification", "ForNextSentencePrediction")):
        named["labels"] = class_labels(request)
    elif name.endswith("ForTokenClassification"):
        named["labels"] = named["input_ids"] % int(request.config.num_labels)
    elif name.endswith("ForMultipleChoice"):
        raise UnsupportedError(
            f"memest has no batch for `{name}`", hint="its inputs have a dimension of choices"
        )
    else:
        named["labels"] = named["input_ids"].clone()
    if "next_sentence_label" in request.forward:
        named["next_sentence_label"] = torch.zeros(request.batch_size, dtype=torch.int64)
    return batch_of(request, named)


def _image_batch(request: Request) -> Batch:
    """Image classifiers, and image models without a head."""
    named, flags, size = image_inputs(request)
    if "labels" in request.forward:
        if not request.class_name.endswith("ForImageClassification"):
            raise UnsupportedError(
                f"memest does not know the labels of `{request.class_name}`",
                hint="it knows image models without a head and those for classification",
            )
        named["labels"] = class_labels(request)
    return batch_of(request, named, flags=flags, image_size=size)


def _speech_batch(request: Request) -> Batch:
    """Whisper: fp32 features (B, M, F) of the full 30 s window, and labels (B, T).

    The encoder's strided convolution halves the frames, so F is twice its positions.
    """
    config = request.config
    mels = getattr(config, "num_mel_bins", None)
    positions = getattr(config, "max_source_positions", None)
    if mels is None or positions is None or "labels" not in request.forward:
        raise UnsupportedError(
            f"memest does not know the inputs of `{request.class_name}`",
            hint="of the speech models it knows Whisper",
        )
    features = torch.empty(request.batch_size, mels, 2 * positions, device=request.device)
    labels = random_ids(request, request.seq_len)
    if request.num_padded:
        labels[1:, -request.num_padded :] = IGNORE_INDEX
    return batch_of(request, {"input_features": features, "labels": labels})


RECIPE_BY_MAIN_INPUT: dict[str, Recipe] = {
    "input_ids": _text_batch,
    "pixel_values": _image_batch,
    "input_features": _speech_batch,
}
"""By a model class's `main_input_name`, for families with nothing of their own."""
