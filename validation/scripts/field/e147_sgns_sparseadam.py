# Skip-gram with negative sampling; sparse gradients + SparseAdam
import os
import tempfile

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB = 1_200_000
DIM = 256
CORPUS_LEN = 400_000
WINDOW = 5
NEG = 15
BATCH = 24_576
STEPS = 8
LR = 2e-3
SUBSAMPLE_T = 1e-4

torch.manual_seed(1)
rng = np.random.RandomState(1)
dev = torch.device("cuda")


def zipf_corpus(n):
    # word ids are frequency ranks, bounded Zipf by inverse transform
    u = rng.rand(n)
    ranks = np.exp(u * np.log(VOCAB)) - 1
    return ranks.astype(np.int64).clip(0, VOCAB - 1)


def subsample(corpus, counts):
    freq = counts[corpus] / len(corpus)
    keep_p = np.minimum(1.0, np.sqrt(SUBSAMPLE_T / freq) + SUBSAMPLE_T / freq)
    return corpus[rng.rand(len(corpus)) < keep_p]


def skipgram_pairs(corpus):
    """dynamic window: each centre draws its own radius in 1..WINDOW"""
    radius = rng.randint(1, WINDOW + 1, size=len(corpus))
    centers, contexts = [], []
    for off in range(1, WINDOW + 1):
        ok = radius[:-off] >= off
        centers.append(corpus[:-off][ok]); contexts.append(corpus[off:][ok])
        ok = radius[off:] >= off
        centers.append(corpus[off:][ok]); contexts.append(corpus[:-off][ok])
    c = np.concatenate(centers)
    o = np.concatenate(contexts)
    p = rng.permutation(len(c))
    return torch.from_numpy(c[p]), torch.from_numpy(o[p])


class SkipGramNS(nn.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        self.inp = nn.Embedding(vocab, dim, sparse=True)
        self.out = nn.Embedding(vocab, dim, sparse=True)
        nn.init.uniform_(self.inp.weight, -0.5 / dim, 0.5 / dim)
        nn.init.zeros_(self.out.weight)

    def forward(self, center, context, negatives):
        v = self.inp(center)                                   # B, D
        u = self.out(context)                                  # B, D
        n = self.out(negatives)                                # B, K, D
        pos = F.logsigmoid((v * u).sum(-1))
        neg = F.logsigmoid(-torch.bmm(n, v.unsqueeze(2)).squeeze(2)).sum(1)
        return -(pos + neg).mean()


corpus = zipf_corpus(CORPUS_LEN)
counts = np.bincount(corpus, minlength=VOCAB).astype(np.float64)
corpus = subsample(corpus, counts)
center, context = skipgram_pairs(corpus)
center, context = center.pin_memory(), context.pin_memory()
print(f"{len(corpus)} tokens after subsampling, {len(center)} pairs")

noise = torch.tensor((counts + 0.1) ** 0.75, dtype=torch.float32, device=dev)
noise /= noise.sum()

model = SkipGramNS(VOCAB, DIM).to(dev)
opt = torch.optim.SparseAdam(list(model.parameters()), lr=LR)
sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: max(1e-4, 1 - s / STEPS))
print(f"tables: {torch.cuda.memory_allocated() / 1e9:.2f} GB")

for step in range(STEPS):
    lo = (step * BATCH) % (len(center) - BATCH)
    c = center[lo:lo + BATCH].to(dev, non_blocking=True)
    o = context[lo:lo + BATCH].to(dev, non_blocking=True)
    neg = torch.multinomial(noise, BATCH * NEG, replacement=True).view(BATCH, NEG)

    opt.zero_grad()
    loss = model(c, o, neg)
    loss.backward()
    if step == 0:
        g = model.out.weight.grad
        print("out grad:", g.layout, "nnz", g._nnz(), "coalesced", g.is_coalesced())
    opt.step()
    sched.step()
    print(f"step {step} loss {loss.item():.4f} lr {sched.get_last_lr()[0]:.2e} "
          f"alloc {torch.cuda.memory_allocated() / 1e9:.2f} GB max {torch.cuda.max_memory_allocated() / 1e9:.2f} GB")

# drop gradients and the optimizer before exporting, then look at some neighbours
opt.zero_grad(set_to_none=True)
del opt, sched, noise
with torch.no_grad():
    vec = F.normalize(model.inp.weight, dim=1)
    queries = torch.tensor([10, 100, 1000, 10_000], device=dev)
    sims = vec[queries] @ vec.t()
    sims[torch.arange(4, device=dev), queries] = -1
    top = sims.topk(5, dim=1).indices
    for q, row in zip(queries.tolist(), top.tolist()):
        print(f"word {q}: {row}")

with tempfile.TemporaryDirectory() as tmp:
    path = os.path.join(tmp, "vectors.pt")
    torch.save(vec[:100_000].half().cpu(), path)
    print("saved", os.path.getsize(path) // 2**20, "MiB")
print(f"reserved {torch.cuda.memory_reserved() / 1e9:.2f} GB")
