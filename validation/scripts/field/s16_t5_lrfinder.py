"""T5: learning-rate finder (state saved and restored), then train with torch.optim.Adafactor."""
import copy
import torch
from transformers import T5Config, T5ForConditionalGeneration

torch.manual_seed(0)
device = "cuda"
config = T5Config(
    vocab_size=32128, d_model=512, d_kv=64, d_ff=2048, num_layers=8, num_heads=8, dropout_rate=0.1,
    decoder_start_token_id=0, pad_token_id=0, use_cache=False,
)
model = T5ForConditionalGeneration(config).to(device)
print("params", model.num_parameters())


def batch(i, bs=16):
    g = torch.Generator().manual_seed(1000 + i)
    src_len = int(torch.randint(200, 400, (1,), generator=g))
    tgt_len = int(torch.randint(60, 160, (1,), generator=g))
    src = torch.randint(2, 32000, (bs, src_len), generator=g)
    att = torch.ones_like(src)
    att[::2, -40:] = 0
    tgt = torch.randint(2, 32000, (bs, tgt_len), generator=g)
    tgt[::3, -20:] = -100
    return {"input_ids": src.to(device), "attention_mask": att.to(device), "labels": tgt.to(device)}


def lr_find(model, start=1e-6, end=1e-1, n=5):
    saved = copy.deepcopy(model.state_dict())
    opt = torch.optim.AdamW(model.parameters(), lr=start)
    gamma = (end / start) ** (1 / (n - 1))
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, gamma)
    lrs, losses = [], []
    model.train()
    for i in range(n):
        loss = model(**batch(i)).loss
        opt.zero_grad()
        loss.backward()
        opt.step()
        lrs.append(sched.get_last_lr()[0])
        losses.append(loss.item())
        sched.step()
    model.load_state_dict(saved)
    model.zero_grad()
    best = min(range(n), key=lambda k: losses[k])
    return lrs[max(best - 1, 0)]


lr = lr_find(model)
print("suggested lr", lr)
print("lr finder: max_memory_allocated", torch.cuda.max_memory_allocated(),
      "max_memory_reserved", torch.cuda.max_memory_reserved())
torch.cuda.reset_peak_memory_stats()

optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-3)
for step in range(6):
    b = batch(100 + step)
    out = model(**b)
    out.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} src {b['input_ids'].shape[1]} tgt {b['labels'].shape[1]} loss {out.loss.item():.4f}")

model.eval()
with torch.no_grad():
    v = model(**batch(999)).loss
print("val loss", v.item())
print("max_memory_allocated", torch.cuda.max_memory_allocated())
print("max_memory_reserved", torch.cuda.max_memory_reserved())
