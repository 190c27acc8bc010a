"""Lists convolutions of common networks that were not measured yet, for `measure_convolutions.py`.

    python scripts/common_convolutions.py NEW.npz
    python scripts/common_convolutions.py --join NEW.0.npz NEW.1.npz ...

The first writes calls with the columns of convolutions.npz in memest/estimator/kernels/, as yet
without figures; `measure_convolutions.py OUT.npz --of NEW.npz --plans` fills them in on a GPU, and
`--join` adds them to that file. A family is a generator of layers; each layer is a plain
convolution, and a transposed one is listed as the plain one whose gradient it is.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path

import numpy as np
import torch
from convolution_layers import ALL, BATCHES, HALVES, ODD_BATCHES, SINGLE, Layer, shapes_of
from model_convolutions import models
from net_convolutions import FAMILIES as MORE_FAMILIES

from memest.estimator.kernels.cudnn_convolution import (
    MEASURED,
    ConvolutionShapes,
    keys_of,
    read,
    write,
)


def of_double_backward(made: ConvolutionShapes) -> ConvolutionShapes:
    """The convolution of a gradient's gradient with the gradient of the output: the weight's."""
    samples, inputs, *image = made.tensor
    outputs, plane = made.output[1], made.output[2:]
    reached = tuple(
        (side + 2 * pad - stride * (window - 1) - 1) // dilation + 1
        for side, pad, stride, window, dilation in zip(
            image, made.padding, made.stride, plane, made.dilation, strict=True
        )
    )
    return ConvolutionShapes(
        (inputs, samples, *image), (outputs, samples, *plane), (inputs, outputs, *reached),
        made.dilation, made.padding, made.stride, 1, made.dtype, False,
    )  # fmt: skip


def reinforcement() -> Iterator[ConvolutionShapes | None]:
    """Encoders of pixels: DQN's, IMPALA's, DrQ's and Dreamer's, for rollouts and minibatches."""
    batches = (*BATCHES, 24, 48, 96, 192, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192)
    for samples, channels, side in product(batches, (1, 3, 4, 9, 12), (64, 84, 96)):
        second = (side - 8) // 4 + 1
        third = (second - 4) // 2 + 1
        layers: list[Layer] = [
            (samples, channels, 32, side, 8, 4, 0), (samples, 32, 64, second, 4, 2, 0),
            (samples, 64, 64, third, 3, 1, 0), (samples, channels, 16, side, 8, 4, 0),
            (samples, 16, 32, second, 4, 2, 0), (samples, channels, 32, side, 3, 2, 0),
        ]  # fmt: skip
        left = (side - 3) // 2 + 1
        layers += [(samples, 32, 32, left - 2 * i, 3, 1, 0) for i in range(3)]
        for depth in (32, 48):
            at, given = side, channels
            for i in range(4):
                layers.append((samples, given, depth << i, at, 4, 2, 0))
                layers.append((samples, given, depth << i, at, 4, 2, 1))
                at, given = (at - 4) // 2 + 1, depth << i
        at, given = side, channels
        for depth in (16, 32, 32):
            layers.append((samples, given, depth, at, 3, 1, 1))
            at, given = -(-at // 2), depth
            layers.append((samples, depth, depth, at, 3, 1, 1))
        for layer, dtype in product(layers, SINGLE if samples > 512 else (*SINGLE, HALVES[1])):
            yield shapes_of(layer, dtype)


def volumes() -> Iterator[ConvolutionShapes | None]:
    """U-Nets of volumes: nnU-Net's and MONAI's channels, with skips, strides and upsampling."""
    patches = [(s, s, s) for s in (32, 48, 64, 80, 96, 112, 128, 160)]
    patches += [(96, 96, 48), (128, 128, 64), (128, 128, 32), (160, 160, 80), (64, 128, 128)]
    plans = [[first << i for i in range(5)] for first in (8, 12, 16, 24, 32, 64)]
    plans.append([32, 64, 128, 256, 320, 320])
    for patch, plan, samples, dtype in product(patches, plans, (1, 2, 3, 4, 8), ALL):
        for given in (1, 2, 4):
            yield shapes_of((samples, given, plan[0], patch, 3, 1, 1), dtype)
        yield shapes_of((samples, plan[0], 1, patch, 1, 1, 0), dtype)
        for outputs in (2, 3, 4, 14):
            yield shapes_of((samples, plan[0], outputs, patch, 1, 1, 0), dtype)
        at = patch
        for below, wide in zip(plan, [*plan[1:], plan[-1] * 2], strict=True):
            half = tuple(side // 2 for side in at)
            for layer in (
                (samples, below, below, at, 3, 1, 1), (samples, below * 2, below, at, 3, 1, 1),
                (samples, below + wide, below, at, 3, 1, 1), (samples, below, wide, at, 3, 2, 1),
                (samples, below, wide, half, 3, 1, 1), (samples, below, wide, at, 2, 2, 0),
                (samples, wide, below, half, 1, 1, 0), (samples, below // 2, below, at, 3, 1, 1),
            ):  # fmt: skip
                yield shapes_of(layer, dtype)
            at = half


def tasks() -> Iterator[ConvolutionShapes | None]:
    """What `torch.func.vmap` makes of a small net: a group for each task or sample."""
    counts, shots = (2, 4, 5, 8, 16, 25, 32), (5, 10, 15, 25, 50, 75)
    for groups, samples, wide in product(counts, shots, (32, 64)):
        for side, given in ((84, 3), (28, 1), (32, 3)):
            at = side
            for inputs in (given, wide, wide, wide):
                layer = (samples, inputs * groups, wide * groups, at, 3, 1, 1)
                yield shapes_of(layer, torch.float32, groups=groups)
                at //= 2
    batches, images = (16, 32, 64, 100, 128, 256), ((28, 1), (32, 3))
    for groups, (side, given), wide in product(batches, images, (16, 32, 64)):
        for layer in (
            (1, given * groups, wide * groups, side, 3, 1, 1),
            (1, given * groups, wide * groups, side, 3, 1, 0),
            (1, given * groups, wide * groups, side, 5, 1, 0),
            (1, wide * groups, 2 * wide * groups, side // 2, 3, 1, 1),
            (1, wide * groups, 2 * wide * groups, side - 2, 3, 1, 0),
        ):
            yield shapes_of(layer, torch.float32, groups=groups)


def critics() -> Iterator[ConvolutionShapes | None]:
    """Critics and generators of images, and the second gradients of a penalty."""
    batches = (16, 24, 32, 48, 50, 64, 96, 100, 128, 256)
    sides, widths = (28, 32, 64, 128), (32, 48, 64, 96, 128)
    for samples, side, wide, given in product(batches, sides, widths, (1, 3)):
        for window, padding in ((4, 1), (5, 2), (3, 1)):
            at, inputs, outputs = side, given, wide
            while at > 4:
                for dtype in ALL if window == 4 else SINGLE:
                    made = shapes_of((samples, inputs, outputs, at, window, 2, padding), dtype)
                    yield made
                    if made is not None:
                        yield of_double_backward(made)
                at, inputs, outputs = -(-at // 2), outputs, min(outputs * 2, 512)
            made = shapes_of((samples, inputs, 1, at, 4, 1, 0), torch.float32)
            yield made
            if made is not None:
                yield of_double_backward(made)


def spectra() -> Iterator[ConvolutionShapes | None]:
    """Nets of spectrograms: bins times frames."""
    frames = (100, 101, 128, 157, 200, 201, 251, 256, 313, 400, 401, 431, 500, 501, 512, 801, 1024)
    for samples, bins, length in product((8, 16, 24, 32, 64, 128), (40, 64, 80, 128), frames):
        for wide in (16, 32, 64):
            image, given = (bins, length), 1
            for i in range(4):
                outputs = wide << i
                for dtype in (*SINGLE, HALVES[1]):
                    yield shapes_of((samples, given, outputs, image, 3, 1, 1), dtype)
                    yield shapes_of((samples, outputs, outputs, image, 3, 1, 1), dtype)
                yield shapes_of((samples, given, outputs, image, 3, 2, 1), torch.float32)
                image, given = (image[0] // 2, image[1] // 2), outputs


def diffusion() -> Iterator[ConvolutionShapes | None]:
    """U-Nets of diffusion and segmentation with batches that are no powers of two, and skips."""
    for samples, side in product((*ODD_BATCHES, 64, 128, 256), (28, 32, 48, 64, 96, 128)):
        for base, factors in product((32, 64, 96, 128), ((1, 2, 2, 2), (1, 2, 4), (1, 2, 4, 8))):
            at, given = side, base
            for i, factor in enumerate(factors):
                wide = base * factor
                pairs = [(given, wide), (wide, wide), (wide * 2, wide), (wide + given, wide)]
                layers: list[Layer] = [
                    (samples, *pair, at, window, 1, window // 2)
                    for pair in pairs
                    for window in (1, 3)
                ]
                layers += [
                    (samples, wide, wide * 3, at, 1, 1, 0),
                    (samples, wide, wide, at, 3, 2, 1),
                ]
                if not i:
                    layers += [(samples, c, wide, at, 3, 1, 1) for c in (1, 3, 4)]
                    layers += [(samples, wide, c, at, 3, 1, 1) for c in (1, 3, 4, 6)]
                for layer, dtype in product(layers, (*SINGLE, HALVES[1])):
                    yield shapes_of(layer, dtype)
                at, given = at // 2, wide


def resolutions() -> Iterator[ConvolutionShapes | None]:
    """Nets that make images larger, and operators on grids."""
    for samples, side in product((1, 2, 4, 8, 16, 32), (24, 32, 48, 64, 96, 128, 192, 256)):
        for layer in (
            (samples, 3, 64, side, 3, 1, 1), (samples, 64, 64, side, 3, 1, 1),
            (samples, 64, 256, side, 3, 1, 1), (samples, 64, 256, side * 2, 3, 1, 1),
            (samples, 64, 3, side * 2, 3, 1, 1), (samples, 64, 3, side * 4, 3, 1, 1),
            (samples, 64, 64, side * 4, 3, 1, 1), (samples, 3, 64, side, 9, 1, 4),
            (samples, 1, 64, side, 9, 1, 4), (samples, 64, 32, side, 5, 1, 2),
            (samples, 32, 3, side, 5, 1, 2), (samples, 3, 256, side, 3, 1, 1),
            (samples, 256, 256, side, 3, 1, 1), (samples, 256, 1024, side, 3, 1, 1),
            (samples, 64, 32, side, 3, 1, 1), (samples, 96, 32, side, 3, 1, 1),
            (samples, 128, 32, side, 3, 1, 1), (samples, 160, 32, side, 3, 1, 1),
            (samples, 192, 64, side, 3, 1, 1),
        ):  # fmt: skip
            for dtype in ALL:
                yield shapes_of(layer, dtype)
    batches, grids = (*BATCHES[:6], 10, 20, 40, 50), (61, 64, 85, 128, 141, 211, 241, 256, 421)
    for samples, side, wide in product(batches, grids, (20, 32, 48, 64)):
        yield shapes_of((samples, wide, wide, side, 1, 1, 0), torch.float32)
        yield shapes_of((samples, wide, 128, side, 1, 1, 0), torch.float32)


def digits() -> Iterator[ConvolutionShapes | None]:
    """Small nets for MNIST and CIFAR."""
    batches = (*BATCHES, *ODD_BATCHES, 500, 512, 1000, 1024, 2048, 4096)
    for samples, (side, given), dtype, padding in product(batches, ((28, 1), (32, 3)), ALL, (0, 1)):
        for wide in (6, 8, 10, 16, 20, 32, 64):
            yield shapes_of((samples, given, wide, side, 3, 1, padding), dtype)
            yield shapes_of((samples, given, wide, side, 5, 1, 2 * padding), dtype)
            less = side - 2 + 2 * padding
            for at in (less, less // 2, side // 2, side // 4):
                yield shapes_of((samples, wide, wide * 2, at, 3, 1, padding), dtype)
                yield shapes_of((samples, wide, wide, at, 3, 1, padding), dtype)
                yield shapes_of((samples, wide * 2, wide * 2, at, 3, 1, padding), dtype)
        yield shapes_of((samples, 6, 16, 14 if side == 32 else 12, 5, 1, 0), dtype)
        yield shapes_of((samples, 10, 20, 12, 5, 1, 0), dtype)
        yield shapes_of((samples, 20, 50, 12, 5, 1, 0), dtype)


def styles() -> Iterator[ConvolutionShapes | None]:
    """Generators of images from images, padded by reflection, and critics of patches."""
    for samples, side, wide in product((1, 2, 3, 4, 6, 8, 12, 16), (128, 256, 512), (32, 64)):
        half, quarter = side // 2, side // 4
        layers: list[Layer] = [
            (samples, 3, wide, side + 6, 7, 1, 0), (samples, wide, 3, side + 6, 7, 1, 0),
            (samples, 3, wide, side, 7, 1, 3), (samples, wide, 3, side, 7, 1, 3),
            (samples, 3, wide, side + 8, 9, 1, 0), (samples, wide, 3, side + 8, 9, 1, 0),
            (samples, wide, wide * 2, side, 3, 2, 1), (samples, wide * 2, wide * 4, half, 3, 2, 1),
            (samples, wide, wide * 2, side + 2, 3, 2, 0),
            (samples, wide * 2, wide * 4, half + 2, 3, 2, 0),
            (samples, wide * 4, wide * 4, quarter + 2, 3, 1, 0),
            (samples, wide * 4, wide * 4, quarter, 3, 1, 1),
            (samples, wide * 4, wide * 2, half + 2, 3, 1, 0),
            (samples, wide * 2, wide, side + 2, 3, 1, 0),
        ]  # fmt: skip
        for given in (3, 6):
            layers += [
                (samples, given, wide, side, 4, 2, 1), (samples, wide, wide * 2, half, 4, 2, 1),
                (samples, wide * 2, wide * 4, quarter, 4, 2, 1),
                (samples, wide * 4, wide * 8, side // 8, 4, 1, 1),
                (samples, wide * 8, 1, side // 8 - 1, 4, 1, 1),
                (samples, wide * 4, wide * 8, side // 8, 4, 2, 1),
                (samples, wide * 8, 1, side // 16, 4, 1, 1),
            ]  # fmt: skip
        for at, inputs, outputs in ((half, wide, wide * 2), (quarter, wide * 2, wide * 4)):
            layers.append((samples, inputs, outputs, at * 2, 4, 2, 1))
            layers.append((samples, outputs * 2, inputs, at * 2, 4, 2, 1))
        for layer, dtype in product(layers, (*SINGLE, HALVES[1]) if side < 512 else SINGLE):
            yield shapes_of(layer, dtype)


def clips() -> Iterator[ConvolutionShapes | None]:
    """Nets of clips: R(2+1)D, R3D, and C3D, 8 to 32 frames."""
    for samples, frames, side in product(
        (1, 2, 4, 6, 8, 12, 16, 20, 24, 32), (8, 16, 32), (56, 112, 128, 224)
    ):
        time, at, given = frames, side // 2, 64
        stem: list[Layer] = [
            (samples, 3, 45, (time, side, side), (1, 7, 7), (1, 2, 2), (0, 3, 3)),
            (samples, 45, 64, (time, at, at), (3, 1, 1), 1, (1, 0, 0)),
            (samples, 3, 64, (time, side, side), (3, 7, 7), (1, 2, 2), (1, 3, 3)),
        ]
        layers = stem
        for wide in (64, 128, 256, 512):
            step = 1 if wide == 64 else 2
            for inputs, pace in ((given, step), (wide, 1)):
                middle = inputs * wide * 27 // (inputs * 9 + 3 * wide)
                whole = (time, at, at)
                less = (time, -(-at // pace), -(-at // pace))
                layers = [
                    *layers,
                    (samples, inputs, middle, whole, (1, 3, 3), (1, pace, pace), (0, 1, 1)),
                    (samples, middle, wide, less, (3, 1, 1), (pace, 1, 1), (1, 0, 0)),
                    (samples, inputs, wide, whole, 3, pace, 1),
                    (samples, inputs, wide, whole, 1, pace, 0),
                ]
                time, at = -(-time // pace), -(-at // pace)
            again = wide * wide * 27 // (wide * 9 + 3 * wide)
            layers.append((samples, wide, again, (time, at, at), (1, 3, 3), 1, (0, 1, 1)))
            layers.append((samples, again, wide, (time, at, at), (3, 1, 1), 1, (1, 0, 0)))
            given = wide
        for layer, dtype in product(layers, ALL):
            yield shapes_of(layer, dtype)


def detectors() -> Iterator[ConvolutionShapes | None]:
    """One-stage detectors at several scales: cross-stage blocks, pyramids and heads."""
    scales = (320, 416, 512, 576, 640, 704, 768)
    for samples, side, first in product((2, 4, 8, 16, 24, 32, 64), scales, (16, 32, 48, 64)):
        at, given = side, 3
        layers: list[Layer] = []
        for level in range(5):
            wide = min(first << level, 512 if first < 64 else 1024)
            layers.append((samples, given, wide, at, 3, 2, 1))
            at, given, half = at // 2, wide, wide // 2
            layers += [
                (samples, wide, wide, at, 1, 1, 0), (samples, wide, half, at, 1, 1, 0),
                (samples, half, half, at, 3, 1, 1), (samples, half, half, at, 1, 1, 0),
                (samples, wide * 2, wide, at, 1, 1, 0), (samples, wide * 3 // 2, wide, at, 1, 1, 0),
                (samples, wide * 2, half, at, 1, 1, 0), (samples, wide * 3, wide, at, 1, 1, 0),
                (samples, half * 3, wide, at, 1, 1, 0), (samples, wide, wide, at, 3, 1, 1),
                (samples, half, half, at * 2, 3, 2, 1),
            ]  # fmt: skip
            if level >= 2:
                for outputs in (1, 4, 64, 80, 20, 85 * 3, 25 * 3):
                    layers.append((samples, wide, outputs, at, 1, 1, 0))
                    layers.append((samples, 64, outputs, at, 1, 1, 0))
                layers += [(samples, wide, 64, at, 3, 1, 1), (samples, 64, 64, at, 3, 1, 1)]
                layers += [(samples, wide, 80, at, 3, 1, 1), (samples, 80, 80, at, 3, 1, 1)]
        for layer, dtype in product(layers, (*SINGLE, HALVES[0])):
            yield shapes_of(layer, dtype)


def conformers() -> Iterator[ConvolutionShapes | None]:
    """Nets of speech whose lengths vary: subsampling, pointwise and depthwise layers."""
    lengths = (*range(64, 640, 32), 201, 251, 301, 351, 401, 500, 501, 601, 750, 751, 800, 1000)
    for samples, length, wide in product((4, 8, 16, 24, 32), lengths, (144, 256, 512)):
        for dtype in (*SINGLE, *HALVES):
            for inputs, outputs in ((wide, wide * 2), (wide, wide)):
                yield shapes_of((samples, inputs, outputs, length, 1, 1, 0), dtype, dims=1)
            for window in (15, 31):
                layer = (samples, wide, wide, length, window, 1, window // 2)
                yield shapes_of(layer, dtype, groups=wide, dims=1)
    for samples, length, wide in product((4, 8, 16, 24, 32), range(400, 1700, 50), (144, 256, 512)):
        for dtype in (*SINGLE, *HALVES):
            yield shapes_of((samples, 1, wide, (length, 80), 3, 2, 0), dtype)
            yield shapes_of((samples, wide, wide, ((length - 3) // 2 + 1, 39), 3, 2, 0), dtype)
            yield shapes_of((samples, 1, wide, (length, 80), 3, 2, 1), dtype)
            yield shapes_of((samples, wide, wide, (length // 2, 40), 3, 2, 1), dtype)


def patches() -> Iterator[ConvolutionShapes | None]:
    """The first layer of vision transformers."""
    batches = (*BATCHES, 3, 6, 10, 12, 20, 24, 40, 48, 80, 96, 100, 160, 192, 512)
    widths = (192, 256, 320, 384, 512, 640, 768, 896, 1024, 1152, 1280, 1408, 1536, 1664)
    sides = (32, 64, 96, 112, 128, 160, 192, 224, 256, 288, 336, 384, 448, 512)
    for side, patch, wide, samples in product(sides, (4, 8, 14, 16, 32), widths, batches):
        if side % patch == 0 and 16 <= (side // patch) ** 2 <= 1600:
            for dtype in ALL:
                yield shapes_of((samples, 3, wide, side, patch, patch, 0), dtype)


FAMILIES: tuple[Callable[[], Iterator[ConvolutionShapes | None]], ...] = (
    reinforcement, volumes, tasks, critics, spectra, diffusion, resolutions, digits,
    styles, clips, detectors, conformers, patches, *MORE_FAMILIES, models,
)  # fmt: skip


def rows_of(family: Callable[[], Iterator[ConvolutionShapes | None]]) -> np.ndarray:
    """The calls of a family, each once."""
    made = dict.fromkeys(made for made in family() if made is not None)
    return np.array([each.row() for each in made], dtype=np.int32)


def unmeasured(most: int) -> np.ndarray:
    """Calls of all families that convolutions.npz lacks, each once, drawn if there are more."""
    known = set(keys_of(read()["calls"].T).tolist())
    found = []
    with ProcessPoolExecutor() as pool:
        for family, rows in zip(FAMILIES, pool.map(rows_of, FAMILIES), strict=True):
            keys = keys_of(rows.T).tolist()
            rows = rows[[key not in known for key in keys]]
            known.update(keys)
            print(f"{family.__name__}: {len(rows)} calls", flush=True)
            found.append(rows)
    of_family = np.repeat(np.arange(len(found)), [len(rows) for rows in found])
    share = 1 / np.sqrt(np.bincount(of_family, minlength=1)[of_family])
    drawn = np.random.default_rng(0).choice(
        len(of_family), min(most, len(of_family)), replace=False, p=share / share.sum()
    )
    return np.concatenate(found)[drawn]


def blank(path: Path, most: int) -> None:
    """Write calls without figures."""
    calls = unmeasured(most)
    columns = {
        name: np.zeros((len(calls), *values.shape[1:]), dtype=values.dtype)
        for name, values in read().items()
    }
    columns["calls"] = calls
    columns["is_common"][:] = True
    columns["kept_aside"] = np.random.default_rng(0).random(len(calls)) < KEPT_ASIDE
    write(path, columns)
    print(f"{path}: {len(calls)} calls")


KEPT_ASIDE = 0.08
"""Share that the fit does not see, about that of the calls measured before."""


def join(parts: list[Path]) -> None:
    """Add what was measured."""
    files = [read(), *map(read, parts)]
    joined = {name: np.concatenate([file[name] for file in files]) for name in files[0]}
    order = np.lexsort(joined["calls"].T[::-1])  # neighbours are alike: the file is smaller
    write(MEASURED, {name: values[order] for name, values in joined.items()})
    print(f"{MEASURED.name}: {len(joined['calls'])} calls")


def main() -> None:
    """List, or join."""
    options = argparse.ArgumentParser()
    options.add_argument("paths", nargs="+", type=Path)
    options.add_argument("--join", action="store_true")
    options.add_argument("--most", type=int, default=250_000, help="calls that are listed")
    chosen = options.parse_args()
    if chosen.join:
        join(chosen.paths)
    else:
        blank(chosen.paths[0], chosen.most)


if __name__ == "__main__":
    main()
