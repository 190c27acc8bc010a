"""Workspaces of convolutions from the installed cuDNN library, without a GPU.

Since release 9.8 the backend API takes a descriptor of device properties in place of a handle
(`CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR` of cudnn_graph.h). The order of the plans is that of
`Conv_v8.cpp` (torch 2.11): the configurations of `CUDNN_HEUR_MODE_INSTANT`, then those of
`CUDNN_HEUR_MODE_FALLBACK`, filtered by their numerical notes.

Four things differ from a GPU's answers:

- cuDNN rejects engines that need a CUDA driver. `cudnnSetCallback` receives the log, which lists
  the rejected configurations in their order and the reason of each. `COMPILED_ENGINES` are compiled
  when they run; `compiled_bytes` has their workspace. Products by cuBLASLt, which compute 1x1
  convolutions, have the workspace of `product_bytes`. An H100 accepted both kinds in each of 7,200
  calls.
- Fourier transforms and Winograd's engines for 3x3 windows are rejected too. They have the
  workspaces of `fourier_bytes` and `winograd_bytes`.
- Hopper's heuristics also read how thread block clusters fit the GPU. The JSON text that describes
  a GPU lacks these figures, so `_write_clusters` adds them to the descriptor where its layout is
  known. Only the answers of cuDNN 9.19 about Hopper were measured; others are estimates.
- No plan is executed, so a plan that fails on the GPU is not passed over.
"""

import ctypes
import hashlib
import itertools
import json
import os
import re
import struct
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from torch._prims_common import make_channels_last_strides_for, make_contiguous_strides_for

from memest.estimator.hardware import gpus
from memest.estimator.ops import cudnn_rules
from memest.estimator.ops.cudnn_rules import ConvolutionShapes, planar

OLDEST, MEASURED = 90800, range(91900, 92000)  # with device properties; measured on Hopper
FOLDER = "MEMEST_CUDNN"  # environment variable: a folder of NVIDIA's packages; `0` for no library
DEVICE_PROPERTIES = Path(gpus.__file__).with_name("device_properties.json")

CONVOLUTION, ENGINE, CONFIG, HEURISTICS, GRAPH, TENSOR, PROPERTIES = 1, 2, 3, 4, 15, 17, 38
OPERATIONS = {"forward": 10, "input": 12, "weight": 11}  # `cudnnBackendDescriptorType_t`
DATA_TYPE, INT64, FLOAT, DOUBLE, MODE, HEUR_MODE = 1, 3, 4, 5, 7, 8
NOTE, DESCRIPTOR, CHAR = 11, 15, 24  # `cudnnBackendAttributeType_t`
C_TYPES: dict[int, Any] = {
    INT64: ctypes.c_int64, FLOAT: ctypes.c_float, DOUBLE: ctypes.c_double,
    DESCRIPTOR: ctypes.c_void_p, CHAR: ctypes.c_char,
}  # fmt: skip
"""C types of cuDNN's attribute types; all other types are enumerations, `int`."""

CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
"""`cudnnCallback_t`: severity, user data, debug information, message."""

DATA_TYPES = dict(zip(cudnn_rules.DTYPES, (0, 2, 9, 1), strict=True))  # `cudnnDataType_t`
DATA_FLOAT, DATA_DOUBLE = 0, 1
CROSS_CORRELATION, INSTANT, FALLBACK = 1, 0, 2
FIRST_OF = {"forward": 700, "input": 706, "weight": 712}
"""First `cudnnBackendAttributeName_t` of an operation: two factors, convolution, w, x, y."""

INFO_MASK, SUPPORT_CHECKS = 8, b"engine_config_support_checks"
"""`CUDNN_SEV_INFO_EN`, and the log message that lists rejected configurations."""

REJECTED = re.compile(rb'"engineId":(\d+)((?:(?!engineConfig:).)*)', re.DOTALL)
"""Pattern of an engine in the log message, and of the reasons why cuDNN rejects it."""

WITHOUT_DRIVER = b"CUDNN_STATUS_NOT_SUPPORTED_RUNTIME_PREREQUISITE_MISSING"
"""Status of a runtime-compiled engine, which cuDNN rejects because there is no CUDA driver."""

