"""DP-SGD with torch.func: per-sample gradients by vmap(grad), clip each, add noise."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call, vmap, grad

torch.manual_seed(0)
device = "cuda"
B, CLIP, SIGMA, LR = 48, 1.0, 0.8, 0.05


class TinyMixer(nn.Module):
    def __init__(self, patches=64, dim=256, depth=4, classes=20):
        super().__init__()
        self.embed = nn.Linear(48, dim)
        self.token = nn.ModuleList(nn.Sequential(nn.LayerNorm(patches), nn.Linear(patches, 256), nn.GELU(),
                                                 nn.Linear(256, patches)) for _ in range(depth))
        self.chan = nn.ModuleList(nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 1024), nn.GELU(),
                                                nn.Linear(1024, dim)) for _ in range(depth))
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        x = self.embed(x)
        for t, c in zip(self.token, self.chan):
            x = x + t(x.transpose(1, 2)).transpose(1, 2)
            x = x + c(x)
        return self.head(x.mean(1))


model = TinyMixer().to(device)
params = {k: v.detach().clone() for k, v in model.named_parameters()}
buffers = {k: v.detach() for k, v in model.named_buffers()}
momentum = {k: torch.zeros_like(v) for k, v in params.items()}
print("params", sum(p.numel() for p in params.values()))


def loss_fn(params, buffers, x, y):
    out = functional_call(model, (params, buffers), (x.unsqueeze(0),))
    return F.cross_entropy(out, y.unsqueeze(0))


per_sample = vmap(grad(loss_fn), in_dims=(None, None, 0, 0))
centers = torch.randn(20, 64, 48, generator=torch.Generator().manual_seed(3))

for step in range(8):
    y = torch.randint(0, 20, (B,))
    x = (centers[y] + 0.7 * torch.randn(B, 64, 48)).to(device)
    y = y.to(device)
    grads = per_sample(params, buffers, x, y)
    norms = torch.stack([g.reshape(B, -1).norm(dim=1) for g in grads.values()], dim=1).norm(dim=1)
    scale = (CLIP / (norms + 1e-6)).clamp(max=1.0)
    for k, g in grads.items():
        clipped = (g * scale.view(-1, *[1] * (g.dim() - 1))).sum(0)
        noisy = (clipped + SIGMA * CLIP * torch.randn_like(clipped)) / B
        momentum[k].mul_(0.9).add_(noisy)
        params[k] = params[k] - LR * momentum[k]
    with torch.no_grad():
        out = functional_call(model, (params, buffers), (x,))
        acc = (out.argmax(1) == y).float().mean()
    print(f"step {step} mean norm {norms.mean().item():.3f} acc {acc.item():.3f} "
          f"peak {torch.cuda.max_memory_allocated()}")

print("max_memory_allocated", torch.cuda.max_memory_allocated())
print("max_memory_reserved", torch.cuda.max_memory_reserved())
