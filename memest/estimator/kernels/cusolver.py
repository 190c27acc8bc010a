"""Workspaces of cuSOLVER, in bytes, as functions of the matrix.

Measured on an H100 (CUDA 13.0, torch 2.11): 1,398 calls of torch.linalg with 2 to 4096 rows, in
float32 and float64, alone and in batches; every one is given to the byte, and
`tests/data/linalg.json.gz` has them. Sub-buffers are rounded up to 32 elements, a block has 32
columns. On other generations of GPUs nothing was measured.

Shapes: m rows, n columns, `item` bytes of an element.
"""

from __future__ import annotations

BLOCK = 32


def up(count: int, step: int = BLOCK) -> int:
    """`count`, rounded up to a multiple of `step`."""
    return -(-count // step) * step


def geqrf_bytes(n: int, item: int) -> int:
    """The factors of a QR decomposition, of any number of rows."""
    return item * (1024 * max(n, 256) + 524288) + 128


def orgqr_bytes(m: int, n: int, k: int, item: int) -> int:
    """The first n columns of Q from k reflectors."""
    if k < 128:
        return item * (256 + 16384 + max(16384, up(2 * n * k)) + up(m * k))
    return item * (256 + 16384 + 128 * m + 256 * n)


def eigh_bytes(n: int, item: int, batch: int) -> int:
    """One call of the solver that torch takes.

    Jacobi's method in float32 for 32 to 512 columns, but for batches of 32; else divide and
    conquer, of all matrices at once up to 32 columns.
    """
    if item == 4 and 32 <= n <= 512 and (batch == 1 or n > 32):
        blocks = -(-n // BLOCK)
        return 4 * (n * n + n + 4 * blocks * blocks + blocks + 1024 * (blocks + 1))
    last = n * n + 2 * n + 3
    reduced = 2 * n * n + 765 * n
    if n <= 32:
        return 128 + item * (batch * (65536 + last) + up(batch * reduced + 1) + up(batch))
    larger = max(65536 + up(reduced + 1), 32768 + 128 + up(3 * n * n + 124 * n + 1))
    return 128 + item * (32 + up(n) + larger + last)


def svd_bytes(m: int, n: int, item: int, is_full: bool) -> int:
    """Jacobi's method for square matrices, else QR iteration on the tall one."""
    if m == n:
        blocks = -(-n // BLOCK)
        if n <= 32:
            return 992 * item
        return item * (1024 * (2 * blocks + 1) + up(2 * n * n) + up(4 * blocks**2 + blocks + n))
    tall, k = max(m, n), min(m, n)
    vectors = tall if is_full else k
    work = 256 * tall + 256 * 257 + up(tall * k + vectors) + up(512 * vectors) + up(k * k)
    needed = max(up(geqrf_bytes(k, item) // item), work) + up(k)
    return item * (needed + (up(m * n) if m < n else 0))


def potrf_bytes(n: int, is_upper: bool) -> int:
    """Cholesky's factor of one matrix."""
    blocks = -(-n // BLOCK)
    return 256 if is_upper else 128 + up(4 * blocks * blocks)


def getrf_bytes(n: int, item: int) -> int:
    """LU factors of one square matrix; where it switches lies between 1280 and 1792 columns."""
    blocks = -(-n // BLOCK)
    panel = max(256 * min(1 << (blocks - 1).bit_length(), 16), up(4 * blocks * blocks))
    if n > 1536:
        panel = max(panel, 8192 * item + 256 * (item + 8) * -(-n // 2048))
    return 256 * (blocks + 1) + panel
