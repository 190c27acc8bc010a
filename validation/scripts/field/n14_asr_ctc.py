#!/usr/bin/env python
"""Wav2vec-ish acoustic model: raw waveform -> 1D convs -> transformer encoder -> CTC."""
import argparse
import math

import torch
import torch.nn as nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset


class SpeechSet(Dataset):
    SR = 16000

    def __init__(self, n, lo=2.0, hi=8.0, vocab=32, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.lens = ((torch.rand(n, generator=g) * (hi - lo) + lo) * self.SR).int().tolist()
        self.lens = sorted(self.lens, reverse=True)
        self.texts = [torch.randint(1, vocab, (int(l / self.SR * 8),), generator=g) for l in self.lens]

    def __len__(self):
        return len(self.lens)

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(1000 + i)
        return torch.randn(self.lens[i], generator=g) * 0.1, self.texts[i]


def collate(batch):
    wav, txt = zip(*batch)
    return (pad_sequence(wav, batch_first=True), torch.tensor([len(w) for w in wav]),
            pad_sequence(txt, batch_first=True), torch.tensor([len(t) for t in txt]))


class FeatureExtractor(nn.Module):
    SPEC = [(256, 10, 5), (256, 3, 2), (256, 3, 2), (256, 3, 2), (384, 3, 2), (384, 2, 2)]

    def __init__(self):
        super().__init__()
        self.convs, self.norms = nn.ModuleList(), nn.ModuleList()
        i = 1
        for c, k, s in self.SPEC:
            self.convs.append(nn.Conv1d(i, c, k, s, bias=False))
            self.norms.append(nn.GroupNorm(c, c) if i == 1 else nn.GroupNorm(1, c))
            i = c

    def forward(self, x):
        x = x.unsqueeze(1)
        for c, n in zip(self.convs, self.norms):
            x = nn.functional.gelu(n(c(x)))
        return x.transpose(1, 2)

    def out_len(self, l):
        for _, k, s in self.SPEC:
            l = torch.div(l - k, s, rounding_mode="floor") + 1
        return l


class PosEnc(nn.Module):
    def __init__(self, d, n=4000):
        super().__init__()
        pe = torch.zeros(n, d)
        pos = torch.arange(n).unsqueeze(1)
        div = torch.exp(torch.arange(0, d, 2) * (-math.log(10000.0) / d))
        pe[:, 0::2], pe[:, 1::2] = torch.sin(pos * div), torch.cos(pos * div)
        self.register_buffer("pe", pe)

    def forward(self, x):
        return x + self.pe[: x.size(1)]


class ASR(nn.Module):
    def __init__(self, d=384, layers=6, vocab=32):
        super().__init__()
        self.fe = FeatureExtractor()
        self.pe = PosEnc(d)
        layer = nn.TransformerEncoderLayer(d, 6, 4 * d, dropout=0.1, activation="gelu", batch_first=True, norm_first=True)
        self.enc = nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(d), enable_nested_tensor=False)
        self.out = nn.Linear(d, vocab)

    def forward(self, wav, lens):
        x = self.pe(self.fe(wav))
        n = self.fe.out_len(lens)
        pad = torch.arange(x.size(1), device=x.device)[None] >= n.to(x.device)[:, None]
        return self.out(self.enc(x, src_key_padding_mask=pad)), n


def greedy(logits, n):
    ids = logits.argmax(-1).cpu()
    return [torch.unique_consecutive(i[:l]) for i, l in zip(ids, n)]


def main(a):
    torch.manual_seed(0)
    dev = "cuda"
    dl = DataLoader(SpeechSet(a.bs * 8), batch_size=a.bs, shuffle=a.shuffle, collate_fn=collate,
                    generator=torch.Generator().manual_seed(2))
    net = ASR(layers=a.layers).to(dev)
    ctc = nn.CTCLoss(blank=0, zero_infinity=True)
    opt = torch.optim.AdamW(net.parameters(), lr=3e-4)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 1e-3, total_steps=len(dl))
    for i, (wav, wl, txt, tl) in enumerate(dl):
        wav, txt = wav.to(dev), txt.to(dev)
        with torch.autocast("cuda", torch.bfloat16, enabled=a.amp):
            logits, n = net(wav, wl)
        lp = logits.float().log_softmax(-1).transpose(0, 1)
        if a.gpu_lengths:
            loss = ctc(lp, txt, n.to(dev), tl.to(dev))
        else:
            loss = ctc(lp, txt, n, tl)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        opt.step()
        sched.step()
        print(f"{i} wav {tuple(wav.shape)} loss {loss.item():.4f}")
    if a.skip_eval:
        return
    net.eval()
    with torch.inference_mode():
        logits, n = net(wav, wl)
        hyp = greedy(logits, n)
    print("hyp lens ok:", len(hyp) == len(wl))


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--bs", type=int, default=12)
    p.add_argument("--layers", type=int, default=6)
    p.add_argument("--amp", action="store_true")
    p.add_argument("--shuffle", action="store_true")
    p.add_argument("--gpu-lengths", action="store_true")
    p.add_argument("--skip-eval", action="store_true")
    main(p.parse_args())
