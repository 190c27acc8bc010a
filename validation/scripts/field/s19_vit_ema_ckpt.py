"""ViT from scratch with mixup and EMA weights; saves a checkpoint in the middle and resumes from it."""
import os
import tempfile
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

device = torch.device("cuda")


class ViT(nn.Module):
    def __init__(self, size=192, patch=16, dim=768, depth=10, heads=12, classes=1000):
        super().__init__()
        self.patch = nn.Conv2d(3, dim, patch, patch)
        n = (size // patch) ** 2
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos = nn.Parameter(torch.randn(1, n + 1, dim) * 0.02)
        layer = nn.TransformerEncoderLayer(dim, heads, dim * 4, 0.1, "gelu", batch_first=True, norm_first=True)
        self.enc = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(dim)
        self.fc = nn.Linear(dim, classes)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.pos
        return self.fc(self.norm(self.enc(x))[:, 0])


def build():
    torch.manual_seed(0)
    model = ViT().to(device)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05, amsgrad=True)
    return model, ema, opt


def mixup(x, y, classes, alpha=0.2):
    lam = float(torch.distributions.Beta(alpha, alpha).sample())
    perm = torch.randperm(x.size(0), device=x.device)
    y = F.one_hot(y, classes).float()
    return lam * x + (1 - lam) * x[perm], lam * y + (1 - lam) * y[perm]


def train(model, ema, opt, start, end):
    model.train()
    for step in range(start, end):
        g = torch.Generator().manual_seed(step)
        x = torch.randn(48, 3, 192, 192, generator=g).to(device)
        y = torch.randint(0, 1000, (48,), generator=g).to(device)
        x, y = mixup(x, y, 1000)
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        ema.update_parameters(model)
        print(f"step {step} loss {loss.item():.4f}")


model, ema, opt = build()
train(model, ema, opt, 0, 4)
print("before save: max_memory_allocated", torch.cuda.max_memory_allocated(),
      "max_memory_reserved", torch.cuda.max_memory_reserved())

with tempfile.TemporaryDirectory() as d:
    path = os.path.join(d, "ckpt.pt")
    torch.save({"model": model.state_dict(), "ema": ema.state_dict(), "opt": opt.state_dict(), "step": 4}, path)
    model, ema, opt = build()
    ckpt = torch.load(path, map_location=device, weights_only=True)
model.load_state_dict(ckpt["model"])
ema.load_state_dict(ckpt["ema"])
opt.load_state_dict(ckpt["opt"])
print("resumed, allocated", torch.cuda.memory_allocated())
train(model, ema, opt, ckpt["step"], 8)

ema.eval()
with torch.inference_mode():
    out = ema(torch.randn(128, 3, 192, 192, device=device))
print("ema out", out.shape)
print("max_memory_allocated", torch.cuda.max_memory_allocated())
print("max_memory_reserved", torch.cuda.max_memory_reserved())
