"""FlashAttention 2 without its package: what its kernels allocate, and what stands in for it."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import memest.models_meta.flash_attention as fa
from memest.errors import PlanError, UnsupportedError
from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.predict import predict
from memest.estimator.replay.reuse import with_value
from memest.estimator.replay.simulated_plan import trace_plan
from memest.estimator.search.related_plans import TraceSeries
from memest.estimator.tensors.storages import MemKind
from memest.estimator.virtual_gpu import VirtualGpu
from memest.models_meta.build import build_model
from memest.models_meta.registry import resolve_config
from memest.plan import TrainingPlan
from memest.report import Prediction
from memest.validate.experiment import Device
from memest.validate.runner import validate
from tests.sim import SimGpu

# Shapes: B batch, L query tokens, S key tokens, H query heads, K key heads, E head width, N tokens
# of all rows without padding. L rounds up to 256, E to 64.
B, L, S, H, K, E = 2, 130, 130, 6, 3, 40
SIZES = B * L * H * E * 2, B * S * K * E * 2
bf16 = torch.bfloat16


def recorder(gpu: str = "h200") -> SimGpu:
    return SimGpu(gpu)


def tensor(*shape: int, dtype: torch.dtype = bf16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)


def births(log: SimGpu) -> list[int]:
    """Bytes of the storages of the last events, in the order of their birth."""
    return [log.storages.num_bytes[e] for e in log.take_events() if e >= 0]


def forward_and_backward(
    query: Tensor, key: Tensor, value: Tensor, gpu: str = "h200", **options: Any
) -> tuple[list[int], list[int]]:
    """Bytes asked for by attention and by its backward, whose gradient is made outside."""
    log = recorder(gpu)
    with log:
        out = fa.flash_attn_func(query, key, value, **options)
    forward = births(log)
    grad = torch.empty_like(out)
    with log:
        out.backward(grad)
    return forward, births(log)


def test_the_forward_keeps_output_logsumexp_and_a_random_state() -> None:
    forward, _ = forward_and_backward(
        tensor(B, L, H, E), tensor(B, S, H, E), tensor(B, S, H, E), dropout_p=0.1
    )

    assert forward == [B * L * H * E * 2, B * H * L * 4, 16]


def test_the_backward_adds_float32_query_gradients_in_blocks_of_128_rows() -> None:
    q, k, v = tensor(B, L, H, E), tensor(B, S, H, E), tensor(B, S, H, E)

    _, backward = forward_and_backward(q, k, v, dropout_p=0.1)

    assert backward == [*[SIZES[0]] * 3, B * H * 256 * 4, B * 256 * H * 64 * 4]


def test_grouped_heads_get_gradients_of_all_query_heads_first() -> None:
    q, k, v = tensor(B, L, H, E), tensor(B, S, K, E), tensor(B, S, K, E)

    _, backward = forward_and_backward(q, k, v, dropout_p=0.1)

    of_all = B * S * H * E * 2
    assert backward == [
        SIZES[0], SIZES[1], SIZES[1], B * H * 256 * 4, B * 256 * H * 64 * 4, of_all, of_all,
    ]  # fmt: skip


def test_a_deterministic_backward_has_one_query_gradient_per_round_of_multiprocessors() -> None:
    q, k, v = tensor(B, L, H, E), tensor(B, S, H, E), tensor(B, S, H, E)

    _, backward = forward_and_backward(q, k, v, gpu="a100", dropout_p=0.1, deterministic=True)

    assert backward[-1] == 9 * B * 256 * H * 64 * 4  # 108 multiprocessors over 2 * 6 heads


@pytest.mark.parametrize("is_row", [False, True])
def test_packed_tensors_get_one_gradient(is_row: bool) -> None:
    """Query, key and value of one tensor, or of one row of texts, as SEDD and k-diffusion call."""
    begins = torch.empty(B + 1, dtype=torch.int32, device="meta")
    shape = (B * L, 3, H, E) if is_row else (B, L, 3, H, E)
    qkv, log = tensor(*shape), recorder()
    with log:
        if is_row:
            out = fa.flash_attn_varlen_qkvpacked_func(qkv, begins, L, 0.1)
        else:
            out = fa.flash_attn_qkvpacked_func(qkv, 0.1)
    forward, grad = births(log), torch.empty_like(out)
    with log:
        out.backward(grad)

    assert forward == [SIZES[0], B * H * L * 4, 16]
    assert births(log)[0] == 3 * SIZES[0]
    assert qkv.grad is not None
    assert qkv.grad.untyped_storage().nbytes() == 3 * SIZES[0]


def test_packed_keys_and_values_get_one_gradient_beside_the_query() -> None:
    query, pair, log = tensor(B, L, H, E), tensor(B, S, 2, H, E), recorder()
    with log:
        out = fa.flash_attn_kvpacked_func(query, pair)
    births(log)
    grad = torch.empty_like(out)
    with log:
        out.backward(grad)

    assert births(log)[:2] == [2 * SIZES[0], SIZES[0]]
    assert query.grad is not None
    assert query.grad.shape == query.shape


def test_an_odd_width_is_padded_to_a_multiple_of_8_and_the_copies_are_kept() -> None:
    q, k, v = tensor(B, L, H, 20), tensor(B, S, H, 20), tensor(B, S, H, 20)
    log = recorder()

    with log:
        out = fa.flash_attn_func(q, k, v, dropout_p=0.1)
    events = log.take_events()

    padded = B * L * H * 24 * 2
    sizes = [log.storages.num_bytes[e] for e in events if e >= 0]
    assert sizes == [*[padded] * 4, B * H * L * 4, 16]
    assert [e for e in events if e < 0] == []
    assert out.shape == (B, L, H, 20)


def test_nothing_is_kept_where_no_gradient_is_wanted() -> None:
    q, k, v = (tensor(B, L, H, E).detach() for _ in range(3))
    log = recorder()

    with log:
        out = fa.flash_attn_func(q, k, v, dropout_p=0.1)
    sizes = [log.storages.num_bytes[~e] for e in log.take_events() if e < 0]

    assert sorted(sizes) == sorted([B * H * L * 4, 16])
    assert out.grad_fn is None


def test_keys_are_split_where_the_queries_do_not_fill_the_gpu() -> None:
    """4 blocks of queries, 8 of keys: 8 splits use 32 of 264 slots, and 4 only 16 of them."""
    q, k, v = tensor(1, 128, 2, 64), tensor(1, 2048, 2, 64), tensor(1, 2048, 2, 64)

    split, _ = forward_and_backward(q, k, v)
    whole, _ = forward_and_backward(q, k, v, dropout_p=0.1)

    rows = 8 * 2 * 128
    assert split == [128 * 2 * 64 * 2, 2 * 128 * 4, rows * 4, rows * 64 * 4, 16]
    assert whole == [128 * 2 * 64 * 2, 2 * 128 * 4, 16]


def test_a_lone_query_token_takes_its_group_of_heads_for_queries() -> None:
    """3 key heads, 1 block of 2 queries each: 8 blocks of keys make 8 splits."""
    q, k, v = tensor(1, 1, 6, 64), tensor(1, 2048, 3, 64), tensor(1, 2048, 3, 64)

    swapped, _ = forward_and_backward(q, k, v, causal=True)

    rows = 8 * 3 * 2
    assert swapped[2:4] == [rows * 4, rows * 64 * 4]


def test_a_strided_width_is_copied_while_the_kernel_runs() -> None:
    q = tensor(B, L, E, H).transpose(2, 3)
    k, v = tensor(B, S, H, E), tensor(B, S, H, E)

    forward, _ = forward_and_backward(q, k, v, dropout_p=0.1)

    assert forward == [SIZES[0], SIZES[0], B * H * L * 4, 16]


def test_texts_of_unlike_length_are_one_row_with_128_rows_between_them() -> None:
    N = 5 + 9
    q, k, v = tensor(N, H, E), tensor(N, H, E), tensor(N, H, E)
    begins = torch.empty(3, dtype=torch.int32, device="meta")
    log = recorder()

    with log:
        out = fa.flash_attn_varlen_func(q, k, v, begins, begins, 9, 9, causal=True)
    forward = births(log)
    grad = torch.empty_like(out)
    with log:
        out.backward(grad)

    size = N * H * E * 2
    rows = H * (N + 2 * 128)
    assert forward == [size, H * N * 4, 16]
    assert births(log) == [size, size, size, rows * 4, rows * 64 * 4]


def test_temporaries_are_workspace_and_end_with_the_kernel() -> None:
    q, k, v = tensor(B, L, H, E), tensor(B, S, K, E), tensor(B, S, K, E)
    log = recorder()
    with log:
        out = fa.flash_attn_func(q, k, v)
    grad = torch.empty_like(out)
    log.take_events()

    with log:
        out.backward(grad)
    events = log.take_events()

    workspace = [e for e in events if e >= 0 and log.storages.kinds[e] is MemKind.WORKSPACE]
    assert len(workspace) == 3
    assert all(~e in events for e in workspace)


def test_padding_is_taken_out_and_put_back() -> None:
    with VirtualGpu(find_gpu("h200")):
        mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]]).cuda()
        states = torch.empty(2, 4, H, E, dtype=bf16, device="cuda", requires_grad=True)
        rows, indices, begins, longest, _ = fa.unpad_input(states, mask)
        back = fa.pad_input(rows, indices, 2, 4)
        back.sum().backward()

    assert rows.shape == (5, H, E)
    assert (longest, begins.shape) == (4, (3,))
    assert back.shape == (2, 4, H, E)


# --- where it stands ------------------------------------------------------------------------------

FLASH = "flash_attention_2"


def plan(model_name: str | Path, **values: Any) -> TrainingPlan:
    defaults: dict[str, Any] = {"batch_size": 2, "seq_len": 16, "precision": "bf16-true"}
    return TrainingPlan(
        model_name=str(model_name), attn_implementation=FLASH, **{**defaults, **values}
    )


def tiny(folder: Path, **values: Any) -> Path:
    """The config of a small decoder."""
    fields: dict[str, Any] = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 96,
        "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 6,
        "num_key_value_heads": 3, "vocab_size": 199, "max_position_embeddings": 512,
    }  # fmt: skip
    path = folder / "config.json"
    path.write_text(json.dumps({**fields, **values}))
    return path


def predicted(folder: Path, config: dict[str, Any] | None = None, **values: Any) -> Prediction:
    return predict(plan(tiny(folder, **(config or {})), **values))


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed", "16-mixed"])
def test_a_decoder_is_predicted_with_nothing_unmodelled(
    tmp_path: Path, precision: str, padded: bool
) -> None:
    report = predicted(tmp_path, precision=precision, padded=padded)

    assert report.coverage["unmodelled"] == {}


def test_a_sliding_window_and_checkpointing_change_no_kernel(tmp_path: Path) -> None:
    mistral = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    wide = predicted(tmp_path, {**mistral, "sliding_window": None}, seq_len=64, act_ckpt=True)
    narrow = predicted(tmp_path, {**mistral, "sliding_window": 8}, seq_len=64, act_ckpt=True)

    assert wide.peak_allocated_bytes == narrow.peak_allocated_bytes


def test_the_stand_in_leaves_nothing_behind(tmp_path: Path) -> None:
    from transformers import modeling_flash_attention_utils as utils

    def state() -> list[Any]:
        names = ("_loaded_implementation", "_flash_fn", "_lazy_imports", "_process_flash_kwargs_fn")
        check = utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2]["general_availability_check"]
        return [check, torch.is_autocast_enabled, *(getattr(utils, name) for name in names)]

    before, modules = state(), "flash_attn" in sys.modules

    predicted(tmp_path)

    assert state() == before
    assert ("flash_attn" in sys.modules) is modules


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="it is installed")
def test_a_real_model_without_the_package_says_what_is_missing(tmp_path: Path) -> None:
    config = resolve_config(str(tiny(tmp_path)))

    with pytest.raises(UnsupportedError, match="FlashAttention2 doesn't seem to be installed") as e:
        build_model(config, dtype=bf16, attn_implementation=FLASH)
    assert "leave `attn_implementation` out" in e.value.hint


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="it is installed")
def test_a_measurement_without_the_package_is_refused_before_it_starts(tmp_path: Path) -> None:
    device = Device(name="x", memory_bytes=1, capability=(9, 0), num_sms=132, driver="")

    with pytest.raises(UnsupportedError, match="needs the package `flash_attn`") as e:
        validate([plan("gpt2")], results=tmp_path / "r.jsonl", device=device)
    assert e.value.hint == "pip install flash-attn --no-build-isolation"


def test_a_quantised_base_in_fp32_casts_queries_to_the_dtype_of_its_config(tmp_path: Path) -> None:
    report = predicted(tmp_path, use_qlora=True, precision="32-true")

    assert report.coverage["unmodelled"] == {}


def test_families_that_import_it_only_with_the_package_find_it(tmp_path: Path) -> None:
    falcon = {
        "model_type": "falcon", "architectures": ["FalconForCausalLM"], "alibi": False,
        "new_decoder_architecture": False,
    }  # fmt: skip

    assert predicted(tmp_path, falcon).coverage["unmodelled"] == {}
    from transformers.models.falcon import modeling_falcon

    installed = importlib.util.find_spec("flash_attn") is not None
    assert hasattr(modeling_falcon, "_flash_attention_forward") is installed


@pytest.mark.parametrize("name", ["bert-base-uncased", "vit-base-patch16-224", "gemma-3-4b-it"])
def test_encoders_image_models_and_mixed_ones_take_it_too(
    name: str, shallow: Callable[..., str]
) -> None:
    """Each sixth layer of Gemma 3 has no sliding window."""
    layers, seq_len = (6, 300) if name.startswith("gemma") else (2, 16)
    traced = trace_plan(plan(shallow(name, layers), seq_len=seq_len), find_gpu("h200"))

    ran = {site.op for site in traced.program.storages.sites}
    assert {"memest.flash_attention_forward", "memest.flash_attention_backward"} <= ran
    assert not any("scaled_dot_product" in op for op in ran)


def test_fp32_is_refused_as_the_kernels_do() -> None:
    q = tensor(B, L, H, E, dtype=torch.float32)
    with pytest.raises(PlanError, match=re.escape("a layer of the model gives it `float32`")):
        fa.flash_attn_func(q, q, q)
    half = tensor(B, L, H, E)
    with pytest.raises(PlanError, match=re.escape("gives it `bfloat16` and `float32`")):
        fa.flash_attn_func(half, q, half)


def test_wide_heads_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=re.escape("heads of up to 256, and the model's are 264")):
        predicted(tmp_path, {"head_dim": 264})


def test_a_class_without_it_is_refused() -> None:
    with pytest.raises(PlanError, match=re.escape("`T5ForConditionalGeneration` has no `flash_")):
        predict(plan("t5-small"))


def test_old_gpus_are_refused() -> None:
    with pytest.raises(PlanError, match=re.escape("8.0 (Ampere) or newer, not 7.0")):
        predict(plan("gpt2", gpu=("v100-16gb",)))


def test_a_cache_and_capped_scores_with_dropout_are_refused() -> None:
    q = tensor(B, L, H, E)
    with pytest.raises(UnsupportedError, match="generation"):
        fa.flash_attn_with_kvcache(q)
    with pytest.raises(PlanError, match="caps scores or drops them"):
        fa.flash_attn_func(q, q, q, dropout_p=0.1, softcap=30.0)
    with pytest.raises(PlanError, match="whole groups, not 6 over 4"):
        fa.flash_attn_func(q, tensor(B, S, 4, E), tensor(B, S, 4, E))


@pytest.mark.parametrize("key", ["batch_size", "seq_len"])
def test_other_sizes_are_derived_from_traces_as_they_are_traced(tmp_path: Path, key: str) -> None:
    """Past the split of keys, and with the tokens of padded rows as the batch has them."""
    small, card = plan(tiny(tmp_path)), find_gpu("h200")
    sizes = range(2, 41) if key == "batch_size" else range(64, 513, 64)
    series = TraceSeries(small, card, key)
    series.cover(sizes)

    for size in (sizes[0], sizes[3], sizes[-1]):
        assert series.at(size) == trace_plan(with_value(small, key, size), card), size
    assert series.num_traces < len(sizes)
