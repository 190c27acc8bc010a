"""The catalogue of GPUs, with the source of every figure.

The data are in `gpus.json`, one object per GPU with the fields of `Gpu`. To add a GPU, add an
object; no code changes. `kinds.json` has other names, of which a bare family name means its largest
GPU, limits of multiprocessors, and bandwidths of links. Instances under MIG are made by name from
`mig.json`, and are not listed.

How the figures were taken:

- `memory_bytes` is the memory that a process sees: the "total capacity" in torch's out-of-memory
  messages or `torch.cuda.get_device_properties`. Where a thread prints GiB with two decimals, the
  entry is `round(x * 2**30)`; the MB that torch prints are MiB. The figure varies by about 0.1 GiB
  between drivers; the entry has the most frequent one.
- `context_bytes` comes from out-of-memory messages too: the process's memory, less the memory
  that torch allocated, less the memory that torch reserved without allocating it. The
  rounding in such a message is 0.01 GiB. An entry without a message has the H200's value.
- `l2_kib` is in NVIDIA's whitepapers of Volta, Turing, Ampere, Ada, Hopper and RTX Blackwell. The
  H200's was read by cuDNN (`device_properties.json`), the B200's is that of pytorch/ao#4002.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

from memest.errors import PlanError, closest
from memest.plan import TrainingPlan
from memest.plan.reading import read_table
from memest.units import MIB, gib_or_mib

DEFAULT_GPUS = ("a100-40gb", "a100-80gb", "h100-80gb", "h200")  # default GPUs
CONTEXT_RANGE_BYTES = 64 << 20
"""Largest context of the single-GPU runs in validation/runs (H100 and H200, driver 580), 824 MiB,
less the catalogue's 760 MiB. CUDA loads a kernel when it first runs, so contexts differ by run."""

LARGEST_MEMORY_RANGE = 0.013
"""Largest difference of usable memory between drivers of one GPU, as a share: the T4's in
`gpus.json`. Used for GPUs of which only one figure was found."""

_MEASURED = "h200"
_MEMORY_TOLERANCE = 0.02  # between drivers: at most 1.3 % (T4); between ECC on and off: 6.4 %
_KINDS: Mapping[str, Any] = read_table(__file__, "kinds.json")
_INCIDENTAL = re.compile(r"nvidia|tesla|geforce|generation|sxm\d?|pcie|hbm\d\w?|\d+gb?")
"""Words of a device name that do not distinguish kinds of GPU of one family."""


class Multiprocessor(NamedTuple):
    """Limits of a GPU's streaming multiprocessor: threads, shared KiB in all and per block."""

    threads: int  # threads that it runs at once (`maxThreadsPerMultiProcessor`)
    shared_kib: int
    block_shared_kib: int  # opt-in shared memory per block (`sharedMemPerBlockOptin`), KiB


MULTIPROCESSORS = {
    tuple(map(int, capability.split("."))): Multiprocessor(*limits)
    for capability, limits in _KINDS["multiprocessors"].items()
}
"""Multiprocessors by compute capability: CUDA Programming Guide 13, table 30 "Memory Information
per Compute Capability" and table 31; 7.0 in the guide of CUDA 12."""

