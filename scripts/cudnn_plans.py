"""Asks cuDNN, on a machine with a GPU, which kernels it has for a convolution.

Its backend API (`cudnn_graph.h` of cuDNN 9), by ctypes: a graph of one convolution, and what its
heuristics offer for it, in the order in which `Conv_v8.cpp` of torch 2.11 gets them: first those
of `CUDNN_HEUR_MODE_INSTANT`, then those of `CUDNN_HEUR_MODE_FALLBACK`. Nothing is run.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from memest.estimator.kernels.cudnn_convolution import DIRECTIONS, SPATIAL

CONVOLUTION, ENGINE, CONFIG, HEURISTICS, GRAPH, TENSOR = 1, 2, 3, 4, 15, 17
OPERATIONS = {"forward": 10, "input": 12, "weight": 11}
"""`cudnnBackendDescriptorType_t`."""

HANDLE, DATA_TYPE, INT64, FLOAT, DOUBLE, MODE, HEUR_MODE, NOTE, DESCRIPTOR = (
    0,
    1,
    3,
    4,
    5,
    7,
    8,
    11,
    15,
)
"""`cudnnBackendAttributeType_t`."""

FIRST_OF = {"forward": 700, "input": 706, "weight": 712}
"""Attributes of the operations: two factors, the convolution, and the tensors in this order."""

TENSORS_OF = {"forward": "wxy", "input": "wxy", "weight": "wxy"}
DTYPES = (0, 2, 9, 1)
"""`cudnnDataType_t` of what `cudnn_convolution.DTYPES` lists."""

CROSS_CORRELATION, INSTANT, FALLBACK, ALIGNMENT = 1, 0, 2, 16
TENSOR_CORES, NONDETERMINISTIC, MOST_NOTES = 0, 4, 16
"""`cudnnBackendNumericalNote_t`, and room for them."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A kernel that cuDNN offers."""

    engine: int
    workspace_bytes: int
    is_deterministic: bool
    uses_tensor_cores: bool


