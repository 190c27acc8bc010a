"""Settings of CUDA's caching allocator: `PYTORCH_ALLOC_CONF`, parsed as torch parses it.

Mirrors `c10/core/AllocatorConfig.cpp` and `c10/cuda/CUDAAllocatorConfig.cpp`, torch 2.11 and 2.13,
with the error messages of 2.11 on an H100. A text is split at `:`, `,`, `[` and `]`. Spaces do not
count, and a number ends where its digits end.
"""

import re
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, replace

from memest.errors import PlanError, UnsupportedError, shown
from memest.estimator.allocator.blocks import LARGE_SEGMENT_BYTES
from memest.estimator.versions import simulated
from memest.units import MIB

EXPANDABLE = "expandable_segments:True"  # setting that advice tries: segments that grow
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables; the first is the newer name. If both are set, CUDA's own options are read
from the second (`AllocatorConfig.cpp`, `CUDAAllocatorConfig.h`)."""

NO_CACHE = "PYTORCH_NO_CUDA_MEMORY_CACHING"

NUM_INTERVALS = 16  # `roundup_power2_divisions`: one per power of two from 1 MiB to 64 GiB
RESERVES = ("expandable_segments_reserve", "expandable_segments_reserve_by_class")
"""Addresses of an expandable segment (`clamp_reserve_bytes`, CUDAAllocatorConfig.h). torch refuses
a request that is larger, and begins another segment when one is full; neither is simulated."""

WITHOUT_EFFECT = (
    "pinned_use_background_threads", "pinned_use_cuda_host_register", "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb", "pinned_free_catch_all", "pinned_max_round_threshold_mb",
    "pinned_max_cached_size_mb", "release_lock_on_cudamalloc", "release_lock_on_hipmalloc",
    "pinned_use_hip_host_register", "graph_capture_record_stream_reuse", "throw_on_cudamalloc_oom",
    *RESERVES,
)  # fmt: skip
"""Options about pinned host memory, locks, CUDA graphs, addresses, and the time of an error. GPU
memory does not depend on them, if no segment is as large as its reserve (`RESERVES`)."""

NEWER = {
    "pinned_free_catch_all": (2, 12),
    "pinned_max_cached_size_mb": (2, 12),
    "throw_on_cudamalloc_oom": (2, 12),
    **dict.fromkeys(RESERVES, (2, 15)),
}
"""Options without effect that torch 2.11 rejects (measured), and the release that added them."""

_LARGE_SEGMENT = "large_segment_size_mb"
_OUT_OF_BOUNDS = "Index out of bounds in ConfigTokenizer"
_NOT_CLOSED = "Expected closing bracket ']' in ConfigTokenizer but reached end of config"
_TOKEN = re.compile(r"[,:\[\]]|[^,:\[\]]+")
_INTEGER = re.compile(r"(?P<sign>[+-]?)(?P<digits>\d+)")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatorSettings:
    """Options of `PYTORCH_ALLOC_CONF`, with torch's defaults."""

    expandable_segments: bool = False  # one growing segment per pool and stream
    max_split_bytes: int | None = None  # larger blocks are not split, nor serve smaller requests
    max_non_split_rounding_bytes: int = LARGE_SEGMENT_BYTES
    """Bytes by which an unsplit block may exceed its request."""

    roundup_divisions: tuple[int, ...] = (0,) * NUM_INTERVALS
    """Divisions between powers of two to which requests round up, by request size."""

    garbage_collection_threshold: float = 0.0  # share of the limit from which segments go
    memory_fraction: float = 1.0  # `per_process_memory_fraction`: allowed share of the GPU
    large_segment_bytes: int = LARGE_SEGMENT_BYTES  # for requests between 1 and 10 MiB
    without_effect: tuple[str, ...] = ()  # given options that have no effect on GPU memory
    text: str = ""  # text as given

    @property
    def is_default(self) -> bool:
        """True if all options that affect GPU memory have torch's defaults."""
        return replace(self, text="", without_effect=()) == DEFAULT

    def as_in_snapshot(self) -> dict[str, object]:
        """Return the dict `allocator_settings` of torch's memory snapshot."""
        return {"PYTORCH_ALLOC_CONF": self.text, "expandable_segments": self.expandable_segments}


