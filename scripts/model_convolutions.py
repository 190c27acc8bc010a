"""Convolutions of the models of transformers that see or hear, for `common_convolutions.py`.

Each class runs forward on the meta device, shrunk to two layers of a kind, at several sizes of
images or lengths of sounds; its convolutions are listed for other batches too. A model that does
not run there, or lacks a library, is left out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
import transformers
from convolution_layers import ALL, BATCHES, MOST_BYTES, ODD_BATCHES
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

from memest.estimator.kernels.cudnn_convolution import ConvolutionShapes

SEEING = (
    "IMAGE_CLASSIFICATION", "BACKBONE", "SEMANTIC_SEGMENTATION", "DEPTH_ESTIMATION",
    "MASKED_IMAGE_MODELING", "VIDEO_CLASSIFICATION", "OBJECT_DETECTION",
    "ZERO_SHOT_IMAGE_CLASSIFICATION",
)  # fmt: skip
HEARING = ("CTC", "SPEECH_SEQ_2_SEQ", "AUDIO_CLASSIFICATION", "TEXT_TO_WAVEFORM")
READING = ("MASKED_LM",)
"""Some of these convolve tokens."""

SIDES = (160, 192, 224, 256, 288, 320, 384, 448, 512, 640)
SAMPLES = (8000, 16000, 32000, 48000, 64000, 80000, 96000, 128000, 160000, 200000, 240000, 320000)
FRAMES = (100, 128, 200, 256, 300, 400, 500, 512, 600, 800, 1000, 1024, 1200, 1500, 2000, 3000)
TOKENS = (50, 64, 100, 128, 200, 256, 384, 512, 1024)
OTHER_BATCHES = (*BATCHES, *ODD_BATCHES[:11], 5, 14, 18, 28, 36, 72)

CONVOLUTIONS = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d, torch.nn.ConvTranspose1d)

LAYERS = {
    "num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers", "depth",
    "num_encoder_layers", "num_decoder_layers",
}  # fmt: skip
"""How configurations name how many layers there are."""


class Convolutions(TorchDispatchMode):
    """Notes every call of `aten.convolution`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[ConvolutionShapes, None] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.convolution.default:
            tensor, weight, _, stride, padding, dilation, is_transposed, _, groups = args
            if is_transposed:
                tensor, result = out, tensor
            else:
                result = out
            dims = tensor.dim() - 2
            full = (tuple(stride) * dims, tuple(padding) * dims, tuple(dilation) * dims)
            self.found[
                ConvolutionShapes(
                    tuple(tensor.shape), tuple(weight.shape), tuple(result.shape),
                    *(sides[:dims] for sides in full), groups, torch.float32, False,
                )
            ] = None  # fmt: skip
        return out


def shrink(config: Any) -> None:
    """Two layers of a kind, in place."""
    for name, value in list(vars(config).items()):
        if isinstance(value, transformers.PreTrainedConfig):
            shrink(value)
        elif name in LAYERS and isinstance(value, int) and value > 2:
            setattr(config, name, 2)
        elif name == "depths":
            setattr(config, name, type(value)(min(depth, 2) for depth in value))


def inputs_of(task: str, config: Any) -> Iterator[dict[str, torch.Tensor]]:
    """What a model is given, two samples, at each size or length."""
    parts = (config, getattr(config, "vision_config", None), getattr(config, "text_config", None))
    channels = next(
        (c.num_channels for c in parts if getattr(c, "num_channels", None) is not None), 3
    )
    tokens = torch.zeros(2, 64, dtype=torch.long, device="meta")
    if task in READING:
        for length in TOKENS:
            yield {"input_ids": torch.zeros(2, length, dtype=torch.long, device="meta")}
    elif task in HEARING:
        labels = torch.zeros(2, 20, dtype=torch.long, device="meta")
        more = {} if task != "SPEECH_SEQ_2_SEQ" else {"decoder_input_ids": labels}
        for length in SAMPLES:
            yield {"input_values": torch.empty(2, length, device="meta"), **more}
        for length in FRAMES:
            for shape in ((2, length, 80), (2, 80, length), (2, length, 128), (2, 128, length)):
                yield {"input_features": torch.empty(shape, device="meta"), **more}
                yield {"input_values": torch.empty(shape, device="meta"), **more}
    else:
        for side in SIDES:
            pixels = torch.empty(2, channels, side, side, device="meta")
            yield {"pixel_values": pixels}
            if task == "ZERO_SHOT_IMAGE_CLASSIFICATION":
                yield {"pixel_values": pixels, "input_ids": tokens}
            if task == "VIDEO_CLASSIFICATION":
                for frames in (8, 16, 32):
                    clip = torch.empty(2, frames, channels, side, side, device="meta")
                    yield {"pixel_values": clip}
                    yield {"pixel_values_videos": clip}


def sized(config: Any, inputs: dict[str, torch.Tensor]) -> Any:
    """The configuration for images of that size."""
    pixels = inputs.get("pixel_values")
    for part in (config, getattr(config, "vision_config", None)):
        side = getattr(part, "image_size", None)
        if pixels is not None and side is not None:
            new = pixels.shape[-1]
            part.image_size = new if isinstance(side, int) else type(side)([new, new])
    return config


def of_model(name: str, task: str, classes: Any) -> dict[ConvolutionShapes, None]:
    """Convolutions of a class, of float32, two samples."""
    mode = Convolutions()
    known = classes if isinstance(classes, str) else classes[0]
    config = CONFIG_MAPPING[name]()
    shrink(config)
    made = None
    for inputs in inputs_of(task, config):
        with contextlib.suppress(Exception), torch.device("meta"):
            if made is None or "pixel_values" in inputs:
                made = getattr(transformers, known)(sized(config, inputs)).train()
                if not any(isinstance(part, CONVOLUTIONS) for part in made.modules()):
                    break
            with torch.no_grad(), mode:
                made(**inputs)
    return mode.found


def other_batches(made: ConvolutionShapes) -> Iterator[ConvolutionShapes]:
    """The same for other batches, dtypes and, of images, channels-last; what is not one sample of
    two is left as it is.
    """
    (samples, *image), (_, *plane) = made.tensor, made.output
    layouts = (False, True) if len(image) == 3 else (False,)
    for dtype, is_last in product(ALL, layouts):
        for batch in OTHER_BATCHES if samples % 2 == 0 else (2,):
            n = samples // 2 * batch if samples % 2 == 0 else samples
            scaled = replace(made, tensor=(n, *image), output=(n, *plane), dtype=dtype)
            scaled = replace(scaled, is_channels_last=is_last)
            sizes = (torch.Size(shape).numel() for shape in (scaled.tensor, scaled.output))
            if max(sizes) * dtype.itemsize <= MOST_BYTES // 2:
                yield scaled


def models() -> Iterator[ConvolutionShapes]:
    """Convolutions of all classes."""
    transformers.logging.set_verbosity_error()
    seen: dict[ConvolutionShapes, None] = {}
    for task in (*SEEING, *HEARING, *READING):
        known = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {})
        for name, classes in known.items():
            with contextlib.suppress(Exception):
                seen |= of_model(name, task, classes)
    for made in seen:
        yield from other_batches(made)
