# RNN-Transducer on synthetic speech. Log-mel on GPU, bf16 autocast, pure pytorch transducer loss.
import argparse
import math
import random
import time

import torch
from torch import nn
import torch.nn.functional as F

ap = argparse.ArgumentParser()
ap.add_argument("--batch-size", type=int, default=16)
ap.add_argument("--steps", type=int, default=24)
ap.add_argument("--accum", type=int, default=2)
ap.add_argument("--vocab", type=int, default=1024)
ap.add_argument("--enc-dim", type=int, default=512)
ap.add_argument("--enc-layers", type=int, default=8)
ap.add_argument("--joint-dim", type=int, default=640)
ap.add_argument("--min-sec", type=float, default=6.0)
ap.add_argument("--max-sec", type=float, default=11.0)
ap.add_argument("--lr", type=float, default=4e-4)
args = ap.parse_args()

SR, NFFT, WIN, HOP, NMEL = 16000, 512, 400, 160, 80
BLANK = 0
random.seed(1234)
torch.manual_seed(1234)
dev = torch.device("cuda")


def mel_filterbank(n_mels, n_fft, sr, fmin=20.0, fmax=7600.0):
    hz2mel = lambda f: 2595.0 * math.log10(1 + f / 700.0)
    pts = torch.linspace(hz2mel(fmin), hz2mel(fmax), n_mels + 2)
    hz = 700.0 * (10 ** (pts / 2595.0) - 1)
    freqs = torch.linspace(0, sr / 2, n_fft // 2 + 1)
    up = (freqs[None] - hz[:-2, None]) / (hz[1:-1] - hz[:-2])[:, None]
    down = (hz[2:, None] - freqs[None]) / (hz[2:] - hz[1:-1])[:, None]
    return torch.clamp(torch.minimum(up, down), min=0)


class LogMel(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("window", torch.hann_window(WIN))
        self.register_buffer("fb", mel_filterbank(NMEL, NFFT, SR))

    @torch.no_grad()
    def forward(self, wav, wav_len):
        wav = torch.cat([wav[:, :1], wav[:, 1:] - 0.97 * wav[:, :-1]], dim=1)
        spec = torch.stft(wav, NFFT, HOP, WIN, self.window, center=True, return_complex=True)
        mel = torch.matmul(self.fb, spec.abs().pow(2)).clamp_min(1e-10).log()
        mel = (mel - mel.mean(-1, keepdim=True)) / (mel.std(-1, keepdim=True) + 1e-5)
        return mel.transpose(1, 2), wav_len // HOP + 1


def spec_augment(x, n_f=2, f=27, n_t=4, t=40):
    x = x.clone()
    for _ in range(n_f):
        w = random.randint(0, f); s = random.randint(0, NMEL - w)
        x[:, :, s:s + w] = 0
    for _ in range(n_t):
        w = random.randint(0, t); s = random.randint(0, max(1, x.size(1) - w))
        x[:, s:s + w] = 0
    return x


class ConvBlock(nn.Module):
    """half of a conformer: ffn + MHSA + depthwise conv"""
    def __init__(self, d, heads=8, k=15, p=0.1):
        super().__init__()
        self.ln1, self.ln2, self.ln3 = nn.LayerNorm(d), nn.LayerNorm(d), nn.LayerNorm(d)
        self.ff = nn.Sequential(nn.Linear(d, 4 * d), nn.SiLU(), nn.Dropout(p), nn.Linear(4 * d, d), nn.Dropout(p))
        self.attn = nn.MultiheadAttention(d, heads, dropout=p, batch_first=True)
        self.pw1, self.pw2 = nn.Conv1d(d, 2 * d, 1), nn.Conv1d(d, d, 1)
        self.dw = nn.Conv1d(d, d, k, padding=k // 2, groups=d)
        self.bn = nn.BatchNorm1d(d)

    def forward(self, x, pad):
        x = x + 0.5 * self.ff(self.ln1(x))
        y = self.ln2(x)
        x = x + self.attn(y, y, y, key_padding_mask=pad, need_weights=False)[0]
        y = self.ln3(x).masked_fill(pad.unsqueeze(-1), 0).transpose(1, 2)
        y = self.pw2(F.silu(self.bn(self.dw(F.glu(self.pw1(y), dim=1)))))
        return x + y.transpose(1, 2)


class Transducer(nn.Module):
    def __init__(self, V, d, L, j):
        super().__init__()
        self.sub = nn.Sequential(nn.Conv2d(1, 128, 3, 2, 1), nn.ReLU(), nn.Conv2d(128, 128, 3, 2, 1), nn.ReLU())
        self.inp = nn.Linear(128 * NMEL // 4, d)
        self.enc = nn.ModuleList([ConvBlock(d) for _ in range(L)])
        self.emb = nn.Embedding(V, 320, padding_idx=BLANK)
        self.pred = nn.LSTM(320, 640, batch_first=True)
        self.enc_proj, self.pred_proj = nn.Linear(d, j), nn.Linear(640, j)
        self.out = nn.Linear(j, V)

    def forward(self, feats, flen, y):
        x = self.sub(feats.unsqueeze(1))
        B, C, T, M = x.shape
        x = self.inp(x.permute(0, 2, 1, 3).reshape(B, T, C * M))
        tlen = ((flen + 1) // 2 + 1) // 2
        pad = torch.arange(T, device=x.device)[None] >= tlen[:, None]
        for blk in self.enc:
            x = blk(x, pad)
        g, _ = self.pred(self.emb(F.pad(y, (1, 0), value=BLANK)))
        h = torch.tanh(self.enc_proj(x).unsqueeze(2) + self.pred_proj(g).unsqueeze(1))
        return self.out(h), tlen  # (B, T, U+1, V)


def rnnt_loss(logits, y, tlen, ulen):
    lp = F.log_softmax(logits.float(), dim=-1)
    B, T, U1, _ = lp.shape
    blank = lp[..., BLANK]
    emit = lp[:, :, :-1].gather(-1, y[:, None, :, None].expand(-1, T, -1, 1)).squeeze(-1)
    cum = F.pad(emit.cumsum(-1), (1, 0))                     # (B, T, U+1)
    alphas = [cum[:, 0]]
    for t in range(1, T):
        stay = alphas[-1] + blank[:, t - 1]
        alphas.append(cum[:, t] + torch.logcumsumexp(stay - cum[:, t], dim=-1))
    alpha = torch.stack(alphas, dim=1)
    b = torch.arange(B, device=lp.device)
    ll = alpha[b, tlen - 1, ulen] + blank[b, tlen - 1, ulen]
    return -(ll / ulen).mean()


def make_batch(bs):
    # length-bucketed: utterances of a batch are within 10% of each other
    top = random.uniform(args.min_sec, args.max_sec)
    secs = [top] + [top * random.uniform(0.9, 1.0) for _ in range(bs - 1)]
    wlen = torch.tensor([int(s * SR) for s in secs])
    ulen = torch.tensor([max(2, int(s * random.uniform(4.5, 6.0))) for s in secs])
    wav = torch.randn(bs, int(wlen.max())) * 0.05
    wav[torch.arange(wav.size(1))[None] >= wlen[:, None]] = 0
    y = torch.randint(1, args.vocab, (bs, int(ulen.max())))
    y[torch.arange(y.size(1))[None] >= ulen[:, None]] = BLANK
    return [z.to(dev, non_blocking=True) for z in (wav, wlen, y, ulen)]


frontend = LogMel().to(dev)
model = Transducer(args.vocab, args.enc_dim, args.enc_layers, args.joint_dim).to(dev)
print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M params")
opt = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=1e-3)
sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min((s + 1) / 10, (10 / (s + 1)) ** 0.5))

model.train()
t0 = time.time()
for step in range(args.steps):
    wav, wlen, y, ulen = make_batch(args.batch_size)
    feats, flen = frontend(wav, wlen)
    feats = spec_augment(feats)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits, tlen = model(feats, flen, y)
    loss = rnnt_loss(logits, y, tlen, ulen)
    (loss / args.accum).backward()
    if (step + 1) % args.accum == 0:
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        sched.step()
    if step % 4 == 0:
        print(f"step {step:3d} loss/tok {loss.item():.3f} joint {tuple(logits.shape)} "
              f"peak {torch.cuda.max_memory_allocated() / 1e9:.2f} GB  {time.time() - t0:.1f}s")

print("max_memory_allocated:", torch.cuda.max_memory_allocated())
print("max_memory_reserved:", torch.cuda.max_memory_reserved())