DEFAULT = AllocatorSettings()


class _RefusedError(Exception):
    """Error of a settings text that torch rejects; the message is torch's."""


def parse_settings(text: str) -> AllocatorSettings:
    """Return the settings of `PYTORCH_ALLOC_CONF=text` in the simulated release of torch.

    >>> parse_settings("expandable_segments:True, max_split_size_mb:64").max_split_bytes >> 20
    64

    Raises:
        PlanError: torch rejects it; the message is torch's.
        UnsupportedError: it selects another allocator.
    """
    return _parse(text, text)


def settings_from(environment: Mapping[str, str]) -> AllocatorSettings:
    """Return the settings in the variables `environment`, {name: value}; see `VARIABLES`. Raise as
    `parse_settings`, and `UnsupportedError` if `NO_CACHE` is set."""
    if environment.get(NO_CACHE, "0").strip() not in ("", "0"):
        raise UnsupportedError(
            f"`{NO_CACHE}` selects an allocator without a cache, which cannot be simulated",
            hint=f"run it without `{NO_CACHE}`",
        )
    texts = [environment[name] for name in VARIABLES if name in environment]
    if not texts:
        return DEFAULT
    return _parse(texts[0], texts[-1])  # CUDA's own options are read from the older variable


def _parse(common: str, cuda: str, large_bytes: int = LARGE_SEGMENT_BYTES) -> AllocatorSettings:
    """Return the settings in two texts: `common` for the options of all devices, `cuda` for CUDA's.
    `large_bytes` is the size of large segments, if `common` does not set it."""
    text = common if common == cuda else f"{common}; {cuda}"
    unknown = [name for name, since in NEWER.items() if since > simulated().version]
    try:
        common_fields = dict(_fields(_Tokens(common, large_bytes), unknown, is_cuda=False))
        cuda_fields = dict(_fields(_Tokens(cuda), unknown, is_cuda=True))
    except _RefusedError as error:
        raise PlanError(
            f"`{VARIABLES[0]}={text}` is refused by torch: {error}",
            hint="write it as `expandable_segments:True,max_split_size_mb:64`",
        ) from None
    if cuda_fields.pop("backend", "native") != "native":
        raise UnsupportedError(
            "`backend:cudaMallocAsync` is another allocator, which cannot be simulated",
            hint="`backend:native` is PyTorch's own",
        )
    fields = {**common_fields, **cuda_fields}
    fields["without_effect"] = tuple(
        name for name in WITHOUT_EFFECT if fields.pop(name, None) is not None
    )
    return AllocatorSettings(**fields, text=text)  # type: ignore[arg-type]


class _Tokens:
    """Tokens of a settings text, split as by torch's `ConfigTokenizer`. `large_bytes` is the size
    of large segments, the least value of some options."""

    def __init__(self, text: str, large_bytes: int = LARGE_SEGMENT_BYTES) -> None:
        self.words: list[str] = _TOKEN.findall("".join(text.split()))
        self.large_bytes = large_bytes

    def __getitem__(self, index: int) -> str:
        if index >= len(self.words):
            raise _RefusedError(_OUT_OF_BOUNDS)
        return self.words[index]

    def boolean(self, index: int) -> bool:
        word = self[index]
        if word not in ("True", "False"):
            raise _RefusedError(
                f"Expected 'True' or 'False' at index {index} in ConfigTokenizer but got '{word}'"
            )
        return word == "True"

    def integer(self, index: int) -> int:
        """Return token number `index` as `std::stoull` reads it: leading digits; negatives wrap."""
        match = _INTEGER.match(self[index])
        if match is None or int(match["digits"]) >= 1 << 64:
            raise _RefusedError("stoull")
        value = int(match["digits"])
        return (-value if match["sign"] == "-" else value) % (1 << 64)

    def number(self, index: int) -> float:
        match = _NUMBER.match(self[index])
        if match is None:
            raise _RefusedError("stod")
        return float(match[0])

    def read_large_segment(self) -> None:
        """Set `large_bytes` to the value of the option `large_segment_size_mb`, if it is given."""
        for index, word in enumerate(self.words):
            if word == _LARGE_SEGMENT:
                value = self.integer(index + 2)
                if value <= 10:
                    raise _RefusedError(f"CachingAllocator option {word} must be > 10 MB")
                self.large_bytes = value * MIB

    def end_of_value(self, index: int) -> int:
        """Return the index of the last token, such as `]`, of the value that begins at `index`."""
        if self[index] != "[":
            return index
        while index < len(self.words) and self.words[index] != "]":
            index += 1
        if index == len(self.words):
            raise _RefusedError(_NOT_CLOSED)
        return index


