"""Random operators: numbers of the GPU's generator, and what their kernels allocate.

A kernel draws from Philox at the generator's offset (`CUDAGeneratorImpl`), each thread from its own
sequence, and moves the offset. So a mask that a script draws on the GPU is known. Steps of the
offset are known for all random operators; numbers for uniform, normal and exponential ones,
integers and choices.

Sources (torch 2.11, `aten/src/ATen`): native/cuda/DistributionTemplates.h, Distributions.cu,
MultinomialKernel.cu, Dropout.cu, Randperm.cu, native/Distributions.cpp,
core/TransformationHelper.h; CUDA's curand_philox4x32_x.h.
Evidence: 488 draws on an H100 (tests/data/draws.json.gz), and the allocator's events of each.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, log, log2
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format

from memest.estimator.hardware.gpus import Gpu
from memest.estimator.ops import cub, registry
from memest.estimator.ops.autograd_ops import Next
from memest.estimator.ops.reductions import reduce_bytes, sum_bytes
from memest.estimator.ops.registry import Args, KernelCall, Kwargs, op, register
from memest.estimator.ops.temporaries import Events, around, passing, temporaries
from memest.estimator.tensors.placement import CPU
from memest.units import ceil_div, round_up

MT_WORDS, MT_SHIFT, MT_DEGREE = 624, 397, 19937
"""MT19937: words of a state, words between those of the recurrence, bits of a state that count."""

_MT_MATRIX = 0x9908B0DF  # last row of the recurrence's matrix
_WORDS_LEFT, _NEXT_INDEX, _STATE_WORDS = slice(8, 12), slice(16, 24), slice(24, 24 + 8 * MT_WORDS)
"""Bytes of a CPU generator's state: number of words left, index of the next word, all words."""


def skip_mt19937(generator: torch.Generator, count: int) -> None:
    """Advance a CPU `generator` (Mersenne Twister) by `count` 32-bit numbers, 624 or more."""
    # draw `MT_WORDS` numbers, so that every word of the state is one that the recurrence made
    torch.empty(MT_WORDS, dtype=torch.uint8, device=CPU).random_(generator=generator)
    count -= MT_WORDS
    state = generator.get_state().numpy().copy()
    # views of `state`, so that writes change it
    num_left, words = state[_WORDS_LEFT].view(np.int32), state[_STATE_WORDS].view(np.uint64)
    next_index = state[_NEXT_INDEX].view(np.uint64)
    unused = int(num_left[0]) - 1  # numbers of the current state that are not drawn yet
    num_new_states = ceil_div(count - unused, MT_WORDS)
    if num_new_states > 0:
        words[:] = _advance_state(words.astype(np.uint32), num_new_states * MT_WORDS)
        used = count - unused - (num_new_states - 1) * MT_WORDS  # numbers of the last state
        num_left[0] = MT_WORDS + 1 - used
        next_index[0] = used
    else:
        next_index[0] += np.uint64(count)
        num_left[0] -= count
    generator.set_state(torch.from_numpy(state))


def _advance_state(words: NDArray[Any], steps: int) -> NDArray[Any]:
    """Return the Mersenne Twister's state `steps` numbers after its state `words`. A step
    multiplies the bits of the state by a matrix, which is a root of its characteristic polynomial.
    Let r be the remainder of t^`steps` divided by this polynomial. Then the result is the sum (xor)
    of the states after k steps, for each term t^k of r."""
    twister = np.random.MT19937()
    twister.state = {"bit_generator": "MT19937", "state": {"key": words, "pos": MT_WORDS}}
    states = [words]
    for _ in range(ceil_div(MT_DEGREE, MT_WORDS)):
        twister.random_raw(MT_WORDS, output=False)
        states.append(twister.state["state"]["key"])
    sequence = np.concatenate(states)
    result = np.zeros(MT_WORDS, dtype=np.uint32)
    for exponent in _exponents(_power_of_t(steps)):
        result ^= sequence[exponent : exponent + MT_WORDS]
    return result


