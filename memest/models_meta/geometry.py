"""Sizes of a model's layers, if they are a stack of equal transformer layers."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from memest.models_meta.registry import ModelConfig

_MLP_WIDTHS = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "encoder_ffn_dim")
_HIDDEN_DROPOUTS = ("resid_pdrop", "hidden_dropout_prob", "hidden_dropout", "dropout")
_ATTENTION_DROPOUTS = ("attn_pdrop", "attention_probs_dropout_prob", "attention_dropout")
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "activation")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerGeometry:
    """Sizes of one transformer layer, for the textbook formula of its activation bytes. `h` is the
    hidden width, `a` and `k` the numbers of query and key heads, `f` the MLP's inner width."""

    h: int
    a: int
    k: int
    head_dim: int
    f: int
    is_gated: bool  # True if the MLP multiplies two products of its input
    activation: str
    hidden_dropout: float
    attention_dropout: float
    num_written_norms: int  # RMS norms of width h that Python code computes in fp32
    num_weights: int  # elements of the matrices of one layer


def layer_geometry(model: nn.Module, config: ModelConfig) -> LayerGeometry | None:
    """Return the geometry of a stack of equal dense transformer layers; None for other models."""
    pretrained = config.pretrained
    text = getattr(pretrained, "get_text_config", lambda: pretrained)()
    h, a = getattr(text, "hidden_size", None), getattr(text, "num_attention_heads", None)
    is_unsupported = (
        text is not pretrained
        or getattr(pretrained, "is_encoder_decoder", False)
        or any(_first(text, (name,)) for name in _EXPERTS)
        or not (isinstance(h, int) and isinstance(a, int))
        or (config.entry is not None and config.entry.modality != "text")
        or getattr(text, "vocab_size", None) is None
    )
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 1]
    if is_unsupported or not stacks or h is None or a is None:
        return None
    layer = max(stacks, key=len)[0]
    f = _first(text, _MLP_WIDTHS) or 4 * h
    matrices = [tuple(p.shape) for p in layer.parameters() if p.dim() == 2]
    num_wide = sum(sorted(shape) == sorted((h, f)) for shape in matrices)
    return LayerGeometry(
        h=h, a=a, k=_first(text, ("num_key_value_heads",)) or a,
        head_dim=_first(text, ("head_dim",)) or h // a, f=f,
        is_gated=num_wide >= 3 or any(sorted(m) == sorted((h, 2 * f)) for m in matrices),
        activation=str(_first(text, _ACTIVATIONS) or "gelu"),
        hidden_dropout=float(_first(text, _HIDDEN_DROPOUTS) or 0),
        attention_dropout=float(_first(text, _ATTENTION_DROPOUTS) or 0),
        num_written_norms=sum(_is_written_norm(m, h) for m in layer.modules()),
        num_weights=sum(rows * columns for rows, columns in matrices),
    )  # fmt: skip


def _first(config: Any, names: tuple[str, ...]) -> Any:
    return next((value for n in names if (value := getattr(config, n, None))), None)


def _is_written_norm(module: nn.Module, width: int) -> bool:
    """Return whether `module` is an RMS norm over `width` elements that is not torch's own."""
    name = type(module).__name__
    weight = getattr(module, "weight", None)
    is_torch = type(module).__module__.startswith("torch.")
    return name.endswith("RMSNorm") and not is_torch and tuple(weight.shape) == (width,)  # type: ignore[union-attr]
