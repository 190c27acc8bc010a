"""The card's own random numbers: the generator that torch draws from there, number for number.

CUDA's generator has a seed and an offset, and no other state: each kernel draws from Philox at its
offset, each thread from a sequence of its own, and moves the offset on (`CUDAGeneratorImpl`). So a
mask that a script draws on the card is known here, and with it the shapes that follow from it.
Which distributions move the offset by how much is known of all below; numbers are drawn of uniform,
normal and exponential ones, of integers, and of choices by them.

Source (torch 2.11): aten/src/ATen/native/cuda/DistributionTemplates.h, Distributions.cu,
MultinomialKernel.cu, Dropout.cu, Randperm.cu, aten/src/ATen/core/TransformationHelper.h; CUDA's
curand_philox4x32_x.h. Evidence: 488 draws on an H100 (tests/data/draws.json.gz).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memest.estimator.hardware.gpus import Gpu
from memest.estimator.kernels.reductions import threads_per_sm

aten = torch.ops.aten

Words = NDArray[np.uint64]
Parts = NDArray[np.int64]
Numbers = NDArray[Any]

BLOCK_THREADS = 256
DRAWS = 4
"""32-bit numbers that Philox makes at once; offsets are multiples of it."""

_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_STEPS = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_WIDE = 1 << 32
"""Integers from a range of this size on take 64 bits each."""

MAX_NUMEL = 1 << 18
"""More numbers are not drawn here, only passed over: few shapes hang on them."""

MAX_NORMALS = 1 << 14
"""Likewise of normal ones, which are noise and weights."""

MOST_ROWS = 65535
"""Blocks in the second dimension of a grid."""


DEFAULT_SEED = 67280421310721
"""`default_rng_seed_val` (c10/core/GeneratorImpl.h). The default generator of a real card begins
from one that is drawn, where a script gives none.
"""


@dataclass(slots=True)
class CardGenerator:
    """`torch.Generator` of the card."""

    seed: int = DEFAULT_SEED
    offset: int = 0

    def manual_seed(self, seed: int) -> None:
        """Begin anew."""
        self.seed, self.offset = int(seed) % (1 << 64), 0

    def state(self) -> Tensor:
        """Seed and offset, 16 bytes (`CUDAGeneratorImpl::get_state`)."""
        numbers = np.array([self.seed, self.offset], dtype="<u8")
        return torch.from_numpy(numbers.view(np.uint8).copy())

    def set_state(self, state: Tensor) -> None:
        """What `state` has returned."""
        seed, offset = state.numpy().view("<u8")
        self.seed, self.offset = int(seed), int(offset)


def philox(seed: int, sequence: Words, counter: Words) -> list[Words]:
    """Four words for each `sequence` at its `counter`: Philox 4x32, ten rounds."""
    words = [counter & _LOW, counter >> _HALF, sequence & _LOW, sequence >> _HALF]
    keys = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(_ROUNDS):
        first, second = words[0] * _MULTIPLIERS[0], words[2] * _MULTIPLIERS[1]
        words = [
            (second >> _HALF) ^ words[1] ^ np.uint64(keys[0]),
            second & _LOW,
            (first >> _HALF) ^ words[3] ^ np.uint64(keys[1]),
            first & _LOW,
        ]
        keys = [(key + step) & 0xFFFFFFFF for key, step in zip(keys, _STEPS, strict=True)]
    return words


@dataclass(frozen=True, slots=True)
class Launch:
    """How `distribution_elementwise_grid_stride_kernel` goes over `count` numbers."""

    count: int
    num_threads: int
    per_draw: int
    """Numbers of one draw of four words: 4, or 2 of 64 bits."""

    @property
    def offset(self) -> int:
        """By how much the generator moves on."""
        return ((self.count - 1) // (self.num_threads * self.per_draw) + 1) * DRAWS

    def words(self, generator: CardGenerator) -> tuple[list[Words], Parts]:
        """Four words for each number, and which of those are its own."""
        item = np.arange(self.count, dtype=np.uint64)
        turn, thread = np.divmod(item, np.uint64(self.num_threads))
        round_, part = np.divmod(turn, np.uint64(self.per_draw))
        counter = round_ + np.uint64(generator.offset // DRAWS)
        return philox(generator.seed, thread, counter), part.astype(np.int64)


def launch(count: int, gpu: Gpu, per_draw: int) -> Launch:
    """As `calc_execution_policy`: no more blocks than the card runs at once."""
    most = gpu.num_sms * (threads_per_sm(gpu) // BLOCK_THREADS)
    return Launch(count, BLOCK_THREADS * min(-(-count // BLOCK_THREADS), most), per_draw)


def _uniform(words: list[Words], part: Parts, is_double: bool) -> Numbers:
    """Above 0 and up to 1 (`curand_uniform4`, `curand_uniform2_double`)."""
    if is_double:
        low, high = _pair(words, part)
        return (low ^ (high << np.uint64(21))) * 2.0**-53 + 2.0**-54
    chosen = np.choose(part, words).astype(np.float32)
    return chosen * np.float32(2.0**-32) + np.float32(2.0**-33)


def _pair(words: list[Words], part: Parts) -> tuple[Words, Words]:
    return np.choose(part, words[::2]), np.choose(part, words[1::2])


def _normal(words: list[Words], part: Parts, is_double: bool) -> Numbers:
    """By Box and Muller (`curand_normal4`)."""
    if is_double:
        raise NotImplementedError
    made = []
    for first, second in (words[:2], words[2:]):
        radius = first.astype(np.float32) * np.float32(2.0**-32) + np.float32(2.0**-33)
        turn = 2 * math.pi * 2.0**-32
        angle = second.astype(np.float32) * np.float32(turn) + np.float32(turn / 2)
        length = np.sqrt(np.float32(-2) * np.log(radius))
        made += [length * np.sin(angle), length * np.cos(angle)]
    return np.choose(part, made)


def _exponential(words: list[Words], part: Parts, is_double: bool) -> Numbers:
    """With a rate of 1 (`transformation::exponential`)."""
    uniform = _uniform(words, part, is_double)
    half = np.finfo(uniform.dtype).eps / 2
    return -np.where(uniform >= 1 - half, -half, np.log(uniform))


def _integers(words: list[Words], part: Parts, low: int, high: int) -> Numbers:
    if high - low >= _WIDE:
        first, second = _pair(words, part)
        drawn = (first << _HALF) | second
    else:
        drawn = np.choose(part, words)
    return (drawn % np.uint64(high - low)).astype(np.int64) + low


class CardDraws:
    """What is drawn on a card, in order.

    Args:
        gpu: how many threads draw at once.
    """

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.default = CardGenerator()
        self.of_script: dict[int, CardGenerator] = {}
        """Those that the script has made, by where they lie."""

    def draw(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, given: Any = None
    ) -> Tensor | None:
        """The numbers of a random operator that has made `out`, where they are few enough and
        known; the generator moves on in any case. `given` is the value of its first argument.
        """
        generator = self._generator(kwargs)
        made: Tensor = out[0] if isinstance(out, tuple | list) else out
        count, name = made.numel(), func._schema.name.removeprefix("aten::")
        if not count or not is_drawn(name, args):
            return None
        fixed = _offset_of(name, args, kwargs, made, self.gpu)
        if fixed is not None:
            generator.offset += fixed
            return None
        if name == "multinomial":
            return self._chosen(generator, args, kwargs, given)
        low, high = _range(func, args, made.dtype) if name in _OF_INTEGERS else (0, 1)
        is_double = made.dtype == torch.float64
        takes_two = (is_double and name not in _DROPOUTS) or high - low >= _WIDE
        per_draw = 2 if takes_two else DRAWS
        plan = launch(count, self.gpu, per_draw)
        numbers = None
        most = MAX_NORMALS if name in _NORMALS else MAX_NUMEL
        is_wanted = count <= most and not isinstance(made, torch.nn.Parameter)
        if is_wanted and (name in _NUMBERS or name in _OF_INTEGERS):
            words, part = plan.words(generator)
            if name in _OF_INTEGERS:
                numbers = torch.from_numpy(_integers(words, part, low, high)).to(made.dtype)
            elif not (name in _NORMALS and is_double):
                numbers = _NUMBERS[name](words, part, made.dtype, *_given(func, args, kwargs))
        generator.offset += plan.offset
        return None if numbers is None else _in_shape(numbers, made)

    def _generator(self, kwargs: dict[str, Any]) -> CardGenerator:
        given = kwargs.get("generator")  # another object of Python's, of the same generator
        return self.default if given is None else self.of_script.get(given._cdata, self.default)

    def _chosen(
        self, generator: CardGenerator, args: tuple[Any, ...], kwargs: dict[str, Any], odds: Any
    ) -> Tensor | None:
        """`multinomial` of one, or without putting back: the largest of each quotient of odds and
        exponential numbers.
        """
        given: Tensor = args[0]
        num_samples, puts_back = int(args[1]), bool(args[2] if len(args) > 2 else False)
        rows = given.numel() // given.size(-1)
        if kwargs.get("replacement", puts_back) and num_samples > 1:
            made = _found(generator, odds, num_samples) if odds is not None and rows == 1 else None
            generator.offset += DRAWS * ((rows - 1) // MOST_ROWS + 1)
            return made
        plan = launch(given.numel(), self.gpu, 2 if given.dtype == torch.float64 else DRAWS)
        words, part = plan.words(generator) if odds is not None else ([], None)
        generator.offset += plan.offset
        if odds is None or part is None or given.dtype == torch.float64:
            return None
        drawn = torch.from_numpy(_exponential(words, part, False)).to(given.dtype)
        quotients: Tensor = odds / drawn.view(odds.shape)
        if num_samples == 1:
            return quotients.argmax(-1, keepdim=True)
        return quotients.topk(num_samples).indices


def _found(generator: CardGenerator, odds: Tensor, num_samples: int) -> Tensor | None:
    """Where uniform numbers, one for each thread, lie among the summed up odds."""
    if num_samples > MAX_NUMEL or odds.dtype != torch.float32:
        return None
    thread = np.arange(num_samples, dtype=np.uint64)
    counter = np.full(num_samples, generator.offset // DRAWS, dtype=np.uint64)
    words = philox(generator.seed, thread, counter)
    drawn = torch.from_numpy(_uniform(words, np.zeros(num_samples, np.int64), False))
    row = odds.reshape(-1)
    return torch.searchsorted((row / row.sum()).cumsum(0), drawn).view(*odds.shape[:-1], -1)


def _in_shape(numbers: Tensor, made: Tensor) -> Tensor:
    """Numbers are drawn in the order of memory."""
    strides = made.stride()
    order = sorted(range(made.dim()), key=lambda d: (-strides[d], d))
    shaped = numbers.view([made.size(d) for d in order])
    return shaped.permute([order.index(d) for d in range(made.dim())])


def _typed(numbers: Numbers, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(numbers).to(dtype)


def _uniform_of(
    words: list[Words], part: Parts, dtype: torch.dtype, start: float = 0.0, end: float = 1.0
) -> Tensor:
    """From `start`, which is in it, to `end`, which is not."""
    drawn = _uniform(words, part, dtype == torch.float64)
    made = _typed(drawn * drawn.dtype.type(end - start) + drawn.dtype.type(start), dtype)
    return torch.where(made == end, start, made)


def _normal_of(
    words: list[Words], part: Parts, dtype: torch.dtype, mean: float = 0.0, std: float = 1.0
) -> Tensor:
    return _typed(_normal(words, part, False) * np.float32(std) + np.float32(mean), dtype)


def _exponential_of(
    words: list[Words], part: Parts, dtype: torch.dtype, rate: float = 1.0
) -> Tensor:
    return _typed(_exponential(words, part, dtype == torch.float64) / rate, dtype)


def _bernoulli_of(words: list[Words], part: Parts, dtype: torch.dtype, odds: float = 0.5) -> Tensor:
    return _typed(_uniform(words, part, dtype == torch.float64) < odds, dtype)


_NUMBERS: dict[str, Callable[..., Tensor]] = {
    "rand": _uniform_of, "rand_like": _uniform_of, "uniform_": _uniform_of,
    "randn": _normal_of, "randn_like": _normal_of, "normal_": _normal_of,
    "exponential_": _exponential_of, "bernoulli_": _bernoulli_of, "bernoulli": _bernoulli_of,
}  # fmt: skip
_NORMALS = ("randn", "randn_like", "normal_")
_OF_INTEGERS = ("randint", "randint_like", "random_")
_DROPOUTS = ("native_dropout", "_fused_dropout")
_FIXED = {"poisson": 20, "_standard_gamma": 12}
_LARGEST = {
    torch.float32: 1 << 24, torch.float64: 1 << 53, torch.float16: 1 << 11, torch.bfloat16: 1 << 8,
}  # fmt: skip
_ATTENTION = {
    "_scaled_dot_product_flash_attention": 3,
    "_scaled_dot_product_efficient_attention": 5,
    "_scaled_dot_product_cudnn_attention": 5,
}
"""The position of the odds of dropout among the arguments."""


_OVER_A_GRID = frozenset((
    *_NUMBERS, *_OF_INTEGERS, *_DROPOUTS, "normal", "normal_functional", "geometric_", "cauchy_",
    "log_normal_", "rrelu_with_noise", "rrelu_with_noise_", "rrelu_with_noise_functional",
))  # fmt: skip
_OTHERS = frozenset((*_ATTENTION, "multinomial", "randperm", *_FIXED))


def is_drawn(name: str, args: tuple[Any, ...]) -> bool:
    """Whether the operator draws with these arguments: not where it drops nothing."""
    if name == "native_dropout":
        return args[2] is not False
    if name.startswith("rrelu"):
        return bool(args[4]) if len(args) > 4 else False
    return name in _OVER_A_GRID or name in _OTHERS


def _offset_of(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], made: Tensor, gpu: Gpu
) -> int | None:
    """By how much the generator moves on for what does not go over its numbers in a grid."""
    if name in _ATTENTION:
        position = _ATTENTION[name]
        odds = args[position] if len(args) > position else kwargs.get("dropout_p", 0.0)
        heads = args[0].size(0) * args[0].size(1)
        lanes = 32 if "flash" in name else args[0].size(2) * args[1].size(2)
        return _rounded(heads * lanes) if odds else 0
    if name == "randperm":
        count = made.numel()
        wide = count > 1 and math.log2(count) * 2 > 28  # keys of so many bits are of 64
        return launch(count, gpu, 2 if wide else DRAWS).offset + _rounded(count)
    is_by_tensor = name in ("bernoulli", "bernoulli_") and (
        len(args) < 2 or isinstance(args[1], Tensor)
    )
    if is_by_tensor and not (name == "bernoulli_" and len(args) < 2):
        return 12
    return _FIXED.get(name)


def _rounded(draws: int) -> int:
    return -(-draws // DRAWS) * DRAWS


def _range(func: Any, args: tuple[Any, ...], dtype: torch.dtype) -> tuple[int, int]:
    """From which integer, and below which other one."""
    numbers = [int(a) for a in args if isinstance(a, int) and not isinstance(a, bool)]
    if func._schema.name == "aten::random_" and not numbers:
        if dtype in _LARGEST:
            return 0, _LARGEST[dtype] + 1
        return 0, 2 if dtype == torch.bool else torch.iinfo(dtype).max + 1
    low, high = (0, *numbers)[-2:]
    return low, high


def _given(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[float]:
    """The numbers that tell which distribution it is."""
    if not func._schema.name.endswith("_") and func._schema.name != "aten::bernoulli":
        return []
    names = [argument.name for argument in func._schema.arguments[1:]]
    found = dict(zip(names, args[1:], strict=False)) | kwargs
    return [float(found[name]) for name in names if name in found and name != "generator"]