_LINKS = {tuple(map(int, key.split("."))): rate for key, rate in _KINDS["links"].items()}
"""Bandwidth to the other GPUs of a node in one direction, 1e9 bytes/s, by compute capability.

Source: NVIDIA's data sheets of V100 SXM2, T4, A100 SXM, A10, RTX 4090, H200, B200 and RTX 5090.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """Properties of a GPU model, or of an instance of one under MIG, as a process sees them."""

    name: str  # name on the command line, such as `a100-80gb`
    label: str  # vendor's name, such as `NVIDIA A100-SXM4-80GB`
    memory_bytes: int  # total of `cudaMemGetInfo`: below the nominal size, without ECC
    capability: tuple[int, int]  # compute capability, `(major, minor)`: decides which kernels run
    num_sms: int  # streaming multiprocessors: decide how reductions and attention are split
    memory_gb_s: int  # data sheet's bandwidth, 1e9 bytes/s
    l2_kib: int = 51200  # L2 cache; the H100's is assumed for GPUs without a figure
    tflops: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Dense peak rates of matrix products by precision: `float16` (with float32 sums), `tf32`,
    `float32`, `float64`, in 1e12 operations/s. Empty for a GPU without rates."""

    context_bytes: int  # memory of one process outside the allocator: context, kernels, libraries
    source: str  # sources of the figures
    chip: str = ""
    """GPU whose kernels and workspaces this one has: its own name, or that of the same chip with
    other memory. `device_properties.json` describes chips to cuDNN."""

    memory_range_bytes: int | None = None
    """Largest less smallest total memory in `source`, by driver; None for a single figure."""

    whole: str = ""  # GPU of which this one is an instance under MIG
    memory_share: float = 1.0  # share of the whole GPU's memory and cache, below 1 for MIG
    beside_bytes: int = 0  # held by other processes: an inference server, a display

    def tflops_of(self, rate: str) -> float:
        """Return the peak rate of the precision `rate`, such as "bfloat16", in 1e12 operations/s.

        A precision without a figure, such as 8-bit, has twice the rate of float16. Before compute
        capability 8.0, bfloat16 has the rate of float32, in which it is emulated.
        """
        if rate == "bfloat16":
            rate = "float16" if self.capability >= (8, 0) else "float32"
        return self.tflops[rate] if rate in self.tflops else 2 * self.tflops["float16"]

    @property
    def link_gb_s(self) -> float:
        """Bandwidth to other GPUs of a node in one direction, 1e9 bytes/s. A compute capability
        without a figure has the next lower one's."""
        capabilities = (c for c in _LINKS if c <= self.capability)
        return _LINKS[max(capabilities, default=min(_LINKS))]

    @property
    def multiprocessor(self) -> Multiprocessor:
        """Limits of each multiprocessor; an unknown compute capability counts as 9.0."""
        return MULTIPROCESSORS.get(self.capability, MULTIPROCESSORS[9, 0])

    @property
    def limit_bytes(self) -> int:
        """Bytes that the caching allocator can reserve before `cudaMalloc` fails."""
        return max(0, self.memory_bytes - self.context_bytes - self.beside_bytes)

    def beside(self, num_bytes: int | None) -> "Gpu":
        """Return this GPU with `num_bytes` (None: 0) in other processes; `PlanError` if full."""
        if not num_bytes:
            return self
        if num_bytes >= self.memory_bytes - self.context_bytes:
            raise PlanError(
                f"other processes with {gib_or_mib(num_bytes)} leave nothing of `{self.name}`, "
                f"which has {gib_or_mib(self.memory_bytes - self.context_bytes)} and a context",
                hint="give what other processes hold, such as `--beside 24GiB`",
            )
        return replace(self, beside_bytes=num_bytes)

    @property
    def spread_bytes(self) -> int:
        """Bytes by which another driver or a larger CUDA context can lower `limit_bytes`."""
        memory = self.memory_range_bytes
        if memory is None:
            memory = int(LARGEST_MEMORY_RANGE * self.memory_bytes)
        return memory + CONTEXT_RANGE_BYTES

    def spread_under(self, limit_bytes: int, beside_bytes: int = 0) -> int:
        """Return how many of `limit_bytes` can be missing on a real GPU of this model.

        The argument `limit_bytes` is the limit of a simulation, which the user can choose. The
        argument `beside_bytes` is memory of libraries outside the allocator. The least usable
        memory is the property `limit_bytes` minus `spread_bytes` (other drivers) and minus
        `beside_bytes`. For example, let the least usable memory be 77 GiB. Then the result is 1 GiB
        for a limit of 78 GiB, and 0 for a limit of 76 GiB.
        """
        least = self.limit_bytes - beside_bytes - self.spread_bytes
        return max(0, limit_bytes - least)


@cache
def _catalogue() -> dict[str, Gpu]:
    """Return {name: GPU} in the order of the catalogue's file."""
    gpus = [
        Gpu(**{"chip": entry["name"], **entry, "capability": tuple(entry["capability"])})
        for entry in read_table(__file__, "gpus.json")
    ]
    return {gpu.name: gpu for gpu in gpus}


