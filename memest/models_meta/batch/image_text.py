"""Batches of images with text, whose inputs belong together in a way of their own by family.

Shapes: B batch, C channels.
"""

from __future__ import annotations

import torch

from memest.errors import PlanError
from memest.models_meta.batch.inputs import Batch, Recipe, Request
from memest.models_meta.batch.parts import (
    batch_of,
    image_inputs,
    num_image_tokens,
    placeholders,
    text_inputs,
)
from memest.models_meta.build import default_image_size


def _contrastive_batch(request: Request) -> Batch:
    """CLIP: as many images as texts, and the contrastive loss between all of them."""
    pixels, flags, size = image_inputs(request)
    text = text_inputs(request)
    named = {name: tensor for name, tensor in text.items() if name in request.forward} | pixels
    return batch_of(request, named, flags={**flags, "return_loss": True}, image_size=size)


def _blip2_batch(request: Request) -> Batch:
    """BLIP-2 as it is fine-tuned on captions: text tokens alone, without image placeholders.

    The image goes through the vision model and the Q-Former all the same.
    """
    pixels, flags, size = image_inputs(request)
    named = pixels | text_inputs(request)
    named["labels"] = named["input_ids"].clone()
    note = "no image placeholders in the text: `seq_len` is the caption's"
    return batch_of(request, named, note, flags=flags, image_size=size)


def _llava_batch(request: Request) -> Batch:
    """LLaVA: one token for each patch of the vision tower."""
    pixels, flags, size = image_inputs(request)
    num_tokens = num_image_tokens(request.config, size)
    prefix = placeholders(request, num_tokens, request.config.image_token_id)
    text = text_inputs(request, prefix)
    named = text | pixels | {"labels": text["input_ids"].clone()}
    return batch_of(request, named, flags=flags, image_size=size)


def _gemma3_batch(request: Request) -> Batch:
    """Gemma 3: the vision tower's patches are pooled to a fixed number of tokens."""
    config = request.config
    pixels, flags, size = image_inputs(request)
    prefix = placeholders(
        request,
        num_image_tokens(config, size) - 2,
        config.image_token_id,
        config.boi_token_id,
        config.eoi_token_id,
    )
    text = text_inputs(request, prefix)
    named = text | pixels | {"labels": text["input_ids"].clone()}
    named["token_type_ids"] = (text["input_ids"] == config.image_token_id).long()
    return batch_of(request, named, flags=flags, image_size=size)


def _qwen2_vl_batch(request: Request) -> Batch:
    """Qwen2-VL: the processor's flat rows of patches, two frames deep, merged two by two to tokens.

    pixel_values is (B * grid * grid, C * temporal * patch * patch).
    """
    config, vision = request.config, request.config.vision_config
    size = request.image_size or default_image_size(config)
    unit = vision.patch_size * vision.spatial_merge_size
    if size is None or size < unit or size % unit:
        raise PlanError(
            f"`image_size` {size} is no multiple of {unit}",
            hint=f"`{request.class_name}` cuts images into squares of {unit} pixels",
        )
    grid = size // vision.patch_size
    num_channels = getattr(vision, "in_channels", 3)
    width = num_channels * vision.temporal_patch_size * vision.patch_size**2
    prefix = placeholders(
        request,
        num_image_tokens(config, size) - 2,
        config.image_token_id,
        config.vision_start_token_id,
        config.vision_end_token_id,
    )
    text = text_inputs(request, prefix)
    named = text | {
        "pixel_values": torch.empty(request.batch_size * grid**2, width, device=request.device),
        "image_grid_thw": torch.tensor([[1, grid, grid]]).repeat(request.batch_size, 1),
        "mm_token_type_ids": (text["input_ids"] == config.image_token_id).int(),
        "labels": text["input_ids"].clone(),
    }
    note = f"one image of {size} x {size} pixels a row"
    return batch_of(request, named, note, image_size=size)


RECIPE_BY_FAMILY: dict[str, Recipe] = {
    "blip-2": _blip2_batch,
    "clip": _contrastive_batch,
    "gemma3": _gemma3_batch,
    "llava": _llava_batch,
    "qwen2_vl": _qwen2_vl_batch,
    "qwen2_5_vl": _qwen2_vl_batch,
    "siglip": _contrastive_batch,
}
"""By `model_type`."""