def _fields(
    tokens: _Tokens, unknown: Container[str], *, is_cuda: bool
) -> Iterator[tuple[str, object]]:
    """Yield (field of `AllocatorSettings`, value) of each option in `tokens`, as one of torch's two
    parsers reads it. If `is_cuda`, that is the parser of CUDA's own options, else the parser of the
    options of all devices. Each parser skips the options of the other one. An unrecognised option
    is skipped by the parser of all devices; CUDA's parser raises `_RefusedError`. Options in
    `unknown` are unrecognised too: they are newer than the simulated release. For an option without
    effect on GPU memory, CUDA's parser yields (key, True)."""
    options, other_options = (
        (_CUDA_OPTIONS, _COMMON_OPTIONS) if is_cuda else (_COMMON_OPTIONS, _CUDA_OPTIONS)
    )
    if not is_cuda:
        tokens.read_large_segment()
    index = 0
    while index < len(tokens.words):
        key = tokens[index]
        tokens[index + 2]  # raises if no value follows the key and its colon
        is_host = key in WITHOUT_EFFECT and key not in unknown
        if key in options:
            name, read = options[key]
            yield name, read(tokens, index + 2)
        elif is_cuda and key not in other_options and not is_host:
            raise _RefusedError(f"Unrecognized key '{key}' in CUDA allocator config.")
        elif not is_cuda and is_host and key in _HOST_OPTIONS:
            _HOST_OPTIONS[key](tokens, index + 2)
        elif is_cuda and is_host:
            yield key, True
        index = tokens.end_of_value(index + 2) + 2


_Read = Callable[[_Tokens, int], object]  # reads the value at an index


def _mib_as_bytes(tokens: _Tokens, index: int) -> int:
    """Return the value at `index`, in MiB, as bytes. Raise `_RefusedError` if it is smaller than
    `tokens.large_bytes`."""
    value, minimum = tokens.integer(index), tokens.large_bytes // MIB
    if value < minimum:
        key = tokens[index - 2]  # before the colon
        raise _RefusedError(f"CachingAllocator option {key} too small, must be >= {minimum}")
    return value * MIB


def _garbage_threshold(tokens: _Tokens, index: int) -> float:
    value = tokens.number(index)
    if not 0 < value < 1:
        raise _RefusedError("garbage_collect_threshold is invalid, set it in (0.0, 1.0)")
    return value


def _share(tokens: _Tokens, index: int) -> float:
    value = tokens.number(index)
    if not 0 <= value <= 1:
        raise _RefusedError("per_process_memory_fraction is invalid, set it in [0.0, 1.0]")
    return value


def _allocator(tokens: _Tokens, index: int) -> str:
    if tokens[index] not in ("native", "cudaMallocAsync"):
        raise _RefusedError("Unknown allocator backend, options are native and cudaMallocAsync")
    return tokens[index]


