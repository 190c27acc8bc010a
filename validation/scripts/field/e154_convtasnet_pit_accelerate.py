"""Two-speaker separation with Conv-TasNet and permutation-invariant SI-SNR, on accelerate."""
import itertools
import os
import tempfile
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset


@dataclass
class HP:
    sr: int = 8000
    seconds: float = 4.0
    N: int = 512        # encoder filters
    L: int = 16         # filter length
    B: int = 128        # bottleneck
    H: int = 512        # conv block channels
    Sc: int = 128       # skip channels
    P: int = 3          # kernel
    X: int = 8          # blocks per repeat
    R: int = 3          # repeats
    C: int = 2
    batch: int = 6      # per micro step
    accum: int = 2
    updates: int = 4
    lr: float = 1e-3


class Mixtures(Dataset):
    """harmonic 'voices' with a wandering pitch and syllable-like envelopes"""

    def __init__(self, hp, n, offset=0):
        self.hp, self.n, self.offset = hp, n, offset

    def __len__(self):
        return self.n

    def voice(self, g):
        T = int(self.hp.sr * self.hp.seconds)
        f0 = 80 + 170 * torch.rand(1, generator=g)
        drift = F.interpolate(torch.randn(1, 1, 16, generator=g), size=T, mode="linear")[0, 0]
        phase = torch.cumsum(2 * torch.pi * f0 * (1 + 0.05 * drift) / self.hp.sr, 0)
        amps = torch.rand(12, generator=g) / torch.arange(1, 13)
        wave = (amps[:, None] * torch.sin(torch.arange(1, 13)[:, None] * phase)).sum(0)
        env = F.interpolate(torch.rand(1, 1, 24, generator=g), size=T, mode="linear")[0, 0]
        return wave * env

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.offset + i)
        src = torch.stack([self.voice(g) for _ in range(self.hp.C)])
        src[1] *= 10 ** (float(torch.rand(1, generator=g)) / 2 - 0.25)
        return src.sum(0), src


class GlobalLayerNorm(nn.Module):
    def __init__(self, ch):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(1, ch, 1))
        self.beta = nn.Parameter(torch.zeros(1, ch, 1))

    def forward(self, y):
        mean = y.mean((1, 2), True)
        var = ((y - mean) ** 2).mean(dim=(1, 2), keepdim=True)
        return self.gamma * (y - mean) / torch.pow(var + 1e-8, 0.5) + self.beta


class TemporalBlock(nn.Module):
    def __init__(self, hp, dilation, last):
        super().__init__()
        self.inp = nn.Conv1d(hp.B, hp.H, 1)
        self.act1, self.norm1 = nn.PReLU(), GlobalLayerNorm(hp.H)
        self.depth = nn.Conv1d(hp.H, hp.H, hp.P, padding=dilation * (hp.P - 1) // 2, dilation=dilation, groups=hp.H)
        self.act2, self.norm2 = nn.PReLU(), GlobalLayerNorm(hp.H)
        self.res = None if last else nn.Conv1d(hp.H, hp.B, 1)
        self.skip = nn.Conv1d(hp.H, hp.Sc, 1)

    def forward(self, x):
        h = self.norm1(self.act1(self.inp(x)))
        h = self.norm2(self.act2(self.depth(h)))
        return (x if self.res is None else x + self.res(h)), self.skip(h)


class ConvTasNet(nn.Module):
    def __init__(self, hp):
        super().__init__()
        self.hp = hp
        self.encoder = nn.Conv1d(1, hp.N, hp.L, stride=hp.L // 2, bias=False)
        self.ln = GlobalLayerNorm(hp.N)
        self.bottleneck = nn.Conv1d(hp.N, hp.B, 1)
        n = hp.R * hp.X
        self.blocks = nn.ModuleList(TemporalBlock(hp, 2 ** (i % hp.X), i == n - 1) for i in range(n))
        self.mask = nn.Sequential(nn.PReLU(), nn.Conv1d(hp.Sc, hp.N * hp.C, 1), nn.Sigmoid())
        self.decoder = nn.ConvTranspose1d(hp.N, 1, hp.L, stride=hp.L // 2, bias=False)

    def forward(self, mix):
        w = F.relu(self.encoder(mix.unsqueeze(1)))
        x, skips = self.bottleneck(self.ln(w)), 0
        for blk in self.blocks:
            x, s = blk(x)
            skips = skips + s
        m = self.mask(skips).view(mix.shape[0], self.hp.C, self.hp.N, -1)
        y = self.decoder((m * w.unsqueeze(1)).flatten(0, 1)).view(mix.shape[0], self.hp.C, -1)
        return F.pad(y, (0, mix.shape[-1] - y.shape[-1]))


def si_snr(est, ref, eps=1e-8):
    est, ref = est - est.mean(-1, keepdim=True), ref - ref.mean(-1, keepdim=True)
    proj = (est * ref).sum(-1, keepdim=True) * ref / (ref.pow(2).sum(-1, keepdim=True) + eps)
    return 10 * torch.log10(proj.pow(2).sum(-1) / ((est - proj).pow(2).sum(-1) + eps) + eps)


def pit_loss(est, ref):
    pair = si_snr(est.unsqueeze(2), ref.unsqueeze(1))              # B, C, C
    perms = list(itertools.permutations(range(ref.shape[1])))
    score = torch.stack([sum(pair[:, i, p[i]] for i in range(len(p))) / len(p) for p in perms], 1)
    return -score.max(1).values.mean()


def main():
    hp = HP()
    set_seed(17)
    acc = Accelerator(gradient_accumulation_steps=hp.accum)
    model = ConvTasNet(hp)
    opt = torch.optim.Adam(model.parameters(), lr=hp.lr)
    train = DataLoader(Mixtures(hp, hp.batch * hp.accum * hp.updates), batch_size=hp.batch, shuffle=True)
    valid = DataLoader(Mixtures(hp, 2 * hp.batch, offset=10_000), batch_size=hp.batch)
    sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=2)
    model, opt, train, valid = acc.prepare(model, opt, train, valid)

    model.train()
    for i, (mix, src) in enumerate(train):
        with acc.accumulate(model):
            loss = pit_loss(model(mix), src)
            acc.backward(loss)
            if acc.sync_gradients:
                acc.clip_grad_norm_(model.parameters(), 5.0)
            opt.step()
            opt.zero_grad()
        acc.print(f"micro {i} si-snr loss {loss.item():.3f} sync {acc.sync_gradients} "
                  f"peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")

    model.eval()
    total = 0.0
    with torch.no_grad():
        for mix, src in valid:
            total += acc.gather(pit_loss(model(mix), src)).mean().item()
    sched.step(total / len(valid))
    acc.print(f"valid si-snr {-total / len(valid):.3f} dB")
    with tempfile.TemporaryDirectory() as tmp:
        acc.save_state(tmp)
        acc.print("checkpoint files:", sorted(os.listdir(tmp)))
    acc.print(f"max reserved {torch.cuda.max_memory_reserved() / 2**30:.2f} GiB")

if __name__ == "__main__":
    main()
