"""What if the batches were smaller: those of DataLoaders, cut as they are put together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data._utils import fetch

from memest.estimator.device.patches import Patches


def install(patches: Patches, parts: int) -> None:
    """Let every DataLoader take only one of `parts` of the samples of each batch, at least one."""
    for fetcher in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
        patches.set(fetcher, "fetch", _cutting(fetcher.fetch, parts))


def _cutting(whole: Callable[..., Any], parts: int) -> Callable[..., Any]:
    def fetch(self: Any, possibly_batched_index: Any) -> Any:
        index = possibly_batched_index
        if self.auto_collation and len(index) > 1:
            index = index[: max(1, len(index) // parts)]
        return whole(self, index)

    return fetch
