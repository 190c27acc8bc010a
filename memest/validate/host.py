"""The host's side of a measured run: what the process holds, sampled at named moments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

_OF_PROCESS = ("VmRSS", "VmHWM", "RssAnon", "RssFile", "RssShmem", "VmLck", "VmPin")
_OF_MACHINE = ("MemAvailable", "MemFree", "Cached", "Shmem")

_EXPLAINING = ("moment", "RssAnon", "RssShmem", "pinned_allocated", "MemAvailable")
"""Keys of `explaining`; what the whole machine has left checks the sum over the ranks."""

BEFORE_MODEL = "before the model"
AFTER_SETUP = "after the strategy's setup"


def sample(moment: str, *, of_cuda: bool = False) -> dict[str, Any]:
    """Bytes by the names of `/proc/self/status` and `/proc/meminfo`; what is not there is left out.

    With `of_cuda`, what torch's allocator of pinned memory holds, too: the driver's pages need not
    count as the process's.
    """
    found: dict[str, Any] = {"moment": moment}
    found |= _read("/proc/self/status", _OF_PROCESS)
    found |= _read("/proc/meminfo", _OF_MACHINE)
    if of_cuda:
        found |= _pinned()
    return found


def held_bytes(samples: Sequence[dict[str, Any]]) -> int:
    """What the process holds more than just before the model was built, at its highest sample.

        max(own(s) for s in samples) - own(before the model)
        own(s) = RssAnon + max(RssShmem, pinned_allocated)

    Anonymous pages are tensors in the host's memory and whatever else is allocated; pinned memory
    is shared pages where the kernel counts it at all, else torch knows it. Pages of files, the
    libraries' code, are left out: the ranks share them, and the kernel can drop them.

    It is what the run keeps on purpose, and 0.8 to 1.4 GiB a rank that the libraries take on the
    way: kernels that CUDA loads, NCCL, imports, what `malloc` does not give back. A run that keeps
    nothing in the host's memory shows that part alone.
    """
    before = next((s for s in samples if s["moment"] == BEFORE_MODEL), {})
    return max(map(_own_bytes, samples), default=0) - _own_bytes(before)


def explaining(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What `held_bytes` was computed from, with the strategy's setup: three samples of few keys."""
    if not samples:
        return []
    by_moment = {s["moment"]: s for s in reversed(samples)}  # the first of each
    highest = max(samples, key=_own_bytes)
    chosen = [by_moment[m] for m in (BEFORE_MODEL, AFTER_SETUP) if m in by_moment]
    chosen += [] if any(s is highest for s in chosen) else [highest]
    return [{k: s[k] for k in _EXPLAINING if k in s} for s in chosen]


def _own_bytes(sample: dict[str, Any]) -> int:
    pinned: int = max(sample.get("RssShmem", 0), sample.get("pinned_allocated", 0))
    return pinned + int(sample.get("RssAnon", 0))


def _read(path: str, keys: Sequence[str]) -> dict[str, int]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    return {k: int(v.split()[0]) * 1024 for k, v in pairs if k in keys}


def _pinned() -> dict[str, int]:
    import torch

    read = getattr(torch.cuda, "host_memory_stats", None)
    if read is None or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    stats = read()
    names = {
        "allocated_bytes.current": "pinned_allocated",
        "allocated_bytes.peak": "pinned_allocated_peak",
        "active_bytes.current": "pinned_active",
        "active_bytes.peak": "pinned_active_peak",
    }
    return {name: int(stats[key]) for key, name in names.items() if key in stats}
