"""Doubles the batch until CUDA is out of memory, then trains with the largest that fitted. 6 GiB cap."""
import gc
import sys
import torch
import torch.nn as nn

dev = torch.device("cuda:0")
total = torch.cuda.get_device_properties(dev).total_memory
torch.cuda.set_per_process_memory_fraction(6 * 1024**3 / total, dev)
d = 1024
model = nn.Sequential(*[m for _ in range(12) for m in (nn.Linear(d, 4 * d), nn.SiLU(), nn.Linear(4 * d, d), nn.LayerNorm(d))]).to(dev)
opt = torch.optim.AdamW(model.parameters())


def one(bs):
    x = torch.randn(bs, d, device=dev)
    loss = (model(x) - x).pow(2).mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.item()


bs, good = 512, None
while True:
    try:
        one(bs)
        print("ok", bs, torch.cuda.max_memory_allocated() // 2**20)
        good = bs
        bs *= 2
    except torch.cuda.OutOfMemoryError as e:
        print("OOM at", bs, "|", str(e)[:60])
        break
for p in model.parameters():
    p.grad = None
gc.collect()
torch.cuda.empty_cache()
torch.cuda.reset_peak_memory_stats()
lo, hi = good, bs
while hi - lo > 1024:
    mid = (lo + hi) // 2
    if "--sloppy" not in sys.argv:
        torch.cuda.empty_cache()
    try:
        one(mid)
        lo = mid
    except RuntimeError as e:
        if "out of memory" not in str(e):
            raise
        hi = mid
        opt.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
print("best", lo)
if "--sloppy" not in sys.argv:
    torch.cuda.empty_cache()
for i in range(2):
    print(one(lo))
