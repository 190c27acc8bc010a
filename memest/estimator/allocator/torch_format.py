"""The dicts of which `torch.cuda.memory._snapshot()` is made.

As `torch/csrc/cuda/Module.cpp` (`THCPModule_memorySnapshot`) fills them, torch 2.11 and 2.13; the
classes are in the docstring of `torch.cuda.memory._snapshot`.
"""

from __future__ import annotations

from typing import Any

from memest.estimator.allocator.settings import AllocatorSettings

POOL = (0, 0)
"""The id of the default pool among those of `torch.cuda.MemPool`."""

SETTINGS = {"PYTORCH_ALLOC_CONF": "", "expandable_segments": False}
"""`allocator_settings` of an allocator with its defaults."""


def settings_entry(settings: AllocatorSettings) -> dict[str, Any]:
    """`allocator_settings`."""
    return {
        "PYTORCH_ALLOC_CONF": settings.text,
        "expandable_segments": settings.expandable_segments,
    }


def block_entry(
    address: int, num_bytes: int, requested_bytes: int, state: str, frames: list[dict[str, Any]]
) -> dict[str, Any]:
    """A `Block`; `state` is `active_allocated`, `active_pending_free` or `inactive`."""
    return {
        "address": address,
        "size": num_bytes,
        "requested_size": requested_bytes,
        "state": state,
        "frames": frames,
    }


def free_block_entry(address: int, num_bytes: int) -> dict[str, Any]:
    """A `Block` that nobody uses."""
    return block_entry(address, num_bytes, 0, "inactive", [])


def segment_entry(
    address: int,
    num_bytes: int,
    *,
    stream: int,
    is_small: bool,
    is_expandable: bool = False,
    blocks: list[dict[str, Any]],
    frames: list[dict[str, Any]],
) -> dict[str, Any]:
    """A `Segment` that `blocks` tile."""
    in_use = [block for block in blocks if block["state"] != "inactive"]
    allocated = [block for block in in_use if block["state"] == "active_allocated"]
    return {
        "device": 0,
        "address": address,
        "total_size": num_bytes,
        "allocated_size": sum(block["size"] for block in allocated),
        "active_size": sum(block["size"] for block in in_use),
        "requested_size": sum(block["requested_size"] for block in in_use),
        "stream": stream,
        "segment_type": "small" if is_small else "large",
        "segment_pool_id": POOL,
        "is_expandable": is_expandable,
        "frames": frames,
        "blocks": blocks,
    }
