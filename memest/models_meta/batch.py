"""One micro-batch as a model's forward takes it, with labels, so that the model computes its loss.

Ids, masks and labels are real tensors on the CPU, because models branch on their values. Pixels and
audio features are meta tensors.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memest.errors import PlanError, UnsupportedError
from memest.models_meta.build import default_image_size, text_config, vision_config
from memest.models_meta.registry import error_text

IGNORE_INDEX = -100  # label that torch's cross entropy ignores


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Arguments of one forward, in the order in which they are moved to the GPU."""

    inputs: Mapping[str, Tensor | bool]
    """Ids, masks and labels with values, floats on meta, and flags such as `return_loss`."""

    loss_output: str = "loss"  # Output to differentiate. An output other than `loss` is averaged.
    image_size: int | None = None  # pixels a side; None without images
    notes: tuple[str, ...] = ()  # assumptions for the report


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Checked arguments of `make_batch`, and facts about the model, from which a batch is made."""

    config: Any
    class_name: str
    forward: frozenset[str]  # names of the parameters of the class's forward
    batch_size: int
    seq_len: int
    image_size: int | None  # pixels a side; None is the model's
    padded: bool  # True if rows but the first end with padding
    generator: torch.Generator  # of random ids

    @property
    def num_padded(self) -> int:
        """Tokens of padding in each row but the first: a quarter, at least 1; 0 if unpadded."""
        can_pad = self.padded and self.batch_size > 1 and self.seq_len > 1
        return max(1, self.seq_len // 4) if can_pad else 0


Recipe = Callable[[Request], Batch]


def batch_of(
    request: Request, named: Mapping[str, Tensor | bool], *notes: str, image_size: int | None = None
) -> Batch:
    """Make a `Batch` of the inputs `named`, {argument of the forward: value}. `notes` are texts for
    the report. Without labels, the loss is the mean of the last hidden state, and a note on this
    loss is added to `notes`. `image_size` is in pixels a side."""
    loss_output = "loss"
    if not {"labels", "start_positions", "return_loss"} & set(named):
        loss_output = "last_hidden_state"
        notes = (*notes, f"{request.class_name} has no loss: the mean of its output is one")
    return Batch(inputs=named, loss_output=loss_output, notes=notes, image_size=image_size)


def random_ids(request: Request, num_tokens: int) -> Tensor:
    """Return random token ids (B, `num_tokens`) without special ids.

    Special ids are all `*_token_id` and `*_token_index` of the config. A special id is replaced by
    the lowest ordinary id, or by 0 if the vocabulary has no ordinary id.
    """
    text = text_config(request.config)
    vocab_size = int(text.vocab_size)
    special_ids = {
        value
        for key, value in {**text.to_dict(), **request.config.to_dict()}.items()
        if key.endswith(("_token_id", "_token_index")) and type(value) is int
    }
    shape = (request.batch_size, num_tokens)
    ids = torch.randint(0, vocab_size, shape, generator=request.generator)
    if special_ids:
        candidates = range(min(vocab_size, len(special_ids) + 1))  # one more than special ids
        ordinary_id = next((index for index in candidates if index not in special_ids), 0)
        ids[torch.isin(ids, torch.tensor(sorted(special_ids)))] = ordinary_id
    return ids


def text_inputs(request: Request, prefix: Tensor | None = None) -> dict[str, Tensor]:
    """Return `input_ids` and `attention_mask`, both (B, T). The ids begin with `prefix` (B, T'), if
    given. All rows but the first end with `request.num_padded` tokens of padding."""
    num_prefix = 0 if prefix is None else prefix.shape[1]
    ids = random_ids(request, request.seq_len - num_prefix)
    if prefix is not None:
        ids = torch.cat([prefix, ids], dim=1)
    mask = torch.ones_like(ids)
    num_padded = min(request.num_padded, request.seq_len - num_prefix)
    if num_padded > 0:
        text = text_config(request.config)
        pad_id: Any = getattr(text, "pad_token_id", None)
        if pad_id is None:
            pad_id = getattr(request.config, "pad_token_id", None)
        if not isinstance(pad_id, int) or not 0 <= pad_id < text.vocab_size:
            pad_id = 0
        ids[1:, -num_padded:] = pad_id
        mask[1:, -num_padded:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def image_inputs(request: Request) -> tuple[dict[str, Tensor | bool], int]:
    """Return (inputs, S), for S pixels a side: `pixel_values` (B, C, S, S) on meta, and the flag
    `interpolate_pos_encoding` if S is not the model's size. `PlanError` if S does not fit."""
    vision = vision_config(request.config) or request.config
    default = default_image_size(request.config)
    size = request.image_size or default
    if size is None or size < 1:
        raise PlanError(f"`image_size` is {size}", hint="give pixels a side, such as 224")
    patch = getattr(vision, "patch_size", None)
    if isinstance(patch, int) and size < patch:
        raise PlanError(
            f"`image_size` {size} is smaller than a patch of `{request.class_name}`",
            hint=f"give at least {patch}, or leave it out for the model's own {default}",
        )
    num_channels = int(getattr(vision, "num_channels", 3))
    shape = (request.batch_size, num_channels, size, size)
    inputs: dict[str, Tensor | bool] = {"pixel_values": torch.empty(shape, device="meta")}
    has_fixed_size = hasattr(vision, "image_size") and request.config.model_type != "dinov2"
    if size != default and has_fixed_size:  # DINOv2 always interpolates its positions
        if "interpolate_pos_encoding" not in request.forward:
            raise PlanError(
                f"`{request.class_name}` takes images of {default} pixels, not {size}",
                hint=f"leave `image_size` out, or set it to {default}",
            )
        inputs["interpolate_pos_encoding"] = True
    return inputs, size


def class_labels(request: Request) -> Tensor:
    """Return random class numbers (B,), or float zeros for regression (a config with one label)."""
    num_labels = int(request.config.num_labels)
    if num_labels == 1:
        return torch.zeros(request.batch_size)
    return torch.randint(0, num_labels, (request.batch_size,), generator=request.generator)


def num_image_tokens(config: Any, image_size: int | None) -> int:
    """Return a row's number of image tokens, start and end tokens included; 0 for a model without
    them. `image_size` is in pixels a side; None is the model's."""
    size = image_size or default_image_size(config) or 0
    vision: Any = getattr(config, "vision_config", None)
    if config.model_type == "llava":
        num_class_tokens = 1 if config.vision_feature_select_strategy == "full" else 0
        return int((size // vision.patch_size) ** 2) + num_class_tokens
    if config.model_type == "gemma3":
        return int(config.mm_tokens_per_image) + 2  # start and end
    if config.model_type in ("qwen2_vl", "qwen2_5_vl"):
        grid = size // vision.patch_size
        return int((grid // vision.spatial_merge_size) ** 2) + 2  # start and end
    return 0


def text_with_image(request: Request, size: int, *ends: int) -> dict[str, Tensor]:
    """Return text inputs that begin with the tokens of an image of `size` pixels a side. `ends` are
    the ids of its start and end token, if any. `PlanError` if there is no room for text."""
    num_tokens = num_image_tokens(request.config, size) - len(ends)
    row = [request.config.image_token_id] * num_tokens
    if ends:
        start_id, end_id = ends
        row = [start_id, *row, end_id]
    if request.seq_len <= len(row):
        raise PlanError(
            f"`seq_len` {request.seq_len} has no room for text: an image of "
            f"`{request.class_name}` is {len(row)} tokens",
            hint=f"`seq_len` counts image tokens too: give more than {len(row)}",
        )
    return text_inputs(request, torch.tensor(row).expand(request.batch_size, -1))


def _text_batch(request: Request) -> Batch:
    """Make the batch of a text model. The name of the model class selects the labels:

    - `...ForQuestionAnswering`: start and end positions, all 0.
    - `...ForSequenceClassification`, `...ForNextSentencePrediction`: a class for each row.
    - `...ForTokenClassification`: a class for each token.
    - Other names: the token ids. A class whose forward takes no `labels` gets none.
    """
    inputs = text_inputs(request)
    name = request.class_name
    if "attention_mask" not in request.forward:
        inputs.pop("attention_mask")
    if name.endswith("ForQuestionAnswering"):
        zeros = torch.zeros(request.batch_size, dtype=torch.int64)
        inputs |= {"start_positions": zeros, "end_positions": zeros.clone()}
    elif "labels" not in request.forward:
        pass
    elif name.endswith(("ForSequenceClassification", "ForNextSentencePrediction")):
        inputs["labels"] = class_labels(request)
    elif name.endswith("ForTokenClassification"):
        inputs["labels"] = inputs["input_ids"] % int(request.config.num_labels)
    elif name.endswith("ForMultipleChoice"):
        raise UnsupportedError(
            f"memest has no batch for `{name}`", hint="its inputs have a dimension of choices"
        )
    else:
        inputs["labels"] = inputs["input_ids"].clone()
    if "next_sentence_label" in request.forward:
        inputs["next_sentence_label"] = torch.zeros(request.batch_size, dtype=torch.int64)
    return batch_of(request, inputs)


def _image_batch(request: Request) -> Batch:
    """Make the batch of an image classifier, or of an image model without a head."""
    inputs, size = image_inputs(request)
    if "labels" in request.forward:
        if not request.class_name.endswith("ForImageClassification"):
            raise UnsupportedError(
                f"memest does not know the labels of `{request.class_name}`",
                hint="recipes exist for image models without a head and for classification",
            )
        inputs["labels"] = class_labels(request)
    return batch_of(request, inputs, image_size=size)


def _speech_batch(request: Request) -> Batch:
    """Make Whisper's batch: features (B, mel bins, frames) of 30 s on meta, and labels (B, T).
    There are two frames per position of the encoder, since its strided convolution halves them."""
    config = request.config
    mels = getattr(config, "num_mel_bins", None)
    positions = getattr(config, "max_source_positions", None)
    if mels is None or positions is None or "labels" not in request.forward:
        raise UnsupportedError(
            f"memest does not know the inputs of `{request.class_name}`",
            hint="of the speech models only Whisper has a recipe",
        )
    features = torch.empty(request.batch_size, mels, 2 * positions, device="meta")
    labels = random_ids(request, request.seq_len)
    if request.num_padded:
        labels[1:, -request.num_padded :] = IGNORE_INDEX
    return batch_of(request, {"input_features": features, "labels": labels})


RECIPE_BY_MAIN_INPUT: dict[str, Recipe] = {
    "input_ids": _text_batch,
    "pixel_values": _image_batch,
    "input_features": _speech_batch,
}
"""Recipes by a model class's `main_input_name`, for families without an own recipe."""


def _contrastive_batch(request: Request) -> Batch:
    """Make the batch of CLIP or SigLIP: as many images as texts; their loss compares all pairs."""
    pixels, size = image_inputs(request)
    text = {name: v for name, v in text_inputs(request).items() if name in request.forward}
    return batch_of(request, {**text, **pixels, "return_loss": True}, image_size=size)


def _blip2_batch(request: Request) -> Batch:
    """Make BLIP-2's batch for captions: text tokens without image placeholders. The image still
    passes the vision model and the Q-Former."""
    pixels, size = image_inputs(request)
    text = text_inputs(request)
    inputs = {**pixels, **text, "labels": text["input_ids"].clone()}
    note = "no image placeholders in the text: `seq_len` is the caption's"
    return batch_of(request, inputs, note, image_size=size)


def _image_text_batch(request: Request) -> Batch:
    """Make a batch with image tokens: one per patch (LLaVA), or a fixed number (Gemma 3)."""
    config = request.config
    pixels, size = image_inputs(request)
    is_gemma = config.model_type == "gemma3"
    ends = (config.boi_token_id, config.eoi_token_id) if is_gemma else ()
    text = text_with_image(request, size, *ends)
    inputs = {**text, **pixels, "labels": text["input_ids"].clone()}
    if is_gemma:  # its forward attends to image tokens in both directions
        inputs["token_type_ids"] = (text["input_ids"] == config.image_token_id).long()
    return batch_of(request, inputs, image_size=size)


def _qwen2_vl_batch(request: Request) -> Batch:
    """Make Qwen2-VL's batch. `pixel_values` has a row per patch: (B * grid * grid, C * frames *
    patch * patch), for `grid` patches a side. A token stands for 2 x 2 patches."""
    config, vision = request.config, request.config.vision_config
    size = request.image_size or default_image_size(config)
    token_width = vision.patch_size * vision.spatial_merge_size  # pixels a side
    if size is None or size < token_width or size % token_width:
        raise PlanError(
            f"`image_size` {size} is no multiple of {token_width}",
            hint=f"`{request.class_name}` cuts images into squares of {token_width} pixels",
        )
    grid = size // vision.patch_size
    num_channels = getattr(vision, "in_channels", 3)
    width = num_channels * vision.temporal_patch_size * vision.patch_size**2
    text = text_with_image(request, size, config.vision_start_token_id, config.vision_end_token_id)
    inputs = text | {
        "pixel_values": torch.empty(request.batch_size * grid**2, width, device="meta"),
        "image_grid_thw": torch.tensor([[1, grid, grid]]).repeat(request.batch_size, 1),
        "mm_token_type_ids": (text["input_ids"] == config.image_token_id).int(),
        "labels": text["input_ids"].clone(),
    }
    note = f"one image of {size} x {size} pixels a row"
    return batch_of(request, inputs, note, image_size=size)


RECIPE_BY_FAMILY: dict[str, Recipe] = {
    "blip-2": _blip2_batch,
    "clip": _contrastive_batch,
    "gemma3": _image_text_batch,
    "llava": _image_text_batch,
    "qwen2_vl": _qwen2_vl_batch,
    "qwen2_5_vl": _qwen2_vl_batch,
    "siglip": _contrastive_batch,
}
"""Recipes by `model_type`."""

SEED = 20

MAX_TOKENS = 2**27  # limit of tokens: real ids of 1 GiB on the host, 3 GiB with mask and labels


def make_batch(
    model: nn.Module, *, batch_size: int, seq_len: int, image_size: int | None = None,
    padded: bool = False,
) -> Batch:  # fmt: skip
    """Make the micro-batch on which `model` (a transformers class, or adapters around one) trains.

    Ids are random under a fixed seed, and special only if the config leaves no others. `padded`
    keeps the first row full and masks the last quarter of the others, whose ids are the padding id.
    Labels of text are the ids themselves, unmasked, as a plain fine-tuning loop passes them.
    `seq_len` counts all tokens, image placeholders included. Images are square, one per row, of
    `image_size` pixels a side; None is the model's size.

    Raises:
        PlanError: a size is not positive, does not fit the model, or has no room for the image.
        UnsupportedError: memest has no recipe for the inputs of this model.
    """
    for name, value in (("batch_size", batch_size), ("seq_len", seq_len)):
        if value < 1:
            raise PlanError(f"`{name}` is {value}", hint="give at least 1")
    if batch_size * seq_len > MAX_TOKENS:
        raise PlanError(
            f"`batch_size` {batch_size} x `seq_len` {seq_len} is beyond {MAX_TOKENS} tokens",
            hint="a micro-batch is what goes through the model at once",
        )
    inner = unwrapped(model)
    request = Request(
        config=inner.config, class_name=type(inner).__name__,
        forward=frozenset(inspect.signature(inner.forward).parameters), batch_size=batch_size,
        seq_len=seq_len, image_size=image_size, padded=padded,
        generator=torch.Generator().manual_seed(SEED),
    )  # fmt: skip
    try:
        return _recipe(request, inner)(request)
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise PlanError(
            f"the config of `{request.class_name}` does not describe its inputs: "
            f"{error_text(error)}",
            hint="check its vocabulary, special token ids, labels and image sizes",
        ) from error


def unwrapped(model: nn.Module) -> Any:
    """Return the transformers model in `model`, without the adapters of peft around it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


def _recipe(request: Request, model: Any) -> Recipe:
    model_type = str(request.config.model_type)
    if model_type in RECIPE_BY_FAMILY:
        return RECIPE_BY_FAMILY[model_type]
    main_input = str(model.main_input_name)
    takes_text_and_images = main_input == "input_ids" and "pixel_values" in request.forward
    if main_input not in RECIPE_BY_MAIN_INPUT or takes_text_and_images:
        raise UnsupportedError(
            f"memest has no recipe for the inputs of `{request.class_name}` (`{model_type}`)",
            hint="recipes exist for text, image and speech models, and the image-text families "
            + ", ".join(f"`{name}`" for name in RECIPE_BY_FAMILY),
        )
    return RECIPE_BY_MAIN_INPUT[main_input]
