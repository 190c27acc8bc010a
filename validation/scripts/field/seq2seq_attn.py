"""Bahdanau seq2seq with LSTMCell decoder and random teacher forcing per batch (fixed seed)."""
import random
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset

random.seed(3)
torch.manual_seed(3)
V, PAD, SOS, EOS = 16000, 0, 1, 2
EMB, HID = 512, 768


class Pairs(Dataset):
    def __init__(self, n):
        r = random.Random(11)
        self.data = [([r.randrange(3, V) for _ in range(r.randint(15, 50))] + [EOS],
                      [r.randrange(3, V) for _ in range(r.randint(12, 40))] + [EOS]) for _ in range(n)]

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        s, t = self.data[i]
        return torch.tensor(s), torch.tensor(t)


def collate(items):
    items = sorted(items, key=lambda p: -len(p[0]))
    s, t = zip(*items)
    return pad_sequence(s, True, PAD), torch.tensor([len(x) for x in s]), pad_sequence(t, True, PAD)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(V, EMB, padding_idx=PAD)
        self.rnn = nn.LSTM(EMB, HID, 2, batch_first=True, bidirectional=True, dropout=0.2)
        self.h, self.c = nn.Linear(2 * HID, HID), nn.Linear(2 * HID, HID)

    def forward(self, src, lens):
        packed = pack_padded_sequence(self.emb(src), lens, batch_first=True)
        out, (h, c) = self.rnn(packed)
        out, _ = pad_packed_sequence(out, batch_first=True)
        return out, (torch.tanh(self.h(torch.cat([h[-2], h[-1]], -1))), torch.tanh(self.c(torch.cat([c[-2], c[-1]], -1))))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(V, EMB, padding_idx=PAD)
        self.cell = nn.LSTMCell(EMB + 2 * HID, HID)
        self.wq, self.wk, self.v = nn.Linear(HID, HID), nn.Linear(2 * HID, HID), nn.Linear(HID, 1, bias=False)
        self.out = nn.Linear(HID * 3, V)

    def forward(self, enc, mask, state, tgt, force):
        keys = self.wk(enc)
        tok = torch.full((enc.size(0),), SOS, dtype=torch.long, device=enc.device)
        logits = []
        for t in range(tgt.size(1)):
            score = self.v(torch.tanh(keys + self.wq(state[0]).unsqueeze(1))).squeeze(-1)
            w = score.masked_fill(~mask, -1e9).softmax(-1)
            ctx = torch.bmm(w.unsqueeze(1), enc).squeeze(1)
            state = self.cell(torch.cat([self.emb(tok), ctx], -1), state)
            o = self.out(torch.cat([state[0], ctx], -1))
            logits.append(o)
            tok = tgt[:, t] if force else o.argmax(-1).detach()
        return torch.stack(logits, 1)


device = "cuda:0"
enc, dec = Encoder().to(device), Decoder().to(device)
opt_e, opt_d = torch.optim.Adam(enc.parameters(), 1e-3), torch.optim.Adam(dec.parameters(), 1e-3)
loader = DataLoader(Pairs(64 * 4 + 21), batch_size=64, collate_fn=collate)
for i, (src, lens, tgt) in enumerate(loader):
    src, tgt = src.to(device), tgt.to(device)
    memory, state = enc(src, lens)
    logits = dec(memory, src != PAD, state, tgt, force=random.random() < 0.6)
    loss = F.cross_entropy(logits.transpose(1, 2), tgt, ignore_index=PAD)
    opt_e.zero_grad(); opt_d.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(enc.parameters(), 1.0)
    nn.utils.clip_grad_norm_(dec.parameters(), 1.0)
    opt_e.step(); opt_d.step()
    print(i, tuple(logits.shape), round(loss.item(), 3))
