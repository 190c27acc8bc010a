"""Instances of a GPU under NVIDIA's MIG: memory and multiprocessors by profile.

`mig.json` has the MiB and the multiprocessors that `nvidia-smi mig -lgip` lists for each profile.
A process on an instance sees that memory as the GPU's total. CUDA reports 4.750 GiB on the 1g.5gb
of an A100, and torch 39.25 GiB on the 3g.40gb of an A100 80GB. The rest follows from the whole GPU.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memest.errors import PlanError

if TYPE_CHECKING:
    from memest.estimator.hardware.gpus import Gpu

_DATA = Path(__file__).with_name("mig.json")
_SLICES = 8  # slices of memory of every GPU with MIG: NVIDIA's MIG User Guide, Concepts
_MEDIA = re.compile(r"\+me$")  # with media engines: the same memory in `nvidia-smi mig -lgip`
_NAME = re.compile(
    r"(.*?)(?:^|[\s_-]+)(?:mig(?:[\s_-]+(.*))?|(\d+g[._-]\d+gb(?:\+me)?))", re.IGNORECASE
)


@cache
def _known() -> dict[str, Any]:
    """Return name of a GPU -> its profiles and their source; read at the first call."""
    known: dict[str, Any] = json.loads(_DATA.read_text(encoding="utf-8"))
    return known


def profiles() -> dict[str, Sequence[str]]:
    """Return name of a GPU -> names of its profiles, of all GPUs that can be divided."""
    return {name: tuple(entry["profiles"]) for name, entry in _known().items()}


def split(name: str) -> tuple[str, str] | None:
    """Return the GPU and the profile in the name of an instance; None for a whole GPU.

    >>> split("a100-80gb-mig-3g.40gb"), split("NVIDIA H200 MIG 1g.18gb"), split("h200")
    (('a100-80gb', '3g.40gb'), ('NVIDIA H200', '1g.18gb'), None)
    """
    if (found := _NAME.fullmatch(name.strip())) is None:
        return None
    profile = (found[2] or found[3] or "").casefold()
    return found[1], re.sub(r"[\s_-]", ".", _MEDIA.sub("", profile.strip()))


def check_is_named(whole: str, profile: str) -> None:
    """Raise a `PlanError` if an instance is named by its profile, without its GPU."""
    if whole:
        return
    names = [f"`{name}-mig-{profile}`" for name, known in profiles().items() if profile in known]
    raise PlanError(
        f"the MIG profile `{profile}` is named without its GPU",
        hint=f"give {' or '.join(names)}" if names else "give a name such as `h200-mig-1g.18gb`",
    )


def instance(whole: Gpu, profile: str) -> Gpu:
    """Return an instance of `whole`.

    Bandwidth and cache follow its slices of memory, rates its multiprocessors. Its CUDA context is
    assumed to be as large as on the whole GPU.

    Raises:
        PlanError: this GPU has no such profile.
    """
    entry = _known().get(whole.name, {"profiles": {}, "source": ""})
    if profile not in entry["profiles"]:
        raise _unknown(whole.name, profile)
    mib, num_sms = entry["profiles"][profile]
    name = f"{whole.name}-mig-{profile}"
    slices = max(1, round(_SLICES * (mib << 20) / whole.memory_bytes))
    return replace(
        whole,
        name=name,
        chip=name,
        whole=whole.name,
        label=f"{whole.label} MIG {profile}",
        memory_bytes=mib << 20,
        memory_range_bytes=None,
        memory_share=slices / _SLICES,
        num_sms=num_sms,
        memory_gb_s=whole.memory_gb_s * slices // _SLICES,
        tflops={rate: value * num_sms / whole.num_sms for rate, value in whole.tflops.items()},
        source=f"Memory and SMs: {entry['source']} Context: assumed to be that of `{whole.name}`. "
        f"Rates: those of `{whole.name}` by SMs, bandwidth by slices of memory.",
    )


def _unknown(whole: str, profile: str) -> PlanError:
    known = profiles()
    if whole not in known:
        return PlanError(
            f"`{whole}` has no MIG profiles in the catalogue",
            hint=f"those that have: {', '.join(f'`{name}`' for name in known)}",
        )
    others = [f"`{n}-mig-{profile}`" for n, names in known.items() if profile in names]
    listed = ", ".join(f"`{name}`" for name in known[whole])
    return PlanError(
        f"`{whole}` has no MIG profile `{profile}` in the catalogue; it has {listed}"
        if profile
        else f"no MIG profile of `{whole}` is named; it has {listed}",
        hint=f"other GPUs have it: {', '.join(others)}"
        if others
        else "`memest gpus` lists them all",
    )
