"""Deep Speech 2-ish: conv front end, packed BiGRU, CTC. Greedy decode at the end."""
import sys

import numpy as np
import torch
from torch import nn
import torch.nn.functional as F

rng = np.random.default_rng(0)
device = torch.device("cuda", 0)


def fake_batch(bs=24):
    tl = np.sort(rng.integers(300, 900, bs))[::-1].copy()
    ul = np.minimum(rng.integers(20, 60, bs), tl // 4 - 5)
    feats = torch.zeros(bs, 1, 80, int(tl[0]))
    for i, n in enumerate(tl):
        feats[i, ..., :n] = torch.from_numpy(rng.standard_normal((80, n), dtype=np.float32))
    targets = torch.from_numpy(rng.integers(1, 30, int(ul.sum())))
    return feats.pin_memory(), torch.from_numpy(tl), targets, torch.from_numpy(ul)


class BNGRU(nn.Module):
    def __init__(self, i, h):
        super().__init__()
        self.bn = nn.BatchNorm1d(i)
        self.rnn = nn.GRU(i, h, bidirectional=True, batch_first=True)
        self.h = h

    def forward(self, x, lens):
        x = self.bn(x.transpose(1, 2)).transpose(1, 2)
        x = nn.utils.rnn.pack_padded_sequence(x, lens, batch_first=True)
        self.rnn.flatten_parameters()
        x, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(x)[0], batch_first=True)
        return x[..., :self.h] + x[..., self.h:]


class DS2(nn.Module):
    def __init__(self, h=1024, layers=4, vocab=30):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, 32, (41, 11), (2, 2), (20, 5)), nn.BatchNorm2d(32), nn.Hardtanh(0, 20, inplace=True),
            nn.Conv2d(32, 32, (21, 11), (2, 1), (10, 5)), nn.BatchNorm2d(32), nn.Hardtanh(0, 20, inplace=True))
        self.rnns = nn.ModuleList([BNGRU(32 * 20 if i == 0 else h, h) for i in range(layers)])
        self.fc = nn.Linear(h, vocab)

    def forward(self, x, lens):
        x = self.conv(x)
        lens = (lens - 1) // 2 + 1
        b, c, f, t = x.shape
        x = x.view(b, c * f, t).transpose(1, 2).contiguous()
        for r in self.rnns:
            x = r(x, lens)
        return self.fc(x).log_softmax(-1), lens


model = DS2().to(device)
ctc = nn.CTCLoss(blank=0, zero_infinity=True)
opt = torch.optim.SGD(model.parameters(), lr=3e-4, momentum=0.9, weight_decay=1e-5)
for epoch in range(5):
    x, xl, y, yl = fake_batch()
    lp, ol = model(x.to(device, non_blocking=True), xl)
    loss = ctc(lp.transpose(0, 1), y.to(device), ol.to(device), yl.to(device))
    opt.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 400)
    opt.step()
    print(epoch, tuple(lp.shape), loss.item())
model.eval()
with torch.no_grad():
    lp, ol = model(x.to(device), xl)
    print(lp.argmax(-1).float().mean().item())
    if "decode" not in sys.argv:
        sys.exit()
    best = lp.argmax(-1).cpu()
    hyps = [torch.unique_consecutive(b[:n]) for b, n in zip(best, ol)]
    print([int((h != 0).sum()) for h in hyps][:5])
