import functools
import os
import torch
import torch.distributed as dist
from torch.distributed.fsdp import (BackwardPrefetch, FullStateDictConfig, FullyShardedDataParallel as FSDP, MixedPrecision,
                                    ShardingStrategy, StateDictType)
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import MistralConfig, MistralForCausalLM
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)
torch.manual_seed(7)
config = MistralConfig(vocab_size=32000, hidden_size=1536, intermediate_size=4096, num_hidden_layers=8, num_attention_heads=12,
                       num_key_value_heads=4, sliding_window=None)
model = MistralForCausalLM(config)
model = FSDP(model, auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={MistralDecoderLayer}),
             mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16),
             sharding_strategy=ShardingStrategy.FULL_SHARD, backward_prefetch=BackwardPrefetch.BACKWARD_PRE, device_id=rank,
             limit_all_gathers=True, use_orig_params=True)
optim = torch.optim.AdamW(model.parameters(), lr=2e-4)
for it in range(4):
    ids = torch.randint(0, 32000, (4, 512 + 64 * it), device="cuda")
    optim.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    gn = model.clip_grad_norm_(1.0)
    optim.step()
    if rank == 0:
        print(it, loss.item(), gn.item(), torch.cuda.memory_reserved() // 2**20)
cfg = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, cfg):
    sd = model.state_dict()
if rank == 0:
    print(len(sd), sum(v.numel() for v in sd.values()))
    torch.save(sd, "/tmp/memest_fsdp1.pt")
    os.remove("/tmp/memest_fsdp1.pt")
dist.barrier()
dist.destroy_process_group()
