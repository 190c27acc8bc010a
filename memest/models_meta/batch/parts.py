"""Parts of a batch: ids, masks, labels, pixels.

Shapes: B batch, T tokens, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from memest.errors import PlanError
from memest.models_meta.batch.inputs import Batch, BatchTensor, Request
from memest.models_meta.build import default_image_size, text_config, vision_config


def batch_of(request: Request, named: Mapping[str, Tensor], *notes: str, **kwargs: Any) -> Batch:
    """A `Batch` of the given tensors; without labels or a loss of its own, one over an output."""
    tensors = tuple(BatchTensor(name=name, value=value) for name, value in named.items())
    flags = kwargs.pop("flags", {})
    loss_output = "loss"
    if not ({"labels", "start_positions"} & set(named) or flags.get("return_loss")):
        loss_output = "last_hidden_state"
        notes = (*notes, f"{request.class_name} has no loss: the mean of its output is one")
    return Batch(tensors=tensors, flags=flags, loss_output=loss_output, notes=notes, **kwargs)


def _special_ids(config: Any) -> set[int]:
    """Ids with a meaning of their own: every `*_token_id` and `*_token_index` of the config."""
    fields = {**text_config(config).to_dict(), **config.to_dict()}
    ends = ("_token_id", "_token_index")
    return {
        value
        for key, value in fields.items()
        if key.endswith(ends) and isinstance(value, int) and not isinstance(value, bool)
    }


def random_ids(request: Request, num_tokens: int) -> Tensor:
    """(B, num_tokens) seeded ids, none of them special while the vocabulary has others."""
    vocab_size = int(text_config(request.config).vocab_size)
    special = _special_ids(request.config)
    shape = (request.batch_size, num_tokens)
    ids = torch.randint(0, vocab_size, shape, generator=request.generator)
    ordinary = next((i for i in range(min(vocab_size, len(special) + 1)) if i not in special), 0)
    if special:
        ids[torch.isin(ids, torch.tensor(sorted(special)))] = ordinary
    return ids


def _pad_id(request: Request) -> int:
    text = text_config(request.config)
    pad_id = getattr(text, "pad_token_id", None)
    if pad_id is None:
        pad_id = getattr(request.config, "pad_token_id", None)
    return pad_id if isinstance(pad_id, int) and 0 <= pad_id < text.vocab_size else 0


def text_inputs(request: Request, prefix: Tensor | None = None) -> dict[str, Tensor]:
    """`input_ids` and `attention_mask` (B, T); ids begin with `prefix` (B, T'), image tokens."""
    num_prefix = 0 if prefix is None else prefix.shape[1]
    ids = random_ids(request, request.seq_len - num_prefix)
    if prefix is not None:
        ids = torch.cat([prefix, ids], dim=1)
    mask = torch.ones_like(ids)
    num_padded = min(request.num_padded, request.seq_len - num_prefix)
    if num_padded > 0:
        ids[1:, -num_padded:] = _pad_id(request)
        mask[1:, -num_padded:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def image_inputs(request: Request) -> tuple[dict[str, Tensor], dict[str, bool], int]:
    """fp32 `pixel_values` (B, C, H, W), flags for a size that is not the model's, the size."""
    vision = vision_config(request.config) or request.config
    own = default_image_size(request.config)
    size = request.image_size or own
    if size is None or size < 1:
        raise PlanError(f"`image_size` is {size}", hint="give pixels a side, such as 224")
    patch = getattr(vision, "patch_size", None)
    if isinstance(patch, int) and size < patch:
        raise PlanError(
            f"`image_size` {size} is smaller than a patch of `{request.class_name}`",
            hint=f"give at least {patch}, or leave it out for the model's own {own}",
        )
    flags: dict[str, bool] = {}
    if size != own and hasattr(vision, "image_size") and request.config.model_type != "dinov2":
        if "interpolate_pos_encoding" not in request.forward:
            raise PlanError(
                f"`{request.class_name}` takes images of {own} pixels, not {size}",
                hint=f"leave `image_size` out, or set it to {own}",
            )
        flags["interpolate_pos_encoding"] = True
    num_channels = int(getattr(vision, "num_channels", 3))
    shape = (request.batch_size, num_channels, size, size)
    return {"pixel_values": torch.empty(shape, device=request.device)}, flags, size


def class_labels(request: Request) -> Tensor:
    """(B,) class numbers; floats for a regression head, which a single label means."""
    num_labels = int(request.config.num_labels)
    if num_labels == 1:
        return torch.zeros(request.batch_size)
    return torch.randint(0, num_labels, (request.batch_size,), generator=request.generator)


def num_image_tokens(config: Any, image_size: int | None) -> int:
    """Tokens of a row that stand for its image, start and end marks included; 0 where none do."""
    size = image_size or default_image_size(config) or 0
    vision: Any = getattr(config, "vision_config", None)
    if config.model_type == "llava":
        has_class_token = config.vision_feature_select_strategy == "full"
        return int((size // vision.patch_size) ** 2 + has_class_token)
    if config.model_type == "gemma3":
        return int(config.mm_tokens_per_image) + 2
    if config.model_type in ("qwen2_vl", "qwen2_5_vl"):
        grid = size // vision.patch_size
        return int((grid // vision.spatial_merge_size) ** 2 + 2)
    return 0


def placeholders(request: Request, num_image_tokens: int, image_id: int, *around: Any) -> Tensor:
    """(B, T') image tokens between an optional start and end id, checked to fit `seq_len`."""
    start, end = around if around else (None, None)
    row = [start] * (start is not None) + [image_id] * num_image_tokens + [end] * (end is not None)
    if request.seq_len <= len(row):
        raise PlanError(
            f"`seq_len` {request.seq_len} has no room for text: an image of "
            f"`{request.class_name}` is {len(row)} tokens",
            hint=f"`seq_len` counts image tokens too: give more than {len(row)}",
        )
    return torch.tensor(row).expand(request.batch_size, -1)
