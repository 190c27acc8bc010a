"""Generation with a cache, a training step, and both again. generation.py greedy|sample|beam|f32"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

KINDS = {
    "sample": {"do_sample": True, "top_k": 50, "temperature": 0.8},
    "beam": {"num_beams": 3, "do_sample": False},
}

mode = sys.argv[1]
torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=768,
    intermediate_size=2048,
    num_hidden_layers=8,
    num_attention_heads=12,
    num_key_value_heads=4,
    vocab_size=32000,
)
model = LlamaForCausalLM(config).to("cuda", torch.float32 if mode == "f32" else torch.bfloat16)
model.generation_config.pad_token_id = 0
model.generation_config.eos_token_id = None
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
kind = KINDS.get(mode, {"do_sample": False})
for _ in range(2):
    model.eval()
    prompt = torch.randint(5, 32000, (4, 64)).cuda()
    text = model.generate(prompt, max_new_tokens=48, attention_mask=torch.ones_like(prompt), **kind)
    print(text.shape, torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved())
    model.train()
    ids = torch.randint(0, 32000, (4, 256)).cuda()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
