"""CTR prediction, DCN-V2 (stacked cross network + MLP) on Criteo-like data.

13 dense features, 26 single-valued categorical features, 3 multi-valued ones
(user click history etc., EmbeddingBag).  Dense gradients, Adagrad.
"""
import time

import numpy as np
import torch
import torch.nn as nn

device = "cuda"

NUM_DENSE = 13
# hashed / frequency-thresholded vocabularies
VOCABS = [1461, 584, 2000000, 1200000, 306, 24, 12518, 634, 4, 93146, 5684, 1600000, 3195,
          28, 14993, 1400000, 11, 5653, 2173, 4, 1500000, 18, 16, 286181, 105, 142572]
BAG_VOCABS = [900000, 40000, 3500]
BAG_MEAN_LEN = [30, 8, 4]
DIM = 32
BATCH = 8192
STEPS = 100
EVAL_BATCHES = 6
LR = 0.02


class CrossNetV2(nn.Module):
    def __init__(self, d, n_layers=3):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(d, d) for _ in range(n_layers)])

    def forward(self, x0):
        x = x0
        for lin in self.layers:
            x = x0 * lin(x) + x
        return x


class DCNv2(nn.Module):
    def __init__(self, hidden=(1024, 1024, 512), p=0.1):
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(v, DIM) for v in VOCABS])
        self.bags = nn.ModuleList([nn.EmbeddingBag(v, DIM, mode="mean") for v in BAG_VOCABS])
        self.dense_bn = nn.BatchNorm1d(NUM_DENSE)
        d = NUM_DENSE + DIM * (len(VOCABS) + len(BAG_VOCABS))
        self.cross = CrossNetV2(d)
        mlp, last = [], d
        for h in hidden:
            mlp += [nn.Linear(last, h), nn.BatchNorm1d(h), nn.ReLU(inplace=True), nn.Dropout(p)]
            last = h
        self.mlp = nn.Sequential(*mlp)
        self.head = nn.Linear(last, 1)

    @torch.no_grad()
    def reset_tables(self):
        for t in list(self.tables) + list(self.bags):
            a = t.num_embeddings ** -0.5
            t.weight.uniform_(-a, a)

    def forward(self, dense, cat, bag_values, bag_offsets):
        feats = [self.dense_bn(dense)]
        feats += [t(cat[:, i]) for i, t in enumerate(self.tables)]
        feats += [b(v, o) for b, v, o in zip(self.bags, bag_values, bag_offsets)]
        x = torch.cat(feats, dim=1)
        return self.head(self.mlp(self.cross(x))).squeeze(1)


class ClickStream:
    """endless stream of impressions with power-law ids"""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        w = np.random.default_rng(99)
        self.w_dense = w.normal(size=NUM_DENSE) * 0.4
        self.w_cat = [w.normal(size=997) * 0.3 for _ in VOCABS]

    def zipf(self, vocab, n):
        u = self.rng.random(n)
        return np.minimum((vocab ** u - 1).astype(np.int64), vocab - 1)

    def batch(self, n=BATCH):
        dense = np.log1p(self.rng.exponential(3.0, (n, NUM_DENSE))).astype(np.float32)
        cat = np.stack([self.zipf(v, n) for v in VOCABS], 1)
        logit = dense @ self.w_dense - 1.5
        for i in range(len(VOCABS)):
            logit += self.w_cat[i][cat[:, i] % 997]
        label = (self.rng.random(n) < 1 / (1 + np.exp(-logit))).astype(np.float32)
        vals, offs = [], []
        for v, m in zip(BAG_VOCABS, BAG_MEAN_LEN):
            lens = 1 + self.rng.poisson(m - 1, n)
            vals.append(torch.from_numpy(self.zipf(v, lens.sum())).to(device))
            offs.append(torch.from_numpy(np.concatenate([[0], lens.cumsum()[:-1]])).to(device))
        return (torch.from_numpy(dense).to(device), torch.from_numpy(cat).to(device), vals, offs,
                torch.from_numpy(label).to(device))


def auc(scores, labels):
    order = torch.argsort(scores)
    ranks = torch.empty_like(scores, dtype=torch.float64)
    ranks[order] = torch.arange(1, len(scores) + 1, device=scores.device, dtype=torch.float64)
    pos = labels > 0.5
    n_pos, n_neg = pos.sum(), (~pos).sum()
    return ((ranks * pos).sum() - n_pos * (n_pos + 1) / 2) / (n_pos * n_neg)


@torch.no_grad()
def evaluate(model, stream):
    model.eval()
    s, l = [], []
    for _ in range(EVAL_BATCHES):
        dense, cat, v, o, y = stream.batch(2 * BATCH)
        s.append(model(dense, cat, v, o))
        l.append(y)
    model.train()
    s, l = torch.cat(s), torch.cat(l)
    ll = nn.functional.binary_cross_entropy_with_logits(s, l)
    return ll.item(), auc(s, l).item()


def main():
    torch.manual_seed(2024)
    model = DCNv2().to(device)
    model.reset_tables()
    n_emb = sum(t.weight.numel() for t in list(model.tables) + list(model.bags))
    n_all = sum(p.numel() for p in model.parameters())
    print(f"embedding params {n_emb / 1e6:.1f}M, other {(n_all - n_emb) / 1e6:.2f}M")
    print("after model:", torch.cuda.memory_allocated() // 2**20, "MiB")

    opt = torch.optim.Adagrad(model.parameters(), lr=LR, initial_accumulator_value=0.1)
    criterion = nn.BCEWithLogitsLoss()
    train, test = ClickStream(0), ClickStream(1)

    run, t0 = 0.0, time.time()
    for step in range(1, STEPS + 1):
        dense, cat, vals, offs, y = train.batch()
        opt.zero_grad()
        out = model(dense, cat, vals, offs)
        loss = criterion(out, y)
        loss.backward()
        opt.step()
        run += loss.item()
        if step % 25 == 0:
            print(f"[{step}/{STEPS}] logloss {run / 25:.4f} {step * BATCH / (time.time() - t0):.0f} ex/s "
                  f"alloc {torch.cuda.max_memory_allocated() / 2**30:.2f} reserved {torch.cuda.max_memory_reserved() / 2**30:.2f}")
            run = 0.0
        if step == STEPS // 2:
            print("mid eval logloss %.4f auc %.4f" % evaluate(model, test))

    print("final logloss %.4f auc %.4f" % evaluate(model, test))
    print("torch.cuda.max_memory_allocated() =", torch.cuda.max_memory_allocated())
    print("torch.cuda.max_memory_reserved() =", torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    main()