def list_gpus() -> list[Gpu]:
    """Return all GPUs of the catalogue, in its order, without MIG instances."""
    return list(_catalogue().values())


def find_gpu(name: str) -> Gpu:
    """Return the GPU with this `name`: the catalogue's name, the vendor's, or a short one.

    Case, spaces, `_`, `-` and a leading `nvidia` do not count. A MIG profile after the name gives
    that instance.

    >>> find_gpu("NVIDIA A100").name, find_gpu("rtx 4090").name, find_gpu("H200 MIG 1g.18gb").name
    ('a100-80gb', 'rtx-4090', 'h200-mig-1g.18gb')

    Raises:
        PlanError: no GPU of the catalogue has this name, or it has no such profile.
    """
    if (instance := split_mig(name)) is not None:
        whole, profile = instance
        _check_whole_is_named(whole, profile)
        return mig_instance(find_gpu(whole), profile)
    key = _folded(name)
    gpus = {_folded(text): gpu for gpu in list_gpus() for text in (gpu.label, gpu.name)}
    gpus |= {alias: _catalogue()[target] for alias, target in _KINDS["aliases"].items()}
    if key in gpus:
        return gpus[key]
    suggestions = dict.fromkeys(gpus[text].name for text in closest(key, gpus))
    names = ", ".join(f"`{n}`" for n in suggestions)
    raise PlanError(
        f"`{name}` is not in the catalogue of GPUs" + (f"; closest: {names}" if names else ""),
        hint="run `memest gpus` for the list, or give the size with `--gpu-memory 24GiB`",
    )


def custom_gpu(memory_bytes: int, like: Gpu | None = None) -> Gpu:
    """Return a GPU with `memory_bytes` of memory and all other properties of `like`.

    Without `like`, they are those of the H200 (compute capability 9.0), on which memest was
    measured.

    >>> custom_gpu(24 * 2**30).name
    '24.00GiB'

    Raises:
        PlanError: the CUDA context alone fills the memory.
    """
    base = like or find_gpu(_MEASURED)
    size = gib_or_mib(memory_bytes)
    if memory_bytes <= base.context_bytes:
        raise PlanError(
            f"a GPU with {size} has no room besides its CUDA context, "
            f"which takes {gib_or_mib(base.context_bytes)}",
            hint="give the GPU's whole memory, such as `--gpu-memory 24GiB`",
        )
    return replace(
        base,
        name=size.replace(" ", ""),
        label=f"GPU with {size}",
        whole="",
        memory_bytes=memory_bytes,
        memory_range_bytes=None,
        source=f"Memory: given by the user. All else: as `{base.name}`. {base.source}",
    )


def match_device(name: str, total_bytes: int) -> Gpu | None:
    """Return the catalogue's entry for an installed GPU with CUDA name `name` and `total_bytes`.

    None if the catalogue has no such GPU, or only one whose memory differs by more than 2 %
    (another variant, ECC switched). Use `custom_gpu` then.

    >>> match_device("NVIDIA A100-PCIE-40GB", 42_298_834_944).name
    'a100-40gb'
    """
    instance = split_mig(name)
    whole, profile = instance or (name, "")
    words = _words(whole)
    gpus = [gpu for gpu in list_gpus() if _kind(_words(gpu.label)) == _kind(words)]
    if instance is not None:
        profiles = mig_profiles()
        gpus = [mig_instance(g, profile) for g in gpus if profile in profiles.get(g.name, ())]
        words = frozenset()  # variants of a GPU have the same profiles
    matches = [
        gpu
        for gpu in gpus
        if abs(gpu.memory_bytes - total_bytes) <= _MEMORY_TOLERANCE * gpu.memory_bytes
    ]
    return max(
        matches,
        key=lambda g: (len(_words(g.label) & words), -abs(g.memory_bytes - total_bytes)),
        default=None,
    )