def _divisions(tokens: _Tokens, index: int) -> tuple[int, ...]:
    divisions = [0] * NUM_INTERVALS
    if tokens[index] != "[":
        value = tokens.integer(index)
        if not _is_power_of_2(value):
            raise _RefusedError("For roundups, the divisions has to be power of 2")
        return (value,) * NUM_INTERVALS
    interval, is_first, index = 0, True, index + 1
    while index < len(tokens.words) and tokens[index] != "]":
        value = tokens.integer(index + 2)  # after its boundary and a colon
        if value and not _is_power_of_2(value):
            raise _RefusedError(
                "For roundups, the divisions has to be power of 2 or 0 to disable roundup"
            )
        if tokens[index] == ">":
            divisions[interval + 1 :] = [value] * (NUM_INTERVALS - interval - 1)
        else:
            boundary = tokens.integer(index)
            if not _is_power_of_2(boundary):
                raise _RefusedError("For roundups, the intervals have to be power of 2")
            interval = min(boundary.bit_length() - 1, NUM_INTERVALS - 1)
            if is_first:
                divisions[:interval] = [value] * interval
                is_first = False
            divisions[interval] = value
        # boundary, colon and value are three tokens; all but the last value have a comma too
        index += 3 if tokens[index + 3] == "]" else 4
    if index >= len(tokens.words):
        raise _RefusedError(_NOT_CLOSED)
    return tuple(divisions)


def _is_power_of_2(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


_COMMON_OPTIONS: dict[str, tuple[str, _Read]] = {
    "expandable_segments": ("expandable_segments", _Tokens.boolean),
    "max_split_size_mb": ("max_split_bytes", _mib_as_bytes),
    "max_non_split_rounding_mb": ("max_non_split_rounding_bytes", _mib_as_bytes),
    "garbage_collection_threshold": ("garbage_collection_threshold", _garbage_threshold),
    "roundup_power2_divisions": ("roundup_divisions", _divisions),
    _LARGE_SEGMENT: ("large_segment_bytes", lambda tokens, index: tokens.large_bytes),
}
"""Options of all devices: their fields in `AllocatorSettings`, and how torch reads them."""

_CUDA_OPTIONS: dict[str, tuple[str, _Read]] = {
    "per_process_memory_fraction": ("memory_fraction", _share),
    "backend": ("backend", _allocator),
}
_HOST_OPTIONS: dict[str, _Read] = {
    "pinned_use_background_threads": _Tokens.boolean,
    "pinned_max_round_threshold_mb": _Tokens.integer,
    "pinned_max_cached_size_mb": _Tokens.integer,
}
"""Options that the parser for all devices checks and that do not affect GPU memory."""


def describe(settings: AllocatorSettings) -> str:
    """Return a description of `settings`, for the assumptions of a report.

    >>> describe(DEFAULT)
    "PyTorch's default allocator"
    """
    if not settings.text:
        return "PyTorch's default allocator"
    without = ", ".join(settings.without_effect)
    note = f" ({without}: no effect on GPU memory)" if without else ""
    if newer_options := ", ".join(name for name in settings.without_effect if name in NEWER):
        note += f" (torch 2.11 does not know {newer_options})"
    if any(name in RESERVES for name in settings.without_effect):
        note += " (assumed that no segment reaches its reserve)"
    return f"PyTorch's allocator with {shown(settings.text)}{note}"


_LEFT_UNCHANGED = ("expandable_segments", "max_non_split_rounding_mb", _LARGE_SEGMENT)
"""Options that a later text without them leaves unchanged (`parseArgs`)."""


def changed_settings(before: AllocatorSettings, text: str) -> AllocatorSettings:
    """Return the settings after a call of `torch.cuda.memory._set_allocator_settings(text)`, given
    those `before` it. Raise as `parse_settings`."""
    settings = _parse(text, text, large_bytes=before.large_segment_bytes)
    fields = [_COMMON_OPTIONS[key][0] for key in _LEFT_UNCHANGED if key not in _Tokens(text).words]
    return replace(settings, **{field: getattr(before, field) for field in fields})
