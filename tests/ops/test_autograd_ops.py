"""What CUDA decides above autograd: autocast's lists and casts, fused dropout, half softmax."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.ops import autograd_ops as module
from memest.estimator.ops.autograd_ops import decisions_of
from memest.estimator.tensors.storages import MemKind
from memest.estimator.virtual_gpu import VirtualGpu

H200 = find_gpu("h200")
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
POLICIES = {
    "AT_FORALL_LOWER_PRECISION_FP": module.LOWER_PRECISION,
    "AT_FORALL_FP32": module.FLOAT32,
    "AT_FORALL_FP32_SET_OPT_DTYPE": module.FLOAT32_RESULT,
    "AT_FORALL_PROMOTE": module.PROMOTE,
}
NOT_MODELLED = {
    "binary_cross_entropy",  # refused by autocast on CUDA
    "cudnn_convolution",  # called by name only; `convolution` is in the list
    "cudnn_convolution_transpose",
    "norm.Scalar",  # redispatched with another signature; models call linalg_vector_norm
    "norm.ScalarOpt_dim",
}
SINCE_2_11 = {"rms_norm"}
"""Casts of the installed torch that 2.11 does not make: `torch._C` of 2.11 lists no such kernel."""


class Calls(TorchDispatchMode):
    """The operators that reach the mode's place, with the dtype of their first result."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, torch.dtype | None]] = []

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.made]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, list | tuple) else out
        name = str(func).removeprefix("aten.").removesuffix(".default")
        if name not in ("empty.memory_format", "detach"):
            self.made.append((name, first.dtype if isinstance(first, Tensor) else None))
        return out


