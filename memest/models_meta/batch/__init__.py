"""One micro-batch as a model's own forward takes it, labels included, so that it computes its loss.

Ids, masks and labels are real tensors on the CPU, because models branch on their values (a mask of
ones is dropped); pixels and audio features have no value that matters and are meta tensors.
"""

from __future__ import annotations

from memest.models_meta.batch.inputs import Batch
from memest.models_meta.batch.make import make_batch
from memest.models_meta.batch.parts import num_image_tokens

__all__ = ["Batch", "make_batch", "num_image_tokens"]
