"""GRU / LSTM language model, pack_padded_sequence, tied weights, padding_idx, several optimisers."""
import argparse
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader

p = argparse.ArgumentParser()
p.add_argument("--cell", choices=["gru", "lstm"], default="gru")
p.add_argument("--optim", choices=["rprop", "radam", "asgd"], default="rprop")
args = p.parse_args()

torch.manual_seed(11)
device = torch.device("cuda")
VOCAB, HID = 20000, 1024


class RNNLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HID, padding_idx=0)
        rnn = nn.GRU if args.cell == "gru" else nn.LSTM
        self.rnn = rnn(HID, HID, num_layers=3, batch_first=True, dropout=0.2)
        self.drop = nn.Dropout(0.3)
        self.out = nn.Linear(HID, VOCAB)
        self.out.weight = self.embed.weight

    def forward(self, x, lengths):
        e = self.drop(self.embed(x))
        packed = pack_padded_sequence(e, lengths.cpu(), batch_first=True, enforce_sorted=False)
        h, _ = self.rnn(packed)
        h, _ = pad_packed_sequence(h, batch_first=True)
        return self.out(self.drop(h))


def sentences(n):
    g = torch.Generator().manual_seed(2)
    out = []
    for _ in range(n):
        length = int(torch.randint(20, 180, (1,), generator=g))
        out.append(torch.randint(1, VOCAB, (length,), generator=g))
    return out


def collate(batch):
    lengths = torch.tensor([len(s) - 1 for s in batch])
    x = pad_sequence([s[:-1] for s in batch], batch_first=True)
    y = pad_sequence([s[1:] for s in batch], batch_first=True)
    return x, y, lengths


loader = DataLoader(sentences(48 * 9), batch_size=48, shuffle=True, collate_fn=collate)
model = RNNLM().to(device)
if args.optim == "rprop":
    opt = torch.optim.Rprop(model.parameters(), lr=1e-3)
elif args.optim == "radam":
    opt = torch.optim.RAdam(model.parameters(), lr=1e-3, decoupled_weight_decay=True, weight_decay=1e-2)
else:
    opt = torch.optim.ASGD(model.parameters(), lr=1.0)

model.train()
for i, (x, y, lengths) in enumerate(loader):
    x, y = x.to(device), y.to(device)
    logits = model(x, lengths)
    loss = F.cross_entropy(logits.reshape(-1, VOCAB), y.reshape(-1), ignore_index=0)
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.25)
    opt.step()
    print(f"batch {i} maxlen {x.size(1)} loss {loss.item():.3f} mem {torch.cuda.memory_allocated()}")
    if i == 4:
        print("middle: max_memory_allocated", torch.cuda.max_memory_allocated(),
              "max_memory_reserved", torch.cuda.max_memory_reserved())

print("max_memory_allocated", torch.cuda.max_memory_allocated())
print("max_memory_reserved", torch.cuda.max_memory_reserved())
