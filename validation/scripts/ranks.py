"""Four steps of a Llama under torch's own ways of using several GPUs.

torchrun --nproc-per-node 2 ranks.py ddp|fsdp|fsdp2 [NAME ...]

f32, amp, bf16      how it computes: as it is, under autocast, weights in 16 bits    (f32)
small, large        130 million parameters or 740 million                            (small)
acc                 four micro-batches a step; the first three without a sync
clip                gradients are clipped
ckpt                checkpointing of each layer
view, static, unused                                   of DDP, as its arguments are called
op                  SHARD_GRAD_OP, reshard_after_forward=False
policy              MixedPrecision, MixedPrecisionPolicy: bf16, gradients summed in 32 bits
log                 the losses of all ranks are gathered as objects and as a tensor
"""

import contextlib
import functools
import os
import sys

import torch
from torch import distributed as dist
from torch.distributed import fsdp
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

kind, *given = sys.argv[1:]
dist.init_process_group("nccl")
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
is_large = "large" in given
config = LlamaConfig(
    hidden_size=2048 if is_large else 1024,
    intermediate_size=5632 if is_large else 2816,
    num_hidden_layers=12 if is_large else 8,
    num_attention_heads=16,
    num_key_value_heads=8,
    vocab_size=32000,
)
torch.manual_seed(0)
with torch.device("cuda"):
    model = LlamaForCausalLM(config).train()
if "bf16" in given:
    model.bfloat16()
if "ckpt" in given:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

if kind == "ddp":
    model = DistributedDataParallel(
        model,
        device_ids=[rank],
        gradient_as_bucket_view="view" in given,
        static_graph="static" in given,
        find_unused_parameters="unused" in given,
    )
elif kind == "fsdp":
    policy = fsdp.MixedPrecision(torch.bfloat16, torch.float32) if "policy" in given else None
    sharding = "SHARD_GRAD_OP" if "op" in given else "FULL_SHARD"
    model = fsdp.FullyShardedDataParallel(
        model,
        auto_wrap_policy=functools.partial(
            transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer}
        ),
        sharding_strategy=fsdp.ShardingStrategy[sharding],
        mixed_precision=policy,
        device_id=rank,
        use_orig_params=True,
    )
else:
    policy = fsdp.MixedPrecisionPolicy()
    if "policy" in given:
        policy = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in (*model.model.layers, model):
        fsdp.fully_shard(layer, mp_policy=policy, reshard_after_forward="op" not in given)


def waits(is_last):
    """Without a sync until the last micro-batch of a step."""
    if kind == "fsdp2":
        model.set_requires_gradient_sync(is_last)
        return contextlib.nullcontext()
    return contextlib.nullcontext() if is_last else model.no_sync()


optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
num_micro = 4 if "acc" in given else 1
for _ in range(4):
    for index in range(num_micro):
        ids = torch.randint(0, 32000, (2, 512), device="cuda")
        with waits(index + 1 == num_micro):
            with torch.autocast("cuda", torch.bfloat16, enabled="amp" in given):
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss / num_micro
            loss.backward()
    if "clip" in given:
        clips = kind == "fsdp" and model.clip_grad_norm_
        clips(1.0) if clips else torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if "log" in given:
        dist.all_reduce(loss.detach())
        losses = [None] * dist.get_world_size()
        dist.all_gather_object(losses, {"rank": rank, "loss": loss.item()})
        dist.barrier()
    if rank == 0:
        print(loss.item())
dist.destroy_process_group()
