"""Workspaces of cuDNN's convolutions: as measured, or of trees that were fitted to those measured.

cuDNN chooses its kernels by heuristics that are not public, and the kernel decides the workspace.
968,800 convolutions, those of common networks and random ones, are `convolutions.npz` beside this
module (H100, torch 2.11, cuDNN 9.19, `cudnn.benchmark` off, TF32 allowed): 293,200 were run one by
one, of the others cuDNN was asked which kernel it has, and it was right about 99.9 % of those that
were run besides. It was also asked of all which kernel it has where only deterministic ones are
allowed, and none that rounds float32 to TF32 (`Kernels`). `scripts/measure_convolutions.py`
measures them again, `scripts/common_convolutions.py` lists more. For other calls, and for other
GPUs, the installed cuDNN says the workspace (`cudnn_library`) where it is right more often than the
trees (`takes_library`). The rest come from the trees in `convolution_trees.npz`, which
`scripts/fit_convolutions.py` fits to the measured calls; it prints how often they are right.

By the trees a workspace is the sum of two parts, each with eleven trees for every direction, of
which the most decide, or the middle one where no two agree:

- *operands* that are rearranged into the order, or padded to the vectors, that the kernel reads:
  one of `FORMS`;
- *sums*: partial sums of a cut product, one for each sample or cut, with their counters, and what
  kernels ask for by themselves. A leaf says how many float32 weights they are, and how many bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from memest.estimator.hardware.gpus import Gpu
from memest.estimator.kernels.cudnn_library import CudnnError, library

Columns = np.ndarray[Any, Any]
"""Integers, a row per call: `ConvolutionShapes.row`, or one number each."""

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

MEASURED, FITTED = (
    Path(__file__).with_name(f"{name}.npz") for name in ("convolutions", "convolution_trees")
)

NUMBERS = [f"calls_{i:02}" for i in range(25)]
"""Names of the columns in `MEASURED` that make a row of `ConvolutionShapes.row`."""

KEY_FACTOR = 0x9E3779B97F4A7C15
"""Odd, near 2^64 over the golden ratio, as multiplicative hashes take it."""

DIRECTIONS = ("forward", "input", "weight")
"""The output, the gradient of the input, and that of the weight."""

MEASURED_CAPABILITY = (9, 0)
"""Compute capability of the GPU that was measured."""

NUM_SMS = 132
"""Multiprocessors of the GPU that was measured."""

ACCUMULATOR_BYTES = 4

TILES = ((64, 64), (64, 128), (128, 64), (128, 128), (128, 256), (256, 128), (64, 256), (256, 64))
"""Outputs and inputs of a weight that one multiprocessor sums, as cuDNN's kernels cut them."""

LARGEST_ALIGNMENT = 64

SPATIAL = 3

NUM_TREES, BLOCK_BYTES = 11, 512
"""Trees of each part that are asked, and the allocator's blocks, in which they agree or not."""


