"""accelerate: bf16 mixed precision, gradient accumulation, seq2seq-free regression transformer with Lion-like schedule."""
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
from accelerate import Accelerator
from accelerate.utils import set_seed

set_seed(3)
accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=3)


class TimeSeriesTransformer(nn.Module):
    def __init__(self, features=64, d=640, layers=8, heads=10, horizon=48):
        super().__init__()
        self.inp = nn.Linear(features, d)
        self.pos = nn.Parameter(torch.randn(1, 720, d) * 0.02)
        enc = nn.TransformerEncoderLayer(d, heads, 4 * d, dropout=0.1, activation="gelu",
                                         batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(enc, layers, norm=nn.LayerNorm(d), enable_nested_tensor=False)
        self.head = nn.Sequential(nn.Linear(d, d), nn.SiLU(), nn.Linear(d, horizon))

    def forward(self, x):
        h = self.inp(x) + self.pos[:, : x.size(1)]
        h = self.encoder(h)
        return self.head(h.mean(1))


g = torch.Generator().manual_seed(0)
x = torch.randn(300, 720, 64, generator=g)
y = torch.randn(300, 48, generator=g)
train = DataLoader(TensorDataset(x[:256], y[:256]), batch_size=16, shuffle=True, drop_last=True)
val = DataLoader(TensorDataset(x[256:], y[256:]), batch_size=32)

model = TimeSeriesTransformer()
optimizer = torch.optim.NAdam(model.parameters(), lr=1e-4)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=16)
model, optimizer, train, val, scheduler = accelerator.prepare(model, optimizer, train, val, scheduler)
loss_fn = nn.HuberLoss()

for epoch in range(1):
    model.train()
    for i, (xb, yb) in enumerate(train):
        with accelerator.accumulate(model):
            pred = model(xb)
            loss = loss_fn(pred, yb)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            accelerator.print(f"batch {i} loss {loss.item():.4f}")

    accelerator.print("train max_memory_allocated", torch.cuda.max_memory_allocated())
    torch.cuda.reset_peak_memory_stats()
    model.eval()
    losses = []
    for xb, yb in val:
        with torch.no_grad():
            pred = model(xb)
        pred, yb = accelerator.gather_for_metrics((pred, yb))
        losses.append(loss_fn(pred.float(), yb).item())
    accelerator.print("val", sum(losses) / len(losses))

print("max_memory_allocated", torch.cuda.max_memory_allocated())
print("max_memory_reserved", torch.cuda.max_memory_reserved())
