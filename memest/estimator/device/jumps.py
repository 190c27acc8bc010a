"""Many draws of torch's generator at once: MT19937 is linear, so its state n steps on is a sum of
states near by, those that the remainder of t^n by its characteristic polynomial names.

The state's bytes are those of `CPUGeneratorImplStateLegacy` (CPUGeneratorImpl.cpp of torch 2.11),
the generator that of ATen/core/MT19937RNGEngine.h; the method is that of Haramoto et al.,
"Efficient Jump Ahead for F2-Linear Random Number Generators" (2008).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]

WORDS, SHIFT, DEGREE = 624, 397, 19937
"""Words of a state, the distance that it is mixed over, and the bits that matter of it."""

_UPPER, _LOWER, _MATRIX = np.uint32(1 << 31), np.uint32((1 << 31) - 1), np.uint32(0x9908B0DF)
_LEFT, _NEXT, _STATE = slice(8, 12), slice(16, 24), slice(24, 24 + 8 * WORDS)
"""Where the bytes hold how many words are left, which is next, and the words, of 8 bytes each."""


def advance(generator: torch.Generator, count: int) -> None:
    """Let `generator` have drawn `count` 32-bit numbers more, `WORDS` or more of them."""
    torch.empty(WORDS, dtype=torch.uint8).random_(generator=generator)  # all words are made ones
    count -= WORDS
    state = generator.get_state().numpy().copy()
    left, words = state[_LEFT].view(np.int32), state[_STATE].view(np.uint64)
    count -= int(left[0]) - 1
    num_blocks = -(-count // WORDS)
    if num_blocks > 0:
        words[:] = _after(words.astype(np.uint32), num_blocks * WORDS)
        count -= (num_blocks - 1) * WORDS
        left[0] = WORDS + 1 - count
        state[_NEXT].view(np.uint64)[0] = count
    else:
        state[_NEXT].view(np.uint64)[0] += np.uint64(count + int(left[0]) - 1)
        left[0] = 1 - count
    generator.set_state(torch.from_numpy(state))


def _after(words: Array, steps: int) -> Array:
    """The words so many steps on."""
    sequence = _sequence(words, WORDS + DEGREE)
    found = np.zeros(WORDS, dtype=np.uint32)
    for place in np.flatnonzero(_power(steps)).tolist():
        found ^= sequence[place : place + WORDS]
    return found


def _sequence(words: Array, length: int) -> Array:
    """The words of a state and those after them."""
    made = np.empty(length + WORDS, dtype=np.uint32)
    made[:WORDS] = words
    stride = WORDS - SHIFT  # so many depend on none of each other
    for place in range(WORDS, length, stride):
        first = made[place - WORDS : place - WORDS + stride]
        second = made[place - WORDS + 1 : place - WORDS + 1 + stride]
        mixed = (first & _UPPER) | (second & _LOWER)
        mixed = (mixed >> np.uint32(1)) ^ np.where(mixed & np.uint32(1), _MATRIX, np.uint32(0))
        made[place : place + stride] = made[place - stride : place] ^ mixed
    return made[:length]


@cache
def _terms() -> Array:
    """The exponents of the characteristic polynomial below its degree, by Berlekamp and Massey from
    the lowest bits of any sequence.
    """
    start = np.random.MT19937(0).state["state"]["key"].astype(np.uint32)
    bits = (_sequence(start, 2 * DEGREE + 2 * WORDS)[WORDS:] & np.uint32(1)).tolist()
    current, before, length, gap, seen = 1, 1, 0, 1, 0
    for number, bit in enumerate(bits[: 2 * DEGREE]):
        seen = (seen << 1) | bit
        if (current & seen).bit_count() % 2 == 0:
            gap += 1
        elif 2 * length <= number:
            current, before = current ^ (before << gap), current
            length, gap = number + 1 - length, 1
        else:
            current, gap = current ^ (before << gap), gap + 1
    return np.array([DEGREE - i for i in range(1, DEGREE + 1) if current >> i & 1])


def _power(steps: int) -> Array:
    """The coefficients of t^steps modulo the characteristic polynomial, 0 or 1 each."""
    terms = _terms()
    room = DEGREE - int(terms.max())  # so many can be taken off at once
    found = np.zeros(2 * DEGREE, dtype=np.uint8)
    found[0] = 1
    for bit in bin(steps)[2:]:
        squared = np.zeros(2 * DEGREE, dtype=np.uint8)
        squared[int(bit) : 2 * DEGREE - 1 + int(bit) : 2][:DEGREE] = found[:DEGREE]
        for top in range(2 * DEGREE, DEGREE, -room):
            low = max(top - room, DEGREE)
            part = squared[low:top].copy()
            if part.any():
                for term in terms:
                    squared[low - DEGREE + term : top - DEGREE + term] ^= part
        squared[DEGREE:] = 0
        found = squared
    return found[:DEGREE]