@dataclass(frozen=True, slots=True)
class ConvolutionShapes:
    """One convolution, as cuDNN is called: a transposed one is the gradient of a plain one.

    `tensor` (N, C, ...), `weight` (O, C / groups, ...) and `output` (N, O, ...) are those of the
    plain convolution.
    """

    tensor: tuple[int, ...]
    weight: tuple[int, ...]
    output: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    dtype: torch.dtype
    is_channels_last: bool

    @property
    def is_depthwise(self) -> bool:
        """Whether each group has one input channel."""
        return self.groups > 1 and self.weight[1] == 1

    def row(self) -> list[int]:
        """The call in numbers; spatial extents are three, the first of them 1 where it has less."""
        dims = len(self.tensor) - 2
        extents = [
            (self.tensor[2:], 1), (self.output[2:], 1), (self.weight[2:], 1),
            (self.stride, 1), (self.padding, 0), (self.dilation, 1),
        ]  # fmt: skip
        return [
            DTYPES.index(self.dtype), int(self.is_channels_last), dims, self.groups,
            self.tensor[0], self.tensor[1], self.output[1],
            *(n for values, fill in extents for n in [fill] * (SPATIAL - dims) + list(values)),
        ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Kernels:
    """Those among which cuDNN may choose: `filterEngineConfigs` of Conv_v8.cpp (torch 2.11)."""

    are_deterministic: bool = False
    """`torch.backends.cudnn.deterministic`, or deterministic algorithms are asked for."""

    are_without_tf32: bool = False
    """Not `torch.backends.cudnn.allow_tf32`; of float32 only."""

    def may_differ(self, direction: str) -> bool:
        """Whether they are fewer for float32; those for the output are all deterministic."""
        return self.are_without_tf32 or (self.are_deterministic and direction != "forward")

    def columns(self) -> list[str]:
        """Those of `MEASURED` whose sum, with `workspaces`, is what they take."""
        if not self.are_without_tf32:
            return ["deterministic"] if self.are_deterministic else []
        return ["without_tf32", *(["deterministic_without_tf32"] if self.are_deterministic else [])]


ANY_KERNELS = Kernels()


@dataclass(frozen=True, slots=True)
class Form:
    """Operands that are rearranged: channels padded to so many, and which of the three."""

    channels: int
    output_channels: int
    has_input: bool
    has_weight: bool
    has_output: bool

    def num_bytes(self, calls: Columns) -> Columns:
        """Bytes of each call's rearranged operands."""
        c = Calls(calls)
        inputs, of_group = _padded(c.inputs, self.channels), _padded(c.per_group, self.channels)
        outputs = _padded(c.outputs, self.output_channels)
        elements = self.has_input * c.samples * inputs * c.input_plane
        elements = elements + self.has_weight * outputs * of_group * c.kernel
        elements = elements + self.has_output * c.samples * outputs * c.output_plane
        found: Columns = elements * c.itemsize
        return found


FORMS = (
    Form(1, 1, False, False, False),
    *(
        Form(channels, outputs, bool(which & 4), bool(which & 2), bool(which & 1))
        for channels in (1, 2, 4, 8, 16, 32)
        for outputs in sorted({1, channels})
        for which in range(1, 8)
    ),
)


class Calls:
    """Named columns of measured or asked calls, and what follows from them."""

    def __init__(self, calls: Columns) -> None:
        self.dtype, self.is_last, self.dims, self.groups = calls[:, :4].T
        self.samples, self.inputs, self.outputs = calls[:, 4:7].T
        extents = calls[:, 7:].reshape(len(calls), 6, SPATIAL)
        self.input, self.output, self.window = (extents[:, i] for i in range(3))
        self.stride, self.padding, self.dilation = (extents[:, i] for i in range(3, 6))
        self.itemsize = np.array([t.itemsize for t in DTYPES])[self.dtype]
        self.per_group = self.inputs // self.groups
        self.input_plane, self.output_plane = self.input.prod(1), self.output.prod(1)
        self.kernel = self.window.prod(1)
        self.depth = self.per_group * self.kernel
        self.weight_bytes = self.outputs * self.depth * ACCUMULATOR_BYTES


def _padded(count: Columns, multiple: int) -> Columns:
    return -(-count // multiple) * multiple


def _alignment(count: Columns) -> Columns:
    """Largest power of two that divides a count."""
    found: Columns = np.minimum(count & -count, LARGEST_ALIGNMENT)
    return found


def features(calls: Columns) -> dict[str, Columns]:
    """What the trees ask of each call (n,): sizes, alignments, and how a product is cut."""
    c = Calls(calls)
    pixels, group_outputs = c.samples * c.output_plane, c.outputs // c.groups
    found: dict[str, Any] = {
        **{str(t).removeprefix("torch."): c.dtype == i for i, t in enumerate(DTYPES)},
        "is_last": c.is_last, "dims": c.dims, "groups": c.groups, "samples": c.samples,
        "inputs": c.inputs, "outputs": c.outputs, "per_group": c.per_group,
        "group_outputs": group_outputs, "input_plane": c.input_plane,
        "output_plane": c.output_plane, "width": c.input[:, -1], "output_width": c.output[:, -1],
        "kernel": c.kernel, "window": c.window.max(1), "window_width": c.window[:, -1],
        "stride": c.stride[:, -1], "padding": c.padding[:, -1], "dilation": c.dilation[:, -1],
        "pixels": pixels, "input_pixels": c.samples * c.input_plane, "depth": c.depth,
        "output_depth": group_outputs * c.kernel, "elements": pixels * c.outputs,
        "input_elements": c.samples * c.inputs * c.input_plane, "weights": c.outputs * c.depth,
        "products": pixels * c.outputs * c.depth // 1000,
        "fewest_channels": np.minimum(c.inputs, c.outputs),
        "most_channels": np.maximum(c.inputs, c.outputs),
        "is_unpadded": c.padding.sum(1) == 0, "is_same_plane": c.input_plane == c.output_plane,
        "growth": c.inputs / c.outputs, "shrinkage": c.input_plane / c.output_plane,
        "plane_bytes": c.input_plane * c.itemsize,
        "output_plane_bytes": c.output_plane * c.itemsize,
        "tiles": -(-pixels // 128) * -(-c.outputs // 128),
        "input_tiles": -(-c.samples * c.input_plane // 128) * -(-c.inputs // 128),
    }  # fmt: skip
    for name in ("inputs", "outputs", "per_group", "group_outputs", "input_plane", "output_plane"):
        found[f"{name}_alignment"] = _alignment(found[name])
    found["width_alignment"] = _alignment(c.input[:, -1])
    for rows, columns in TILES:
        tiles = -(-c.outputs // rows) * -(-c.depth // columns)
        rest = tiles % NUM_SMS
        cuts = np.where(rest > 0, NUM_SMS // np.maximum(rest, 1), 0)
        name = f"{rows}x{columns}"
        found[f"cuts_{name}"] = NUM_SMS // tiles
        found[f"rest_cuts_{name}"] = cuts
        found[f"rest_tiles_{name}"] = rest * cuts
    return found


@dataclass(frozen=True, slots=True)
class Tree:
    """A decision tree in preorder: where a feature is at most the threshold, the next node, else
    `right`. At a leaf `feature` is -1 and `right` the row of `leaves`.
    """

    feature: Columns
    threshold: Columns
    right: Columns
    leaves: Columns

    def leaf(self, values: list[float]) -> list[int]:
        """The leaf to which these features lead."""
        node = 0
        while (feature := self.feature[node]) >= 0:
            is_left = values[feature] <= self.threshold[node]
            node = node + 1 if is_left else self.right[node]
        found: list[int] = self.leaves[self.right[node]].tolist()
        return found


def keys_of(numbers: Iterable[Columns]) -> Columns:
    """A key for each call, by which the measured ones are looked up, of the columns of its row.

    It has 64 bits: that another call has the key of one of 968,800 is one chance in 10^13.
    """
    found = np.zeros((), dtype=np.uint64)
    for column in numbers:
        found = (found + column.astype(np.uint64)) * np.uint64(KEY_FACTOR)
        found ^= found >> np.uint64(32)
    return found


def read(path: Path = MEASURED) -> dict[str, Columns]:
    """All that a file like `MEASURED` holds; `calls` has a row for each."""
    with np.load(path) as data:
        found = {name: data[name] for name in data.files if name not in NUMBERS}
        found["calls"] = np.stack([data[name] for name in NUMBERS], 1)
    return found


def write(path: Path, columns: Mapping[str, Columns]) -> None:
    """Write such a file: each number of the rows by itself, so that few are read at a time."""
    kept: dict[str, Any] = dict(zip(NUMBERS, columns["calls"].T, strict=True))
    kept |= {name: values for name, values in columns.items() if name != "calls"}
    np.savez_compressed(path, **kept)


@cache
def _measured(column: str) -> Columns:
    """A column of `MEASURED`, of shape (n, ...)."""
    with np.load(MEASURED) as data:
        found: Columns = data[column]
    return found


@cache
def _sorted_keys() -> tuple[Columns, Columns]:
    """The keys of the measured calls in order, and their rows, both (n,)."""
    with np.load(MEASURED) as data:
        keys = keys_of(data[name] for name in NUMBERS)
    order = np.argsort(keys)
    return keys[order], order


def as_measured(call: Columns, column: str) -> Columns | None:
    """What was measured of a call (1, 25)."""
    keys, order = _sorted_keys()
    key = keys_of(call.T)[0]
    place = int(np.searchsorted(keys, key))
    if place == len(keys) or keys[place] != key:
        return None
    found: Columns = _measured(column)[order[place]]
    return found


@cache
def trees() -> dict[str, Tree]:
    """The fitted trees, by direction, part and number: leaves of operands are (form,), those of
    sums (weights per sample, weights, bytes), those of what is tried, of which there is one tree,
    one number (`cudnn_search`).
    """
    with np.load(FITTED) as data:
        names = sorted({name.rpartition("_")[0] for name in data.files})
        return {name: Tree(*(data[f"{name}_{part}"] for part in Tree.__slots__)) for name in names}


@dataclass(frozen=True, slots=True)
class Workspace:
    """Bytes that cuDNN takes for one direction of a convolution.

    `is_sure` where the call was measured, the installed cuDNN says it, or all trees say the same:
    of such calls of common networks that the trees had not seen 98 % are right forward, 99 % for
    the input, 96 % for the weight. cuDNN is right in 99.4, 99.4 and 98.1 % of 316 such calls.
    """

    num_bytes: int
    is_sure: bool


@lru_cache(maxsize=4096)
def workspaces(
    shapes: ConvolutionShapes, kernels: Kernels = ANY_KERNELS, gpu: Gpu | None = None
) -> dict[str, Workspace]:
    """Workspaces of `DIRECTIONS` on `gpu`: measured, of the installed cuDNN, or of the trees.

    Without `gpu`, and where cuDNN is not installed, the workspaces are those of an H100.
    """
    call = np.array([shapes.row()], dtype=np.int64)
    measured = _as_measured(call, kernels)
    if measured and (gpu is None or gpu.capability == MEASURED_CAPABILITY):
        return measured
    installed = {} if gpu is None else _by_library(shapes, kernels, gpu)
    return (measured or _likely(call, shapes, kernels)) | installed


def _as_measured(call: Columns, kernels: Kernels) -> dict[str, Workspace]:
    """Workspaces that were measured on an H100; empty if the call was not."""
    found = as_measured(call, "workspaces")
    if found is None:
        return {}
    for column in kernels.columns():
        found = found + as_measured(call, column)
    return {d: Workspace(int(n), is_sure=True) for d, n in zip(DIRECTIONS, found, strict=True)}


def _likely(call: Columns, shapes: ConvolutionShapes, kernels: Kernels) -> dict[str, Workspace]:
    """Workspaces by the trees."""
    likely = _by_trees(call)
    if shapes.dtype != torch.float32:
        return likely
    others = {d for d in DIRECTIONS if kernels.may_differ(d)}
    return {d: Workspace(w.num_bytes, w.is_sure and d not in others) for d, w in likely.items()}


def takes_library(shapes: ConvolutionShapes, direction: str) -> bool:
    """Return whether the installed cuDNN stands for the trees.

    Without a GPU, cuDNN offers neither cuBLASLt's products, which compute 1x1 convolutions, nor
    kernels without a workspace that most grouped convolutions take, except for the weight's
    gradient where groups are wider than one channel.
    """
    if shapes.groups > 1:
        return direction == "weight" and not shapes.is_depthwise
    return {*shapes.weight[2:], *shapes.stride} != {1} or any(shapes.padding)


def _by_library(shapes: ConvolutionShapes, kernels: Kernels, gpu: Gpu) -> dict[str, Workspace]:
    """Workspaces by the installed cuDNN, where it can be asked without a GPU and is right often."""
    found: dict[str, Workspace] = {}
    installed = library()
    if installed is None or not installed.knows(gpu):
        return found
    for direction in filter(lambda d: takes_library(shapes, d), DIRECTIONS):
        try:
            plan = installed.first_plan(
                shapes.row(), direction, gpu.name,
                deterministic=kernels.are_deterministic, without_tf32=kernels.are_without_tf32,
            )  # fmt: skip
        except CudnnError:  # cuDNN refuses the call
            continue
        if plan is not None:
            is_sure = shapes.groups == 1 and not kernels.are_without_tf32
            found[direction] = Workspace(plan.workspace_bytes, is_sure)
    return found


def _by_trees(call: Columns) -> dict[str, Workspace]:
    """What the trees say of each of `DIRECTIONS`."""
    values = [float(np.float32(v[0])) for v in features(call).values()]
    return {direction: _by_trees_of(direction, call, values) for direction in DIRECTIONS}


def _by_trees_of(direction: str, call: Columns, values: list[float]) -> Workspace:
    said = [_by_tree(direction, number, call, values) for number in range(NUM_TREES)]
    blocks = [-(-num_bytes // BLOCK_BYTES) for num_bytes in said]
    most = max(map(blocks.count, blocks))
    likeliest = next(
        n for n, block in zip(said, blocks, strict=True) if blocks.count(block) == most
    )
    return Workspace(sorted(said)[NUM_TREES // 2] if most == 1 else likeliest, most == NUM_TREES)


def _by_tree(direction: str, number: int, call: Columns, values: list[float]) -> int:
    known = Calls(call)
    (form,) = trees()[f"{direction}_operands_{number}"].leaf(values)
    per_sample, weights, num_bytes = trees()[f"{direction}_sums_{number}"].leaf(values)
    sums = (per_sample * int(known.samples[0]) + weights) * int(known.weight_bytes[0])
    return int(FORMS[form].num_bytes(call)[0]) + sums + num_bytes
