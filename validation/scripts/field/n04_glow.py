"""Glow (multi-scale) on synthetic 32x32 images. Usage: n04_glow.py [K] [L] [--fp64-det]"""
import math
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

pos = [a for a in sys.argv[1:] if not a.startswith("--")]
K = int(pos[0]) if len(pos) > 0 else 8
L = int(pos[1]) if len(pos) > 1 else 3
BS = int(pos[2]) if len(pos) > 2 else 64
FP64 = "--fp64-det" in sys.argv
HID = 256


class ActNorm(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.loc = nn.Parameter(torch.zeros(1, c, 1, 1))
        self.logs = nn.Parameter(torch.zeros(1, c, 1, 1))
        self.register_buffer("inited", torch.tensor(0, dtype=torch.uint8))

    @torch.no_grad()
    def initialize(self, x):
        flat = x.permute(1, 0, 2, 3).reshape(x.shape[1], -1)
        mean = flat.mean(1).view(1, -1, 1, 1)
        std = flat.std(1).view(1, -1, 1, 1)
        self.loc.data.copy_(-mean)
        self.logs.data.copy_(-torch.log(std + 1e-6))

    def forward(self, x):
        if self.inited.item() == 0:
            self.initialize(x)
            self.inited.fill_(1)
        _, _, h, w = x.shape
        return torch.exp(self.logs) * (x + self.loc), h * w * self.logs.sum()


class InvConv(nn.Module):
    def __init__(self, c):
        super().__init__()
        q, _ = torch.linalg.qr(torch.randn(c, c))
        self.w = nn.Parameter(q)

    def forward(self, x):
        _, c, h, w = x.shape
        if FP64:
            ld = torch.slogdet(self.w.double())[1].float()
        else:
            ld = torch.linalg.slogdet(self.w)[1]
        return F.conv2d(x, self.w.view(c, c, 1, 1)), h * w * ld


class ZeroConv(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.conv = nn.Conv2d(i, o, 3, padding=0)
        nn.init.zeros_(self.conv.weight)
        nn.init.zeros_(self.conv.bias)
        self.scale = nn.Parameter(torch.zeros(1, o, 1, 1))

    def forward(self, x):
        return self.conv(F.pad(x, [1, 1, 1, 1], value=1)) * torch.exp(self.scale * 3)


class Coupling(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(c // 2, HID, 3, padding=1), nn.ReLU(inplace=True),
            nn.Conv2d(HID, HID, 1), nn.ReLU(inplace=True), ZeroConv(HID, c))

    def forward(self, x):
        a, b = x.chunk(2, 1)
        log_s, t = self.net(a).chunk(2, 1)
        s = torch.sigmoid(log_s + 2)
        return torch.cat([a, (b + t) * s], 1), torch.log(s).view(x.shape[0], -1).sum(1)


def squeeze(x):
    b, c, h, w = x.shape
    x = x.view(b, c, h // 2, 2, w // 2, 2).permute(0, 1, 3, 5, 2, 4)
    return x.contiguous().view(b, c * 4, h // 2, w // 2)


def gauss_logp(x, mean, logs):
    return -0.5 * math.log(2 * math.pi) - logs - 0.5 * (x - mean) ** 2 / torch.exp(2 * logs)


class Level(nn.Module):
    def __init__(self, c, split):
        super().__init__()
        c4 = c * 4
        self.steps = nn.ModuleList(
            nn.ModuleList([ActNorm(c4), InvConv(c4), Coupling(c4)]) for _ in range(K))
        self.split = split
        self.prior = ZeroConv(c * 2, c4) if split else ZeroConv(c4, c * 8)

    def forward(self, x):
        x = squeeze(x)
        logdet = 0
        for step in self.steps:
            for f in step:
                x, d = f(x)
                logdet = logdet + d
        if self.split:
            x, z = x.chunk(2, 1)
            m, s = self.prior(x).chunk(2, 1)
        else:
            z = x
            m, s = self.prior(torch.zeros_like(x)).chunk(2, 1)
        return x, logdet, gauss_logp(z, m, s).flatten(1).sum(1)


class Glow(nn.Module):
    def __init__(self):
        super().__init__()
        c, self.levels = 3, nn.ModuleList()
        for i in range(L):
            self.levels.append(Level(c, i < L - 1))
            c *= 2

    def forward(self, x):
        ld, lp = 0, 0
        for lv in self.levels:
            x, d, p = lv(x)
            ld, lp = ld + d, lp + p
        return lp, ld


torch.manual_seed(3)
model = Glow().cuda()
opt = torch.optim.Adamax(model.parameters(), lr=5e-4, weight_decay=5e-5)
n_pixel = 32 * 32 * 3
n_bins = 2.0 ** 5
for it in range(6):
    img = torch.randint(0, 256, (BS, 3, 32, 32), device="cuda").float()
    img = torch.floor(img / 8) / n_bins - 0.5
    if it == 0:
        with torch.no_grad():
            model(img + torch.rand_like(img) / n_bins)
        continue
    lp, ld = model(img + torch.rand_like(img) / n_bins)
    loss = -(lp + ld - math.log(n_bins) * n_pixel).mean() / (math.log(2) * n_pixel)
    model.zero_grad()
    loss.backward()
    gn = nn.utils.clip_grad_value_(model.parameters(), 5)
    opt.step()
    print(f"it {it}: {loss.item():.5f} bits/dim; logdet {ld.mean().item():.2f}")
