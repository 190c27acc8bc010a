"""Tiny-ish DDPM on 64x64 images, homework 4. python ddpm_unet.py [fp32|bf16]"""
import copy
import math
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

MODE = sys.argv[1] if len(sys.argv) > 1 else "fp32"
device = torch.device("cuda")
T = 1000
BATCH = 48


def timestep_embedding(t, dim):
    half = dim // 2
    freqs = torch.exp(-math.log(10000) * torch.arange(half, device=t.device) / half)
    args = t[:, None].float() * freqs[None]
    return torch.cat([args.cos(), args.sin()], dim=-1)


class ResBlock(nn.Module):
    def __init__(self, cin, cout, temb):
        super().__init__()
        self.n1 = nn.GroupNorm(32, cin)
        self.c1 = nn.Conv2d(cin, cout, 3, padding=1)
        self.emb = nn.Linear(temb, cout * 2)
        self.n2 = nn.GroupNorm(32, cout)
        self.drop = nn.Dropout(0.1)
        self.c2 = nn.Conv2d(cout, cout, 3, padding=1)
        self.skip = nn.Conv2d(cin, cout, 1) if cin != cout else nn.Identity()

    def forward(self, x, e):
        h = self.c1(F.silu(self.n1(x)))
        scale, shift = self.emb(F.silu(e))[:, :, None, None].chunk(2, dim=1)
        h = self.n2(h) * (1 + scale) + shift
        h = self.c2(self.drop(F.silu(h)))
        return h + self.skip(x)


class AttnBlock(nn.Module):
    def __init__(self, ch, heads=4):
        super().__init__()
        self.norm = nn.GroupNorm(32, ch)
        self.qkv = nn.Conv1d(ch, ch * 3, 1)
        self.proj = nn.Conv1d(ch, ch, 1)
        self.heads = heads

    def forward(self, x):
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x).view(b, c, h * w)).chunk(3, dim=1)
        d = c // self.heads
        q = q.reshape(b * self.heads, d, -1)
        k = k.reshape(b * self.heads, d, -1)
        v = v.reshape(b * self.heads, d, -1)
        att = torch.einsum("bct,bcs->bts", q * d**-0.25, k * d**-0.25).softmax(-1)
        o = torch.einsum("bts,bcs->bct", att, v).reshape(b, c, -1)
        return x + self.proj(o).view(b, c, h, w)


class UNet(nn.Module):
    def __init__(self, base=128, mult=(1, 2, 2, 4), attn_at=(2, 3)):
        super().__init__()
        emb = base * 4
        self.base = base
        self.time = nn.Sequential(nn.Linear(base, emb), nn.SiLU(), nn.Linear(emb, emb))
        self.inp = nn.Conv2d(3, base, 3, padding=1)
        self.downs, self.ups = nn.ModuleList(), nn.ModuleList()
        chs, ch = [base], base
        for i, m in enumerate(mult):
            for _ in range(2):
                self.downs.append(nn.ModuleList([ResBlock(ch, base * m, emb),
                                                 AttnBlock(base * m) if i in attn_at else nn.Identity()]))
                ch = base * m
                chs.append(ch)
            if i != len(mult) - 1:
                self.downs.append(nn.ModuleList([nn.Conv2d(ch, ch, 3, stride=2, padding=1)]))
                chs.append(ch)
        self.mid1, self.mida, self.mid2 = ResBlock(ch, ch, emb), AttnBlock(ch), ResBlock(ch, ch, emb)
        for i, m in reversed(list(enumerate(mult))):
            for j in range(3):
                self.ups.append(nn.ModuleList([ResBlock(ch + chs.pop(), base * m, emb),
                                               AttnBlock(base * m) if i in attn_at else nn.Identity()]))
                ch = base * m
            if i:
                self.ups.append(nn.ModuleList([nn.Conv2d(ch, ch, 3, padding=1)]))
        self.out = nn.Sequential(nn.GroupNorm(32, ch), nn.SiLU(), nn.Conv2d(ch, 3, 3, padding=1))

    def forward(self, x, t):
        e = self.time(timestep_embedding(t, self.base))
        h = self.inp(x)
        hs = [h]
        for layer in self.downs:
            if len(layer) == 1:
                h = layer[0](h)
            else:
                h = layer[1](layer[0](h, e))
            hs.append(h)
        h = self.mid2(self.mida(self.mid1(h, e)), e)
        for layer in self.ups:
            if len(layer) == 1:
                h = layer[0](F.interpolate(h, scale_factor=2, mode="nearest"))
            else:
                h = layer[1](layer[0](torch.cat([h, hs.pop()], 1), e))
        return self.out(h)


betas = torch.linspace(1e-4, 0.02, T, device=device)
abar = torch.cumprod(1 - betas, 0)

net = UNet().to(device)
ema = copy.deepcopy(net).requires_grad_(False).eval()
opt = torch.optim.AdamW(net.parameters(), lr=2e-4, weight_decay=0.0)
sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1, (s + 1) / 100))
print("params", sum(p.numel() for p in net.parameters()) / 1e6, "M")

for step in range(5):
    x0 = torch.rand(BATCH, 3, 64, 64).mul_(2).sub_(1).to(device)
    t = torch.randint(0, T, (BATCH,), device=device)
    noise = torch.randn_like(x0)
    a = abar[t].view(-1, 1, 1, 1)
    xt = a.sqrt() * x0 + (1 - a).sqrt() * noise
    with torch.autocast("cuda", torch.bfloat16, enabled=MODE == "bf16"):
        pred = net(xt, t)
    loss = F.mse_loss(pred.float(), noise)
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    opt.step()
    sched.step()
    with torch.no_grad():
        for pe, p in zip(ema.parameters(), net.parameters()):
            pe.lerp_(p, 1 - 0.9999)
    print(step, loss.item())


@torch.no_grad()
def sample(model, n=16, steps=6):
    x = torch.randn(n, 3, 64, 64, device=device)
    ts = torch.linspace(T - 1, 0, steps, device=device).long()
    for i in range(steps):
        eps = model(x, ts[i].expand(n))
        a = abar[ts[i]]
        a_prev = abar[ts[i + 1]] if i + 1 < steps else torch.tensor(1.0, device=device)
        x0 = ((x - (1 - a).sqrt() * eps) / a.sqrt()).clamp(-1, 1)
        x = a_prev.sqrt() * x0 + (1 - a_prev).sqrt() * eps
    return x


imgs = sample(ema)
print("sampled", imgs.shape, "peak GB", torch.cuda.max_memory_allocated() / 1e9)
