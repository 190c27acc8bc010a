"""Which layers of a model bitsandbytes quantises, and how what is left is prepared for training.

The layers themselves are bitsandbytes' own, see `memest.loops.quantize`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from memest.errors import PlanError

THRESHOLD = 6.0
"""`llm_int8_threshold`, the default of transformers' `BitsAndBytesConfig`."""

ASSUMPTION = (
    f"LLM.int8: no activation reaches {THRESHOLD}, so no column is kept in 16 bit; those of trained"
    " checkpoints do, and so can products of a gated MLP with random weights, which costs their"
    " columns of input and weight in 16 bit"
)


def layers_to_quantize(model: nn.Module, skip: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """Names and layers, all at once: a loop over `list(model.named_modules())` holds the originals
    to its end, and so does a loop over this.

    Args:
        model: in the dtype in which its weights are loaded.
        skip: patterns of names of modules to leave alone.

    Raises:
        PlanError: there are none.
    """
    names = convertible_names(model, skip)
    if not names:
        own = {type(m).__name__ for m in model.modules() if isinstance(m, nn.Linear)} - {"Linear"}
        why = (
            f"transformers converts no {', '.join(f'`{c}`' for c in sorted(own))}; " if own else ""
        )
        raise PlanError(
            f"`{type(model).__name__}` has no linear layer to quantise",
            hint=f"{why}left alone by name: {', '.join(f'`{p}`' for p in skip) or 'none'}",
        )
    return [(name, model.get_submodule(name)) for name in names]


def convertible_names(model: nn.Module, skip: Sequence[str]) -> list[str]:
    """The names of the layers that `replace_with_bnb_linear` of transformers would convert."""
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.quantizers_utils import should_convert_module

    return [
        name
        for name, module in model.named_modules()
        if (type(module) is nn.Linear or isinstance(module, Conv1D))
        and should_convert_module(name, list(skip))
    ]


def prepare_for_kbit_training(model: nn.Module, *, use_gradient_checkpointing: bool) -> nn.Module:
    """`peft.prepare_model_for_kbit_training`: all frozen, what is not quantised in fp32.

    With checkpointing it also makes the embeddings' output require a gradient, and turns
    checkpointing on (reentrant, the default of transformers).
    """
    from peft import prepare_model_for_kbit_training

    return prepare_model_for_kbit_training(  # type: ignore[no-untyped-call, no-any-return]
        model, use_gradient_checkpointing=use_gradient_checkpointing, auto_clear_cache=False
    )
