"""Audio tagging CRNN: on-device log-mel (torch.stft) -> conv stack -> bidirectional GRU (cuDNN, packed) -> CTC.

Student project flavour: a class for everything, fp32, gradient accumulation by hand.
"""
import argparse
import math
import torch
import torch.nn as nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

parser = argparse.ArgumentParser()
parser.add_argument('--batch', type=int, default=24)
parser.add_argument('--accum', type=int, default=2)
parser.add_argument('--steps', type=int, default=4)
parser.add_argument('--seconds', type=float, default=12.0)
parser.add_argument('--hidden', type=int, default=512)
opt = parser.parse_args()

torch.manual_seed(99)
SR, NFFT, HOP, NMEL, VOCAB = 16000, 400, 160, 80, 32
DEVICE = 'cuda'


def mel_filterbank(n_freq, n_mel, sr):
    to_mel = lambda f: 2595 * math.log10(1 + f / 700)
    pts = torch.linspace(0, to_mel(sr / 2), n_mel + 2)
    hz = 700 * (10 ** (pts / 2595) - 1)
    freqs = torch.linspace(0, sr / 2, n_freq)
    up = (freqs[None] - hz[:-2, None]) / (hz[1:-1] - hz[:-2])[:, None]
    down = (hz[2:, None] - freqs[None]) / (hz[2:] - hz[1:-1])[:, None]
    return torch.minimum(up, down).clamp(min=0)


class LogMel(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer('window', torch.hann_window(NFFT))
        self.register_buffer('fb', mel_filterbank(NFFT // 2 + 1, NMEL, SR))

    def forward(self, wav):
        spec = torch.stft(wav, NFFT, HOP, window=self.window, center=True, return_complex=True)
        power = spec.abs().pow(2)
        mel = torch.matmul(self.fb, power).clamp(min=1e-10).log10()
        return (mel - mel.mean(dim=(1, 2), keepdim=True)) / (mel.std(dim=(1, 2), keepdim=True) + 1e-5)


class SpecAugment(nn.Module):
    def forward(self, x):
        if not self.training:
            return x
        x = x.clone()
        f0 = int(torch.randint(0, NMEL - 15, (1,)))
        t0 = int(torch.randint(0, x.shape[-1] - 40, (1,)))
        x[:, f0:f0 + 15] = 0
        x[:, :, t0:t0 + 40] = 0
        return x


class ResCNN(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.bn1, self.bn2 = nn.BatchNorm2d(c), nn.BatchNorm2d(c)
        self.conv1, self.conv2 = nn.Conv2d(c, c, 3, 1, 1), nn.Conv2d(c, c, 3, 1, 1)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        y = self.conv1(self.drop(torch.nn.functional.gelu(self.bn1(x))))
        y = self.conv2(self.drop(torch.nn.functional.gelu(self.bn2(y))))
        return x + y


class SpeechNet(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.front, self.aug = LogMel(), SpecAugment()
        self.stem = nn.Conv2d(1, 32, 3, stride=2, padding=1)
        self.res = nn.Sequential(ResCNN(32), ResCNN(32), ResCNN(32))
        self.fc = nn.Linear(32 * (NMEL // 2), hidden)
        self.gru = nn.GRU(hidden, hidden, num_layers=4, bidirectional=True, batch_first=True, dropout=0.1)
        self.out = nn.Sequential(nn.Linear(2 * hidden, hidden), nn.GELU(), nn.Dropout(0.1), nn.Linear(hidden, VOCAB))

    def forward(self, wav, lengths):
        with torch.no_grad():
            mel = self.aug(self.front(wav))
        x = self.res(self.stem(mel.unsqueeze(1)))
        B, C, Fq, T = x.shape
        x = self.fc(x.permute(0, 3, 1, 2).reshape(B, T, C * Fq))
        frames = (lengths // HOP // 2).clamp(max=T)
        packed = pack_padded_sequence(x, frames, batch_first=True, enforce_sorted=False)
        packed, _ = self.gru(packed)
        x, _ = pad_packed_sequence(packed, batch_first=True)
        return self.out(x), frames


net = SpeechNet(opt.hidden).to(DEVICE)
optimizer = torch.optim.AdamW(net.parameters(), lr=5e-4)
sched = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-4, total_steps=opt.steps)
ctc = nn.CTCLoss(blank=0, zero_infinity=True)
n = int(SR * opt.seconds)

for step in range(opt.steps):
    optimizer.zero_grad()
    total = 0.0
    for micro in range(opt.accum):
        wav = (torch.randn(opt.batch, n) * 0.1).to(DEVICE)
        lengths = torch.randint(n // 2, n + 1, (opt.batch,))
        tgt_len = torch.randint(20, 80, (opt.batch,))
        tgt = torch.randint(1, VOCAB, (opt.batch, 80)).to(DEVICE)
        logits, frames = net(wav, lengths)
        logp = logits.log_softmax(-1).transpose(0, 1)
        loss = ctc(logp, tgt, frames, tgt_len) / opt.accum
        loss.backward()
        total += loss.item()
    nn.utils.clip_grad_norm_(net.parameters(), 5.0)
    optimizer.step()
    sched.step()
    print('step %d ctc %.3f max_alloc %d max_reserved %d' % (
        step, total, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))
