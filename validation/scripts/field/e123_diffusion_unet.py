#!/usr/bin/env python
"""Class-conditional DDPM. U-Net with attention, channels_last + bf16 autocast, EMA, DDIM sampling with
classifier-free guidance afterwards. Peak memory is reported per phase."""
import argparse
import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


def timestep_embedding(t, dim):
    half = dim // 2
    freqs = torch.exp(-math.log(10000) * torch.arange(half, device=t.device) / half)
    a = t[:, None].float() * freqs[None]
    return torch.cat([a.cos(), a.sin()], dim=-1)


class ResBlock(nn.Module):
    def __init__(self, cin, cout, emb, dropout=0.1):
        super().__init__()
        self.in_layers = nn.Sequential(nn.GroupNorm(32, cin), nn.SiLU(), nn.Conv2d(cin, cout, 3, padding=1))
        self.emb = nn.Linear(emb, 2 * cout)
        self.norm = nn.GroupNorm(32, cout)
        self.out_layers = nn.Sequential(nn.SiLU(), nn.Dropout(dropout), nn.Conv2d(cout, cout, 3, padding=1))
        nn.init.zeros_(self.out_layers[-1].weight)
        self.skip = nn.Conv2d(cin, cout, 1) if cin != cout else nn.Identity()

    def forward(self, x, e):
        h = self.in_layers(x)
        scale, shift = self.emb(F.silu(e))[:, :, None, None].chunk(2, dim=1)
        h = self.norm(h) * (1 + scale) + shift
        return self.skip(x) + self.out_layers(h)


class Attn(nn.Module):
    def __init__(self, c, heads=4):
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(32, c)
        self.qkv = nn.Conv2d(c, 3 * c, 1)
        self.proj = nn.Conv2d(c, c, 1)

    def forward(self, x, e=None):
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(b, 3, self.heads, c // self.heads, h * w).transpose(-1, -2).unbind(1)
        o = F.scaled_dot_product_attention(q, k, v)
        return x + self.proj(o.transpose(-1, -2).reshape(b, c, h, w))


class UNet(nn.Module):
    def __init__(self, ch=128, mult=(1, 2, 2, 4), nres=2, attn_levels=(2, 3), classes=100):
        super().__init__()
        emb = 4 * ch
        self.ch = ch
        self.time = nn.Sequential(nn.Linear(ch, emb), nn.SiLU(), nn.Linear(emb, emb))
        self.label = nn.Embedding(classes + 1, emb)
        self.inp = nn.Conv2d(3, ch, 3, padding=1)
        self.down, chans, c = nn.ModuleList(), [ch], ch
        for i, m in enumerate(mult):
            for _ in range(nres):
                blk = nn.ModuleList([ResBlock(c, ch * m, emb)])
                c = ch * m
                if i in attn_levels:
                    blk.append(Attn(c))
                self.down.append(blk)
                chans.append(c)
            if i < len(mult) - 1:
                self.down.append(nn.ModuleList([nn.Conv2d(c, c, 3, stride=2, padding=1)]))
                chans.append(c)
        self.mid = nn.ModuleList([ResBlock(c, c, emb), Attn(c), ResBlock(c, c, emb)])
        self.up = nn.ModuleList()
        for i, m in reversed(list(enumerate(mult))):
            for j in range(nres + 1):
                blk = nn.ModuleList([ResBlock(c + chans.pop(), ch * m, emb)])
                c = ch * m
                if i in attn_levels:
                    blk.append(Attn(c))
                if i > 0 and j == nres:
                    blk.append(nn.ConvTranspose2d(c, c, 4, 2, 1))
                self.up.append(blk)
        self.out = nn.Sequential(nn.GroupNorm(32, c), nn.SiLU(), nn.Conv2d(c, 3, 3, padding=1))

    @staticmethod
    def run(blk, x, e):
        for m in blk:
            x = m(x, e) if isinstance(m, (ResBlock, Attn)) else m(x)
        return x

    def forward(self, x, t, y):
        e = self.time(timestep_embedding(t, self.ch)) + self.label(y)
        x = self.inp(x)
        skips = [x]
        for blk in self.down:
            x = self.run(blk, x, e)
            skips.append(x)
        x = self.run(self.mid, x, e)
        for blk in self.up:
            x = self.run(blk, torch.cat([x, skips.pop()], dim=1), e)
        return self.out(x)


@torch.no_grad()
def ddim(model, abar, y, shape, steps, guidance, null):
    x = torch.randn(shape, device=abar.device).to(memory_format=torch.channels_last)
    ts = torch.linspace(len(abar) - 1, 0, steps + 1).long().tolist()
    for t, s in zip(ts[:-1], ts[1:]):
        tt = torch.full((2 * shape[0],), t, device=x.device)
        with torch.autocast(x.device.type, torch.bfloat16):
            c, u = model(torch.cat([x, x]), tt, torch.cat([y, torch.full_like(y, null)])).chunk(2)
        eps = (u + guidance * (c - u)).float()
        x0 = ((x - (1 - abar[t]).sqrt() * eps) / abar[t].sqrt()).clamp(-1, 1)
        x = abar[s].sqrt() * x0 + (1 - abar[s]).sqrt() * eps
    return x


def report(tag):
    print(f"{tag}: allocated {torch.cuda.max_memory_allocated()} reserved {torch.cuda.max_memory_reserved()}")


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch", type=int, default=48)
    ap.add_argument("--size", type=int, default=64)
    ap.add_argument("--ch", type=int, default=128)
    ap.add_argument("--steps", type=int, default=6)
    a = ap.parse_args()
    torch.manual_seed(7)
    dev = torch.device("cuda")
    model = UNet(a.ch).to(dev, memory_format=torch.channels_last)
    ema = copy.deepcopy(model).eval().requires_grad_(False)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    abar = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, device=dev), 0)
    for step in range(a.steps):
        x = torch.rand(a.batch, 3, a.size, a.size, device=dev).mul(2).sub(1).to(memory_format=torch.channels_last)
        y = torch.randint(0, 100, (a.batch,), device=dev)
        y = torch.where(torch.rand(a.batch, device=dev) < 0.1, 100, y)
        t = torch.randint(0, 1000, (a.batch,), device=dev)
        noise = torch.randn_like(x)
        ab = abar[t].view(-1, 1, 1, 1)
        with torch.autocast("cuda", torch.bfloat16):
            pred = model(ab.sqrt() * x + (1 - ab).sqrt() * noise, t, y)
            w = torch.clamp(ab / (1 - ab), max=5.0) / (ab / (1 - ab))  # min-SNR weighting
            loss = (w * (pred - noise) ** 2).mean()
        opt.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        for pe, pm in zip(ema.parameters(), model.parameters()):
            pe.mul_(0.999).add_(pm.detach(), alpha=0.001)
        print(f"step {step}: loss {loss.item():.4f}")
    report("train")
    del pred, loss, x, noise
    opt.zero_grad(set_to_none=True)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    img = ddim(ema, abar, torch.randint(0, 100, (64,), device=dev), (64, 3, a.size, a.size), 6, 3.0, 100)
    print("sample mean/std", img.mean().item(), img.std().item())
    report("sample")


if __name__ == "__main__":
    main()