class Cudnn:
    """The library that torch has loaded, with a handle of its own."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcudnn_graph.so.9")
        self._handle = ctypes.c_void_p()
        self._check(self._library.cudnnCreate(ctypes.byref(self._handle)))
        self._made: list[ctypes.c_void_p] = []

    def plans(self, row: Sequence[int]) -> dict[str, list[Plan]]:
        """Of a call as `ConvolutionShapes.row` gives it, for each of `DIRECTIONS`."""
        try:
            return {direction: self._plans_of(row, direction) for direction in DIRECTIONS}
        finally:
            for made in reversed(self._made):
                self._library.cudnnBackendDestroyDescriptor(made)
            self._made = []

    def _plans_of(self, row: Sequence[int], direction: str) -> list[Plan]:
        graph = self._graph(row, direction)
        return [plan for mode in (INSTANT, FALLBACK) for plan in self._offered(graph, mode)]

    def _graph(self, row: Sequence[int], direction: str) -> Any:
        dtype, is_last, dims, groups, samples, inputs, outputs = row[:7]
        kept = max(2, dims)  # torch makes two dimensions of one
        extents = [list(row[i : i + SPATIAL][SPATIAL - kept :]) for i in range(7, 25, SPATIAL)]
        image, result, window, stride, padding, dilation = extents
        convolution = self._make(
            CONVOLUTION,
            (100, DATA_TYPE, [1 if DTYPES[dtype] == 1 else 0]),
            (101, MODE, [CROSS_CORRELATION]),
            (106, INT64, [kept]),
            (105, INT64, padding), (104, INT64, padding),
            (103, INT64, stride), (102, INT64, dilation),
        )  # fmt: skip
        shapes = {
            "x": [samples, inputs, *image],
            "y": [samples, outputs, *result],
            "w": [outputs, inputs // groups, *window],
        }
        tensors = [
            self._make(
                TENSOR,
                (906, INT64, [ord(name)]), (901, DATA_TYPE, [DTYPES[dtype]]),
                (902, INT64, shapes[name]), (903, INT64, _strides(shapes[name], bool(is_last))),
                (900, INT64, [ALIGNMENT]),
            )
            for name in TENSORS_OF[direction]
        ]  # fmt: skip
        first, factor = FIRST_OF[direction], DOUBLE if DTYPES[dtype] == 1 else FLOAT
        operation = self._make(
            OPERATIONS[direction],
            (first, factor, [1.0]), (first + 1, factor, [0.0]),
            (first + 2, DESCRIPTOR, [convolution]),
            *((first + 3 + i, DESCRIPTOR, [tensor]) for i, tensor in enumerate(tensors)),
        )  # fmt: skip
        return self._make(GRAPH, (800, HANDLE, [self._handle]), (801, DESCRIPTOR, [operation]))

    def _offered(self, graph: Any, mode: int) -> list[Plan]:
        heuristics = self._make(HEURISTICS, (201, DESCRIPTOR, [graph]), (200, HEUR_MODE, [mode]))
        count = self._count(heuristics, 202, DESCRIPTOR)
        configs = [self._new(CONFIG) for _ in range(count)]
        found = self._get(heuristics, 202, DESCRIPTOR, configs)
        return [self._plan(config) for config in found]

    def _plan(self, config: Any) -> Plan:
        (workspace,) = self._get(config, 303, INT64, [0])
        (engine,) = self._get(config, 300, DESCRIPTOR, [self._new(ENGINE)])
        (index,) = self._get(engine, 1301, INT64, [0])
        notes = self._get(engine, 1303, NOTE, [0] * MOST_NOTES)
        return Plan(index, workspace, NONDETERMINISTIC not in notes, TENSOR_CORES in notes)

    # --- descriptors

    def _new(self, kind: int) -> Any:
        made = ctypes.c_void_p()
        self._check(self._library.cudnnBackendCreateDescriptor(kind, ctypes.byref(made)))
        self._made.append(made)
        return made

    def _make(self, kind: int, *attributes: tuple[int, int, Sequence[Any]]) -> Any:
        made = self._new(kind)
        for name, of_type, values in attributes:
            array = _array(of_type, values)
            self._check(
                self._library.cudnnBackendSetAttribute(
                    made, name, of_type, ctypes.c_int64(len(values)), array
                )
            )
        self._check(self._library.cudnnBackendFinalize(made))
        return made

    def _count(self, made: Any, name: int, of_type: int) -> int:
        count = ctypes.c_int64()
        self._check(
            self._library.cudnnBackendGetAttribute(
                made, name, of_type, ctypes.c_int64(0), ctypes.byref(count), None
            )
        )
        return count.value

    def _get(self, made: Any, name: int, of_type: int, room: Sequence[Any]) -> list[Any]:
        count, array = ctypes.c_int64(), _array(of_type, room)
        self._check(
            self._library.cudnnBackendGetAttribute(
                made, name, of_type, ctypes.c_int64(len(room)), ctypes.byref(count), array
            )
        )
        if of_type == DESCRIPTOR:
            return list(room[: count.value])
        return list(array[: count.value])

    def _check(self, status: int) -> None:
        if status:
            raise RuntimeError(f"cuDNN says {status}")


def _array(of_type: int, values: Sequence[Any]) -> Any:
    kinds: dict[int, Any] = {
        HANDLE: ctypes.c_void_p, DESCRIPTOR: ctypes.c_void_p, INT64: ctypes.c_int64,
        FLOAT: ctypes.c_float, DOUBLE: ctypes.c_double,
    }  # fmt: skip
    plain = [v.value if isinstance(v, ctypes.c_void_p) else v for v in values]
    return (kinds.get(of_type, ctypes.c_int) * len(plain))(*plain)


def _strides(shape: Sequence[int], is_last: bool) -> list[int]:
    order = [*range(len(shape) - 1, -1, -1)]
    if is_last:
        order = [1, *range(len(shape) - 1, 1, -1), 0]
    found, step = [0] * len(shape), 1
    for dim in order:
        found[dim] = step
        step *= shape[dim]
    return found
