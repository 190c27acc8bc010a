"""CTR model (DCN-v2 + GRU over the click history) with large sparse embedding tables, trained with
Accelerate: gradient accumulation, SparseAdam for the tables and AdamW for the dense part."""
import argparse

import torch
import torch.nn as nn
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import DataLoader, Dataset


def parse():
    ap = argparse.ArgumentParser()
    ap.add_argument("--rows", type=int, default=10_000_000, help="rows over all tables")
    ap.add_argument("--items", type=int, default=500_000)
    ap.add_argument("--tables", type=int, default=20)
    ap.add_argument("--emb", type=int, default=64)
    ap.add_argument("--batch", type=int, default=16384)
    ap.add_argument("--history", type=int, default=30)
    ap.add_argument("--accum", type=int, default=2)
    ap.add_argument("--updates", type=int, default=5)
    return ap.parse_args()


class CrossNet(nn.Module):
    def __init__(self, d, n=3, rank=256):
        super().__init__()
        self.u = nn.ModuleList([nn.Linear(d, rank, bias=False) for _ in range(n)])
        self.v = nn.ModuleList([nn.Linear(rank, d) for _ in range(n)])

    def forward(self, x0):
        x = x0
        for u, v in zip(self.u, self.v):
            x = x0 * v(u(x)) + x
        return x


class CTR(nn.Module):
    def __init__(self, a, dense=13):
        super().__init__()
        per = torch.tensor([1.0 / (i + 1) for i in range(a.tables)])
        sizes = (per / per.sum() * a.rows).long().clamp(min=10)
        self.sizes = sizes.tolist()
        self.register_buffer("offset", torch.cumsum(sizes, 0) - sizes, persistent=False)
        self.table = nn.Embedding(int(sizes.sum()), a.emb, sparse=True)
        self.tags = nn.EmbeddingBag(200_000, a.emb, mode="sum", sparse=True)
        self.item = nn.Embedding(a.items, a.emb, padding_idx=0)
        self.gru = nn.GRU(a.emb, 128, batch_first=True)
        self.bottom = nn.Sequential(nn.Linear(dense, 256), nn.ReLU(), nn.Linear(256, a.emb), nn.ReLU())
        d = a.emb * (a.tables + 2) + 128
        self.cross = CrossNet(d)
        self.deep = nn.Sequential(nn.Linear(d, 1024), nn.ReLU(), nn.Dropout(0.1), nn.Linear(1024, 512), nn.ReLU())
        self.head = nn.Linear(d + 512, 1)
        with torch.no_grad():
            for e in (self.table, self.tags):
                e.weight.uniform_(-0.01, 0.01)

    def forward(self, dense, cat, tags, hist, hist_len):
        e = self.table(cat + self.offset).flatten(1)
        packed = pack_padded_sequence(self.item(hist), hist_len.cpu(), batch_first=True, enforce_sorted=False)
        _, h = self.gru(packed)
        x = torch.cat([self.bottom(dense), e, self.tags(tags), h[-1].to(e.dtype)], dim=1)
        return self.head(torch.cat([self.cross(x), self.deep(x)], dim=1)).squeeze(1)

    def split_parameters(self):
        sparse = [self.table.weight, self.tags.weight]
        ids = {id(p) for p in sparse}
        return sparse, [p for p in self.parameters() if id(p) not in ids]


def synthetic(a, n, sizes):
    g = torch.Generator().manual_seed(0)
    u = torch.rand(n, len(sizes), generator=g)
    cat = (u ** 3 * torch.tensor(sizes)).long()  # skewed popularity
    dense = torch.randn(n, 13, generator=g)
    tags = torch.randint(0, 200_000, (n, 8), generator=g)
    hist = torch.randint(1, a.items, (n, a.history), generator=g)
    hl = torch.randint(1, a.history + 1, (n,), generator=g)
    y = (dense[:, 0] + (cat[:, 0] % 2) + 0.5 * torch.randn(n, generator=g) > 0.5).float()
    return dense, cat, tags, hist, hl, y


class WholeBatches(Dataset):
    """one item = one ready batch, so that nothing has to be collated row by row"""

    def __init__(self, columns, batch):
        self.columns, self.batch = columns, batch

    def __len__(self):
        return len(self.columns[0]) // self.batch

    def __getitem__(self, i):
        s = slice(i * self.batch, (i + 1) * self.batch)
        return [c[s] for c in self.columns]


@torch.no_grad()
def evaluate(model, batch, loss_fn):
    model.eval()
    *x, y = batch
    logit = model(*x)
    order = logit.float().argsort()
    rank = torch.empty_like(order, dtype=torch.float64)
    rank[order] = torch.arange(1, len(y) + 1, device=y.device, dtype=torch.float64)
    pos = y.sum().double()
    auc = (rank[y > 0].sum() - pos * (pos + 1) / 2) / (pos * (len(y) - pos))
    model.train()
    return loss_fn(logit, y).item(), auc.item()


def main():
    a = parse()
    set_seed(1)
    acc = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=a.accum)
    with acc.device:
        model = CTR(a)
    sparse, dense = model.split_parameters()
    print("sparse", sum(p.numel() for p in sparse) / 1e6, "M; dense", sum(p.numel() for p in dense) / 1e6, "M")
    opt_s = torch.optim.SparseAdam(sparse, lr=1e-3)
    opt_d = torch.optim.AdamW(dense, lr=1e-3, weight_decay=1e-5)
    data = WholeBatches(synthetic(a, a.batch * a.accum * a.updates, model.sizes), a.batch)
    loader = DataLoader(data, batch_size=1, shuffle=True, collate_fn=lambda items: items[0], pin_memory=True)
    model, opt_s, opt_d, loader = acc.prepare(model, opt_s, opt_d, loader)
    loss_fn = nn.BCEWithLogitsLoss()

    update, losses = 0, []
    for batch in loader:
        with acc.accumulate(model):
            *x, y = batch
            loss = loss_fn(model(*x), y)
            acc.backward(loss)
            losses.append(loss.item())
            if acc.sync_gradients:
                acc.clip_grad_norm_(dense, 10.0)
            opt_s.step()
            opt_d.step()
            opt_s.zero_grad()
            opt_d.zero_grad()
        if acc.sync_gradients:
            print(f"update {update} loss {sum(losses) / len(losses):.4f}")
            losses.clear()
            if update % 2 == 1:
                print("   valid loss %.4f auc %.4f" % evaluate(model, batch, loss_fn))
            update += 1
    print("max_memory_allocated", torch.cuda.max_memory_allocated())
    print("max_memory_reserved", torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    main()