def nearest_gpu(capability: tuple[int, int], memory_bytes: int) -> Gpu:
    """Return the catalogue's GPU whose kernels are most like those of a GPU that it lacks.

    It has the same compute capability, else the highest one below it, else the lowest. Among
    several, its memory is the nearest to `memory_bytes`.

    >>> nearest_gpu((8, 9), 12 << 30).capability, nearest_gpu((8, 7), 32 << 30).capability
    ((8, 9), (8, 6))
    """
    capabilities = sorted({gpu.capability for gpu in list_gpus()})
    nearest = max((c for c in capabilities if c <= capability), default=capabilities[0])
    candidates = (gpu for gpu in list_gpus() if gpu.capability == nearest)
    return min(candidates, key=lambda gpu: abs(gpu.memory_bytes - memory_bytes))


def _folded(name: str) -> str:
    return re.sub(r"[\s_-]", "", name.casefold()).removeprefix("nvidia")


def _words(device_name: str) -> frozenset[str]:
    return frozenset(re.split(r"[\s_-]+", device_name.casefold().strip()))


def _kind(words: frozenset[str]) -> frozenset[str]:
    """Return the `words` of a GPU's name that identify its model: `{"rtx", "4090"}`, `{"a100"}`."""
    return frozenset(w for w in words if not _INCIDENTAL.fullmatch(w))


COMMUNICATOR_BYTES = 846 * MIB  # first communicator of a process, with NCCL's kernels
FURTHER_COMMUNICATOR_BYTES = 388 * MIB  # over the same GPUs: the device mesh of FSDP2
COMMUNICATOR_OF_ONE_BYTES = 564 * MIB  # one of a single rank: H100, torch 2.11, `all_reduce`
SUBGROUP_BYTES = 485 * MIB  # each further group: 484 to 486 MiB on four H100s, torch 2.11
NCCL_KERNELS_BYTES = COMMUNICATOR_BYTES - SUBGROUP_BYTES  # kernels of a process with a communicator
SUBGROUP_OF_ONE_BYTES = 388 * MIB  # a further group of one rank: two and four H200s
WITHOUT_COLLECTIVES_BYTES = 198 * MIB  # a communicator that only sends and receives
SENDING_BYTES = 64 * MIB
RECEIVING_BYTES = 320 * MIB  # buffers for each rank it sends to, and each it receives from
MESSAGES_BYTES = 64 * MIB
"""Memory of the kernels of a process that sends or receives, bytes.

The last five constants were measured on two and four H200s, torch 2.11, NCCL 2.28
(validation/scripts/nccl_memory.py). They give pipelines of two and four stages on four H100s, and
scatter, gather and all-to-all on two and four H200s, within 16 MiB.
"""

DEEPSPEED_BYTES = 486 * MIB  # memory of DeepSpeed 0.19.8 besides the first communicator
DEEPSPEED_ALONE_BYTES = 952 * MIB  # DeepSpeed on a single GPU, with the first communicator
DEEPSPEED_HOST_BYTES = 1160 * MIB
"""Host memory of one process under DeepSpeed without offloaded tensors: CUDA, NCCL, modules.

Median of 14 runs without offload (1071 to 1259 MiB); `validation/runs/h200-*multi.jsonl`.
"""

INT8_BYTES = 64 * MIB
"""Memory of cuBLAS's int8 kernels (LLM.int8), in 5 of 6 runs of h200-variants.jsonl."""


def libraries_bytes(plan: TrainingPlan) -> int:
    """Return bytes per GPU of NCCL, DeepSpeed and cuBLAS's int8 kernels in a run of `plan`."""
    int8_bytes = INT8_BYTES if plan.use_qlora and plan.quant == "int8" else 0
    return int8_bytes + _communicators_bytes(plan)


def _communicators_bytes(plan: TrainingPlan) -> int:
    if not plan.is_distributed:
        return 0
    if plan.is_deepspeed:
        is_alone = plan.world_size == 1
        return DEEPSPEED_ALONE_BYTES if is_alone else COMMUNICATOR_BYTES + DEEPSPEED_BYTES
    if plan.is_hybrid:
        return COMMUNICATOR_BYTES + 2 * SUBGROUP_BYTES
    if plan.strategy == "fsdp2":
        return COMMUNICATOR_BYTES + FURTHER_COMMUNICATOR_BYTES
    return COMMUNICATOR_BYTES


