"""Full-batch GCNII node classification on a synthetic citation-like graph.

The normalised adjacency D^-1/2 (A + I) D^-1/2 is a torch.sparse COO tensor; propagation is
torch.sparse.mm.  Weight decay is split between propagation layers and the dense head/stem,
as in the GCNII reference implementation.
"""
import argparse
import math

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--nodes", type=int, default=300_000)
parser.add_argument("--edges", type=int, default=2_400_000)
parser.add_argument("--feat", type=int, default=128)
parser.add_argument("--classes", type=int, default=40)
parser.add_argument("--hidden", type=int, default=256)
parser.add_argument("--layers", type=int, default=8)
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--alpha", type=float, default=0.1)
parser.add_argument("--lamda", type=float, default=0.5)
parser.add_argument("--dropout", type=float, default=0.3)
parser.add_argument("--wd1", type=float, default=0.01)
parser.add_argument("--wd2", type=float, default=5e-4)
parser.add_argument("--seed", type=int, default=42)
args = parser.parse_args()

np.random.seed(args.seed)
torch.manual_seed(args.seed)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_graph(n, m, n_cls):
    """Degree-skewed graph with label homophily. Returns host-side row/col/labels."""
    rng = np.random.default_rng(args.seed)
    labels = np.sort(rng.integers(0, n_cls, size=n))
    src = (n * rng.random(m) ** 1.7).astype(np.int64)          # hubs near the small ids
    local = np.clip(src + rng.integers(-2000, 2000, size=m), 0, n - 1)
    far = rng.integers(0, n, size=m)
    dst = np.where(rng.random(m) < 0.7, local, far)
    keep = src != dst
    return src[keep], dst[keep], labels


def sym_normalised(row, col, n):
    # make it undirected, add the self loops
    loops = np.arange(n)
    r = np.concatenate([row, col, loops])
    c = np.concatenate([col, row, loops])
    idx = torch.from_numpy(np.vstack([r, c]))
    adj = torch.sparse_coo_tensor(idx, torch.ones(idx.shape[1]), (n, n)).coalesce()
    # parallel edges were summed: binarise
    idx, val = adj.indices(), torch.ones_like(adj.values())
    deg = torch.zeros(n).scatter_add_(0, idx[0], val)
    dinv = deg.pow(-0.5)
    val = dinv[idx[0]] * val * dinv[idx[1]]
    return torch.sparse_coo_tensor(idx, val, (n, n)).coalesce()


class GraphConv(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, dim))
        bound = 1.0 / math.sqrt(dim)
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x, adj, h0, lamda, alpha, layer):
        theta = math.log(lamda / layer + 1)
        hi = torch.sparse.mm(adj, x)
        support = (1 - alpha) * hi + alpha * h0
        return theta * torch.mm(support, self.weight) + (1 - theta) * support + x


class GCNII(nn.Module):
    def __init__(self, nfeat, nhid, nclass, nlayers):
        super().__init__()
        self.convs = nn.ModuleList([GraphConv(nhid) for _ in range(nlayers)])
        self.norms = nn.ModuleList([nn.LayerNorm(nhid) for _ in range(nlayers)])
        self.fcs = nn.ModuleList([nn.Linear(nfeat, nhid), nn.Linear(nhid, nclass)])

    def forward(self, x, adj):
        x = F.dropout(x, args.dropout, training=self.training)
        h = F.relu(self.fcs[0](x))
        h0 = h
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms)):
            h = F.dropout(h, args.dropout, training=self.training)
            h = F.relu(norm(conv(h, adj, h0, args.lamda, args.alpha, i + 1)))
        h = F.dropout(h, args.dropout, training=self.training)
        return F.log_softmax(self.fcs[1](h), dim=1)


def accuracy(logp, y):
    return (logp.argmax(1) == y).float().mean().item()


row, col, labels = make_graph(args.nodes, args.edges, args.classes)
adj = sym_normalised(row, col, args.nodes)
centers = np.random.randn(args.classes, args.feat).astype(np.float32)
features = centers[labels] + 2.0 * np.random.randn(args.nodes, args.feat).astype(np.float32)
features /= np.abs(features).sum(1, keepdims=True)
perm = np.random.permutation(args.nodes)
n_tr, n_va = int(0.5 * args.nodes), int(0.2 * args.nodes)

adj = adj.to(device)
features = torch.from_numpy(features).to(device)
labels = torch.from_numpy(labels).long().to(device)
idx_train = torch.from_numpy(perm[:n_tr]).to(device)
idx_val = torch.from_numpy(perm[n_tr:n_tr + n_va]).to(device)
print(f"nodes {args.nodes}  nnz {adj._nnz()}  data on card "
      f"{torch.cuda.memory_allocated() / 2**20:.0f} MiB")

model = GCNII(args.feat, args.hidden, args.classes, args.layers).to(device)
optimizer = torch.optim.Adam([
    {"params": list(model.convs.parameters()) + list(model.norms.parameters()), "weight_decay": args.wd1},
    {"params": model.fcs.parameters(), "weight_decay": args.wd2},
], lr=args.lr)

for epoch in range(args.epochs):
    model.train()
    optimizer.zero_grad()
    out = model(features, adj)
    loss = F.nll_loss(out[idx_train], labels[idx_train])
    loss.backward()
    optimizer.step()
    line = f"epoch {epoch:03d} loss {loss.item():.4f} train acc {accuracy(out[idx_train], labels[idx_train]):.3f}"
    if epoch % 2 == 1:
        model.eval()
        with torch.no_grad():
            out = model(features, adj)
            line += f" val acc {accuracy(out[idx_val], labels[idx_val]):.3f}"
    print(line, f"peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
print(torch.cuda.memory_summary(abbreviated=True))
