"""Checkpointing under autocast, its cache of casts on or off.

checkpointing.py bfloat16|float16 cache|nocache re|no      re: the reentrant kind
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

dtype = getattr(torch, sys.argv[1])
is_cached = sys.argv[2] == "cache"
is_reentrant = sys.argv[3] == "re"
config = LlamaConfig(
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=8,
    num_attention_heads=16,
    num_key_value_heads=8,
    vocab_size=32000,
)
model = LlamaForCausalLM(config).cuda().train()
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": is_reentrant})
if is_reentrant:
    model.enable_input_require_grads()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
scaler = torch.amp.GradScaler(enabled=dtype == torch.float16)
for _ in range(4):
    ids = torch.randint(0, 32000, (4, 512)).cuda()
    with torch.autocast("cuda", dtype=dtype, cache_enabled=is_cached):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    print(loss.item())
