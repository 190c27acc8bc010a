"""Fused inference of `nn.TransformerEncoder` and `nn.MultiheadAttention` on CUDA.

Without gradients, in evaluation, torch.nn calls one operator for a whole layer. With a padding mask
it packs the valid rows into a nested tensor. Here the same steps run one by one on a tensor of the
valid rows, or of all rows if the mask is not known.

Sources (torch 2.11): ATen/native/transformers/transformer.cpp, cuda/attention.cu,
ATen/native/nested/NestedTensorMath.cpp. Evidence: recordings on an H100, event by event.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from memest.estimator.ops import registry
from memest.estimator.ops.registry import INDEX_BYTES
from memest.estimator.ops.sim_mode import SimMode
from memest.estimator.tensors.patches import Patches
from memest.estimator.tensors.placement import CPU, on_gpu


class Packed(Tensor):
    """Stub of a nested tensor: rows without padding. `padded_shape` is (batch, steps, width)."""

    padded_shape: torch.Size
    is_nested = True
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def to_padded_tensor(self, padding: float, output_size: Any = None) -> Tensor:
        """Return an empty tensor of `padded_shape`. On the GPU a table of sizes (3 int32 for each
        sequence, and one more) is allocated and freed. `padding` and `output_size` are not used."""
        result = torch.empty(self.padded_shape, dtype=self.dtype, device="cuda")
        _allocate_and_free(4 * (3 * self.padded_shape[0] + 1))
        return result


def install(patches: Patches, mode: SimMode) -> None:
    """Replace the functions of torch.nn's fast path for encoders by those of this file. They read
    the known values of padding masks from `mode`."""

    def lengths(mask: Tensor) -> list[int] | None:
        """Return the lengths of the rows of `mask`; None if unknown, [] if one has a gap."""
        mask_values = mode.values.value_of(mask)
        if mask_values is None:
            return None
        with _disable_current_modes():
            row_lengths = mask_values.sum(1)
            is_leading = torch.arange(mask_values.shape[1], device=CPU)[None] < row_lengths[:, None]
            return row_lengths.tolist() if bool((is_leading == mask_values).all()) else []

    def is_left_aligned(tensor: Tensor, mask: Tensor) -> bool:
        sizes = _sizes_of(mask)
        _allocate_and_free(INDEX_BYTES, 1)
        del sizes
        return lengths(mask) != []

    def packed(tensor: Tensor, mask: Tensor, mask_check: bool = True) -> Tensor:
        batch, steps, width = tensor.shape
        row_lengths = lengths(mask)
        num_rows = sum(row_lengths) if row_lengths else batch * steps
        expanded, column, positions = _sizes_of(mask)
        row_sizes = _bytes(INDEX_BYTES * batch)
        _allocate_and_free(2 * INDEX_BYTES * batch)
        del expanded
        result = _as_packed(tensor.new_empty((1, num_rows, width)), tensor.shape)
        _allocate_and_free(14 * batch, 28 * batch)
        del row_sizes, positions, column
        return result

    _follow_masks(patches, mode)
    for name, replacement in (
        ("_transformer_encoder_layer_fwd", _run_layer),
        ("_native_multi_head_attention", _run_attention),
        ("_nested_tensor_from_mask_left_aligned", is_left_aligned),
        ("_nested_tensor_from_mask", packed),
    ):
        patches.set(torch, name, _where_on_gpu(getattr(torch, name), replacement))


def _follow_masks(patches: Patches, mode: SimMode) -> None:
    """Make torch.nn keep known values when it converts a padding mask to a float mask."""
    canonical = F._canonical_mask

    # Dynamo guards on the defaults of the original, so the replacement has them too
    def canonical_mask(
        mask: Any, mask_name: Any, other_type: Any, other_name: Any, target_type: Any,
        check_other: bool = True,
    ) -> Tensor | None:  # fmt: skip
        result: Tensor | None = canonical(
            mask, mask_name, other_type, other_name, target_type, check_other
        )
        if mask is not None and result is not None and result is not mask and on_gpu(result):
            mask_values = mode.values.value_of(mask)
            if mask_values is not None and mask_values.dtype is torch.bool:
                with _disable_current_modes():
                    zeros = torch.zeros(mask_values.shape, dtype=result.dtype, device=CPU)
                    mode.values.adopt(result, zeros.masked_fill(mask_values, float("-inf")))
        return result

    patches.set(F, "_canonical_mask", canonical_mask)


def _where_on_gpu(original: Any, replacement: Any) -> Any:
    def call(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not on_gpu(x):
            return original(x, *args, **kwargs)
        # below autograd no operand requires a gradient, which `should_fold` of matmul checks
        operands = [a.detach() if isinstance(a, torch.nn.Parameter) else a for a in args]
        return replacement(x, *operands, **kwargs)

    return call


def _as_packed(rows: Tensor, shape: torch.Size) -> Packed:
    packed = rows.as_subclass(Packed)
    packed.padded_shape = shape
    return packed


def _bytes(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device="cuda")


def _allocate_and_free(*sizes: int) -> None:
    """Allocate temporaries of `sizes` bytes in order, then free them in reverse order."""
    buffers = [_bytes(n) for n in sizes]
    while buffers:
        buffers.pop()


def _sizes_of(mask: Tensor) -> tuple[Tensor, ...]:
    """Allocate what CUDA needs to find the first masked position in each row of `mask`. The kernel
    appends a column to the mask, casts the result to int32, and searches each row. Then it makes
    two int64 tensors of the mask's size, and frees the second. Return the tensors that stay
    allocated: (int64 tensor of the mask's size, appended column, position found in each row)."""
    batch, steps = mask.shape
    column = _bytes(batch)
    wider_mask = _bytes(batch * (steps + 1))
    cast = _bytes(batch * (steps + 1) * 4)
    positions = _bytes(batch * INDEX_BYTES)
    del cast
    del wider_mask
    expanded = _bytes(batch * steps * INDEX_BYTES)
    _allocate_and_free(batch * steps * INDEX_BYTES)
    return expanded, column, positions


def _run_attention(
    query: Tensor, key: Tensor, value: Tensor, embed_dim: int, num_heads: int, qkv_weight: Tensor,
    qkv_bias: Tensor, proj_weight: Tensor, proj_bias: Tensor, mask: Tensor | None = None,
    need_weights: bool = True, average_attn_weights: bool = True, mask_type: int | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Run `native_multi_head_attention_cuda`; return (output, attention weights). The weights are
    None without `need_weights` and for a `Packed` query. Queries, keys and values are all computed
    from `query`. So `key`, `value`, `embed_dim` and `mask_type` are not used."""
    x = query.as_subclass(Tensor) if isinstance(query, Packed) else query
    batch, steps, width = x.shape
    head = width // num_heads
    weights, qkv = None, []  # `qkv` lives until the projection
    if isinstance(query, Packed):
        qkv.append(F.linear(x, qkv_weight, qkv_bias))
        lengths = [_bytes(4 * (query.padded_shape[0] + 1)) for _ in range(2)]
        context = x.new_empty(x.shape)
        del lengths
    elif mask is None and not need_weights:
        qkv.append(F.linear(x, qkv_weight, qkv_bias))
        q, k, v = (p.view(batch, -1, num_heads, head).transpose(1, 2) for p in qkv[0].chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v)
        del q, k, v
        context = attended.transpose(1, 2).reshape(batch, -1, width)
        del attended
    else:
        products = F.linear(x, qkv_weight)
        qkv += x.new_empty((3, batch, num_heads, steps, head)).unbind()
        del products
        q, k, v = (part.reshape(-1, steps, head) for part in qkv)
        scores = q @ k.transpose(1, 2)
        mask_copy = None if mask is None else _bytes(mask.numel())
        weights = scores if mask is None else torch.empty_like(scores)
        del scores, mask_copy
        torch.bmm(weights, v, out=q)
        weights = weights if need_weights else None
        context = x.new_empty((batch, steps, width))
    out = F.linear(context, proj_weight, proj_bias)
    if weights is not None:
        weights = weights.view(batch, num_heads, steps, -1)
        weights = weights.mean(1) if average_attn_weights else weights
    return (_as_packed(out, query.padded_shape) if isinstance(query, Packed) else out), weights


def _run_layer(src: Tensor, *args: Any) -> Tensor:
    """Run torch's C++ encoder layer on meta tensors; its attention is `_run_attention`. `args` are
    the arguments of `_transformer_encoder_layer_fwd` after `src`."""
    cpu = torch._C.DispatchKey.CPU
    out: Tensor = torch.ops.aten._transformer_encoder_layer_fwd.default._op_dk(cpu, src, *args)
    return _as_packed(out, src.padded_shape) if isinstance(src, Packed) else out


registry.register("_native_multi_head_attention", decomposition=_run_attention)
registry.register("_transformer_encoder_layer_fwd", decomposition=_run_layer)
