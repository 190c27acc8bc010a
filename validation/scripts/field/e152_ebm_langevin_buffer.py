#!/usr/bin/env python
"""Image energy-based model: short-run Langevin dynamics, persistent replay buffer on the host,
contrastive divergence loss plus an energy-magnitude penalty, EMA of the energy network."""
import argparse
import copy
import random

import numpy as np
import torch
from torch import nn, autograd
from torch.nn.utils.parametrizations import spectral_norm


def conv(cin, cout, k=3):
    return spectral_norm(nn.Conv2d(cin, cout, k, padding=k // 2))


class ResBlock(nn.Module):
    def __init__(self, cin, cout, down):
        super().__init__()
        self.c1, self.c2 = conv(cin, cout), conv(cout, cout)
        self.skip = conv(cin, cout, 1) if cin != cout or down else None
        self.act = nn.SiLU()
        self.down = down

    def forward(self, x):
        h = self.c2(self.act(self.c1(self.act(x))))
        h = h + (x if self.skip is None else self.skip(x))
        return nn.functional.avg_pool2d(h, 2) if self.down else h


class Energy(nn.Module):
    def __init__(self, ch):
        super().__init__()
        self.net = nn.Sequential(
            conv(3, ch), ResBlock(ch, ch, True), ResBlock(ch, ch, False), ResBlock(ch, 2 * ch, True),
            ResBlock(2 * ch, 2 * ch, False), ResBlock(2 * ch, 2 * ch, True), ResBlock(2 * ch, 2 * ch, False),
            nn.SiLU())
        self.head = nn.Linear(2 * ch, 1)

    def forward(self, x):
        return self.head(self.net(x).sum((2, 3))).squeeze(1)


class SampleBuffer:
    def __init__(self, capacity, res):
        self.capacity, self.res, self.items = capacity, res, []

    def push(self, samples):
        self.items.extend(samples.detach().cpu().unbind(0))
        if len(self.items) > self.capacity:
            self.items = self.items[-self.capacity:]

    def draw(self, n, device, p=0.95):
        k = (np.random.rand(n) < p).sum() if self.items else 0
        old = [random.choice(self.items) for _ in range(k)]
        fresh = torch.rand(n - k, 3, self.res, self.res)
        x = torch.cat([torch.stack(old), fresh]) if old else fresh
        return x.to(device)


def langevin(energy, x, steps, step_size, noise_std):
    noise = torch.empty_like(x)
    x = x.clone().requires_grad_(True)
    for _ in range(steps):
        noise.normal_(0, noise_std)
        x.data.add_(noise)
        e = energy(x).sum()
        (g,) = autograd.grad(e, x)
        g.clamp_(-0.01, 0.01)
        x.data.add_(g, alpha=-step_size)
        x.data.clamp_(0, 1)
    return x.detach()


@torch.no_grad()
def ema_update(dst, src, decay):
    for a, b in zip(dst.parameters(), src.parameters()):
        a.mul_(decay).add_(b, alpha=1 - decay)


def blobs(n, res, rng):
    g = torch.linspace(-1, 1, res)
    c = torch.from_numpy(rng.uniform(-0.6, 0.6, (n, 3, 2))).float()
    r2 = (g[None, None, :, None] - c[..., 0, None, None]) ** 2 + (g[None, None, None, :] - c[..., 1, None, None]) ** 2
    return torch.exp(-r2 / 0.08)


def run(opt):
    random.seed(opt.seed)
    np.random.seed(opt.seed)
    torch.manual_seed(opt.seed)
    rng = np.random.default_rng(opt.seed)
    device = "cuda"

    data = blobs(4096, opt.res, rng)
    energy = Energy(opt.ch).to(device)
    ema = copy.deepcopy(energy).eval().requires_grad_(False)
    optim = torch.optim.Adam(energy.parameters(), lr=opt.lr, betas=(0.0, 0.999))
    buf = SampleBuffer(10_000, opt.res)
    print("parameters: %.2fM" % (sum(p.numel() for p in energy.parameters()) / 1e6))

    for it in range(opt.iters):
        pos = data[torch.randint(len(data), (opt.batch,))].to(device)
        pos = (pos + torch.randn_like(pos) * 0.005).clamp_(0, 1)

        # sampling phase: no parameter gradients
        energy.requires_grad_(False)
        energy.eval()
        neg = langevin(energy, buf.draw(opt.batch, device), opt.langevin_steps, opt.step_size, 0.005)
        mem_s = torch.cuda.max_memory_allocated() / 2 ** 30
        energy.requires_grad_(True)
        energy.train()

        optim.zero_grad()
        e_pos, e_neg = energy(torch.cat([pos, neg])).chunk(2)
        cd = e_pos.mean() - e_neg.mean()
        reg = (e_pos ** 2 + e_neg ** 2).mean()
        loss = cd + opt.alpha * reg
        loss.backward()
        torch.nn.utils.clip_grad_norm_(energy.parameters(), 1.0)
        optim.step()
        ema_update(ema, energy, 0.99)
        buf.push(neg)
        print("it %d  cd %+.4f  reg %.4f  buffer %d  peak after sampling %.2f, after step %.2f GiB"
              % (it, cd.item(), reg.item(), len(buf.items), mem_s, torch.cuda.max_memory_allocated() / 2 ** 30))

    gallery = langevin(ema, torch.rand(64, 3, opt.res, opt.res, device=device), 2 * opt.langevin_steps,
                       opt.step_size, 0.005)
    print("gallery mean %.3f std %.3f" % (gallery.mean().item(), gallery.std().item()))


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--res", type=int, default=64)
    ap.add_argument("--ch", type=int, default=128)
    ap.add_argument("--batch", type=int, default=96)
    ap.add_argument("--iters", type=int, default=5)
    ap.add_argument("--langevin-steps", type=int, default=20)
    ap.add_argument("--step-size", type=float, default=10.0)
    ap.add_argument("--alpha", type=float, default=0.1)
    ap.add_argument("--lr", type=float, default=1e-4)
    ap.add_argument("--seed", type=int, default=11)
    run(ap.parse_args())
