"""The options that make a plan, one for each of its keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from memest.cli.group import OPTION_SECTIONS
from memest.plan.optimizers import OPTIMIZERS
from memest.plan.values import (
    ATTENTIONS,
    CLIPPING,
    LOOPS,
    LORA_BIASES,
    PRECISIONS,
    QUANT_LOADS,
    QUANTISATIONS,
    SHARDINGS,
    STRATEGIES,
)
from memest.units import parse_bytes


class _Size(click.ParamType):  # type: ignore[type-arg]
    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        return parse_bytes(value)


def completes(values: Callable[[], Iterable[str]], *, is_list: bool = False) -> Any:
    """For `shell_complete`: the values that begin with what was typed, of a list its last item."""

    def complete(ctx: Any, param: Any, incomplete: str) -> list[CompletionItem]:
        head, comma, tail = incomplete.rpartition(",") if is_list else ("", "", incomplete)
        return [CompletionItem(f"{head}{comma}{v}") for v in values() if v.startswith(tail)]

    return complete


def model_names() -> list[str]:
    """Of the bundled models; read from the names of files, so that a shell need not wait."""
    from memest.models_meta.registry import CONFIG_DIR

    return sorted(path.stem for path in CONFIG_DIR.glob("*.json"))


def gpu_names() -> list[str]:
    """Of the catalogue."""
    from memest.estimator.hardware.gpus import list_gpus

    return [gpu.name for gpu in list_gpus()]


def suite_names() -> list[str]:
    """Of the bundled suites."""
    return sorted(path.stem for path in SUITES.glob("*.yaml"))


SUITES = Path(__file__).parents[1] / "validate" / "suites"

VALUES: dict[str, Callable[[], Iterable[str]]] = {
    "model_name": model_names, "models": model_names, "gpu": gpu_names, "gpu_name": gpu_names,
    "precision": lambda: PRECISIONS, "optim": lambda: OPTIMIZERS, "quant": lambda: QUANTISATIONS,
    "quant_load": lambda: QUANT_LOADS,
    "strategy": lambda: STRATEGIES, "sharding_strategy": lambda: SHARDINGS,
    "attn_implementation": lambda: ATTENTIONS, "lora_bias": lambda: LORA_BIASES,
}  # fmt: skip
"""What a shell offers for a key."""


def _choice(*names: str, values: Sequence[str], before: str = "") -> Any:
    """An option whose help and whose completion have all its values."""
    text = f"{before}{', '.join(values)}."
    return click.option(*names, help=text, shell_complete=completes(lambda: values))


def _place_all(options: Iterable[Any]) -> None:
    """The sections of `--help` for the options of a plan, by their keys."""

    def taken() -> None:
        """Stands for a command, to see which options there are."""

    for option in options:
        option(taken)
    for param in vars(taken)["__click_params__"]:
        OPTION_SECTIONS[param.name] = _section(param.name)


def _section(key: str) -> str:
    return next((name for name, keys in _SECTIONS.items() if key in keys), "Plan")


_SECTIONS = {
    "Adapters and quantisation": (
        "use_lora", "use_qlora", "quant", "lora_r", "lora_alpha", "lora_dropout",
        "lora_target_modules", "lora_modules_to_save", "lora_bias", "use_rslora", "use_dora",
        "double_quant", "quant_skip", "kbit_ckpt", "quant_load",
    ),
    "Several GPUs and offload": (
        "strategy", "devices", "num_nodes", "sharding_strategy", "shard_size", "wrap_classes",
        "activation_checkpointing_policy", "gradient_as_bucket_view", "bucket_cap_mb",
        "reduce_bucket_size", "allgather_bucket_size",
    ),
    "Training": (
        "loop", "optim", "optim_options", "weight_decay", "gradient_clip_val",
        "gradient_clip_algorithm", "momentum", "nesterov", "act_ckpt", "steps",
        "limit_val_batches", "val_batch_size", "val_check_interval",
    ),
    "Inputs": ("seq_len", "lengths", "padded", "image_size"),
    "Cards": ("gpu", "gpu_memory", "memory_limit", "alloc_conf", "host_memory"),
}  # fmt: skip


_PLAN_OPTIONS = [
    click.option("--model", "model_name", help="Bundled name, folder, config.json or Hub id.",
                 shell_complete=completes(model_names)),
    click.option("--bs", "batch_size", type=int, help="Samples per micro-batch."),
    click.option("--acc", "accumulate_grad_batches", type=int, help="Micro-batches per step."),
    _choice("--precision", values=PRECISIONS),
    _choice("--loop", values=LOOPS, before="Whose training loop: "),
    click.option("--optim", help="A name of docs/plan.md, such as adamw or paged_adamw_8bit, or a"
                 " class of torch.optim or bitsandbytes.optim.",
                 shell_complete=completes(lambda: OPTIMIZERS)),
    click.option("--optim-options", help="More of them: amsgrad=true,eps=1e-6."),
    click.option("--weight-decay", type=float, help="Of the optimizer."),
    click.option("--clip", "gradient_clip_val", type=float, help="Clip gradients to this norm."),
    _choice("--clip-algorithm", "gradient_clip_algorithm", values=CLIPPING),
    click.option("--momentum", type=float, help="Of sgd and rmsprop."),
    click.option("--nesterov/--no-nesterov", default=None, help="Of sgd with momentum."),
    click.option("--act-ckpt/--no-act-ckpt", default=None, help="Activation checkpointing."),
    click.option("--lora/--no-lora", "use_lora", default=None, help="Train LoRA adapters only."),
    click.option("--qlora/--no-qlora", "use_qlora", default=None,
                 help="LoRA on a quantised base."),
    _choice("--quant", values=QUANTISATIONS),
    click.option("--lora-r", type=int, help="Rank of the adapters."),
    click.option("--lora-alpha", type=float, help="Scale of the adapters."),
    click.option("--lora-dropout", type=float, help="Dropout before the adapters."),
    click.option("--lora-target", "lora_target_modules", multiple=True,
                 help="Module that gets an adapter, or all-linear."),
    click.option("--lora-save", "lora_modules_to_save", multiple=True,
                 help="Module trained whole beside the adapters."),
    _choice("--lora-bias", values=LORA_BIASES),
    click.option("--rslora/--no-rslora", "use_rslora", default=None, help="Rank-stable scale."),
    click.option("--dora/--no-dora", "use_dora", default=None, help="Weight-decomposed LoRA."),
    click.option("--double-quant/--no-double-quant", default=None,
                 help="Quantise nf4's scales too."),
    click.option("--quant-skip", multiple=True, help="Module that stays unquantised."),
    click.option("--kbit-ckpt/--no-kbit-ckpt", default=None,
                 help="QLoRA: checkpointing by prepare_model_for_kbit_training, on by default."),
    _choice("--quant-load", values=QUANT_LOADS),
    _choice("--strategy", values=STRATEGIES),
    click.option("--devices", type=int, help="Number of GPUs, or of each node's."),
    click.option("--num-nodes", type=int, help="Number of nodes."),
    _choice("--sharding", "sharding_strategy", values=SHARDINGS, before="FSDP: "),
    click.option("--shard-size", type=int, help="FSDP, HYBRID_SHARD: GPUs that share a copy."),
    click.option("--wrap", "wrap_classes", multiple=True, help="FSDP: layer class to wrap."),
    click.option("--ckpt-policy", "activation_checkpointing_policy", multiple=True,
                 help="FSDP: layer class to checkpoint."),
    click.option("--bucket-view/--no-bucket-view", "gradient_as_bucket_view", default=None,
                 help="DDP: gradients lie in the buckets."),
    click.option("--bucket-cap-mb", type=int, help="DDP: MiB of gradients in a bucket."),
    click.option("--reduce-bucket-size", type=int, help="DeepSpeed: elements summed at once."),
    click.option("--allgather-bucket-size", type=int, help="DeepSpeed: elements gathered at once."),
    click.option("--seq-len", type=int, help="Tokens per sample, padding included."),
    click.option("--lengths", help="Tokens of each micro-batch in turn: 512,96,300 or a file."),
    click.option("--padded/--no-padded", default=None, help="Whether some rows are shorter."),
    click.option("--image-size", type=int, help="Pixels per side."),
    _choice("--attn", "attn_implementation", values=ATTENTIONS),
    click.option("--freeze", multiple=True, help="Glob of parameter names not to train."),
    click.option("--tie-embeddings/--untie-embeddings", "tie_word_embeddings", default=None,
                 help="Whether the output head shares the embeddings."),
    click.option("--gpu", multiple=True, help="GPU to judge; may be given again.",
                 shell_complete=completes(gpu_names)),
    click.option("--gpu-memory", type=_Size(), help="Memory of a GPU not in the catalogue: 24GiB."),
    click.option("--memory-limit", type=_Size(), help="Cap on the allocator: 78.4GiB."),
    click.option("--alloc-conf", help="The allocator's settings: expandable_segments:True."),
    click.option("--host-memory", type=_Size(), help="Host memory of the node to judge: 256GiB."),
    click.option("--val-batches", "limit_val_batches", type=int, help="Batches of a validation."),
    click.option("--val-bs", "val_batch_size", type=int, help="Samples of a validation batch."),
    click.option("--val-interval", "val_check_interval", type=int,
                 help="Micro-batches between validations."),
    click.option("--steps", type=int, help="Optimizer steps to simulate."),
]  # fmt: skip


_place_all(_PLAN_OPTIONS)


def plan_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Every option of a plan, in the order of `--help`."""
    for option in reversed(_PLAN_OPTIONS):
        command = option(command)
    return command
