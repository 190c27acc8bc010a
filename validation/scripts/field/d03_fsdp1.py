"""FSDP1 with mixed precision, transformer auto-wrap policy, clip_grad_norm_, full state dict at the end."""
import functools
import os
import sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import (
    FullyShardedDataParallel as FSDP, MixedPrecision, ShardingStrategy, BackwardPrefetch,
    StateDictType, FullStateDictConfig,
)
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

strategy = {"full": ShardingStrategy.FULL_SHARD, "grad": ShardingStrategy.SHARD_GRAD_OP}[
    sys.argv[1] if len(sys.argv) > 1 else "full"]


def main():
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    torch.manual_seed(0)
    cfg = LlamaConfig(
        vocab_size=32000, hidden_size=1536, intermediate_size=4096, num_hidden_layers=12,
        num_attention_heads=12, num_key_value_heads=12, max_position_embeddings=2048, use_cache=False,
    )
    model = LlamaForCausalLM(cfg)
    if rank == 0:
        print("params", sum(p.numel() for p in model.parameters()))
    model = FSDP(
        model,
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer}),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16,
                                       buffer_dtype=torch.bfloat16),
        sharding_strategy=strategy,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        device_id=local,
        limit_all_gathers=True,
        use_orig_params=True,
    )
    print(f"rank {rank} after wrap {torch.cuda.memory_allocated()} peak {torch.cuda.max_memory_allocated()}")
    torch.cuda.reset_peak_memory_stats()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    sched = torch.optim.lr_scheduler.StepLR(opt, step_size=1, gamma=0.85)
    g = torch.Generator().manual_seed(rank)
    model.train()
    for step in range(6):
        ids = torch.randint(0, 32000, (4, 1024), generator=g).to(local)
        loss = model(input_ids=ids, labels=ids).loss
        opt.zero_grad()
        loss.backward()
        norm = model.clip_grad_norm_(1.0)
        opt.step()
        sched.step()
        avg = loss.detach().clone()
        dist.all_reduce(avg)
        if rank == 0:
            print(f"step {step} loss {(avg / world).item():.4f} norm {norm.item():.3f}")
    print(f"rank {rank} train max_memory_allocated {torch.cuda.max_memory_allocated()} "
          f"max_memory_reserved {torch.cuda.max_memory_reserved()}")
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT,
                              FullStateDictConfig(offload_to_cpu=True, rank0_only=True)):
        sd = model.state_dict()
    if rank == 0:
        print("state dict entries", len(sd))
    dist.barrier()
    print(f"rank {rank} max_memory_allocated {torch.cuda.max_memory_allocated()} "
          f"max_memory_reserved {torch.cuda.max_memory_reserved()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
