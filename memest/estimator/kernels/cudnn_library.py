"""Workspaces of convolutions from the installed cuDNN library, without a GPU.

Since release 9.8 the backend API takes a descriptor of device properties in place of a handle
(`CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR` of cudnn_graph.h). The order of the plans is that of
`Conv_v8.cpp` (torch 2.11): the configurations of `CUDNN_HEUR_MODE_INSTANT`, then those of
`CUDNN_HEUR_MODE_FALLBACK`, filtered by their numerical notes.

Three things differ from a GPU's answers:

- cuDNN offers no engine that needs cuBLASLt or a CUDA driver. These are the products of 1x1
  convolutions, and some kernels for groups, Fourier transforms and Winograd.
- Hopper's heuristics also read how thread block clusters fit the GPU. The JSON text that describes
  a GPU lacks these figures, so `_write_clusters` adds them to the descriptor. The layout is known
  for cuDNN 9.19 only; other versions are not used for Hopper.
- No plan is executed, so a plan that fails on the GPU is not passed over.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from memest.estimator.hardware import gpus

OLDEST, LAYOUT_KNOWN = 90800, range(91900, 92000)
"""First version with device properties, and those whose descriptors are known in memory."""

DISABLED = "MEMEST_CUDNN"
"""Environment variable; `0` turns the library off."""

DEVICE_PROPERTIES = Path(gpus.__file__).with_name("device_properties.json")

CONVOLUTION, ENGINE, CONFIG, HEURISTICS, GRAPH, TENSOR, PROPERTIES = 1, 2, 3, 4, 15, 17, 38
OPERATIONS = {"forward": 10, "input": 12, "weight": 11}
"""`cudnnBackendDescriptorType_t`."""

DATA_TYPE, INT64, FLOAT, DOUBLE, MODE, HEUR_MODE, NOTE, DESCRIPTOR, CHAR = (
    1,
    3,
    4,
    5,
    7,
    8,
    11,
    15,
    24,
)
"""`cudnnBackendAttributeType_t`."""

C_TYPES: dict[int, Any] = {
    INT64: ctypes.c_int64, FLOAT: ctypes.c_float, DOUBLE: ctypes.c_double,
    DESCRIPTOR: ctypes.c_void_p, CHAR: ctypes.c_char,
}  # fmt: skip
"""The others are enumerations, `int`."""

FIRST_OF = {"forward": 700, "input": 706, "weight": 712}
"""Attributes of an operation: two factors, the convolution, then the tensors w, x and y."""

DATA_TYPES = (0, 2, 9, 1)
"""`cudnnDataType_t` of float32, float16, bfloat16 and float64."""

CROSS_CORRELATION, INSTANT, FALLBACK = 1, 0, 2

ALIGNMENT = 16
"""Bytes by which every tensor is aligned; results are the same with 32, which torch passes."""

TENSOR_CORES, DOWN_CONVERTS, NONDETERMINISTIC, MOST_NOTES = 0, 1, 4, 16
"""`cudnnBackendNumericalNote_t`, and room for all of them."""

CLUSTER_INTS, DEFAULT_CLUSTERS = 40, (18, *(0,) * 39)
"""Figures about clusters in a descriptor, and their values in one that was made from JSON."""

DESCRIPTOR_BYTES = 544
"""Size of a descriptor of device properties in cuDNN 9.19."""


class CudnnError(Exception):
    """cuDNN returned an error status."""


@dataclass(frozen=True, slots=True)
class Plan:
    """An engine configuration that cuDNN offers."""

    engine: int
    """Global index of the engine."""

    workspace_bytes: int
    """Bytes that the plan requests."""

    notes: frozenset[int]
    """Numerical notes of its engine."""

    def is_allowed(self, *, deterministic: bool, without_tf32: bool) -> bool:
        """Return what `filterEngineConfigs` keeps."""
        unwanted = {DOWN_CONVERTS}
        unwanted |= {NONDETERMINISTIC} if deterministic else set()
        unwanted |= {TENSOR_CORES} if without_tf32 else set()
        return not self.notes & unwanted


@cache
def device_properties(gpu: str) -> tuple[str, tuple[int, ...]] | None:
    """Return the JSON text that describes a GPU to cuDNN, and its clusters; None if unknown."""
    known = json.loads(DEVICE_PROPERTIES.read_text(encoding="utf-8"))
    if gpu not in known:
        return None
    entry = known[gpu]
    properties = entry["properties"]
    base = entry
    while "like" in base:
        base = known[base["like"]]
        properties = base["properties"] | properties
    return json.dumps(properties), tuple(entry.get("clusters", ()))


def _folders() -> Iterator[Path]:
    """Yield folders that may hold cuDNN: NVIDIA's wheels, then conda's folder."""
    for place in sys.path:
        if (folder := Path(place or ".", "nvidia", "cudnn", "lib")).is_dir():
            yield folder
    if "CONDA_PREFIX" in os.environ:
        yield Path(os.environ["CONDA_PREFIX"], "lib")


class Library:
    """cuDNN's backend API; not for several threads at once."""

    def __init__(self, loaded: Any) -> None:
        self._library = loaded
        self._library.cudnnGetVersion.restype = ctypes.c_size_t
        pointer, number = ctypes.c_void_p, ctypes.c_int
        loaded.cudnnBackendSetAttribute.argtypes = [
            pointer,
            number,
            number,
            ctypes.c_int64,
            pointer,
        ]
        loaded.cudnnBackendGetAttribute.argtypes = [
            pointer, number, number, ctypes.c_int64, pointer, pointer
        ]  # fmt: skip
        loaded.cudnnBackendFinalize.argtypes = [pointer]
        loaded.cudnnBackendDestroyDescriptor.argtypes = [pointer]
        self.version = int(loaded.cudnnGetVersion())
        self._made: list[Any] = []
        self._properties: dict[str, Any] = {}
        self._lock = threading.Lock()

    def knows(self, gpu: gpus.Gpu) -> bool:
        """Whether plans for `gpu` can be requested."""
        found = device_properties(gpu.name)
        if found is None:
            return False
        return gpu.capability < (9, 0) or (bool(found[1]) and self.version in LAYOUT_KNOWN)

    def first_plan(
        self,
        row: Sequence[int],
        direction: str,
        gpu: str,
        *,
        deterministic: bool,
        without_tf32: bool,
    ) -> Plan | None:
        """Return the first allowed plan of a call (`ConvolutionShapes.row`); None if there is none.

        Raises:
            CudnnError: cuDNN refuses the call or the GPU.
        """
        with self._lock, self._descriptors():
            properties = self._device(gpu)
            graph = self._graph(row, direction)
            for mode in (INSTANT, FALLBACK):
                for plan in self._plans(graph, mode, properties):
                    if plan.is_allowed(deterministic=deterministic, without_tf32=without_tf32):
                        return plan
        return None

    @contextmanager
    def _descriptors(self) -> Iterator[None]:
        try:
            yield
        finally:
            for made in reversed(self._made):
                self._library.cudnnBackendDestroyDescriptor(made)
            self._made = []

    def _device(self, gpu: str) -> Any:
        if gpu not in self._properties:
            found = device_properties(gpu)
            if found is None:
                raise CudnnError(f"the properties of {gpu} are not known")
            text, clusters = found
            made = self._make(PROPERTIES, (2702, CHAR, text.encode() + b"\0"))
            if clusters:
                self._write_clusters(made, text, clusters)
            self._made.remove(made)
            self._properties[gpu] = made
        return self._properties[gpu]

    def _write_clusters(self, made: Any, text: str, clusters: Sequence[int]) -> None:
        """Write how thread block clusters fit the GPU after its compute capability and driver.

        Raises:
            CudnnError: the descriptor does not have the known layout.
        """
        properties = json.loads(text)
        head = struct.pack("2i", properties["deviceVer"], properties["driverVer"])
        found = head + struct.pack(f"{CLUSTER_INTS}i", *DEFAULT_CLUSTERS)
        place = ctypes.string_at(made.value, DESCRIPTOR_BYTES).find(found)
        if self.version not in LAYOUT_KNOWN or place < 0:
            raise CudnnError(f"cuDNN {self.version} has device properties of another layout")
        values = struct.pack(f"{CLUSTER_INTS}i", *clusters)
        ctypes.memmove(made.value + place + len(head), values, len(values))

    def _graph(self, row: Sequence[int], direction: str) -> Any:
        dtype, is_last, dims, groups, samples, inputs, outputs = row[:7]
        kept = max(2, dims)  # torch makes two dimensions of one
        extents = [list(row[i : i + 3][3 - kept :]) for i in range(7, 25, 3)]
        image, result, window, stride, padding, dilation = extents
        data_type = DATA_TYPES[dtype]
        convolution = self._make(
            CONVOLUTION,
            (100, DATA_TYPE, [1 if data_type == 1 else 0]),  # float32 but for float64
            (101, MODE, [CROSS_CORRELATION]), (106, INT64, [kept]),
            (105, INT64, padding), (104, INT64, padding),
            (103, INT64, stride), (102, INT64, dilation),
        )  # fmt: skip
        shapes = {
            "w": [outputs, inputs // groups, *window],
            "x": [samples, inputs, *image],
            "y": [samples, outputs, *result],
        }
        tensors = [
            self._make(
                TENSOR,
                (906, INT64, [ord(name)]), (901, DATA_TYPE, [data_type]), (902, INT64, shape),
                (903, INT64, strides(shape, bool(is_last))), (900, INT64, [ALIGNMENT]),
            )
            for name, shape in shapes.items()
        ]  # fmt: skip
        first, factor = FIRST_OF[direction], DOUBLE if data_type == 1 else FLOAT
        operation = self._make(
            OPERATIONS[direction],
            (first, factor, [1.0]), (first + 1, factor, [0.0]),
            (first + 2, DESCRIPTOR, [convolution]),
            *((first + 3 + i, DESCRIPTOR, [tensor]) for i, tensor in enumerate(tensors)),
        )  # fmt: skip
        return self._make(GRAPH, (801, DESCRIPTOR, [operation]))

    def _plans(self, graph: Any, mode: int, properties: Any) -> Iterator[Plan]:
        heuristics = self._make(
            HEURISTICS,
            (201, DESCRIPTOR, [graph]), (200, HEUR_MODE, [mode]), (204, DESCRIPTOR, [properties]),
        )  # fmt: skip
        count = ctypes.c_int64()
        self._check(
            self._library.cudnnBackendGetAttribute(
                heuristics, 202, DESCRIPTOR, 0, ctypes.byref(count), None
            )
        )
        configs = [self._new(CONFIG) for _ in range(count.value)]
        num_found = len(self._get(heuristics, 202, DESCRIPTOR, configs))
        for config in configs[:num_found]:
            (workspace,) = self._get(config, 303, INT64, [0])
            engine = self._new(ENGINE)
            self._get(config, 300, DESCRIPTOR, [engine])
            (index,) = self._get(engine, 1301, INT64, [0])
            notes = self._get(engine, 1303, NOTE, [0] * MOST_NOTES)
            yield Plan(index, workspace, frozenset(notes))

    # --- descriptors and their attributes

    def _new(self, kind: int) -> Any:
        made = ctypes.c_void_p()
        self._check(self._library.cudnnBackendCreateDescriptor(kind, ctypes.byref(made)))
        self._made.append(made)
        return made

    def _make(self, kind: int, *attributes: tuple[int, int, Sequence[Any]]) -> Any:
        made = self._new(kind)
        for name, of_type, values in attributes:
            self._check(
                self._library.cudnnBackendSetAttribute(
                    made, name, of_type, len(values), _array(of_type, values)
                )
            )
        self._check(self._library.cudnnBackendFinalize(made))
        return made

    def _get(self, made: Any, name: int, of_type: int, room: Sequence[Any]) -> list[Any]:
        count, array = ctypes.c_int64(), _array(of_type, room)
        self._check(
            self._library.cudnnBackendGetAttribute(
                made, name, of_type, len(room), ctypes.byref(count), array
            )
        )
        return list(array[: count.value])

    def _check(self, status: int) -> None:
        if status:
            raise CudnnError(f"cuDNN {self.version} returned status {status}")


def _array(of_type: int, values: Sequence[Any]) -> Any:
    plain = [v.value if isinstance(v, ctypes.c_void_p) else v for v in values]
    return (C_TYPES.get(of_type, ctypes.c_int) * len(plain))(*plain)


def strides(shape: Sequence[int], is_last: bool) -> list[int]:
    """Strides of a dense tensor, with channels innermost if `is_last`."""
    order = [*range(len(shape) - 1, -1, -1)]
    if is_last:
        order = [1, *range(len(shape) - 1, 1, -1), 0]
    found, step = [0] * len(shape), 1
    for dim in order:
        found[dim] = step
        step *= shape[dim]
    return found


@cache
def library() -> Library | None:
    """Return the installed cuDNN; None if there is none, or none that takes device properties."""
    if os.environ.get(DISABLED) == "0":
        return None
    for folder in _folders():
        path = folder / "libcudnn_graph.so.9"
        if not path.is_file():
            continue
        try:
            found = Library(ctypes.CDLL(str(path)))
        except (OSError, AttributeError):  # not a library, or an older one
            continue
        if found.version >= OLDEST:
            return found
    return None
