"""Prompt tuning or IA3 (choose on the command line) on a frozen GPT-2-like model."""
import sys
import torch
from torch.utils.data import TensorDataset, DataLoader
from transformers import GPT2Config, GPT2LMHeadModel
from peft import PromptTuningConfig, PromptTuningInit, IA3Config, TaskType, get_peft_model

method = sys.argv[1] if len(sys.argv) > 1 else "prompt"
torch.manual_seed(0)
device = torch.device("cuda")

config = GPT2Config(n_embd=1024, n_layer=16, n_head=16, n_positions=1024, vocab_size=50257)
model = GPT2LMHeadModel(config)

if method == "prompt":
    peft_config = PromptTuningConfig(
        task_type=TaskType.CAUSAL_LM, prompt_tuning_init=PromptTuningInit.RANDOM, num_virtual_tokens=32,
    )
else:
    peft_config = IA3Config(
        task_type=TaskType.CAUSAL_LM, target_modules=["c_attn", "mlp.c_proj"],
        feedforward_modules=["mlp.c_proj"], fan_in_fan_out=True,
    )
model = get_peft_model(model, peft_config)
model.print_trainable_parameters()
model.to(device)

g = torch.Generator().manual_seed(7)
ids = torch.randint(0, 50257, (48, 384), generator=g)
mask = torch.ones_like(ids)
labels = ids.clone()
labels[:, :128] = -100
loader = DataLoader(TensorDataset(ids, mask, labels), batch_size=6, shuffle=True)

trainable = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trainable, lr=3e-2)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=len(loader))

model.train()
total = 0.0
for step, (x, m, y) in enumerate(loader):
    x, m, y = x.to(device), m.to(device), y.to(device)
    with torch.autocast("cuda", dtype=torch.float16):
        outputs = model(input_ids=x, attention_mask=m, labels=y)
        loss = outputs.loss
    total += loss.detach().float()
    loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.4f}")
print("mean loss", (total / len(loader)).item())

model.eval()
with torch.no_grad():
    ppl = torch.exp(model(input_ids=ids[:6].to(device), attention_mask=mask[:6].to(device),
                          labels=labels[:6].to(device)).loss)
print("ppl", ppl.item())
print("max_memory_allocated", torch.cuda.max_memory_allocated())
print("max_memory_reserved", torch.cuda.max_memory_reserved())
