"""The options that make a plan, one for each of its keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from memest.plan.values import (
    ATTENTIONS,
    CLIPPING,
    LOOPS,
    LORA_BIASES,
    PRECISIONS,
    QUANTISATIONS,
    SHARDINGS,
    STRATEGIES,
)
from memest.units import parse_bytes


class _Size(click.ParamType):  # type: ignore[type-arg]
    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        return parse_bytes(value)


_PLAN_OPTIONS = [
    click.option("--model", "model_name", help="Bundled name, folder, config.json or Hub id."),
    click.option("--bs", "batch_size", type=int, help="Samples per micro-batch."),
    click.option("--acc", "accumulate_grad_batches", type=int, help="Micro-batches per step."),
    click.option("--precision", help=f"{', '.join(PRECISIONS)}."),
    click.option("--loop", help=f"Whose training loop: {', '.join(LOOPS)}."),
    click.option("--optim", help="A name of docs/plan.md, such as adamw or paged_adamw_8bit, or a"
                 " class of torch.optim or bitsandbytes.optim."),
    click.option("--optim-options", help="More of them: amsgrad=true,eps=1e-6."),
    click.option("--weight-decay", type=float, help="Of the optimizer."),
    click.option("--clip", "gradient_clip_val", type=float, help="Clip gradients to this norm."),
    click.option("--clip-algorithm", "gradient_clip_algorithm", help=f"{', '.join(CLIPPING)}."),
    click.option("--momentum", type=float, help="Of sgd and rmsprop."),
    click.option("--nesterov/--no-nesterov", default=None, help="Of sgd with momentum."),
    click.option("--act-ckpt/--no-act-ckpt", default=None, help="Activation checkpointing."),
    click.option("--lora/--no-lora", "use_lora", default=None, help="Train LoRA adapters only."),
    click.option("--qlora/--no-qlora", "use_qlora", default=None,
                 help="LoRA on a quantised base."),
    click.option("--quant", help=f"{', '.join(QUANTISATIONS)}."),
    click.option("--lora-r", type=int, help="Rank of the adapters."),
    click.option("--lora-alpha", type=float, help="Scale of the adapters."),
    click.option("--lora-dropout", type=float, help="Dropout before the adapters."),
    click.option("--lora-target", "lora_target_modules", multiple=True,
                 help="Module that gets an adapter, or all-linear."),
    click.option("--lora-save", "lora_modules_to_save", multiple=True,
                 help="Module trained whole beside the adapters."),
    click.option("--lora-bias", help=f"{', '.join(LORA_BIASES)}."),
    click.option("--rslora/--no-rslora", "use_rslora", default=None, help="Rank-stable scale."),
    click.option("--dora/--no-dora", "use_dora", default=None, help="Weight-decomposed LoRA."),
    click.option("--double-quant/--no-double-quant", default=None,
                 help="Quantise nf4's scales too."),
    click.option("--quant-skip", multiple=True, help="Module that stays unquantised."),
    click.option("--strategy", help=f"{', '.join(STRATEGIES)}."),
    click.option("--devices", type=int, help="Number of GPUs, or of each node's."),
    click.option("--num-nodes", type=int, help="Number of nodes."),
    click.option("--sharding", "sharding_strategy", help=f"FSDP: {', '.join(SHARDINGS)}."),
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
    click.option("--padded/--no-padded", default=None, help="Whether some rows are shorter."),
    click.option("--image-size", type=int, help="Pixels per side."),
    click.option("--attn", "attn_implementation", help=f"{', '.join(ATTENTIONS)}."),
    click.option("--freeze", multiple=True, help="Glob of parameter names not to train."),
    click.option("--tie-embeddings/--untie-embeddings", "tie_word_embeddings", default=None,
                 help="Whether the output head shares the embeddings."),
    click.option("--gpu", multiple=True, help="GPU to judge; may be given again."),
    click.option("--gpu-memory", type=_Size(), help="Memory of a GPU not in the catalogue: 24GiB."),
    click.option("--memory-limit", type=_Size(), help="Cap on the allocator: 78.4GiB."),
    click.option("--host-memory", type=_Size(), help="Host memory of the node to judge: 256GiB."),
    click.option("--val-batches", "limit_val_batches", type=int, help="Batches of a validation."),
    click.option("--val-bs", "val_batch_size", type=int, help="Samples of a validation batch."),
    click.option("--val-interval", "val_check_interval", type=int,
                 help="Micro-batches between validations."),
    click.option("--steps", type=int, help="Optimizer steps to simulate."),
]  # fmt: skip


def plan_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Every option of a plan, in the order of `--help`."""
    for option in reversed(_PLAN_OPTIONS):
        command = option(command)
    return command
