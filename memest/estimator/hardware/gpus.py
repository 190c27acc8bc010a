"""The catalogue of GPUs: what each offers, with the source of every figure.

The data are in `gpus.json`, one object per GPU with the fields of `Gpu`. To add a GPU, add an
object: `list_gpus`, `find_gpu` and `match_device` need no change.

How the figures were taken:

- `memory_bytes` is what a process sees: the "total capacity" in torch's out-of-memory messages or
  `torch.cuda.get_device_properties`. Where a thread prints GiB with two decimals, the entry holds
  `round(x * 2**30)`; the MB that torch prints are MiB. The figure moves by about 0.1 GiB between
  drivers; the entry has the most frequent one.
- `context_bytes` comes from out-of-memory messages too: memory in use by the process, less what
  torch allocated, less what torch reserved without allocating it. The rounding in such a message is
  0.01 GiB. Where no message was found, the entry has the H200's measurement and says so.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from memest.errors import PlanError, closest
from memest.units import format_gib

FIRST_OF_CUDA_13 = (7, 5)
"""The oldest compute capability in torch 2.11's wheels for CUDA 13.0, on which memest was measured;
7.0 needs those for CUDA 12.6 (RELEASE.md, https://github.com/pytorch/pytorch/pull/175253)."""

DEFAULT_GPUS = ("a100-40gb", "a100-80gb", "h100-80gb", "h200")
"""The GPUs that a verdict covers when the user names none."""

_DATA = Path(__file__).with_name("gpus.json")
_MEASURED = "h200"
_MEMORY_TOLERANCE = 0.02  # between drivers: at most 1.3 % (T4); between ECC on and off: 6.4 %
_ALIASES = {  # a bare family name means its largest card
    "a100": "a100-80gb", "a100sxm": "a100-80gb", "v100": "v100-32gb",
    "h100": "h100-80gb", "h100sxm": "h100-80gb", "h100sxm80gb": "h100-80gb",
    "h100pcie": "h100-pcie-80gb", "gh200": "gh200-96gb",
    "3090": "rtx-3090", "4090": "rtx-4090", "5090": "rtx-5090",
    "rtxa6000": "a6000", "6000ada": "rtx-6000-ada",
}  # fmt: skip
_INCIDENTAL = re.compile(r"nvidia|tesla|geforce|generation|sxm\d?|pcie|hbm\d\w?|\d+gb?")
"""Words of a device name that do not tell one kind of GPU from another of the same family."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One kind of GPU, as its driver presents it to a process."""

    name: str
    """The name on the command line, such as `a100-80gb`."""

    label: str
    """The vendor's name, such as `NVIDIA A100-SXM4-80GB`."""

    memory_bytes: int
    """What `cudaMemGetInfo` gives as total: less than the name says, ECC and firmware taken off."""

    capability: tuple[int, int]
    """Compute capability, `(major, minor)`: decides which kernels run."""

    num_sms: int
    """Streaming multiprocessors: decides how reductions and attention are split."""

    memory_gb_s: int
    """Bandwidth of its memory by NVIDIA's data sheet, in 1e9 bytes/s; only the moments at which
    blocks come back depend on it (`speed.py`).
    """

    context_bytes: int
    """What one CUDA process holds beside the caching allocator: context, kernels, libraries."""

    source: str
    """Where the figures come from."""

    @property
    def limit_bytes(self) -> int:
        """Bytes that the caching allocator can reserve before `cudaMalloc` fails."""
        return self.memory_bytes - self.context_bytes


@cache
def _catalogue() -> dict[str, Gpu]:
    """Name -> GPU, in the order of the file; read at the first call."""
    entries = json.loads(_DATA.read_text(encoding="utf-8"))
    gpus = [Gpu(**{**entry, "capability": tuple(entry["capability"])}) for entry in entries]
    return {gpu.name: gpu for gpu in gpus}


def list_gpus() -> list[Gpu]:
    """Every GPU of the catalogue, in its order."""
    return list(_catalogue().values())


def find_gpu(name: str) -> Gpu:
    """The GPU that `name` means: its name, its vendor's name or a short form.

    Case, spaces, `_`, `-` and a leading `nvidia` do not count.

    >>> find_gpu("NVIDIA A100").name, find_gpu("rtx 4090").name
    ('a100-80gb', 'rtx-4090')

    Raises:
        PlanError: no GPU of the catalogue has this name.
    """
    folded = _folded(name)
    known = {_folded(text): gpu for gpu in list_gpus() for text in (gpu.label, gpu.name)}
    known |= {alias: _catalogue()[target] for alias, target in _ALIASES.items()}
    if folded in known:
        return known[folded]
    near = dict.fromkeys(known[text].name for text in closest(folded, known))
    names = ", ".join(f"`{n}`" for n in near)
    raise PlanError(
        f"`{name}` is not in the catalogue of GPUs" + (f"; closest: {names}" if names else ""),
        hint="run `memest gpus` for the list, or give the size with `--gpu-memory 24GiB`",
    )


def custom_gpu(memory_bytes: int, like: Gpu | None = None) -> Gpu:
    """A GPU of which only the memory is known; all else is as `like` has it.

    Without `like`, the kernels and the context are those of the H200 (compute capability 9.0), the
    GPU on which memest was measured.

    >>> custom_gpu(24 * 2**30).name
    '24.00GiB'

    Raises:
        PlanError: the CUDA context alone fills the memory.
    """
    base = like or find_gpu(_MEASURED)
    size = format_gib(memory_bytes)
    if memory_bytes <= base.context_bytes:
        raise PlanError(
            f"a GPU with {size} has no room beside its CUDA context, "
            f"which takes {format_gib(base.context_bytes)}",
            hint="give the GPU's whole memory, such as `--gpu-memory 24GiB`",
        )
    return replace(
        base,
        name=size.replace(" ", ""),
        label=f"GPU with {size}",
        memory_bytes=memory_bytes,
        source=f"Memory: given by the user. All else: as `{base.name}`. {base.source}",
    )


def match_device(name: str, total_bytes: int) -> Gpu | None:
    """The entry for a GPU at hand, from its CUDA device name and its total memory.

    None when the catalogue has no such GPU, or only one whose memory differs by more than 2 %
    (another variant, a slice of a GPU, ECC switched): use `custom_gpu` then.

    >>> match_device("NVIDIA A100-PCIE-40GB", 42_298_834_944).name
    'a100-40gb'
    """
    words = _words(name)
    same_kind = [
        gpu
        for gpu in list_gpus()
        if _kind(_words(gpu.label)) == _kind(words)
        and abs(gpu.memory_bytes - total_bytes) <= _MEMORY_TOLERANCE * gpu.memory_bytes
    ]
    return max(
        same_kind,
        key=lambda g: (len(_words(g.label) & words), -abs(g.memory_bytes - total_bytes)),
        default=None,
    )


def nearest_gpu(capability: tuple[int, int], memory_bytes: int) -> Gpu:
    """The entry whose kernels are likeliest those of a GPU that the catalogue lacks.

    One of the same compute capability, else of the highest one below it, else the lowest; among
    several the one with the nearest memory.

    >>> nearest_gpu((8, 9), 12 << 30).capability, nearest_gpu((8, 7), 32 << 30).capability
    ((8, 9), (8, 6))
    """
    known = sorted({gpu.capability for gpu in list_gpus()})
    chosen = max((c for c in known if c <= capability), default=known[0])
    alike = (gpu for gpu in list_gpus() if gpu.capability == chosen)
    return min(alike, key=lambda gpu: abs(gpu.memory_bytes - memory_bytes))


def _folded(name: str) -> str:
    return re.sub(r"[\s_-]", "", name.casefold()).removeprefix("nvidia")


def _words(device_name: str) -> frozenset[str]:
    return frozenset(re.split(r"[\s_-]+", device_name.casefold().strip()))


def _kind(words: frozenset[str]) -> frozenset[str]:
    """The words that name the kind of GPU: `{"rtx", "4090"}`, `{"a100"}`."""
    return frozenset(w for w in words if not _INCIDENTAL.fullmatch(w))
