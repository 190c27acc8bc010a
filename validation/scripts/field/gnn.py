#!/usr/bin/env python
# node classification on a random graph. kinds: sage (index_add), gat (scatter_reduce), gcn (sparse.mm)
import sys
import torch, torch.nn as nn, torch.nn.functional as F

kind = sys.argv[1]
dev = 'cuda'
torch.manual_seed(7)
N, E, D, H, C = 60_000, 900_000, 256, 512, 47
if kind == "gat":
    N, E, H = 40_000, 400_000, 256

src = torch.randint(N, (E,))
dst = (torch.rand(E) ** 2 * N).long()
ei = torch.stack([src, dst]).to(dev)
x = torch.randn(N, D).to(dev)
y = torch.randint(C, (N,)).to(dev)
train_mask = (torch.rand(N) < 0.6).to(dev)
train_idx = torch.arange(0, N, 2, device=dev)


class SAGE(nn.Module):
    def __init__(s, i, o):
        super().__init__()
        s.self_, s.neigh = nn.Linear(i, o), nn.Linear(i, o, bias=False)

    def forward(s, x, ei):
        agg = torch.zeros_like(x).index_add_(0, ei[1], x[ei[0]])
        deg = torch.zeros(x.size(0), device=x.device).index_add_(0, ei[1], torch.ones(ei.size(1), device=x.device))
        return s.self_(x) + s.neigh(agg / deg.clamp(min=1)[:, None])


class GAT(nn.Module):
    def __init__(s, i, o, heads=4):
        super().__init__()
        s.h, s.w = heads, nn.Linear(i, o, bias=False)
        s.a_src, s.a_dst = (nn.Parameter(torch.randn(heads, o // heads) * .1) for _ in range(2))

    def forward(s, x, ei):
        z = s.w(x).view(len(x), s.h, -1)
        e = F.leaky_relu((z * s.a_src).sum(-1)[ei[0]] + (z * s.a_dst).sum(-1)[ei[1]], 0.2)
        ix = ei[1][:, None].expand(-1, s.h)
        m = torch.full((len(x), s.h), -1e9, device=x.device).scatter_reduce(0, ix, e.detach(), "amax")
        p = (e - m[ei[1]]).exp()
        den = torch.zeros(len(x), s.h, device=x.device).scatter_add(0, ix, p)
        p = p / (den[ei[1]] + 1e-9)
        out = torch.zeros_like(z)
        out = out.index_add(0, ei[1], z[ei[0]] * p[..., None])
        return out.flatten(1)


class GCN(nn.Module):
    def __init__(s, i, o):
        super().__init__()
        s.w = nn.Linear(i, o)

    def forward(s, x, A):
        return torch.sparse.mm(A, s.w(x))


Conv = {"sage": SAGE, "gat": GAT, "gcn": GCN}[kind]
graph = ei
if kind == "gcn":
    loops = torch.arange(N, device=dev).repeat(2, 1)
    idx = torch.cat([ei, loops], 1)
    deg = torch.bincount(idx[0], minlength=N).float()
    val = deg[idx[0]].rsqrt() * deg[idx[1]].clamp(min=1).rsqrt()
    graph = torch.sparse_coo_tensor(idx, val, (N, N)).coalesce()


class Net(nn.Module):
    def __init__(s):
        super().__init__()
        s.convs = nn.ModuleList([Conv(D, H), Conv(H, H), Conv(H, H)])
        s.norms = nn.ModuleList([nn.LayerNorm(H) for _ in range(3)])
        s.out = nn.Linear(H, C)

    def forward(s, x):
        for c, n in zip(s.convs, s.norms):
            x = F.dropout(F.elu(n(c(x, graph))), 0.3, s.training)
        return s.out(x)


net = Net().to(dev)
opt = torch.optim.Adam(net.parameters(), 1e-2, weight_decay=5e-4)
for ep in range(6):
    net.train()
    opt.zero_grad()
    out = net(x)
    loss = F.cross_entropy(out[train_idx], y[train_idx])
    loss.backward(); opt.step()
    net.eval()
    with torch.no_grad():
        acc = (net(x).argmax(-1) == y).float().mean()
    print(f'{ep:02d} {loss:.4f} {acc:.3f}')
