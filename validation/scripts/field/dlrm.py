"""Recommender: 26 embedding bags (sparse) + dense towers. Two optimizers."""
import sys

import torch
from torch import nn

ROWS = [400_000, 250_000, 120_000, 80_000] + [20_000] * 10 + [1_000] * 12
DIM = 64
SPARSE = "dense" not in sys.argv


class DLRM(nn.Module):
    def __init__(self):
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(r, DIM, mode="sum", sparse=SPARSE) for r in ROWS)
        self.bottom = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, DIM), nn.ReLU())
        n = len(ROWS) + 1
        self.top = nn.Sequential(nn.Linear(n * (n - 1) // 2 + DIM, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(),
                                 nn.Linear(1024, 1))
        li, lj = torch.tril_indices(n, n, -1)
        self.register_buffer("li", li, persistent=False)
        self.register_buffer("lj", lj, persistent=False)

    def forward(self, dense, values, offsets):
        d = self.bottom(dense)
        e = [bag(v, o) for bag, v, o in zip(self.bags, values, offsets)]
        t = torch.stack([d] + e, dim=1)
        z = torch.bmm(t, t.transpose(1, 2))
        return self.top(torch.cat([d, z[:, self.li, self.lj]], dim=1)).squeeze(-1)


def batches(n, bs=16384):
    g = torch.Generator().manual_seed(0)
    for i in range(n):
        values, offsets = [], []
        for r in ROWS:
            lens = torch.randint(1, 5, (bs,), generator=g)
            offsets.append((lens.cumsum(0) - lens))
            values.append(torch.randint(0, r, (int(lens.sum()),), generator=g))
        yield torch.rand(bs, 13, generator=g), values, offsets, torch.randint(0, 2, (bs,), generator=g).float()


def main():
    torch.cuda.set_device(0)
    model = DLRM().cuda()
    sparse = (torch.optim.SparseAdam if SPARSE else torch.optim.Adam)(list(model.bags.parameters()), lr=1e-3)
    dense = torch.optim.Adagrad([p for n, p in model.named_parameters() if not n.startswith("bags")], lr=1e-2)
    lossfn = nn.BCEWithLogitsLoss()
    for k, (x, v, o, y) in enumerate(batches(5)):
        x, y = x.cuda(), y.cuda()
        v, o = [t.cuda() for t in v], [t.cuda() for t in o]
        loss = lossfn(model(x, v, o), y)
        sparse.zero_grad(), dense.zero_grad()
        loss.backward()
        sparse.step(), dense.step()
        print(k, loss.item(), torch.cuda.memory_allocated() // 1024**2)


main()
