# %% [markdown]
# # Two LoRA adapters on Phi-3-mini: "style" and "facts"
# train each one on its own data -> combine with add_weighted_adapter -> merge into the base -> sample
# (notebook exported to .py)

# %%
import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, Phi3Config, get_linear_schedule_with_warmup

set_seed(11)
accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
device = accelerator.device


def mem(tag):
    print(f"{tag:<28s} now {torch.cuda.memory_allocated() / 2**30:6.2f}  "
          f"peak {torch.cuda.max_memory_allocated() / 2**30:6.2f} GiB")


# %%
config = Phi3Config(
    vocab_size=32064, hidden_size=3072, intermediate_size=8192, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=32, max_position_embeddings=4096, sliding_window=2047,
    pad_token_id=32000, bos_token_id=1, eos_token_id=32000)
with device:
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
model.config.use_cache = False
mem("base model")


# %%
class Instructions(Dataset):
    """prompt | response, the loss is on the response only"""

    def __init__(self, n, low, high, max_len, seed):
        g = torch.Generator().manual_seed(seed)
        self.items = []
        for _ in range(n):
            lp = int(torch.randint(20, max_len // 3, (1,), generator=g))
            lr = int(torch.randint(max_len // 4, max_len - lp, (1,), generator=g))
            ids = torch.randint(low, high, (lp + lr,), generator=g)
            labels = ids.clone()
            labels[:lp] = -100
            self.items.append((ids, labels))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate(batch):
    n = max(len(ids) for ids, _ in batch)
    input_ids = torch.full((len(batch), n), config.pad_token_id)
    labels = torch.full((len(batch), n), -100)
    mask = torch.zeros(len(batch), n, dtype=torch.long)
    for i, (ids, lab) in enumerate(batch):
        input_ids[i, : len(ids)] = ids
        labels[i, : len(ids)] = lab
        mask[i, : len(ids)] = 1
    return dict(input_ids=input_ids, attention_mask=mask, labels=labels)


datasets = {
    "style": Instructions(12, 100, 2000, 512, seed=1),    # 3 optimizer steps
    "facts": Instructions(12, 5000, 30000, 1024, seed=2),
}

# %%
lora = dict(r=16, lora_alpha=32, lora_dropout=0.0, task_type="CAUSAL_LM", target_modules=["qkv_proj", "o_proj"])
model = get_peft_model(model, LoraConfig(**lora), adapter_name="style")
model.add_adapter("facts", LoraConfig(**lora))
model = accelerator.prepare(model)
mem("with two adapters")


# %%
def train_adapter(name, lr=2e-4):
    peft_model = accelerator.unwrap_model(model)
    peft_model.set_adapter(name)
    params = [p for n, p in peft_model.named_parameters() if p.requires_grad]
    assert all(f".{name}." in n for n, p in peft_model.named_parameters() if p.requires_grad)
    optimizer = torch.optim.AdamW(params, lr=lr)
    loader = DataLoader(datasets[name], batch_size=2, shuffle=True, collate_fn=collate)
    scheduler = get_linear_schedule_with_warmup(optimizer, 1, 4)
    optimizer, loader, scheduler = accelerator.prepare(optimizer, loader, scheduler)
    model.train()
    for step, batch in enumerate(loader):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(params, 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        print(f"{name} micro-step {step} len {batch['input_ids'].shape[1]:4d} loss {loss.item():.4f}")
    mem(f"after training {name}")


for name in ("style", "facts"):
    train_adapter(name)
    torch.cuda.reset_peak_memory_stats()

# %% combine
peft_model = accelerator.unwrap_model(model)
peft_model.add_weighted_adapter(["style", "facts"], [0.6, 0.4], adapter_name="both", combination_type="cat")
with tempfile.TemporaryDirectory() as d:
    peft_model.save_pretrained(d, selected_adapters=["style", "both"])

model.eval()
for adapter in ("style", "facts", "both"):
    peft_model.set_adapter(adapter)
    with torch.no_grad():
        losses = [model(**{k: v.to(device) for k, v in collate([ds[0], ds[1]]).items()}).loss.item()
                  for ds in datasets.values()]
    print(f"{adapter:>6s}: style loss {losses[0]:.4f}  facts loss {losses[1]:.4f}")
mem("after evaluation")

# %% merge and sample
merged = peft_model.merge_and_unload(adapter_names=["both"])
mem("merged")
prompt = datasets["facts"][0][0][:48][None].to(device)
with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
    text = merged.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=32, do_sample=True,
                           top_p=0.9, use_cache=True)
print("sampled:", text[0, prompt.shape[1]:].tolist()[:10])
mem("end")
