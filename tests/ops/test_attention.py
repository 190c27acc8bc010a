"""The choice of attention kernel, the operations around it, and what the kernels allocate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from memest.estimator.hardware.gpus import Gpu
from memest.estimator.ops.attention import (
    choose_backend,
    math_attention,
    scaled_dot_product_attention,
)
from memest.estimator.ops.registry import op_of
from memest.estimator.ops.temporaries import Scratch
from memest.estimator.versions import find_release
from tests.op_calls import meta, requested, scratch
from tests.requests_at_peak import scratch_of

aten = torch.ops.aten
bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32


def gpu(major: int, minor: int, num_sms: int = 132) -> Gpu:
    return Gpu(
        name="test",
        label="test",
        memory_bytes=2**34,
        capability=(major, minor),
        num_sms=num_sms,
        memory_gb_s=4800,
        context_bytes=0,
        source="test",
    )


V100, T4, A100, A10G, L4 = gpu(7, 0), gpu(7, 5), gpu(8, 0, 108), gpu(8, 6), gpu(8, 9)
H200, B200, RTX5090 = gpu(9, 0), gpu(10, 0), gpu(12, 0)


def heads(
    B: int, H: int, T: int, E: int, dtype: torch.dtype = bf16, *, requires_grad: bool = True
) -> Tensor:
    return torch.empty(B, H, T, E, dtype=dtype, device="meta", requires_grad=requires_grad)


def qkv(dtype: torch.dtype, E: int, *, L: int = 96, S: int = 96) -> tuple[Tensor, Tensor, Tensor]:
    return heads(2, 4, L, E, dtype), heads(2, 4, S, E, dtype), heads(2, 4, S, E, dtype)


class Operations(TorchDispatchMode):
    """Names of the operations that ran, and the allocator's view of the attention ones."""

    def __init__(self, on: Gpu) -> None:
        super().__init__()
        self.on = on
        self.names: list[str] = []
        self.calls: dict[str, tuple[Any, ...]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.names.append(func._schema.name.removeprefix("aten::"))
        if op_of(func).requests:
            self.calls[self.names[-1]] = (func, args, kwargs or {}, out)
        return out

    def events(self, name: str) -> list[int]:
        func, args, kwargs, out = self.calls[name]
        return [e.num_bytes for e in requested(func, args, kwargs, out, self.on)]


def run(on: Gpu, *tensors: Tensor, backward: bool = True, **options: Any) -> Operations:
    with Operations(on) as operations:
        out = scaled_dot_product_attention(*tensors, gpu=on, **options)
        if backward:
            out.sum().backward()
    return operations


@pytest.mark.parametrize(
    ("on", "dtype", "expected"),
    [
        (V100, fp16, SDPBackend.EFFICIENT_ATTENTION),
        (V100, bf16, SDPBackend.MATH),
        (V100, fp32, SDPBackend.EFFICIENT_ATTENTION),
        (T4, fp16, SDPBackend.EFFICIENT_ATTENTION),
        (T4, bf16, SDPBackend.MATH),
        (A100, bf16, SDPBackend.FLASH_ATTENTION),
        (A100, fp32, SDPBackend.EFFICIENT_ATTENTION),
        (A10G, fp16, SDPBackend.FLASH_ATTENTION),
        (L4, bf16, SDPBackend.FLASH_ATTENTION),
        (H200, bf16, SDPBackend.CUDNN_ATTENTION),
        (H200, fp32, SDPBackend.EFFICIENT_ATTENTION),
        (B200, fp16, SDPBackend.CUDNN_ATTENTION),
        (RTX5090, bf16, SDPBackend.FLASH_ATTENTION),
    ],
)
def test_each_gpu_generation_has_its_own_order(
    on: Gpu, dtype: torch.dtype, expected: SDPBackend
) -> None:
    assert choose_backend(*qkv(dtype, 64), gpu=on) == expected


@pytest.mark.parametrize(
    ("on", "head_dim", "expected"),
    [
        (H200, 256, SDPBackend.CUDNN_ATTENTION),
        (H200, 264, SDPBackend.EFFICIENT_ATTENTION),
        (H200, 100, SDPBackend.FLASH_ATTENTION),
        (B200, 136, SDPBackend.FLASH_ATTENTION),
        (A100, 256, SDPBackend.FLASH_ATTENTION),
        (A10G, 200, SDPBackend.EFFICIENT_ATTENTION),
        (A10G, 256, SDPBackend.FLASH_ATTENTION),
        (RTX5090, 224, SDPBackend.EFFICIENT_ATTENTION),
    ],
)
def test_wide_heads_leave_the_first_choice(on: Gpu, head_dim: int, expected: SDPBackend) -> None:
    assert choose_backend(*qkv(bf16, head_dim), gpu=on) == expected


def test_a_wide_head_of_256_with_dropout_cannot_train_on_small_shared_memory() -> None:
    assert choose_backend(*qkv(bf16, 256), dropout_p=0.1, gpu=L4) == SDPBackend.EFFICIENT_ATTENTION
    with torch.no_grad():
        assert choose_backend(*qkv(bf16, 256), dropout_p=0.1, gpu=L4) == SDPBackend.FLASH_ATTENTION


def test_a_mask_rules_out_flash_and_a_mask_with_gradient_rules_out_cudnn() -> None:
    tensors = qkv(bf16, 64)
    mask = torch.empty(2, 4, 96, 96, dtype=bf16, device="meta")

    assert choose_backend(*tensors, mask, gpu=A100) == SDPBackend.EFFICIENT_ATTENTION
    assert choose_backend(*tensors, mask, gpu=H200) == SDPBackend.CUDNN_ATTENTION
    assert (
        choose_backend(*tensors, mask.requires_grad_(), gpu=H200) == SDPBackend.EFFICIENT_ATTENTION
    )


def test_a_mask_expanded_in_its_last_dimension_leaves_only_math() -> None:
    mask = torch.empty(2, 1, 96, 1, dtype=torch.bool, device="meta").expand(2, 1, 96, 96)

    assert choose_backend(*qkv(bf16, 64), mask, gpu=H200) == SDPBackend.MATH


def test_causal_attention_of_unequal_lengths_is_not_flash() -> None:
    assert (
        choose_backend(*qkv(bf16, 64, S=130), is_causal=True, gpu=A100)
        == SDPBackend.EFFICIENT_ATTENTION
    )


def test_grouped_heads_are_math_in_float32() -> None:
    half = heads(1, 8, 32, 64), heads(1, 2, 32, 64), heads(1, 2, 32, 64)
    full = tuple(t.float() for t in half)

    assert choose_backend(*half, enable_gqa=True, gpu=A100) == SDPBackend.FLASH_ATTENTION
    assert choose_backend(*full, enable_gqa=True, gpu=A100) == SDPBackend.MATH
    assert choose_backend(*half, gpu=A100) == SDPBackend.MATH


def test_a_later_torch_refuses_cudnn_for_dropout_off_the_sixteenths() -> None:
    tensors = qkv(bf16, 64)

    assert choose_backend(*tensors, dropout_p=0.1, gpu=H200) == SDPBackend.CUDNN_ATTENTION
    assert (
        choose_backend(*tensors, dropout_p=0.1, gpu=H200, release=find_release("2.13"))
        == SDPBackend.FLASH_ATTENTION
    )
    assert (
        choose_backend(*tensors, dropout_p=0.125, gpu=H200, release=find_release("2.13"))
        == SDPBackend.CUDNN_ATTENTION
    )


def test_the_users_switch_is_honoured() -> None:
    with sdpa_kernel([SDPBackend.MATH]):
        assert choose_backend(*qkv(bf16, 64), gpu=H200) == SDPBackend.MATH


def test_cudnn_alone_runs_where_it_is_not_preferred() -> None:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        assert choose_backend(*qkv(bf16, 64), gpu=A100) == SDPBackend.CUDNN_ATTENTION


def test_attention_fails_if_no_allowed_backend_takes_the_call() -> None:
    mask = torch.ones(96, 96, dtype=torch.bool, device="meta")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(RuntimeError) as error:
        choose_backend(*qkv(bf16, 64), mask, gpu=A100)

    assert str(error.value) == "No available kernel. Aborting execution."


@pytest.mark.parametrize(
    ("on", "first"),
    [(A100, SDPBackend.EFFICIENT_ATTENTION), (H200, SDPBackend.EFFICIENT_ATTENTION)],
)
def test_the_users_order_goes_before_that_of_the_gpu(on: Gpu, first: SDPBackend) -> None:
    backends = [
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
    ]
    with sdpa_kernel(backends, set_priority=True):
        assert choose_backend(*qkv(bf16, 64), gpu=on) == first


def test_the_order_of_torch_2_6_ends_with_a_second_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_get_sdp_priority_order", lambda: [1, 2, 0, 3, 0], raising=False)

    assert choose_backend(*qkv(bf16, 64), gpu=H200) == SDPBackend.CUDNN_ATTENTION


def test_flash_pads_odd_heads_and_slices_the_padding_off() -> None:
    operations = run(H200, *qkv(bf16, 100))

    assert operations.names[:4] == ["constant_pad_nd"] * 3 + ["_scaled_dot_product_flash_attention"]
    assert "slice_backward" in operations.names


def test_a_boolean_mask_becomes_an_aligned_additive_one_for_the_efficient_kernel() -> None:
    mask = torch.empty(2, 1, 96, 130, dtype=torch.bool, device="meta")

    operations = run(H200, *qkv(fp32, 64, S=130), attn_mask=mask)

    assert operations.names[:6] == [
        "scalar_tensor",
        "scalar_tensor",
        "where",
        "constant_pad_nd",
        "slice",
        "expand",
    ]


def test_the_math_path_runs_the_operations_of_torchs_own_but_adds_the_mask_in_place() -> None:
    """torch's composite adds out of place whenever a dispatch mode looks on."""
    mask = torch.empty(2, 4, 96, 130, dtype=bf16, device="meta")
    tensors, others = qkv(bf16, 100, S=130), qkv(bf16, 100, S=130)

    with Operations(H200) as ours:
        out = math_attention(*tensors, mask, 0.0, False, scale=None, enable_gqa=False)
        out.sum().backward()
    with Operations(H200) as torchs:
        out = aten._scaled_dot_product_attention_math.default(*others, mask)[0]
        out.sum().backward()

    assert [n.replace("add_", "add") for n in ours.names] == torchs.names
    assert "add_" in ours.names


def test_flash_splits_the_keys_of_a_small_batch_over_the_gpu() -> None:
    """8 query blocks of 64 leave 264 slots idle: two key blocks of 128, two float32 outputs."""
    B, H, L, S, E = 2, 4, 96, 130, 104
    out, lse = B * H * L * E * 2, B * H * L * 4
    lse_accumulator, out_accumulator = 2 * lse, 2 * B * H * L * 128 * 4

    operations = run(H200, heads(B, H, L, 100), heads(B, H, S, 100), heads(B, H, S, 100))

    assert operations.events("_scaled_dot_product_flash_attention") == [
        out, lse, lse_accumulator, out_accumulator, 16, 8, -lse_accumulator, -out_accumulator,
    ]  # fmt: skip
    assert E % 8 == 0


def test_flash_with_dropout_never_splits_and_renews_its_random_state() -> None:
    operations = run(A100, *qkv(bf16, 64, S=4096), dropout_p=0.1)

    out, lse = 2 * 4 * 96 * 64 * 2, 2 * 4 * 96 * 4
    assert operations.events("_scaled_dot_product_flash_attention") == [out, lse, 16, 8, 16, -16]


def test_flash_backward_of_grouped_heads_holds_expanded_gradients() -> None:
    B, H, K, L, E = 2, 8, 2, 200, 64
    q = B * H * L * E * 2
    kv = B * K * L * E * 2
    sums, accumulated = B * H * 256 * 4, B * H * 256 * E * 4

    operations = run(A100, heads(B, H, L, E), heads(B, K, L, E), heads(B, K, L, E), enable_gqa=True)

    assert operations.events("_scaled_dot_product_flash_attention_backward") == [
        q, q, q, kv, kv, sums, accumulated, q, q, -q, -q, -accumulated, -sums, -q, -q,
    ]  # fmt: skip


def test_packed_texts_have_a_logsumexp_per_token_and_blocks_between_them_in_the_backward() -> None:
    """`varlen_attn`: three texts of 300 tokens, grouped heads."""
    tokens, H, K, E = 300, 8, 2, 64
    q, kv, lse = tokens * H * E * 2, tokens * K * E * 2, tokens * H * 4
    rows = H * (tokens + 3 * 128)
    made = {"dtype": bf16, "device": "meta"}
    query, key = torch.empty(tokens, H, E, **made), torch.empty(tokens, K, E, **made)
    starts = torch.empty(4, dtype=torch.int32, device="meta")
    lengths = starts, starts, 150, 150, 0.0

    with Operations(A100) as operations:
        out, sums, state, unused, _ = torch.ops.aten._flash_attention_forward(
            query, key, key, *lengths, True, False
        )
        torch.ops.aten._flash_attention_backward(
            query, query, key, key, out, sums, *lengths, True, state, unused
        )

    assert operations.events("_flash_attention_forward") == [q, lse, 16, 8]
    assert operations.events("_flash_attention_backward") == [
        q, kv, kv, rows * 4, rows * E * 4, q, q, -q, -q, -rows * E * 4, -rows * 4,
    ]  # fmt: skip


def test_efficient_backward_in_float32_frees_the_product_before_its_workspace() -> None:
    """Two tiles of 64 x 64 for 96 queries, four more floats for a lock, per batch and head."""
    B, H, L, S, E = 2, 4, 96, 130, 64
    q, kv, sums = B * H * L * E * 4, B * H * S * E * 4, B * H * L * 4
    workspace = B * H * 2 * (4 + 64 * 64) * 4

    operations = run(H200, *qkv(fp32, E, S=S))

    name = "_scaled_dot_product_efficient_attention_backward"
    assert operations.events(name) == [
        q, q, kv, kv, q, sums, sums, -sums, -q, workspace, -sums, -workspace, -q,
    ]  # fmt: skip
    func, args, kwargs, out = operations.calls[name]
    events = requested(func, args, kwargs, out, H200)
    assert scratch_of(events) == Scratch(before=(q,), after=(sums, workspace))


@pytest.mark.parametrize(
    ("on", "dtype", "floats"),
    [
        (H200, bf16, 1 * (4 + 128 * 128)),
        (A100, fp16, 1 * (4 + 128 * 128)),
        # 64 x 64 tiles: 2 x 2 for the queries, and keys and values of 3 tiles staged in float32.
        (L4, bf16, 4 * (4 + 64 * 64) + 3 * 64 * (128 + 128)),
        (A100, fp32, 1 * 2 * (4 + 128 * 64)),
        (L4, fp32, 2 * 2 * (4 + 64 * 64)),
        (T4, fp16, 1 * 2 * (4 + 128 * 64)),
        (T4, fp32, 2 * 2 * (4 + 64 * 64)),
    ],
)
def test_the_efficient_workspace_follows_the_tile_that_fits_the_shared_memory(
    on: Gpu, dtype: torch.dtype, floats: int
) -> None:
    mask = torch.empty(2, 4, 96, 136, dtype=dtype, device="meta", requires_grad=True)

    operations = run(on, *qkv(dtype, 128, S=136), attn_mask=mask)

    events = operations.events("_scaled_dot_product_efficient_attention_backward")
    assert 2 * 4 * floats * 4 in events


def test_a_trained_bias_has_a_gradient_with_rows_padded_to_16() -> None:
    mask = torch.empty(2, 4, 96, 130, dtype=bf16, device="meta", requires_grad=True)

    operations = run(H200, *qkv(bf16, 64, S=130), attn_mask=mask)

    events = operations.events("_scaled_dot_product_efficient_attention_backward")
    assert events[4] == 2 * 4 * 96 * 144 * 2


def test_without_gradient_there_is_no_logsumexp() -> None:
    with torch.no_grad():
        efficient = run(A100, *qkv(fp32, 64), backward=False)
        cudnn = run(H200, *qkv(bf16, 64), backward=False)

    assert efficient.events("_scaled_dot_product_efficient_attention") == [2 * 4 * 96 * 64 * 4]
    out = 2 * 4 * 96 * 64 * 2
    assert cudnn.events("_scaled_dot_product_cudnn_attention") == [8, 8, out, 256, -256]
    func, args, kwargs, result = cudnn.calls["_scaled_dot_product_cudnn_attention"]
    events = requested(func, args, kwargs, result, H200)
    assert [(e.output, e.num_bytes) for e in events if e.output is not None] == [
        (6, 8), (7, 8), (0, out),
    ]  # fmt: skip


def test_cudnn_backward_accumulates_the_query_gradient_in_float32() -> None:
    """Grouped heads add key and value gradients of all 32 query heads."""
    B, H, K, L, E = 1, 32, 4, 512, 64
    q, kv = B * H * L * E * 2, B * K * L * E * 2
    workspace = B * H * L * E * 4 + B * H * L * 4 + 2 * q + 256

    operations = run(H200, heads(B, H, L, E), heads(B, K, L, E), heads(B, K, L, E), enable_gqa=True)

    assert workspace == 8_454_400
    assert operations.events("_scaled_dot_product_cudnn_attention_backward") == [
        q, kv, kv, q, workspace, -workspace, -q,
    ]  # fmt: skip


def test_cudnn_on_another_generation_is_reported_as_not_modelled() -> None:
    op = op_of(torch.ops.aten._scaled_dot_product_cudnn_attention.default)

    assert op.is_modelled((), {}, H200)
    assert not op.is_modelled((), {}, B200)


def test_safe_softmax_allocates_a_boolean_per_score_and_per_row() -> None:
    operations = run(V100, *qkv(bf16, 64, S=130), backward=False)

    scores, rows = 2 * 4 * 96 * 130, 2 * 4 * 96
    assert operations.events("_safe_softmax") == [
        4 * scores, scores, rows, 4, -4, -rows, -scores,
    ]  # fmt: skip


def test_safe_softmax_marks_entries_and_rows() -> None:
    """One boolean per entry, one per row of 11, one zero."""
    found = scratch(aten._safe_softmax.default, meta(3, 5, 7, 11), -1)

    assert found == Scratch(after=(3 * 5 * 7 * 11, 3 * 5 * 7, 4))