# Polynomials over bits: bit i of a number is the coefficient of t^i.


def _power_of_t(steps: int) -> int:
    """Return t^`steps` modulo the characteristic polynomial of a Mersenne Twister's step (Matsumoto
    and Nishimura, 1998). Bit i of the result is the coefficient of t^i."""
    characteristic = 1
    for bit in range(31):  # a step joins the upper bit of one word to the lower 31 of the next
        product = (characteristic << MT_WORDS - 1) ^ (characteristic << MT_SHIFT - 1)
        characteristic = product ^ (_MT_MATRIX >> bit & 1)
    product = (characteristic << MT_WORDS) ^ (characteristic << MT_SHIFT)
    characteristic = product ^ (_MT_MATRIX >> 31)
    *terms, _ = _exponents(characteristic)
    power = 1
    for digit in bin(steps)[2:]:
        power = int(bin(power)[2:], 4) << int(digit)  # base 4 puts a 0 between bits: the square
        while high := power >> MT_DEGREE:
            power &= (1 << MT_DEGREE) - 1
            for term in terms:  # t^MT_DEGREE is the sum of the other terms
                power ^= high << term
    return power


def _exponents(polynomial: int) -> list[int]:
    return [i for i, bit in enumerate(reversed(bin(polynomial))) if bit == "1"]


aten = torch.ops.aten
Words = NDArray[np.uint64]
Parts = NDArray[np.int64]
Numbers = NDArray[Any]

BLOCK_THREADS = 256
DRAWS = 4  # 32-bit numbers that one Philox call returns; offsets are multiples of it
_PHILOX_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_PHILOX_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_PHILOX_ROUNDS = 10
_LOW_32_BITS, _32 = np.uint64(0xFFFFFFFF), np.uint64(32)
_WIDE_RANGE = 1 << 32  # integers from a range of this size on take 64 bits each
MAX_NUMEL = 1 << 18  # most random numbers that are computed; larger draws only advance the offset
MAX_NORMALS = 1 << 14  # like `MAX_NUMEL` for normal numbers, which are noise and weights
MAX_GRID_ROWS = 65535  # blocks in the second dimension of a grid
DEFAULT_SEED = 67280421310721  # `default_rng_seed_val` (GeneratorImpl.h); GPUs start at random


@dataclass(slots=True)
class GpuGenerator:
    """State of a CUDA `torch.Generator`: its seed and the offset in its numbers (Philox)."""

    seed: int = DEFAULT_SEED
    offset: int = 0

    def manual_seed(self, seed: int) -> None:
        """Set the seed, and the offset to 0."""
        self.seed, self.offset = int(seed) % (1 << 64), 0

    def state(self) -> Tensor:
        """Return seed and offset as a tensor of 16 bytes (`CUDAGeneratorImpl::get_state`)."""
        numbers = np.array([self.seed, self.offset], dtype="<u8")
        return torch.from_numpy(numbers.view(np.uint8).copy())

    def set_state(self, state: Tensor) -> None:
        """Set seed and offset from the result of `state`."""
        seed, offset = state.numpy().view("<u8")
        self.seed, self.offset = int(seed), int(offset)


def philox(seed: int, sequence: Words, counter: Words) -> list[Words]:
    """Return four arrays of 32-bit random words, with an item for each (`sequence`, `counter`):
    Philox 4x32 in ten rounds, with key `seed`."""
    words = [counter & _LOW_32_BITS, counter >> _32, sequence & _LOW_32_BITS, sequence >> _32]
    keys = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(_PHILOX_ROUNDS):
        first, second = words[0] * _PHILOX_MULTIPLIERS[0], words[2] * _PHILOX_MULTIPLIERS[1]
        words = [
            (second >> _32) ^ words[1] ^ np.uint64(keys[0]),
            second & _LOW_32_BITS,
            (first >> _32) ^ words[3] ^ np.uint64(keys[1]),
            first & _LOW_32_BITS,
        ]
        keys = [
            (key + step) & 0xFFFFFFFF for key, step in zip(keys, _PHILOX_KEY_STEPS, strict=True)
        ]
    return words


