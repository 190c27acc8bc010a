"""docs/kernels.md is generated, current and complete, and its formulas hold for the functions."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from memest.estimator.hardware.gpus import find_gpu, list_gpus
from memest.estimator.ops.attention import scaled_dot_product_attention
from memest.estimator.ops.registry import OUTPUTS_ONLY, op_of
from memest.estimator.ops.temporaries import Events
from memest.models_meta.flash_attention import BACKWARD, FORWARD
from tests.op_calls import requested
from tests.requests_at_peak import scratch_of

if TYPE_CHECKING:
    from scripts import kernels_page as pages

ROOT = Path(__file__).resolve().parents[2]
fp32, fp16, bf16 = torch.float32, torch.float16, torch.bfloat16


@pytest.fixture(scope="module")
def page() -> pages:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import kernels_page
    finally:
        sys.path.pop(0)
    return kernels_page


def test_the_page_is_current(page: pages) -> None:
    text = page.PAGE.read_text(encoding="utf-8")

    assert text == page.kernels_page(), "run `python scripts/kernels_page.py`"


def test_every_operator_of_the_tables_is_on_the_page(page: pages) -> None:
    text = page.kernels_page()
    tables = map(page.always_registered, ("requests", "modelled", "product"))

    assert [op for table in tables for op in page.op_names(table) if f"`{op}`" not in text] == []
    assert [name for name in OUTPUTS_ONLY if f"`{name}`" not in text] == []
    assert [gpu.name for gpu in list_gpus() if gpu.name not in text] == []


def test_every_row_says_what_it_models_and_names_a_source(page: pages) -> None:
    for operators, what, function, source in page.operator_rows():
        assert all((operators, what, function, source)), function


def peak(events: Events) -> int:
    """The most that temporaries hold at once."""
    scratch = scratch_of(events)
    return sum(scratch.before) + sum(scratch.after)


class Attention(TorchDispatchMode):
    """Requests of the attention kernels that run under it, and what they leave to the backward."""

    def __init__(self, gpu: str) -> None:
        super().__init__()
        self.gpu = find_gpu(gpu)
        self.peaks: list[int] = []
        self.kept: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if op_of(func).requests and "_scaled_dot_product" in func._schema.name:
            events = requested(func, args, kwargs or {}, out, self.gpu)
            self.peaks.append(peak(events))
            if len(self.peaks) == 1:
                self.kept = {e.output: e.num_bytes for e in events if e.output}
        return out


def tokens_first(B: int, H: int, T: int, E: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(B, T, H, E, dtype=dtype, device="meta").transpose(1, 2)


def value_of(formula: str, **letters: int) -> int:
    functions = {"up": lambda x, n: -(-x // n) * n, "ceil": lambda x, n: -(-x // n), "max": max}
    result: int = eval(formula, {"__builtins__": {}}, {**functions, **letters})
    return result


CASES = [  # backend, GPU, dtype, H, K, E, tile
    ("flash", "a100-80gb", bf16, 16, 16, 64, None),
    ("flash", "l4", fp16, 16, 4, 96, None),
    ("efficient, 16 bits", "t4", fp16, 4, 4, 64, (64, 64)),
    ("efficient, 16 bits", "v100-32gb", fp16, 4, 4, 128, (128, 64)),
    ("efficient, fp32", "l4", fp32, 4, 4, 128, (64, 64)),
    ("efficient, fp32", "h200", fp32, 4, 4, 128, (128, 64)),
    ("efficient, fp32", "b200", fp32, 4, 4, 40, (64, 64)),
    ("cuDNN", "h200", bf16, 8, 8, 128, None),
    ("cuDNN", "h100-80gb", fp16, 8, 2, 64, None),
]


@pytest.mark.parametrize(("backend", "gpu", "dtype", "H", "K", "E", "tile"), CASES)
def test_the_formulas_are_what_the_kernels_ask_for(
    page: pages,
    backend: str,
    gpu: str,
    dtype: torch.dtype,
    H: int,
    K: int,
    E: int,
    tile: tuple[int, int] | None,
) -> None:
    B, L, S = 4, 1030, 1111
    formulas = next(f for f in page.FORMULAS if f.backend == backend)
    q, k = tile or (0, 0)
    letters = {"B": B, "H": H, "K": K, "L": L, "S": S, "E": E, "i": dtype.itemsize, "q": q, "k": k}
    query, key, value = (
        tokens_first(B, heads, T, E, dtype).requires_grad_()
        for heads, T in ((H, L), (K, S), (K, S))
    )

    with Attention(gpu) as attention:
        out = scaled_dot_product_attention(
            query, key, value, enable_gqa=K < H, gpu=attention.gpu
        )  # fmt: skip
        torch.autograd.grad(out, (query, key, value), tokens_first(B, H, L, E, dtype))

    found = [sum(attention.kept.values()), *attention.peaks]
    wanted = [value_of(f, **letters) for f in (formulas.saved, formulas.forward, formulas.backward)]
    assert found == wanted


def test_a_wide_head_has_its_output_in_float32_beside(page: pages) -> None:
    """Above a width of 128 in 16 bits it does not fit the registers."""
    B, H, L, E = 2, 4, 96, 160
    formula = next(f for f in page.FORMULAS if f.backend == "efficient, 16 bits").forward

    with Attention("t4") as attention, torch.no_grad():
        query = tokens_first(B, H, L, E, fp16)
        scaled_dot_product_attention(query, query, query, gpu=attention.gpu)

    assert attention.peaks == [value_of(formula, B=B, H=H, L=L, E=E)]
    assert attention.peaks == [4 * B * H * L * E]


def test_the_math_kernel_keeps_the_weights_and_both_factors_of_each_product(page: pages) -> None:
    """bfloat16 on a T4: all in float32."""
    B, H, L, S, E = 2, 3, 50, 70, 64
    formula = next(f for f in page.FORMULAS if f.backend == "math, 16 bits").saved
    query, key, value = (tokens_first(B, H, T, E, bf16).requires_grad_() for T in (L, S, S))
    kept: dict[int, Tensor] = {}
    given = {t.untyped_storage()._cdata for t in (query, key, value)}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        scaled_dot_product_attention(query, key, value, gpu=find_gpu("t4"))

    found = sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in given)
    assert found == value_of(formula, B=B, H=H, L=L, S=S, E=E)


def test_flash_attention_2_holds_what_its_formula_says(page: pages) -> None:
    B, H, K, L, S, E = 4, 16, 4, 1030, 1111, 64
    formulas = next(f for f in page.FORMULAS if "flash_attention_2" in f.backend)
    letters = {"B": B, "H": H, "K": K, "L": L, "S": S, "E": E, "i": 2}
    gpu = find_gpu("a100-80gb")
    query, key = (torch.empty(B, T, h, E, dtype=bf16, device="meta") for T, h in ((L, H), (S, K)))
    lse = torch.empty(B, H, L, device="meta")
    rng = torch.empty(2, dtype=torch.int64, device="meta")
    sums = torch.empty(B, H, -(-L // 128) * 128, device="meta")

    out = torch.empty_like(query), lse, rng
    forward = requested(FORWARD, (query, key, key, None, L, S, 0.1, False), {}, out, gpu)
    given = (query, query, key, key, query, lse, rng, query, key, None, False)
    backward = requested(BACKWARD, given, {}, sums, gpu)

    assert sum(e.num_bytes for e in forward if e.output) == value_of(formulas.saved, **letters)
    assert peak(forward) == value_of(formulas.forward, **letters)
    assert peak(backward) == value_of(formulas.backward, **letters)
