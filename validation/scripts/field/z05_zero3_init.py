"""A Llama made under zero.Init, trained with parameters and optimizer on the host, layers checkpointed."""
import sys

import deepspeed
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from transformers import LlamaConfig, LlamaForCausalLM

offload = "--offload" in sys.argv
zero = {"stage": 3, "stage3_max_live_parameters": 2e8, "stage3_prefetch_bucket_size": 2e7, "reduce_bucket_size": 5e7}
if offload:
    zero |= {"offload_optimizer": {"device": "cpu", "pin_memory": True}, "offload_param": {"device": "cpu", "pin_memory": True}}
config = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "zero_optimization": zero, "gradient_clipping": 1.0}
deepspeed.init_distributed()
with deepspeed.zero.Init(config_dict_or_path=config):
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=5504, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=4,
    ))
model.gradient_checkpointing_enable()
optimizer = DeepSpeedCPUAdam(model.parameters(), lr=1e-5) if offload else torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
engine.train()
for step in range(3):
    ids = torch.randint(0, 32000, (2, 1024), device=engine.device)
    loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
    engine.backward(loss)
    engine.step()
print(torch.cuda.max_memory_allocated() >> 20)