@dataclass(frozen=True, slots=True)
class Launch:
    """Grid of `distribution_elementwise_grid_stride_kernel`: threads that draw `count` numbers."""

    count: int
    num_threads: int
    per_draw: int  # numbers of one call of Philox, which gives four words: 4, or 2 of 64 bits

    @property
    def offset(self) -> int:
        """Increase of the generator's offset by this kernel."""
        return ceil_div(self.count, self.num_threads * self.per_draw) * DRAWS

    def words(self, generator: GpuGenerator) -> tuple[list[Words], Parts]:
        """Return (Philox words of all numbers, part of each number). The words are four arrays;
        item i of each array is a 32-bit word for number i. A 32-bit number is one of its four
        words, and its part is the index of the word. A 64-bit number is made of two words. Its part
        is 0 for the first two words and 1 for the last two."""
        item = np.arange(self.count, dtype=np.uint64)
        turn, thread = np.divmod(item, np.uint64(self.num_threads))
        round_, part = np.divmod(turn, np.uint64(self.per_draw))
        counter = round_ + np.uint64(generator.offset // DRAWS)
        return philox(generator.seed, thread, counter), part.astype(np.int64)


def launch(count: int, gpu: Gpu, per_draw: int) -> Launch:
    """Return the grid of `calc_execution_policy` for `count` numbers. It has at most the blocks
    that `gpu` runs at once. A call of Philox gives `per_draw` numbers: 4, or 2 of 64 bits."""
    max_blocks = gpu.num_sms * (gpu.multiprocessor.threads // BLOCK_THREADS)
    num_blocks = min(ceil_div(count, BLOCK_THREADS), max_blocks)
    return Launch(count, num_blocks * BLOCK_THREADS, per_draw)


def _uniform(words: list[Words], part: Parts, is_double: bool) -> Numbers:
    """Return uniform numbers above 0, up to 1 (`curand_uniform4`, `curand_uniform2_double`), in
    float64 if `is_double`, else float32. `words` and `part` are those of `Launch.words`."""
    if is_double:
        low, high = _pair(words, part)
        return (low ^ (high << np.uint64(21))) * 2.0**-53 + 2.0**-54
    numbers = np.choose(part, words).astype(np.float32)
    return numbers * np.float32(2.0**-32) + np.float32(2.0**-33)


def _pair(words: list[Words], part: Parts) -> tuple[Words, Words]:
    return np.choose(part, words[::2]), np.choose(part, words[1::2])


def _exponential(words: list[Words], part: Parts, is_double: bool) -> Numbers:
    """Return exponential numbers of rate 1 (`transformation::exponential`), like `_uniform`."""
    uniform = _uniform(words, part, is_double)
    half = np.finfo(uniform.dtype).eps / 2
    return -np.where(uniform >= 1 - half, -half, np.log(uniform))


def _integers(words: list[Words], part: Parts, low: int, high: int) -> Numbers:
    if high - low >= _WIDE_RANGE:
        first, second = _pair(words, part)
        numbers = (first << _32) | second
    else:
        numbers = np.choose(part, words)
    return (numbers % np.uint64(high - low)).astype(np.int64) + low


class CudaRng:
    """Random generators of `gpu`, which compute the numbers that CUDA's random operators draw."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.default = GpuGenerator()
        self.of_script: dict[int, GpuGenerator] = {}  # generators that the script created, by `id`

    def draw(
        self, op: registry.Op, args: Args, kwargs: Kwargs, out: Any, probs: Any = None
    ) -> Tensor | None:
        """Advance the generator by one random operator, and return the drawn numbers. Return None
        if they are not computed: too many, no rule for their distribution, or unknown arguments.
        `out` is the meta result. `probs` are the values of the first argument of `multinomial`;
        None if unknown, and for other operators."""
        handle = kwargs.get("generator")  # Python has several objects for one generator
        generator = self.of_script.get(getattr(handle, "_cdata", 0), self.default)
        result: Tensor = out[0] if isinstance(out, tuple | list) else out
        count, func, dtype = result.numel(), op.func, result.dtype
        name = func._schema.name.removeprefix("aten::")
        if not count or not (op.random_offset or draws_numbers(name, args)):
            return None
        call = op.call(args, kwargs, result, self.gpu)
        increase = op.random_offset(call) if op.random_offset else None
        if increase is not None:
            generator.offset += increase
            return None
        if name == "multinomial":
            return self._draw_indices(generator, call, probs)
        low, high = _range(func, args, dtype) if name in _INTEGER_OPS else (0, 1)
        is_double = dtype == torch.float64
        takes_64_bits = (is_double and name not in _DROPOUTS) or high - low >= _WIDE_RANGE
        grid = launch(count, self.gpu, 2 if takes_64_bits else DRAWS)
        limit = MAX_NORMALS if name in _NORMAL_OPS else MAX_NUMEL
        is_computed = count <= limit and not isinstance(result, torch.nn.Parameter)
        numbers = None
        if is_computed and name in _INTEGER_OPS:
            numbers = torch.from_numpy(_integers(*grid.words(generator), low, high)).to(dtype)
        elif is_computed and name in _NUMBERS_BY_OP and not (name in _NORMAL_OPS and is_double):
            parameters = _distribution_parameters(func, args, kwargs)
            numbers = _NUMBERS_BY_OP[name](*grid.words(generator), dtype, *parameters)
        generator.offset += grid.offset
        if numbers is None:
            return None
        strides = result.stride()  # numbers are drawn in memory order
        order = sorted(range(result.dim()), key=lambda d: (-strides[d], d))
        shaped = numbers.view([result.size(d) for d in order])
        return shaped.permute([order.index(d) for d in range(result.dim())])

    def _draw_indices(self, generator: GpuGenerator, c: KernelCall, probs: Any) -> Tensor | None:
        """Advance `generator` by call `c` of `multinomial`; return the drawn indices. `probs` are
        the probabilities. Return None if they are unknown (None) or the draw is not computed."""
        tensor: Tensor = c.self
        num_samples: int = c.num_samples
        rows = tensor.numel() // tensor.size(-1)
        if c.replacement and num_samples > 1:
            indices = None
            if probs is not None and rows == 1:
                indices = _sample(generator, probs, num_samples)
            generator.offset += DRAWS * ceil_div(rows, MAX_GRID_ROWS)
            return indices
        is_double = tensor.dtype == torch.float64
        grid = launch(tensor.numel(), self.gpu, 2 if is_double else DRAWS)
        is_computed = probs is not None and not is_double
        numbers = _exponential(*grid.words(generator), False) if is_computed else None
        generator.offset += grid.offset
        if numbers is None:
            return None
        noise = torch.from_numpy(numbers).to(tensor.dtype)
        quotients: Tensor = probs / noise.view(probs.shape)
        if num_samples == 1:
            return quotients.argmax(-1, keepdim=True)
        return quotients.topk(num_samples).indices


def _sample(generator: GpuGenerator, probs: Tensor, num_samples: int) -> Tensor | None:
    """Return `num_samples` indices drawn with replacement: uniform numbers searched in cumulative
    sums of the probabilities `probs`. None for too many samples, or if `probs` are not float32."""
    if num_samples > MAX_NUMEL or probs.dtype != torch.float32:
        return None
    thread = np.arange(num_samples, dtype=np.uint64)
    counter = np.full(num_samples, generator.offset // DRAWS, dtype=np.uint64)
    words = philox(generator.seed, thread, counter)
    uniforms = torch.from_numpy(_uniform(words, np.zeros(num_samples, np.int64), False))
    row = probs.reshape(-1)
    cumulative = (row / row.sum()).cumsum(0)
    return torch.searchsorted(cumulative, uniforms).view(*probs.shape[:-1], -1)


def _uniform_of(
    words: list[Words], part: Parts, dtype: torch.dtype, start: float = 0.0, end: float = 1.0
) -> Tensor:
    """Return uniform numbers from `start` to `end` (excluded), as `dtype`."""
    uniforms = _uniform(words, part, dtype == torch.float64)
    scaled = uniforms * uniforms.dtype.type(end - start) + uniforms.dtype.type(start)
    result = torch.from_numpy(scaled).to(dtype)
    return torch.where(result == end, start, result)


def _normal_of(
    words: list[Words], part: Parts, dtype: torch.dtype, mean: float = 0.0, std: float = 1.0
) -> Tensor:
    """Return normal numbers by Box and Muller (`curand_normal4`), as `dtype`."""
    normals = []
    for first, second in (words[:2], words[2:]):
        radius = first.astype(np.float32) * np.float32(2.0**-32) + np.float32(2.0**-33)
        unit = 2 * math.pi * 2.0**-32
        angle = second.astype(np.float32) * np.float32(unit) + np.float32(unit / 2)
        length = np.sqrt(np.float32(-2) * np.log(radius))
        normals += [length * np.sin(angle), length * np.cos(angle)]
    numbers = np.choose(part, normals) * np.float32(std) + np.float32(mean)
    return torch.from_numpy(numbers).to(dtype)


def _bernoulli_of(words: list[Words], part: Parts, dtype: torch.dtype, odds: float = 0.5) -> Tensor:
    return torch.from_numpy(_uniform(words, part, dtype == torch.float64) < odds).to(dtype)


_NUMBERS_BY_OP: dict[str, Callable[..., Tensor]] = {
    "rand": _uniform_of, "rand_like": _uniform_of, "uniform_": _uniform_of,
    "randn": _normal_of, "randn_like": _normal_of, "normal_": _normal_of,
    "bernoulli_": _bernoulli_of, "bernoulli": _bernoulli_of,
    "exponential_": lambda words, part, dtype, rate=1.0: torch.from_numpy(
        _exponential(words, part, dtype == torch.float64) / rate
    ).to(dtype),
}  # fmt: skip
_NORMAL_OPS = ("randn", "randn_like", "normal_")
_INTEGER_OPS = ("randint", "randint_like", "random_")
_DROPOUTS = ("native_dropout", "_fused_dropout")
_LARGEST_EXACT_INTEGER = {
    torch.float32: 1 << 24, torch.float64: 1 << 53, torch.float16: 1 << 11, torch.bfloat16: 1 << 8,
}  # fmt: skip
_GRID_OPS = frozenset((
    *_NUMBERS_BY_OP, *_INTEGER_OPS, *_DROPOUTS, "normal", "normal_functional", "geometric_",
    "cauchy_", "log_normal_",
    "rrelu_with_noise", "rrelu_with_noise_", "rrelu_with_noise_functional",
))  # fmt: skip


def draws_numbers(name: str, args: Args) -> bool:
    """Return whether operator `name` draws random numbers: dropout and `rrelu` in training only."""
    if name == "native_dropout":
        return args[2] is not False  # argument `train`; None counts as True
    if name.startswith("rrelu"):
        return len(args) > 4 and bool(args[4])  # argument `training`, False by default
    return name in _GRID_OPS or name == "multinomial"


def _overloads(*packets: Any) -> list[OpOverload]:
    return [getattr(packet, name) for packet in packets for name in packet.overloads()]


@registry.random_offset(*_overloads(aten.randperm))
def randperm_offset(c: KernelCall) -> int:
    """Return the increase of the generator's offset by `randperm` (Randperm.cu). It draws random
    keys, then numbers that shuffle items of equal keys."""
    count = c.out.numel()
    has_64_bit_keys = count > 1 and math.log2(count) * 2 > 28  # keys of more bits are 64-bit
    keys_offset = launch(count, c.gpu, 2 if has_64_bit_keys else DRAWS).offset
    return keys_offset + round_up(count, DRAWS)


for _packets, _step in (
    ((aten.poisson,), 20),
    ((aten._standard_gamma, aten._sample_dirichlet), 12),
    # `philox_engine_inputs(42)` of cuda/Distributions.cu, rounded up to a multiple of 4
    ((aten.binomial,), 44),
):
    register(*_overloads(*_packets), random_offset=lambda c, step=_step: step)
register(
    *_overloads(aten.bernoulli, aten.bernoulli_),
    # probabilities in a tensor
    random_offset=lambda c: 12 if isinstance(c.get("p", c.self), Tensor) else None,
)

# without meta kernels; `_standard_gamma` has one from torch 2.12
register(
    "_standard_gamma _sample_dirichlet binomial _standard_gamma_grad _dirichlet_grad",
    result=registry.empty_like(0),
)


@registry.requests("_sample_dirichlet")
def dirichlet(c: KernelCall) -> Events:
    """Allocations of `_s_dirichlet_cuda` (cuda/Distributions.cpp): gamma samples, their sums."""
    sums_bytes = c.out.nbytes // max(1, c.out.shape[-1])
    staging = passing(*sum_bytes(c.out, (-1,), c.out.dtype, c.gpu))
    return c.outputs() + around((sums_bytes,), staging)


def _range(func: Any, args: Args, dtype: torch.dtype) -> tuple[int, int]:
    """Return (lowest integer, excluded upper bound) of what `func(*args)` draws as `dtype`."""
    bounds = [int(a) for a in args if isinstance(a, int) and not isinstance(a, bool)]
    if len(bounds) > 1:
        *_, low, high = bounds
        return low, high
    if bounds:
        return 0, bounds[0]
    if dtype in _LARGEST_EXACT_INTEGER:
        return 0, _LARGEST_EXACT_INTEGER[dtype] + 1
    return 0, 2 if dtype == torch.bool else torch.iinfo(dtype).max + 1


def _distribution_parameters(func: Any, args: Args, kwargs: Kwargs) -> list[float]:
    """Return the numbers that describe a call's distribution, such as mean and deviation. They are
    in the order of the schema; [] for operators with a fixed distribution, such as `rand`."""
    if not func._schema.name.endswith("_") and func._schema.name != "aten::bernoulli":
        return []
    _, *arguments = registry.arguments_by_name(func, args, kwargs).items()
    return [float(value) for name, value in arguments if name != "generator"]


_ODDS_OF_DISTINCT_KEYS = 0.9  # for which `randperm` draws enough bits


def randperm_bits(num_items: int) -> int:
    """Return the number of bits in the random keys that `randperm` of `num_items` sorts."""
    n = float(num_items)
    return min(64, ceil(log2(n - (6 * n * n + 1) / (12 * log(_ODDS_OF_DISTINCT_KEYS)))))


@registry.requests(
    "randperm randperm.generator",
    when="the numbers are int64, for which the sort's tunings are known",
    # the default, `long`, is a number here
    modelled=lambda c: c.dtype is torch.int64 or not isinstance(c.dtype, torch.dtype),
)
def randperm(c: KernelCall) -> Events:
    """Allocations of `randperm` (Randperm.cu): a scalar of a range check, numbers, keys, a sort.
    Unsorted and sorted keys have 4 bytes each if 32 bits are enough, else 8."""
    count = c.out.numel()
    events = c.outputs() + passing(c.out.itemsize)
    if count < 2:
        return events
    bits = randperm_bits(count)
    key_bytes = 4 if bits <= 32 else 8
    sort = cub.radix_sort_bytes(count, c.gpu, num_bits=bits, key_bytes=key_bytes)
    keys = count * key_bytes
    return events + passing(c.out.nbytes, keys, keys, sort)


@registry.requests(
    "multinomial",
    when="up to 1024 samples; with replacement, of several rows or of one in float32",
    modelled=lambda c: (
        c.self.dim() > 1 or c.self.dtype == torch.float32
        if c.replacement and c.num_samples > 1
        else c.num_samples <= 1024
    ),
)
def multinomial(c: KernelCall) -> Events:
    """Allocations of `multinomial` (native/Distributions.cpp): checks, then quotients. Results of
    the checks (largest and smallest probability, sum of each row) stay allocated. Then
    probabilities are divided by exponential noise. For several samples, `topk` also allocates
    values. Several samples with replacement need no checks and no quotients. They need three
    tensors of the size of the probabilities, such as the cumulative sums."""
    probs, item, num = c.self, c.self.itemsize, c.num_samples
    if c.replacement and num > 1:  # MultinomialKernel.cu: probabilities, their sums
        scan = passing(cub.scan_bytes(probs.numel(), value_bytes=4)) if probs.dim() == 1 else []
        return c.outputs() + around((probs.nbytes,) * 3, scan)
    rows = 1 if probs.dim() == 1 else probs.shape[0]
    extreme = passing(*reduce_bytes(probs, (), c.gpu))
    sums = temporaries(rows * item, rows, 1, -rows, -rows * item)
    if probs.dim() == 1:
        sums = temporaries(item, 1, -item)
    values = passing(rows * num * item) if num > 1 else []
    return (
        c.outputs()
        + temporaries(item)
        + extreme
        + temporaries(1, item)
        + extreme
        + temporaries(1, 1, -1, -item, -1, -item)
        + sums
        + passing(1)
        + around((probs.numel() * item,), values)
        + temporaries(-1, -1)
    )


op(
    "bernoulli", "a float32 copy of 16-bit probabilities (cuda/Distributions.cpp)",
    after=lambda c: c.self.numel() * 4 if c.self.itemsize == 2 else 0,
)  # fmt: skip


@registry.requests("normal.Tensor_Tensor normal.float_Tensor")
def normal(c: KernelCall) -> Events:
    """Allocations of `normal` (DistributionTemplates.h) with a tensor of deviations. A check finds
    the smallest deviation, once before the result is allocated and once after. A scalar mean then
    becomes a tensor."""
    smallest = reduce_bytes(c.std, (), c.gpu)
    check = around((c.std.itemsize,), passing(*smallest) + passing(1))
    number = [] if isinstance(c.mean, Tensor) else passing(c.out.itemsize)
    return check + c.outputs() + check + number


register(
    "native_dropout",
    about="the mask first, if anything is drawn (Dropout.cu)",
    requests=lambda c: c.outputs(1, 0) if c.train is not False and 0 < c.p < 1 else c.outputs(),
)
register(  # cuda/Dropout.cu
    "native_dropout_backward",
    layout=lambda c: torch.empty_like(c.out, memory_format=suggest_memory_format(c.args[0])),
)


# functorch's own `dropout` is on this key (PyTorchOperatorHacks.cpp)
@registry.above_autograd("dropout", vmap_key="FuncTorchDynamicLayerFrontMode")
def dropout(next_kernel: Next, x: Tensor, p: float, train: bool) -> Tensor:
    """Run the fused kernel if `train` and 0 < `p` < 1 (`is_fused_kernel_acceptable`, Dropout.cpp);
    else run torch's `next_kernel`."""
    if train and 0 < p < 1 and x.numel() > 0:
        return aten.native_dropout.default(x, p, train)[0]
    return next_kernel(x, p, train)


@registry.result("normal_")
def filled_normal(c: KernelCall) -> Tensor:
    """Return the argument of `normal_`, without torch's meta kernel, which runs a dozen operators.
    For arguments that torch refuses, the meta kernel runs and raises torch's error."""
    tensor: Tensor = c.self
    if tensor.is_floating_point() and c.std >= 0:
        return tensor
    return aten.normal_.default(**c)  # raises torch's error
