#!/usr/bin/env python
"""Deep CCA between a speech view (STFT) and an articulatory view, fully deterministic run."""
import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import numpy as np
import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint_sequential

SEED = 11
BS, SR, SECS = 192, 16000, 4
N_FFT, HOP = 1024, 256
ART_CH = 24
WIDTH, DEPTH, OUT = 512, 12, 128
SEGMENTS = 4
ITERS = 5


class ResBlock(nn.Module):
    """conv block with stochastic depth: only the surviving rows go through the branch"""

    def __init__(self, ch, drop, dilation):
        super().__init__()
        self.drop = drop
        self.branch = nn.Sequential(
            nn.GroupNorm(8, ch), nn.SiLU(), nn.Conv1d(ch, ch, 5, padding=2 * dilation, dilation=dilation),
            nn.GroupNorm(8, ch), nn.SiLU(), nn.Dropout1d(0.1), nn.Conv1d(ch, ch, 1))

    def forward(self, x):
        if not self.training or self.drop == 0:
            return x + self.branch(x)
        keep = torch.empty(x.size(0), device=x.device).bernoulli_(1 - self.drop)
        rows = keep.nonzero(as_tuple=True)[0]
        if rows.numel() == 0:
            return x
        return x.index_add(0, rows, self.branch(x[rows]) / (1 - self.drop))


class Encoder(nn.Module):
    def __init__(self, cin):
        super().__init__()
        self.stem = nn.Conv1d(cin, WIDTH, 3, padding=1)
        self.blocks = nn.Sequential(*[ResBlock(WIDTH, 0.4 * i / DEPTH, 2 ** (i % 4)) for i in range(DEPTH)])
        self.proj = nn.Linear(2 * WIDTH, OUT)

    def forward(self, x):
        x = self.stem(x)
        if self.training:
            x = checkpoint_sequential(self.blocks, SEGMENTS, x, use_reentrant=False)
        else:
            x = self.blocks(x)
        return self.proj(torch.cat([x.mean(-1), x.var(-1).add(1e-5).sqrt()], 1))


def inv_sqrt(c):
    w, v = torch.linalg.eigh(c)
    return torch.einsum("ij,j,kj->ik", v, w.clamp_min(1e-6).rsqrt(), v)


def cca_loss(a, b, r=1e-2):
    n = a.size(0) - 1
    a, b = a.double() - a.double().mean(0), b.double() - b.double().mean(0)
    eye = torch.eye(a.size(1), device=a.device, dtype=a.dtype)
    saa, sbb, sab = a.T @ a / n + r * eye, b.T @ b / n + r * eye, a.T @ b / n
    corr = torch.linalg.svdvals(inv_sqrt(saa) @ sab @ inv_sqrt(sbb))
    return (1 - corr.clamp(max=1)).mean(), corr.detach()


def batch(rng, window):
    """one latent trajectory drives both views"""
    n = SR * SECS
    f0 = torch.from_numpy(rng.uniform(80, 300, (BS, 1)).astype(np.float32)).cuda()
    lat = torch.from_numpy(rng.standard_normal((BS, ART_CH, 40)).astype(np.float32)).cuda()
    t = torch.arange(n, device="cuda") / SR
    env = lat[:, :3].repeat_interleave(n // 40, dim=2)
    wav = sum((1 + 0.5 * env[:, k]) * torch.sin(2 * np.pi * (k + 1) * f0 * t) for k in range(3))
    wav += 0.05 * torch.randn_like(wav)
    spec = torch.stft(wav, N_FFT, HOP, window=window, return_complex=True)
    spec = spec.abs().clamp_(min=1e-5).log_()
    # SpecAugment-like frequency masking
    lo = torch.randint(0, N_FFT // 2 - 60, (BS, 1, 1), device="cuda")
    f = torch.arange(spec.size(1), device="cuda").view(1, -1, 1)
    spec = spec.masked_fill((f >= lo) & (f < lo + 40), 0.0)
    art = lat.repeat_interleave(6, dim=2) + 0.1 * torch.randn(BS, ART_CH, 240, device="cuda")
    return spec, art


def main():
    torch.manual_seed(SEED)
    rng = np.random.default_rng(SEED)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    window = torch.hann_window(N_FFT, device="cuda")
    enc = nn.ModuleDict({"speech": Encoder(N_FFT // 2 + 1), "art": Encoder(ART_CH)}).cuda()
    for m in enc.modules():
        if isinstance(m, nn.Linear):
            torch.nn.utils.parametrizations.orthogonal(m)     # canonical directions stay orthonormal
    grads = {}
    for name, e in enc.items():
        e.stem.register_full_backward_hook(
            lambda mod, gi, go, name=name: grads.__setitem__(name, go[0].norm()))
    opt = torch.optim.RMSprop(enc.parameters(), lr=1e-4, momentum=0.9, centered=True)
    print("parameters (M):", round(sum(p.numel() for p in enc.parameters()) / 1e6, 1))
    enc.train()
    for it in range(ITERS):
        torch.cuda.reset_peak_memory_stats()
        spec, art = batch(rng, window)
        za, zb = enc["speech"](spec), enc["art"](art)
        fwd = torch.cuda.memory_allocated()
        loss, corr = cca_loss(za, zb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"it {it}: loss {loss.item():.4f} top corr {corr[0].item():.3f} "
              f"stem grads {grads['speech'].item():.2e}/{grads['art'].item():.2e} "
              f"after forward {fwd / 1e9:.2f} GB peak {torch.cuda.max_memory_allocated() / 1e9:.2f} GB")
    enc.eval()
    with torch.no_grad():
        spec, art = batch(rng, window)
        print("eval loss", cca_loss(enc["speech"](spec), enc["art"](art))[0].item())
    print("reserved GB", torch.cuda.memory_reserved() / 1e9)


if __name__ == "__main__":
    main()