_SLICES = 8  # slices of memory of every GPU with MIG: NVIDIA's MIG User Guide, Concepts
_MIG: Mapping[str, Any] = read_table(__file__, "mig.json")
"""{GPU name: {"profiles": {profile: (MiB, SMs)}, "source": text}}, of NVIDIA's MIG.

`nvidia-smi mig -lgip` lists these MiB and multiprocessors. A process on an instance sees that
memory as the GPU's total. CUDA reports 4.750 GiB on the 1g.5gb of an A100, and torch 39.25 GiB on
the 3g.40gb of an A100 80GB. The rest follows from the whole GPU.
"""

_MEDIA = re.compile(r"\+me$")  # with media engines: the same memory in `nvidia-smi mig -lgip`
_NAME = re.compile(
    r"(?P<gpu>.*?)(?:^|[\s_-]+)(?:mig(?:[\s_-]+(?P<named>.*))?|(?P<bare>\d+g[._-]\d+gb(?:\+me)?))",
    re.IGNORECASE,
)


def mig_profiles() -> dict[str, Sequence[str]]:
    """Return {GPU name: names of its MIG profiles} for all GPUs that support MIG."""
    return {name: tuple(entry["profiles"]) for name, entry in _MIG.items()}


def split_mig(name: str) -> tuple[str, str] | None:
    """Return (GPU name, profile) for the name of a MIG instance; None for a whole GPU.

    >>> split_mig("a100-80gb-mig-3g.40gb"), split_mig("NVIDIA H200 MIG 1g.18gb"), split_mig("h200")
    (('a100-80gb', '3g.40gb'), ('NVIDIA H200', '1g.18gb'), None)
    """
    if (match := _NAME.fullmatch(name.strip())) is None:
        return None
    profile = (match["named"] or match["bare"] or "").casefold()
    return match["gpu"], re.sub(r"[\s_-]", ".", _MEDIA.sub("", profile.strip()))


def _check_whole_is_named(whole: str, profile: str) -> None:
    """Raise a `PlanError` if `whole`, the name of the GPU of a MIG `profile`, is empty."""
    if whole:
        return
    names = [
        f"`{gpu}-mig-{profile}`" for gpu, profiles in mig_profiles().items() if profile in profiles
    ]
    raise PlanError(
        f"the MIG profile `{profile}` is named without its GPU",
        hint=f"give {' or '.join(names)}" if names else "give a name such as `h200-mig-1g.18gb`",
    )


def mig_instance(whole: Gpu, profile: str) -> Gpu:
    """Return the MIG instance of `whole` with a `profile` such as `3g.40gb`.

    Its bandwidth and cache are in proportion to its slices of memory, rates to its multiprocessors.
    The CUDA context is assumed to be as large as on the whole GPU.

    Raises:
        PlanError: this GPU has no such profile.
    """
    entry = _MIG.get(whole.name, {"profiles": {}, "source": ""})
    if profile not in entry["profiles"]:
        raise _unknown_profile(whole.name, profile)
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


def _unknown_profile(whole: str, profile: str) -> PlanError:
    profiles = mig_profiles()
    if whole not in profiles:
        return PlanError(
            f"`{whole}` has no MIG profiles in the catalogue",
            hint=f"those that have: {', '.join(f'`{name}`' for name in profiles)}",
        )
    alternatives = [f"`{n}-mig-{profile}`" for n, names in profiles.items() if profile in names]
    own_profiles = ", ".join(f"`{name}`" for name in profiles[whole])
    return PlanError(
        f"`{whole}` has no MIG profile `{profile}` in the catalogue; it has {own_profiles}"
        if profile
        else f"no MIG profile of `{whole}` is named; it has {own_profiles}",
        hint=f"other GPUs have it: {', '.join(alternatives)}"
        if alternatives
        else "`memest gpus` lists them all",
    )
