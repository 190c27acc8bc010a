"""When the CUDA backend of bitsandbytes 0.50.2 multiplies by 4-bit weights as they are packed.

Shapes: N out_features, K in_features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

BLOCK_NUMEL = 64
"""functional.py: the default `blocksize` of `quantize_4bit`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedGemmRule:
    """When the CUDA backend multiplies by the packed weight, without dequantising it first.

    The thresholds are those of `_gemm_4bit_use_custom_cuda` (backends/cuda/ops.py). `num_blocks` is
    the number of 64-column tiles of the output; a wave is one tile per multiprocessor.
    """

    capability: tuple[int, int] = (9, 0)
    """Compute capability of the GPU, `(major, minor)`."""

    num_sms: int = 132
    """Its streaming multiprocessors."""

    def applies(self, num_rows: int, shape: Sequence[int], dtype: torch.dtype) -> bool:
        """Whether an input of `num_rows` rows and a weight of `shape` (N, K) take that kernel."""
        n, k = shape
        if num_rows > 1536 or k % BLOCK_NUMEL:
            return False
        if num_rows <= 4:
            return True
        if dtype == torch.float32 or not self._has_tensor_core_kernel(dtype):
            return num_rows < 8
        if self.capability == (8, 7) or self.capability[0] == 11:
            return False
        tiles = -(-n // 64)
        if self.capability[0] == 10:
            return num_rows <= self._limit_sm100(n, k, tiles)
        if n * k < 4 * 2**20:
            return num_rows <= self._limit_small_weight(n, k, tiles, num_rows)
        if num_rows > 512:
            return False
        if num_rows < 8:
            return not self._few_rows_dequantise(n, k, tiles, num_rows)
        return num_rows <= self._limit_large_weight(n, k, tiles)

    def _has_tensor_core_kernel(self, dtype: torch.dtype) -> bool:
        if self.capability < (7, 5):
            return False
        return self.capability[0] > 7 or dtype == torch.float16

    def _limit_sm100(self, n: int, k: int, tiles: int) -> int:
        if tiles >= 3 * self.num_sms:
            return 32
        return 8 if tiles >= self.num_sms and k < n else 0

    def _limit_small_weight(self, n: int, k: int, tiles: int, num_rows: int) -> int:
        if 2 * k < n:
            return self._limit_short_small_weight(k, tiles)
        quarter_wave = 4 * tiles <= self.num_sms
        if self.capability == (8, 0) and quarter_wave:
            if k < n:
                return 384
            return 32 if 8 * tiles <= self.num_sms else 128
        if self.capability == (7, 5) and tiles < self.num_sms and num_rows > 8:
            return 64
        if quarter_wave:
            return 32 if k < n or self._has_hbm else 23
        return 16 if 2 * tiles <= self.num_sms else 0

    def _limit_short_small_weight(self, k: int, tiles: int) -> int:
        if self._has_hbm:
            low_wave = 3 * tiles < self.num_sms
            if self.capability == (8, 0):
                return 1536 if low_wave else 512
            return 512 if low_wave else 320
        if self.capability == (7, 5):
            if tiles >= 3 * self.num_sms or k < 704:
                return 320
            return 64 if k >= 1024 else 96
        crowded = tiles < self.num_sms and tiles * k > 320 * self.num_sms
        return 192 if crowded else 320

    @property
    def _has_hbm(self) -> bool:
        return self.capability == (8, 0) or self.capability[0] == 9

    def _few_rows_dequantise(self, n: int, k: int, tiles: int, num_rows: int) -> bool:
        hopper = self.capability[0] == 9
        if not self._has_hbm or num_rows < 6 or tiles < (36 if hopper else 48):
            return False
        below_75 = 4 * tiles < 3 * self.num_sms
        below_60 = 5 * tiles < 3 * self.num_sms
        if k > n:
            return below_75
        return k == n and (below_75 and not below_60 if hopper else below_60)

    def _limit_large_weight(self, n: int, k: int, tiles: int) -> int:
        limits = {(7, 5): self._limit_sm75, (8, 0): self._limit_sm80, (12, 0): self._limit_sm120}
        if self.capability[0] == 9:
            return self._limit_sm90(n, k, tiles)
        if self.capability == (8, 6):
            return self._by_waves(tiles, ((1, 128), (0.5, 64)), 16)
        if self.capability == (12, 1) and tiles >= self.num_sms:
            return 256
        return limits.get(self.capability, self._limit_sm89)(n, k, tiles)

    def _by_waves(self, tiles: int, tiers: Sequence[tuple[float, int]], otherwise: int) -> int:
        """The limit of the first tier whose number of waves `tiles` fill."""
        for waves, limit in tiers:
            if tiles >= int(waves * self.num_sms):
                return limit
        return otherwise

    def _limit_sm75(self, n: int, k: int, tiles: int) -> int:
        return self._by_waves(tiles, ((3, 128 if k < n else 64), (0.5, 64)), 32)

    def _limit_sm80(self, n: int, k: int, tiles: int) -> int:
        sms = self.num_sms
        if tiles >= sms:
            return self._by_waves(tiles, ((3, 128),), 64 if k < n else 32)
        if k >= 3 * n and 4 * tiles > sms:
            return 0
        if k == n and tiles >= 48 and 5 * tiles < 3 * sms:
            return 0
        if 2 * tiles < sms:
            if k <= n:
                return 128
            if 3 * tiles >= sms:
                return 0
        return 128 if tiles >= sms // 2 and k < n else 16

    def _limit_sm90(self, n: int, k: int, tiles: int) -> int:
        if tiles < self.num_sms and k >= n and 4 * tiles < 3 * self.num_sms:
            return 0
        return self._by_waves(tiles, ((3, 64), (2, 48), (1, 32), (0.5, 16)), 0)

    def _limit_sm120(self, n: int, k: int, tiles: int) -> int:
        if 5 * tiles >= 4 * self.num_sms:
            return self._by_waves(tiles, ((3, 256), (2, 128)), 96 if k >= n else 64)
        if tiles >= self.num_sms // 2:
            return 64 if 2 * k >= n and tiles >= 128 else 8
        return 16 if k > 2 * n and tiles > 64 else 8

    def _limit_sm89(self, n: int, k: int, tiles: int) -> int:
        tall = k > 2 * n
        if tiles >= 2 * self.num_sms:
            return 256 if tiles >= 3 * self.num_sms else 128
        if 5 * tiles >= 4 * self.num_sms:
            if tall or tiles >= 200:
                return 128
            if k >= n:
                return 128 if self.num_sms >= 60 else 32
            return 64
        if tiles >= self.num_sms // 2:
            return 64 if tall else 8 if tiles >= 64 else 32
        if k > n and tiles <= 48:
            return 12 if k >= 3 * n else 10
        return 16 if tall or tiles < 48 else 8
