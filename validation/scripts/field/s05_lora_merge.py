"""LoRA with peft on a small Mistral; merge into the base and keep training with full weights."""
import gc
import torch
from transformers import MistralConfig, MistralForCausalLM
from peft import LoraConfig, get_peft_model

torch.manual_seed(0)
device = "cuda"
config = MistralConfig(
    vocab_size=32000, hidden_size=1280, intermediate_size=3584, num_hidden_layers=12,
    num_attention_heads=20, num_key_value_heads=4, max_position_embeddings=2048, sliding_window=256,
)
base = MistralForCausalLM(config).to(torch.bfloat16)

lora = LoraConfig(
    r=16, lora_alpha=32, lora_dropout=0.05, task_type="CAUSAL_LM",
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
)
model = get_peft_model(base, lora).to(device)
model.print_trainable_parameters()


def batches(n, bs, seqlen, seed):
    g = torch.Generator().manual_seed(seed)
    for _ in range(n):
        yield torch.randint(0, config.vocab_size, (bs, seqlen), generator=g)


def train(model, optimizer, n, bs, seqlen, seed):
    model.train()
    for i, ids in enumerate(batches(n, bs, seqlen, seed)):
        ids = ids.to(device)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"  step {i} loss {loss.item():.4f}")


print("phase 1: adapters")
opt = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=2e-4)
train(model, opt, 5, 4, 1024, 0)
print("adapters: max_memory_allocated", torch.cuda.max_memory_allocated(),
      "max_memory_reserved", torch.cuda.max_memory_reserved())

print("phase 2: merged, all weights")
del opt
model = model.merge_and_unload()
gc.collect()
torch.cuda.empty_cache()
torch.cuda.reset_peak_memory_stats()
print("after merge:", torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
for p in model.parameters():
    p.requires_grad_(True)
opt = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, nesterov=True)
train(model, opt, 4, 2, 1024, 1)

print("max_memory_allocated", torch.cuda.max_memory_allocated())
print("max_memory_reserved", torch.cuda.max_memory_reserved())
