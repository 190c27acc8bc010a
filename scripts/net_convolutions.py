"""More families of `common_convolutions.py`: backbones at any size, heads, vocoders, generators."""

from __future__ import annotations

from itertools import product

from convolution_layers import ALL, HALVES, SINGLE, Family, Layer, shapes_of

SOME_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64, 72, 96, 128, 192, 256)


def backbones() -> Family:
    """Residual nets at sizes other than 224, of small and of wide stems, dilated and grouped."""
    sides = (32, 48, 64, 96, 128, 160, 192, 256, 257, 288, 320, 321, 384, 416, 448, 480, 512, 513)
    for side, samples in product((*sides, 600, 640, 769, 800, 1024), SOME_BATCHES):
        for stem in (64, 32):
            at, given = (side + 1) // 4 if stem == 64 else side, stem
            layers: list[Layer] = [
                (samples, 3, 64, side, 7, 2, 3), (samples, 3, 64, side, 3, 1, 1),
                (samples, 3, 32, side, 3, 2, 1), (samples, 32, 64, (side + 1) // 2, 3, 1, 1),
            ]  # fmt: skip
            for wide in (64, 128, 256, 512):
                step = 1 if wide == 64 else 2
                layers += [
                    (samples, given, wide, at, 3, step, 1), (samples, wide, wide, at, 3, step, 1),
                    (samples, given, wide, at, 1, step, 0),
                    (samples, given * 2, wide, at, 1, 1, 0),
                    (samples, given * 2, wide * 4, at, 1, step, 0),
                ]  # fmt: skip
                at, given = (at - 1) // step + 1, wide
                layers += [
                    (samples, wide, wide, at, 3, 1, 1), (samples, wide, wide * 4, at, 1, 1, 0),
                    (samples, wide * 4, wide, at, 1, 1, 0),
                ]  # fmt: skip
            for layer, dtype, is_last in product(layers, ALL, (False, True)):
                yield shapes_of(layer, dtype, is_last=is_last)
        eighth = (side + 7) // 8
        for wide, dilation, dtype in product((128, 256, 512), (2, 4), ALL):
            layer = (samples, wide, wide, eighth, 3, 1, dilation)
            yield shapes_of(layer, dtype, dilation=dilation)
        sides_of_last = (eighth, (side + 15) // 16)
        for at, wide, dilation in product(sides_of_last, (512, 1024, 2048), (6, 12, 18)):
            layer = (samples, wide, 256, at, 3, 1, dilation)
            for dtype in (*SINGLE, HALVES[1]):
                yield shapes_of(layer, dtype, dilation=dilation)
                yield shapes_of((samples, wide, 256, at, 1, 1, 0), dtype)
                yield shapes_of((samples, wide, 256, at, 3, 1, 1), dtype)
                yield shapes_of((samples, 1280, 256, at, 1, 1, 0), dtype)
                yield shapes_of((samples, 304, 256, at * 4, 3, 1, 1), dtype)


def parallel_resolutions() -> Family:
    """Nets that keep several resolutions beside each other."""
    sides = (224, 256, 320, 384, 400, 448, 473, 480, 512, 513, 520, 640, 713, 768)
    for side, samples, first in product(sides, SOME_BATCHES[:14], (18, 32, 40, 48)):
        at, wide = (side - 1) // 4 + 1, first
        layers: list[Layer] = [(samples, 64, 64, (side - 1) // 2 + 1, 3, 2, 1)]
        layers += [(samples, 256, first, at, 3, 1, 1), (samples, 15 * first, 19, at, 1, 1, 0)]
        layers += [(samples, 15 * first, 15 * first, at, 1, 1, 0)]
        for _ in range(4):
            layers.append((samples, wide, wide, at, 3, 1, 1))
            layers += [(samples, wide, first << i, at, 3, 2, 1) for i in range(4)]
            layers += [(samples, wide, first << i, at, 1, 1, 0) for i in range(4)]
            at, wide = (at - 1) // 2 + 1, wide * 2
        for layer, dtype in product(layers, ALL):
            yield shapes_of(layer, dtype)


def heads() -> Family:
    """Feature pyramids, and the heads of detectors and of key points on them."""
    images = [(s, s) for s in (320, 384, 416, 448, 512, 576, 608, 640, 704, 768, 800, 896, 1024)]
    images += [(800, 1333), (800, 1344), (608, 1024), (480, 640), (512, 1024), (384, 640)]
    for image, samples in product(images, (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)):
        for level in range(2, 8):
            at = tuple(-(-side // 2**level) for side in image)
            layers: list[Layer] = [
                (samples, 256, outputs, at, 3, 1, 1)
                for outputs in (256, 80, 20, 10, 4, 1, 2, 5, 64, 720, 180, 36, 9)
            ]
            layers += [(samples, 64, outputs, at, 1, 1, 0) for outputs in (80, 20, 2, 17, 34)]
            layers += [(samples, 256, 64, at, 3, 1, 1), (samples, 128, 128, at, 3, 1, 1)]
            layers += [(samples, wide, 256, at, 1, 1, 0) for wide in (256, 512, 1024, 2048)]
            layers += [(samples, wide, 256, at, 3, 2, 1) for wide in (256, 2048)]
            for layer, dtype in product(layers, ALL):
                yield shapes_of(layer, dtype)


def vocoders() -> Family:
    """Generators of waves, their critics, and codecs."""
    for samples, frames in product((1, 2, 4, 8, 12, 16, 24, 32, 64), (16, 25, 32, 40, 50, 64, 128)):
        for first, rates in ((512, (8, 8, 2, 2)), (256, (8, 8, 4)), (128, (8, 8, 2, 2))):
            layers: list[tuple[Layer, int, int]] = [((samples, 80, first, frames, 7, 1, 3), 1, 1)]
            at, given = frames, first
            for rate in rates:
                wide = given // 2
                back = (samples, wide, given, at * rate, rate * 2, rate, rate // 2)
                layers.append((back, 1, 1))
                at, given = at * rate, wide
                for window, dilation in product((3, 7, 11), (1, 3, 5)):
                    padding = dilation * (window - 1) // 2
                    layers.append(((samples, wide, wide, at, window, 1, padding), dilation, 1))
            layers.append(((samples, given, 1, at, 7, 1, 3), 1, 1))
            length, inputs = at, 1
            for outputs, window, step, groups in (
                (128, 15, 1, 1), (128, 41, 2, 4), (256, 41, 2, 16), (512, 41, 4, 16),
                (1024, 41, 4, 16), (1024, 41, 1, 16), (1024, 5, 1, 1),
            ):  # fmt: skip
                layer = (samples, inputs, outputs, length, window, step, window // 2)
                layers.append((layer, 1, groups))
                length, inputs = (length - 1) // step + 1, outputs
            for (layer, dilation, groups), dtype in product(layers, (*SINGLE, HALVES[1])):
                yield shapes_of(layer, dtype, dilation=dilation, groups=groups, dims=1)
            for period in (2, 3, 5, 7, 11):
                height, inputs = -(-at // period), 1
                for outputs in (32, 128, 512, 1024):
                    layer = (samples, inputs, outputs, (height, period), (5, 1), (3, 1), (2, 0))
                    yield shapes_of(layer, SINGLE[0])
                    height, inputs = (height - 1) // 3 + 1, outputs
                layer = (samples, 1024, 1024, (height, period), (5, 1), (1, 1), (2, 0))
                yield shapes_of(layer, SINGLE[0])


def waves() -> Family:
    """Encoders and decoders of waves, and critics of them, that double their channels."""
    lengths = (2048, 4096, 8192, 16000, 16384, 22050, 24000, 32000, 32768, 48000, 65536)
    for samples, length, first in product(SOME_BATCHES[:13], lengths, (16, 24, 32, 48, 64)):
        layers: list[tuple[Layer, int, int]] = []
        for window in (7, 15):
            layers.append(((samples, 1, first, length, window, 1, window // 2), 1, 1))
            layers.append(((samples, first, 1, length, window, 1, window // 2), 1, 1))
        at, wide = length, first
        for rate in (2, 4, 4, 5, 8):
            for dilation in (1, 3, 9):
                layers.append(((samples, wide, wide, at, 3, 1, dilation), dilation, 1))
                layers.append(((samples, wide, wide, at, 7, 1, 3 * dilation), dilation, 1))
            layers.append(((samples, wide, wide, at, 1, 1, 0), 1, 1))
            for window in (2 * rate, 2 * rate + 1, 41, 15):
                padding = rate // 2 + rate % 2 if window == 2 * rate else window // 2
                layers.append(((samples, wide, wide * 2, at, window, rate, padding), 1, 1))
                if window == 41:
                    layers.append(((samples, wide, wide * 2, at, window, rate, padding), 1, 4))
            at, wide = at // rate, wide * 2
            if at < 16:
                break
        for (layer, dilation, groups), dtype in product(layers, ALL):
            yield shapes_of(layer, dtype, dilation=dilation, groups=groups, dims=1)


def sounds() -> Family:
    """Nets along time: of spoken text, of dilated stacks, of waves and of heart beats."""
    lengths = (50, 64, 80, 96, 100, 120, 128, 150, 160, 200, 256, 300, 400, 500, 512, 600, 800)
    for samples, length in product((*SOME_BATCHES, 512), (*lengths, 1000, 1024, 1500, 2048, 4096)):
        layers: list[tuple[Layer, int]] = []
        for wide, window in product((32, 64, 80, 128, 256, 384, 512), (3, 5, 7, 9)):
            layers.append(((samples, wide, wide, length, window, 1, window // 2), 1))
            layers.append(((samples, wide, wide * 2, length, window, 2, window // 2), 1))
        for wide, inner in ((256, 1024), (384, 1536), (80, 512), (512, 80), (1024, 256)):
            layers += [((samples, wide, inner, length, w, 1, w // 2), 1) for w in (1, 3, 5, 9)]
        for wide, step in product((32, 64, 128), range(1, 9)):
            dilation = 1 << step
            layers.append(((samples, wide, wide, length, 3, 1, dilation), dilation))
            layers.append(((samples, wide, wide, length, 2, 1, dilation), dilation))
            layers.append(((samples, wide, wide * 2, length, 3, 1, dilation), dilation))
        layers += [((samples, given, 64, length, 7, 2, 3), 1) for given in (1, 2, 12)]
        for (layer, dilation), dtype in product(layers, (*SINGLE, HALVES[1])):
            yield shapes_of(layer, dtype, dilation=dilation, dims=1)


def positions() -> Family:
    """Convolutions over all of a sound's positions, in groups, and the encoders of its wave."""
    for samples, frames in product((1, 2, 3, 4, 6, 8, 10, 12, 16, 24, 32), range(24, 1500, 25)):
        for dtype in ALL:
            for wide, window in ((768, 128), (1024, 128), (768, 19), (1024, 19), (512, 31)):
                layer = (samples, wide, wide, frames - 1, window, 1, window // 2)
                yield shapes_of(layer, dtype, groups=16, dims=1)
            length = frames * 320
            for window, step in ((10, 5), (3, 2), (3, 2), (3, 2), (3, 2), (2, 2), (2, 2)):
                given = 1 if step == 5 else 512
                yield shapes_of((samples, given, 512, length, window, step, 0), dtype, dims=1)
                length = (length - window) // step + 1


def generators() -> Family:
    """Autoencoders of images with losses of features, and generators of adversarial nets."""
    for samples, side in product(SOME_BATCHES, (64, 96, 128, 192, 256, 512)):
        layers: list[Layer] = []
        for base, factors in ((128, (1, 1, 2, 2, 4)), (128, (1, 2, 4, 4)), (64, (1, 2, 4, 8))):
            at, given = side, base
            for factor in factors:
                wide = base * factor
                layers += [
                    (samples, given, wide, at, 3, 1, 1), (samples, wide, wide, at, 3, 1, 1),
                    (samples, given, wide, at, 1, 1, 0), (samples, wide, given, at, 3, 1, 1),
                    (samples, wide, wide, at + 1, 3, 2, 0), (samples, wide, wide, at, 1, 1, 0),
                ]  # fmt: skip
                at, given = at // 2, wide
            layers += [
                (samples, base, 3, side, 3, 1, 1), (samples, 3, base, side, 3, 1, 1),
                *((samples, given, c, at * 2, 3, 1, 1) for c in (4, 8, 16, 256)),
                *((samples, c, given, at * 2, 3, 1, 1) for c in (4, 16, 256)),
            ]  # fmt: skip
        at, given = side, 3
        for wide in (64, 128, 256, 512, 512):
            layers += [(samples, given, wide, at, 3, 1, 1), (samples, wide, wide, at, 3, 1, 1)]
            layers.append((samples, wide, 1, at, 1, 1, 0))
            at, given = at // 2, wide
        at, wide = side, 64
        while at >= 8:
            layers.append((samples, wide, wide * 2, at // 2, 4, 2, 1))
            layers.append((samples, 3, wide, at, 4, 2, 1))
            at, wide = at // 2, min(wide * 2, 512)
        layers += [(samples, 512, 100, 4, 4, 1, 0), (samples, 1024, 100, 4, 4, 1, 0)]
        for layer, dtype in product(layers, (*SINGLE, HALVES[1])):
            yield shapes_of(layer, dtype)
    for samples, at in product((2, 4, 8, 12, 16, 32), (4, 8, 16, 32, 64, 128, 256)):
        wide = {4: 512, 8: 512, 16: 512, 32: 512, 64: 256, 128: 128, 256: 64}[at]
        for dtype in (*SINGLE, HALVES[0]):
            for inputs, outputs in ((wide, wide), (wide * 2, wide), (wide, 3)):
                layer = (1, inputs * samples, outputs * samples, at, 3, 1, 1)
                yield shapes_of(layer, dtype, groups=samples)


def shifted_volumes() -> Family:
    """Nets of volumes with windows of attention: patches of two, and residual units."""
    for samples, side, base in product((1, 2, 4, 6, 8, 12), (64, 96, 128), (12, 24, 36, 48)):
        at, given = side, 1
        layers: list[Layer] = [(samples, c, base, side, 2, 2, 0) for c in (1, 2, 4)]
        for factor in (1, 1, 2, 4, 8, 16):
            wide = base * factor
            layers += [
                (samples, given, wide, at, 3, 1, 1), (samples, wide, wide, at, 3, 1, 1),
                (samples, given, wide, at, 1, 1, 0), (samples, wide * 2, wide, at, 3, 1, 1),
                (samples, wide * 2, wide, at, 1, 1, 0), (samples, wide, wide * 2, at, 2, 2, 0),
            ]  # fmt: skip
            if factor > 1 or given > 1:
                at //= 2
            given = wide
        layers += [(samples, base, classes, side, 1, 1, 0) for classes in (2, 3, 4, 14)]
        for layer, dtype in product(layers, ALL):
            sides = tuple((value,) * 3 if isinstance(value, int) else value for value in layer[3:])
            yield shapes_of((*layer[:3], *sides), dtype)


FAMILIES = (
    backbones, parallel_resolutions, heads, waves, vocoders, sounds, positions, generators,
    shifted_volumes,
)  # fmt: skip
