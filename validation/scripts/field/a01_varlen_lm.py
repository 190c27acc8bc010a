"""Language model whose sequence length changes every batch; logits in float32."""
import random
import sys
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

random.seed(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
torch.manual_seed(0)
device = torch.device("cuda")

config = Qwen2Config(
    vocab_size=64000, hidden_size=896, intermediate_size=2432, num_hidden_layers=10,
    num_attention_heads=14, num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True,
    use_cache=False,
)
model = Qwen2ForCausalLM(config).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)


def get_batch():
    longest = random.randint(150, 2000)
    lens = [max(32, int(longest * random.uniform(0.4, 1.0))) for _ in range(3)] + [longest]
    ids = torch.zeros(4, longest, dtype=torch.long)
    labels = torch.full((4, longest), -100)
    att = torch.zeros(4, longest, dtype=torch.long)
    for i, n in enumerate(lens):
        row = torch.randint(10, 64000, (n,))
        ids[i, :n] = row
        labels[i, :n] = row
        att[i, :n] = 1
    return ids.to(device), att.to(device), labels.to(device)


model.train()
for step in range(12):
    ids, att, labels = get_batch()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = model(input_ids=ids, attention_mask=att, labels=labels)
    out.loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step:2d} len {ids.size(1):4d} loss {out.loss.item():.3f} "
          f"allocated {torch.cuda.memory_allocated()} reserved {torch.cuda.memory_reserved()}")

stats = torch.cuda.memory_stats()
print("alloc retries", stats["num_alloc_retries"], "ooms", stats["num_ooms"])
print("max_memory_allocated", torch.cuda.max_memory_allocated())
print("max_memory_reserved", torch.cuda.max_memory_reserved())
