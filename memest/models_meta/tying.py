"""Whether the output head shares the weights of the token embeddings."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from memest.errors import PlanError


def set_tied_embeddings(model: Any, tied: bool) -> None:
    """Give the output head a weight of its own, or the embeddings' one.

    A config alone cannot say it for T5: transformers 5.17 builds it tied whatever the file says
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
