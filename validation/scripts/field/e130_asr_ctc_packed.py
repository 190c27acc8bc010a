import math
import numpy as np
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

SR, NFFT, HOP, MELS = 16000, 512, 160, 80
MIN_SEC, MAX_SEC = 3.0, 16.0
BATCH_SECONDS = 400          # each batch holds about this much audio, so its size varies
CONV, HIDDEN, RNN_LAYERS, CHARS = 512, 896, 4, 48
UNFREEZE_AT, STEPS = 3, 8


class Utterances(Dataset):
    def __init__(self, n):
        rng = np.random.default_rng(0)
        self.sec = rng.uniform(MIN_SEC, MAX_SEC, n)
        self.text = [rng.integers(1, CHARS, max(2, int(s * 6))) for s in self.sec]

    def __len__(self):
        return len(self.sec)

    def __getitem__(self, i):
        n = int(self.sec[i] * SR)
        t = torch.arange(n) / SR
        f = 100 + 50 * (i % 20)
        wav = 0.3 * torch.sin(2 * math.pi * f * t) + 0.05 * torch.randn(n)
        return wav, torch.from_numpy(self.text[i]).long()


class BucketSampler(Sampler):
    """sorted by duration, cut by total (padded) seconds, order of batches shuffled"""

    def __init__(self, ds, seed=0):
        order = np.argsort(ds.sec)
        self.batches, cur = [], []
        for i in order:
            if cur and (len(cur) + 1) * ds.sec[i] > BATCH_SECONDS:
                self.batches.append(cur)
                cur = []
            cur.append(int(i))
        if cur:
            self.batches.append(cur)
        np.random.default_rng(seed).shuffle(self.batches)

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


def collate(batch):
    wavs, texts = zip(*batch)
    return (pad_sequence(wavs, batch_first=True), torch.tensor([len(w) for w in wavs]),
            torch.cat(texts), torch.tensor([len(t) for t in texts]))


class LogMel(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("win", torch.hann_window(NFFT))
        hz = 700 * (10 ** (torch.linspace(0, 2595 * math.log10(1 + SR / 2 / 700), MELS + 2) / 2595) - 1)
        bins = torch.linspace(0, SR / 2, NFFT // 2 + 1)
        up = (bins - hz[:-2, None]) / (hz[1:-1] - hz[:-2])[:, None]
        dn = (hz[2:, None] - bins) / (hz[2:] - hz[1:-1])[:, None]
        self.register_buffer("fb", torch.minimum(up, dn).clamp(min=0))

    @torch.no_grad()
    def forward(self, wav, lens):
        spec = torch.stft(wav, NFFT, HOP, window=self.win, center=True, return_complex=True)
        mel = (self.fb @ spec.abs().square() + 1e-6).log()
        mel = (mel - mel.mean((1, 2), keepdim=True)) / (mel.std((1, 2), keepdim=True) + 1e-5)
        if self.training:  # SpecAugment
            for row in mel:
                f0 = int(torch.randint(0, MELS - 12, (1,)))
                row[f0:f0 + 12] = 0
                t0 = int(torch.randint(0, max(1, row.size(1) - 40), (1,)))
                row[:, t0:t0 + 40] = 0
        return mel, lens // HOP + 1


class Acoustic(nn.Module):
    def __init__(self):
        super().__init__()
        self.mel = LogMel()
        self.front = nn.Sequential(
            weight_norm(nn.Conv1d(MELS, CONV, 5, 1, 2)), nn.BatchNorm1d(CONV), nn.Hardswish(),
            weight_norm(nn.Conv1d(CONV, CONV, 5, 1, 2)), nn.BatchNorm1d(CONV), nn.Hardswish(),
            weight_norm(nn.Conv1d(CONV, CONV, 5, 2, 2)), nn.BatchNorm1d(CONV), nn.Hardswish())
        self.rnn = nn.LSTM(CONV, HIDDEN, RNN_LAYERS, batch_first=True, bidirectional=True, dropout=0.2)
        self.out = nn.Sequential(nn.LayerNorm(2 * HIDDEN), nn.Linear(2 * HIDDEN, CHARS))

    def forward(self, wav, lens):
        x, n = self.mel(wav, lens)
        x = self.front(x)
        n = (n - 1) // 2 + 1
        packed = pack_padded_sequence(x.transpose(1, 2), n.cpu(), batch_first=True, enforce_sorted=False)
        y, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.out(y).log_softmax(-1), n


def run():
    torch.manual_seed(31)
    ds = Utterances(400)
    loader = DataLoader(ds, batch_sampler=BucketSampler(ds), collate_fn=collate, pin_memory=True)
    net = Acoustic().to("cuda")
    ctc = nn.CTCLoss(blank=0, zero_infinity=True)

    net.front.requires_grad_(False)
    opt = torch.optim.RAdam([p for p in net.parameters() if p.requires_grad], lr=3e-4)

    for step, (wav, wl, txt, tl) in enumerate(loader):
        if step == STEPS:
            break
        if step == UNFREEZE_AT:
            net.front.requires_grad_(True)
            opt.add_param_group({"params": list(net.front.parameters()), "lr": 1e-4})
            print("front end unfrozen; peak so far", torch.cuda.max_memory_allocated())
        net.train()
        if step < UNFREEZE_AT:
            net.front.eval()
        wav = wav.to("cuda", non_blocking=True)
        logp, n = net(wav, wl)
        loss = ctc(logp.transpose(0, 1), txt.to("cuda", non_blocking=True), n.to("cuda"), tl.to("cuda"))
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        opt.step()
        print(f"step {step} utts {len(wl)} maxlen {wav.size(1) / SR:.1f}s loss {loss.item():.4f}")

    print("max_memory_allocated", torch.cuda.max_memory_allocated())
    print("max_memory_reserved", torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    run()