WITHOUT_WINOGRAD = b"ConvolutionEngine::getStatus()"  # reason for Winograd's engines
COMPILED_ENGINES = {"forward": (5,), "input": (6,), "weight": (16, 19)}  # depthwise, small images
SUMS_IN_PARTS = 16  # the compiled engine that `compiled_bytes` is about; the others take nothing
FOURIER_ENGINES = {"forward": 3, "input": 50, "weight": 18}  # by transforms, which need a GPU
WITHOUT_CUBLASLT = b"engine_iface->getStatus()"  # cuBLASLt has no GPU to create its handle for
ALIGNMENT = 16  # bytes of every tensor; with 32, which torch passes, results are the same
TENSOR_CORES, DOWN_CONVERTS, FOURIER, NONDETERMINISTIC, MOST_NOTES = 0, 1, 3, 4, 16
"""`cudnnBackendNumericalNote_t`, and room for all of them."""

LAYOUTS = ((18, *(0,) * 39), (0, 18, *(0,) * 23, *(max(1, 18 // size) for size in range(1, 17))))
"""Numbers after compute capability and driver in a descriptor made from JSON, in cuDNN 9.19 and in
9.24. The last 40 are about clusters; the last 16 are the clusters of each size that fit.
"""

CLUSTER_INTS = 40
DESCRIPTOR_BYTES = 544  # size of a descriptor of device properties in cuDNN 9.19


class CudnnError(Exception):
    """Error of cuDNN: a call returned an error status, or a GPU's properties are not known."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """Restrictions on the kernels that cuDNN may choose: `filterEngineConfigs` of Conv_v8.cpp."""

    are_deterministic: bool = False  # deterministic algorithms are requested
    are_without_tf32: bool = False  # float32 without TF32, so not on tensor cores


@dataclass(frozen=True, slots=True)
class Plan:
    """Engine configuration that cuDNN offers for a convolution."""

    workspace_bytes: int  # bytes that the plan requests
    notes: frozenset[int]  # numerical notes of its engine (`cudnnBackendNumericalNote_t`)
    is_estimated: bool = False  # `product_bytes` estimated it, rarely right to 512 B

    def is_allowed(self, kernels: Kernels) -> bool:
        """Return whether `kernels` allow the plan: `filterEngineConfigs` of Conv_v8.cpp."""
        unwanted = {DOWN_CONVERTS}
        unwanted |= {NONDETERMINISTIC} if kernels.are_deterministic else set()
        unwanted |= {TENSOR_CORES} if kernels.are_without_tf32 else set()
        return not self.notes & unwanted


@cache
def device_properties(gpu: str) -> tuple[str, tuple[int, ...]] | None:
    """Return (JSON text, cluster figures) of the GPU named `gpu`; None for an unknown GPU.

    The JSON text has the GPU's device properties, in cuDNN's format. The cluster figures are 40
    integers about thread block clusters, or () if they are unknown. The last 16 integers are the
    numbers of clusters of 1 to 16 blocks that fit the GPU. cuDNN reads the figures to choose
    convolution kernels on Hopper.
    """
    entries = json.loads(DEVICE_PROPERTIES.read_text(encoding="utf-8"))
    if gpus.split_mig(gpu) is not None:
        return _instance_properties(gpus.find_gpu(gpu))
    if gpu not in entries:
        return None
    entry = entries[gpu]
    properties = entry["properties"]
    base = entry
    while "like" in base:
        base = entries[base["like"]]
        properties = base["properties"] | properties
    return json.dumps(properties), tuple(entry.get("clusters", ()))


def _instance_properties(gpu: gpus.Gpu) -> tuple[str, tuple[int, ...]] | None:
    """Return `device_properties` of the MIG instance `gpu`, with () for unknown cluster figures."""
    text, _ = device_properties(gpus.find_gpu(gpu.whole).chip) or ("", ())
    if not text:
        return None
    properties = json.loads(text)
    cache = int(properties["l2CacheSize"] * gpu.memory_share)
    size = {"multiProcessorCount": gpu.num_sms, "totalGlobalMem": gpu.memory_bytes}
    return json.dumps(properties | size | {"l2CacheSize": cache, "deviceName": gpu.label}), ()


def _folders() -> Iterator[Path]:
    """Yield folders that may hold cuDNN: below MEMEST_CUDNN, or of NVIDIA's wheels and conda."""
    user_folder = os.environ.get(FOLDER)
    for root in [user_folder] if user_folder else sys.path:
        if (folder := Path(root or ".", "nvidia", "cudnn", "lib")).is_dir():
            yield folder
    if "CONDA_PREFIX" in os.environ and not user_folder:
        yield Path(os.environ["CONDA_PREFIX"], "lib")


def _load_cublaslt(folder: Path) -> bool:
    """Load cuBLASLt, and return whether that succeeded. Without cuBLASLt, cuDNN would abort.

    `folder` is the folder of the cuDNN library. The search for cuBLASLt begins in `folder`. It goes
    on in the folders `cu13/lib` and `cublas/lib` of NVIDIA's packages, then in the system's folders
    of libraries.
    """
    folders = [folder, folder / "../../cu13/lib", folder / "../../cublas/lib"]
    names = [str(path) for root in folders for path in sorted(root.glob("libcublasLt.so.1?"))]
    for name in (*names, "libcublasLt.so.13", "libcublasLt.so.12"):
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return True
    return False


class Library:
    """Loaded cuDNN, which lists a convolution's plans without a GPU. A lock serializes calls."""

    def __init__(self, cdll: Any) -> None:
        self._library = cdll
        self._library.cudnnGetVersion.restype = ctypes.c_size_t
        self.version = int(cdll.cudnnGetVersion())
        self._to_destroy: list[Any] = []
        self._properties: dict[str, Any] = {}
        self._lock = threading.Lock()

    def supports(self, gpu: gpus.Gpu) -> bool:
        """Return whether cuDNN can plan convolutions for `gpu`: its device properties are known."""
        return device_properties(gpu.chip) is not None

    def is_measured(self, gpu: gpus.Gpu) -> bool:
        """Return whether the plans that cuDNN lists for `gpu` are reliable. They are reliable for
        all GPUs older than Hopper. For Hopper and newer GPUs, the cluster figures of `gpu` must be
        known. Also, plans of this release of cuDNN must have been compared with those on a GPU."""
        if gpu.capability < (9, 0):
            return True
        _, clusters = device_properties(gpu.chip) or ("", ())
        return bool(clusters) and self.version in MEASURED

    def fingerprint(self, gpu: str) -> str:
        """Return a file name, with a hash of all on which results for the GPU `gpu` depend."""
        sources = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("cudnn_*.py"))]
        digest = hashlib.blake2b(repr((device_properties(gpu), sources)).encode(), digest_size=6)
        return f"{self.version}-{gpu}-{digest.hexdigest()}"

    def first_plan(
        self, shapes: ConvolutionShapes, direction: str, gpu: str, kernels: Kernels
    ) -> Plan | None:
        """Return the first plan that `kernels` allow, in cuDNN's order; None if there is none.

        `direction` is "forward", or "input" or "weight" for that gradient; `gpu` is a chip's name.

        Raises:
            CudnnError: cuDNN returned an error, or the properties of `gpu` are not known.
        """
        with self._lock, self._descriptors():
            plans = self._plans(shapes, direction, gpu)
            return next((plan for plan in plans if plan.is_allowed(kernels)), None)

    def all_plans(self, shapes: ConvolutionShapes, direction: str, gpu: str) -> list[Plan]:
        """Return all plans in cuDNN's order; arguments and errors as of `first_plan`."""
        with self._lock, self._descriptors():
            return list(self._plans(shapes, direction, gpu))

    @contextmanager
    def _descriptors(self) -> Iterator[None]:
        try:
            yield
        finally:
            for descriptor in reversed(self._to_destroy):
                self._library.cudnnBackendDestroyDescriptor(descriptor)
            self._to_destroy = []

    def _properties_of(self, gpu: str) -> Any:
        if gpu not in self._properties:
            properties = device_properties(gpu)
            if properties is None:
                raise CudnnError(f"the properties of {gpu} are not known")
            text, clusters = properties
            descriptor = self._make(PROPERTIES, (2702, CHAR, text.encode() + b"\0"))  # JSON
            if clusters:
                self._write_clusters(descriptor, text, clusters)
            self._to_destroy.remove(descriptor)  # it is used again
            self._properties[gpu] = descriptor
        return self._properties[gpu]

    def _write_clusters(self, descriptor: Any, text: str, clusters: Sequence[int]) -> None:
        """Write the integers `clusters` into `descriptor`, cuDNN's descriptor of device properties.

        `clusters` are 40 integers about the GPU's thread block clusters, and `text` has the GPU's
        properties as JSON (both from `device_properties`). The memory of `descriptor` is searched
        for a sequence of integers: (compute capability, driver version, *layout). The first two are
        in `text`, and the layout is one of `LAYOUTS`. `clusters` replace the last 40 integers of
        the sequence. If the sequence is not found, nothing is written.

        Raises:
            CudnnError: the sequence is not found, and this release of cuDNN is a measured one.
        """
        properties = json.loads(text)
        values = struct.pack(f"{CLUSTER_INTS}i", *clusters)
        for layout in LAYOUTS:
            numbers = (properties["deviceVer"], properties["driverVer"], *layout)
            marker = struct.pack(f"{len(numbers)}i", *numbers)
            offset = ctypes.string_at(descriptor.value, DESCRIPTOR_BYTES).find(marker)
            if offset >= 0:
                ctypes.memmove(
                    descriptor.value + offset + len(marker) - len(values), values, len(values)
                )
                return
        if self.version in MEASURED:
            raise CudnnError(f"cuDNN {self.version} has device properties of another layout")

    def _graph(self, conv: ConvolutionShapes, direction: str) -> Any:
        samples, inputs, outputs = conv.channels
        data_type = DATA_TYPES[conv.dtype]
        is_double = data_type == DATA_DOUBLE
        convolution = self._make(
            CONVOLUTION,
            (100, DATA_TYPE, [DATA_DOUBLE if is_double else DATA_FLOAT]),  # computed
            (101, MODE, [CROSS_CORRELATION]), (106, INT64, [len(conv.image)]),  # mode, dimensions
            (105, INT64, planar(conv.padding, 0)), (104, INT64, planar(conv.padding, 0)),
            (103, INT64, planar(conv.stride)), (102, INT64, planar(conv.dilation)),
        )  # fmt: skip
        tensors_of = {
            "w": [outputs, inputs // conv.groups, *conv.window],
            "x": [samples, inputs, *conv.image],
            "y": [samples, outputs, *conv.result],
        }
        strides_of: Any = (
            make_channels_last_strides_for if conv.is_channels_last else make_contiguous_strides_for
        )
        tensors = [
            self._make(
                TENSOR,  # unique number, type, sizes, strides, alignment
                (906, INT64, [ord(name)]), (901, DATA_TYPE, [data_type]), (902, INT64, shape),
                (903, INT64, strides_of(shape)), (900, INT64, [ALIGNMENT]),
            )
            for name, shape in tensors_of.items()
        ]  # fmt: skip
        first, factor = FIRST_OF[direction], DOUBLE if is_double else FLOAT
        operation = self._make(
            OPERATIONS[direction],
            (first, factor, [1.0]), (first + 1, factor, [0.0]),
            (first + 2, DESCRIPTOR, [convolution]),
            *((first + 3 + i, DESCRIPTOR, [tensor]) for i, tensor in enumerate(tensors)),
        )  # fmt: skip
        return self._make(GRAPH, (801, DESCRIPTOR, [operation]))  # its operations

    def _plans(self, shapes: ConvolutionShapes, direction: str, gpu: str) -> Iterator[Plan]:
        """Yield plans of both heuristic modes, including those that cuDNN accepts only on a GPU."""
        properties, graph = self._properties_of(gpu), self._graph(shapes, direction)
        for mode in (INSTANT, FALLBACK):
            heuristics = self._make(
                HEURISTICS,  # graph, mode, device
                (201, DESCRIPTOR, [graph]), (200, HEUR_MODE, [mode]),
                (204, DESCRIPTOR, [properties]),
            )  # fmt: skip
            num_rejected = 0
            for num_requested in itertools.count(1):  # cuDNN checks until it has enough of them
                with self._log() as rejected:
                    configs = [self._new(CONFIG) for _ in range(num_requested)]
                    num_found = len(self._get(heuristics, 202, DESCRIPTOR, configs))  # results
                for engine, reasons in rejected[num_rejected:]:
                    yield from _plans_on_gpu(engine, reasons, shapes, direction, gpu)
                num_rejected = len(rejected)
                if num_found < num_requested:
                    break
                yield self._plan(configs[-1])

    def _plan(self, config: Any) -> Plan:
        (workspace,) = self._get(config, 303, INT64, [0])  # its workspace size
        engine = self._new(ENGINE)
        self._get(config, 300, DESCRIPTOR, [engine])  # its engine
        notes = self._get(engine, 1303, NOTE, [0] * MOST_NOTES)  # numerical notes
        return Plan(workspace, frozenset(notes))

    @contextmanager
    def _log(self) -> Iterator[list[tuple[int, bytes]]]:
        """Yield a list that collects (engine number, reasons) of each rejected configuration."""
        rejected: list[tuple[int, bytes]] = []

        def receive(severity: int, data: Any, debug: Any, message: int) -> None:
            if SUPPORT_CHECKS in ctypes.string_at(message):
                rejections = REJECTED.findall(b"\n".join(_lines(message)))
                rejected.extend((int(engine), reasons) for engine, reasons in rejections)

        callback = CALLBACK(receive)
        self._library.cudnnSetCallback(INFO_MASK, None, callback)
        try:
            yield rejected
        finally:
            self._library.cudnnSetCallback(0, None, CALLBACK())

    def _new(self, kind: int) -> Any:
        descriptor = ctypes.c_void_p()
        self._check(self._library.cudnnBackendCreateDescriptor(kind, ctypes.byref(descriptor)))
        self._to_destroy.append(descriptor)
        return descriptor

    def _make(self, kind: int, *attributes: tuple[int, int, Sequence[Any]]) -> Any:
        descriptor = self._new(kind)
        for name, of_type, values in attributes:
            self._check(
                self._library.cudnnBackendSetAttribute(
                    descriptor, name, of_type, ctypes.c_int64(len(values)), _array(of_type, values)
                )
            )
        self._check(self._library.cudnnBackendFinalize(descriptor))
        return descriptor

    def _get(self, descriptor: Any, name: int, of_type: int, room: Sequence[Any]) -> list[Any]:
        count, array = ctypes.c_int64(), _array(of_type, room)
        self._check(
            self._library.cudnnBackendGetAttribute(
                descriptor, name, of_type, ctypes.c_int64(len(room)), ctypes.byref(count), array
            )
        )
        return list(array[: count.value])

    def _check(self, status: int) -> None:
        if status:
            raise CudnnError(f"cuDNN {self.version} returned status {status}")


def _lines(message: int) -> Iterator[bytes]:
    """Yield the lines of the log message at address `message`. Each ends with a zero byte, the last
    with two."""
    while line := ctypes.string_at(message):
        yield line
        message += len(line) + 1


def _plans_on_gpu(
    engine: int, reasons: bytes, shapes: ConvolutionShapes, direction: str, gpu: str
) -> Iterator[Plan]:
    """Yield the plan of an `engine` that cuDNN rejected, if the log's `reasons` and the shapes show
    that a GPU would accept it."""
    if engine == FOURIER_ENGINES[direction]:
        if cudnn_rules.is_fourier(shapes, direction):
            yield Plan(cudnn_rules.fourier_bytes(shapes, direction), frozenset({FOURIER}))
    elif WITHOUT_DRIVER in reasons and engine in COMPILED_ENGINES[direction]:
        num_bytes = cudnn_rules.compiled_bytes(shapes, direction) if engine == SUMS_IN_PARTS else 0
        yield Plan(num_bytes, frozenset())
    elif WITHOUT_CUBLASLT in reasons and cudnn_rules.is_product(shapes):
        num_bytes = cudnn_rules.product_bytes(shapes, direction, gpus.find_gpu(gpu).num_sms)
        is_estimated = direction == "weight" and shapes.is_channels_last
        yield Plan(num_bytes, frozenset({TENSOR_CORES}), is_estimated)
    elif WITHOUT_WINOGRAD in reasons and cudnn_rules.is_winograd(shapes, direction):
        yield Plan(cudnn_rules.winograd_bytes(shapes, direction), frozenset())


def _array(of_type: int, values: Sequence[Any]) -> Any:
    plain = [v.value if isinstance(v, ctypes.c_void_p) else v for v in values]
    return (C_TYPES.get(of_type, ctypes.c_int) * len(plain))(*plain)


@cache
def library() -> Library | None:
    """Return the installed cuDNN; None if missing, before 9.8 or turned off (MEMEST_CUDNN=0)."""
    if os.environ.get(FOLDER) == "0":
        return None
    for folder in _folders():
        path = folder / "libcudnn_graph.so.9"
        if not path.is_file() or not _load_cublaslt(folder):
            continue
        try:
            cudnn = Library(ctypes.CDLL(str(path)))
        except (OSError, AttributeError):  # not a library, or an older one
            continue
        if cudnn.version >= OLDEST:
            return cudnn
    return None