@contextmanager
def autocast(dtype: torch.dtype | None) -> Iterator[None]:
    """`torch.autocast("cuda", dtype, cache_enabled=False)`, which does nothing without a GPU."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    was_cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_enabled("cuda", dtype is not None)
    torch.set_autocast_dtype("cuda", dtype or before[1])
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])
        torch.set_autocast_cache_enabled(was_cached)


@contextmanager
def on_gpu(autocast_dtype: torch.dtype | None = None) -> Iterator[Calls]:
    calls = Calls()
    with decisions_of(H200), autocast(autocast_dtype), calls:
        yield calls


def meta(*shape: int, dtype: torch.dtype = FP32, grad: bool = False) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=grad)


def installed_lists() -> dict[str, set[str]]:
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    text = header.read_text().replace("\\\n", "")
    lists = {}
    for macro in POLICIES:
        body = re.search(rf"#define {macro}\(_\)(.*)", text)
        assert body is not None, macro
        pairs = re.findall(r"_\((\w+)(?:,\s*(\w+))?\)", body[1])
        lists[macro] = {f"{name}.{overload}" if overload else name for name, overload in pairs}
    return lists


@pytest.mark.parametrize("macro", POLICIES)
def test_the_lists_are_those_of_the_installed_torch(macro: str) -> None:
    """Policy by policy, read from the header that torch ships."""
    ours = POLICIES[macro]

    assert len(ours) == len(set(ours))
    assert set(ours) == installed_lists()[macro] - SINCE_2_11


def test_all_that_torch_registers_for_autocast_is_modelled_or_known() -> None:
    registered = {
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    }
    ours = {name for names in POLICIES.values() for name in names}

    assert registered - ours == NOT_MODELLED | SINCE_2_11
    assert ours <= registered


def test_nothing_else_uses_the_dispatch_key() -> None:
    """What is registered on it is what memest registered, and no more."""
    with on_gpu():
        pass
    registered = set(torch._C._dispatch_get_registrations_for_dispatch_key(module.KEY_NAME))
    ours = {name for names in POLICIES.values() for name in names} | {"dropout", "batch_norm"}
    layers = ("lstm", "gru", "rnn_tanh", "rnn_relu")
    ours |= {f"{layer}.{form}" for layer in layers for form in ("input", "data")}

    ours |= {"rms_norm", "mish_backward", "one_hot", "binary_cross_entropy"}
    ours |= {"_pad_packed_sequence", "combinations", "pad_sequence", "vander"}
    ours |= {"ctc_loss.Tensor", "ctc_loss.IntList"}
    ours |= {"cumprod_backward", "linalg_svdvals", "linalg_eigvalsh", "linalg_eigvals"}
    ours |= {"_convolution_double_backward", *module.NOT_IN_A_POLICY}
    found = {name.removeprefix("aten::") for name in registered if name.startswith("aten::")}
    assert found == ours


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_matrix_products_run_in_the_lower_precision(dtype: torch.dtype) -> None:
    with on_gpu(dtype) as calls:
        out = F.linear(meta(3, 5), meta(7, 5))

    assert out.dtype is dtype
    assert calls.made[-1] == ("mm", dtype)
    assert calls.names.count("_to_copy") == 2


@pytest.mark.parametrize(
    "run",
    [
        lambda x: F.softmax(x, -1),
        lambda x: F.layer_norm(x, (5,)),
        lambda x: x.exp(),
        lambda x: x.sum(),
        lambda x: x.cumsum(0),
        lambda x: torch.linalg.vector_norm(x),
        torch.rsqrt,
    ],
    ids=["softmax", "layer_norm", "exp", "sum", "cumsum", "norm", "rsqrt"],
)
def test_sums_and_exponentials_run_in_float32(run: Callable[[Tensor], Tensor]) -> None:
    with on_gpu(BF16):
        assert run(meta(3, 5, dtype=BF16)).dtype is FP32
    with on_gpu():
        assert run(meta(3, 5, dtype=BF16)).dtype is BF16


def test_a_dtype_that_the_caller_gives_wins() -> None:
    with on_gpu(BF16):
        assert F.softmax(meta(3, 5, dtype=BF16), -1, dtype=BF16).dtype is BF16
        assert meta(3, 5, dtype=BF16).sum(dtype=FP64).dtype is FP64


def test_mixed_inputs_are_promoted_to_the_widest() -> None:
    half, full = meta(5, dtype=BF16), meta(5)

    with on_gpu(BF16):
        assert torch.addcmul(half, half, full).dtype is FP32
        assert torch.addcmul(half, half, half).dtype is BF16


def test_double_and_integers_are_left_alone() -> None:
    with on_gpu(BF16):
        assert F.linear(meta(3, 5, dtype=FP64), meta(7, 5, dtype=FP64)).dtype is FP64
        assert meta(3, dtype=torch.int64).sum().dtype is torch.int64


def test_other_operators_keep_their_dtype() -> None:
    with on_gpu(BF16):
        assert (meta(3) + meta(3)).dtype is FP32
        assert F.gelu(meta(3, dtype=BF16)).dtype is BF16


def test_a_weight_is_cast_anew_by_every_operator() -> None:
    """Lightning opens autocast without its cache: two uses are two casts."""
    weight, x = meta(5, 5, grad=True), meta(3, 5, dtype=BF16)

    with on_gpu(BF16) as calls:
        F.linear(x, weight)
        F.linear(x, weight)

    assert calls.names.count("_to_copy") == 2


def test_operators_inside_a_composite_run_without_autocast() -> None:
    """`einsum` casts its inputs once; the bmm inside finds nothing to cast."""
    with on_gpu(BF16) as calls:
        torch.einsum("bij,bjk->bik", meta(2, 3, 5), meta(2, 5, 7))

    assert calls.names.count("_to_copy") == 2


def test_without_autocast_nothing_is_cast() -> None:
    with on_gpu() as calls:
        out = F.linear(meta(3, 5), meta(7, 5))

    assert out.dtype is FP32
    assert "_to_copy" not in calls.names


def test_cpu_tensors_pass_through() -> None:
    """Shadow values and counters live on the CPU; nothing of CUDA happens to them."""
    with on_gpu(), torch.random.fork_rng():
        assert torch.equal(F.softmax(torch.zeros(2), -1), torch.full((2,), 0.5))
        assert F.dropout(torch.ones(4), 0.5, training=False).tolist() == [1, 1, 1, 1]


def test_dropout_is_fused_and_makes_a_mask() -> None:
    with on_gpu() as calls:
        F.dropout(meta(3, 5), 0.1, training=True)

    assert calls.names == ["native_dropout"]


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (1.0, True), (0.1, False)])
def test_dropout_is_not_fused_where_it_keeps_all_or_nothing(p: float, training: bool) -> None:
    with on_gpu() as calls:
        F.dropout(meta(3, 5), p, training=training)

    assert "native_dropout" not in calls.names


def test_a_half_softmax_in_float32_makes_no_copy_of_its_input() -> None:
    with on_gpu() as calls:
        F.softmax(meta(3, 5, dtype=FP16), -1, dtype=FP32)
        F.log_softmax(meta(3, 5, dtype=FP16), -1, dtype=FP32)

    assert calls.made == [("_softmax", FP32), ("_log_softmax", FP32)]


def test_a_bfloat16_softmax_in_float32_copies_its_input() -> None:
    """The shortcut of CUDA is for float16 alone."""
    with on_gpu() as calls:
        F.softmax(meta(3, 5, dtype=BF16), -1, dtype=FP32)

    assert calls.names == ["_to_copy", "_softmax"]


def test_attention_takes_a_kernel_of_the_gpu() -> None:
    query = meta(2, 3, 8, 64, dtype=BF16, grad=True)

    with on_gpu() as calls:
        F.scaled_dot_product_attention(query, query, query, is_causal=True)
    assert len(calls.names) == 1
    assert calls.names[0].startswith("_scaled_dot_product_")

    with Calls() as outside:
        F.scaled_dot_product_attention(query, query, query, is_causal=True)
    assert outside.names != calls.names


def test_transformers_can_switch_autocast_off() -> None:
    """Rotary embeddings are computed in float32 under `maybe_autocast(enabled=False)`."""
    from transformers.utils.generic import maybe_autocast

    with VirtualGpu(H200), torch.autocast("cuda", BF16):
        x, weight = torch.empty(3, 5, device="cuda"), torch.empty(7, 5, device="cuda")
        with maybe_autocast(device_type=x.device.type, enabled=False):
            assert F.linear(x, weight).dtype is FP32
        assert F.linear(x, weight).dtype is BF16


def test_autocast_refuses_the_cross_entropy_of_probabilities_on_the_gpu() -> None:
    """Recorded on an H200: the first line of its message."""
    with VirtualGpu(H200), torch.autocast("cuda", BF16):
        on_host = F.binary_cross_entropy(torch.ones(3), torch.ones(3))
        with pytest.raises(RuntimeError, match="BCELoss are unsafe to autocast"):
            F.binary_cross_entropy(torch.ones(3, device="cuda"), torch.ones(3, device="cuda"))
    assert on_host == 0


def test_checkpointing_recomputes_under_the_same_autocast() -> None:
    """The backward runs outside of autocast, but the recomputation casts as the forward did."""
    with VirtualGpu(H200) as gpu:
        layer = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 5)).cuda()
        x = torch.empty(3, 5, device="cuda", requires_grad=True)
        with torch.autocast("cuda", BF16):
            out = checkpoint(layer, x, use_reentrant=False)
        storages = gpu.mode.memory.storages
        in_forward = len(storages.sites)
        out.float().sum().backward()

        made = range(in_forward, len(storages.sites))
        outputs = [i for i in made if storages.kinds[i] is not MemKind.WORKSPACE]
        ran = [(storages.sites[i].op, storages.num_bytes[i]) for i in outputs]
        recomputed = [(op, n) for op, n in ran if op in ("aten.addmm", "aten.gelu")]
    assert recomputed[:2] == [("aten.addmm", 3 * 7 * 2), ("aten.gelu", 3 * 7 * 2)]


def key_state() -> tuple[bool, bool]:
    key = module._KEY
    return (
        torch._C._dispatch_tls_is_dispatch_key_excluded(key),
        torch._C._dispatch_tls_is_dispatch_key_included(key),
    )


def test_nothing_stays_switched_on() -> None:
    before = key_state()
    with on_gpu(BF16):
        assert key_state() != before

    assert key_state() == before
    with Calls() as calls:
        F.dropout(meta(3, 5), 0.1, training=True)
        assert F.softmax(meta(3, 5, dtype=BF16), -1).dtype is BF16
    assert "native_dropout" not in calls.names
    assert not torch.is_autocast_enabled("cuda")


def test_nothing_stays_switched_on_after_an_error() -> None:
    before = key_state()
    with pytest.raises(RuntimeError), on_gpu(BF16):
        F.linear(meta(3, 5), meta(7, 6))

    assert key_state() == before
    assert not module.INSIDE.autocast
    assert not torch.is_autocast_enabled("cuda")


def test_contexts_nest() -> None:
    with on_gpu(), on_gpu() as calls:
        F.dropout(meta(3, 5), 0.1, training=True)
    assert calls.names == ["native_dropout"]

    with on_gpu() as outer:
        with on_gpu():
            pass
        F.dropout(meta(3, 5), 0.1, training=True)
    assert outer.names == ["native_dropout"]


@pytest.mark.parametrize("key", [torch._C.DispatchKey.Python, module._KEY])
def test_operators_that_call_operators_reach_the_mode_where_torch_has_no_rule(
    monkeypatch: pytest.MonkeyPatch, key: Any
) -> None:
    """torch 2.8 and older refuse them in a mode."""

    class Mode(Calls):
        supports_higher_order_operators = True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            return func, args

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    operator = torch._prims.rng_prims.graphsafe_run_with_rng_state  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "_torch_dispatch", refuse)
    monkeypatch.delattr(TorchDispatchMode, "supports_higher_order_operators", raising=False)
    with Mode():
        found = module._dispatch_higher_order(operator, key, "a")

    assert found == (operator, ("a",))
