"""The batch of a model: its class says which recipe."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from memest.errors import PlanError, UnsupportedError
from memest.models_meta.batch.image_text import RECIPE_BY_FAMILY
from memest.models_meta.batch.inputs import Batch, Recipe, Request
from memest.models_meta.batch.recipes import RECIPE_BY_MAIN_INPUT
from memest.models_meta.registry import error_text

SEED = 20


MAX_TOKENS = 2**27
"""Ids are real tensors: this many take 1 GiB of host memory, thrice with mask and labels."""


def make_batch(
    model: nn.Module,
    *,
    batch_size: int,
    seq_len: int,
    image_size: int | None = None,
    padded: bool = False,
    device: torch.device | str = "meta",
) -> Batch:
    """The micro-batch that `model` (a transformers class, or adapters around one) is trained on.

    Ids are random under a fixed seed, and never a special id of the config. `padded` keeps the
    first row full and masks the last quarter of the others, where the ids are the padding id.
    Labels are the ids themselves, unmasked, as a plain fine-tuning loop passes them; `seq_len`
    counts all tokens, image placeholders included. The pixels of a model are square, one image a
    row, of its own size unless `image_size` says otherwise. `device` is where float inputs are.

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
    inner = _unwrapped(model)
    request = Request(
        config=inner.config,
        class_name=type(inner).__name__,
        forward=frozenset(inspect.signature(inner.forward).parameters),
        batch_size=batch_size,
        seq_len=seq_len,
        image_size=image_size,
        padded=padded,
        device=torch.device(device),
        generator=torch.Generator().manual_seed(SEED),
    )
    try:
        return _recipe(request, inner)(request)
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise PlanError(
            f"the config of `{request.class_name}` does not say what its inputs are: "
            f"{error_text(error)}",
            hint="check its vocabulary, special token ids, labels and image sizes",
        ) from error


def _unwrapped(model: nn.Module) -> Any:
    """The transformers model inside adapters."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


def _recipe(request: Request, model: Any) -> Recipe:
    """By family, for inputs that belong together in a way of their own; else by the main input."""
    model_type = str(request.config.model_type)
    if model_type in RECIPE_BY_FAMILY:
        return RECIPE_BY_FAMILY[model_type]
    main_input = str(model.main_input_name)
    takes_images = main_input == "input_ids" and "pixel_values" in request.forward
    if main_input not in RECIPE_BY_MAIN_INPUT or takes_images:
        raise UnsupportedError(
            f"memest does not know the inputs of `{request.class_name}` (`{model_type}`)",
            hint="it knows text, image and speech models, and the image-text families "
            + ", ".join(f"`{name}`" for name in RECIPE_BY_FAMILY),
        )
    return RECIPE_BY_MAIN_INPUT[main_input]
