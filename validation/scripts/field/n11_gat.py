"""Graph attention net on a random (power-law-ish) citation graph, pure PyTorch message passing."""
import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F


def scatter_softmax(e, dst, n):
    # e: E x H
    idx = dst.unsqueeze(-1).expand_as(e)
    m = torch.full((n, e.size(1)), float("-inf"), device=e.device, dtype=e.dtype)
    m = m.scatter_reduce(0, idx, e.detach(), reduce="amax", include_self=True)
    ex = torch.exp(e - m[dst])
    den = torch.zeros(n, e.size(1), device=e.device, dtype=e.dtype).index_add(0, dst, ex)
    return ex / (den[dst] + 1e-16)


class GATLayer(nn.Module):
    def __init__(self, din, dout, heads, concat=True, dropout=0.3):
        super().__init__()
        self.h, self.d, self.concat, self.p = heads, dout, concat, dropout
        self.W = nn.Linear(din, heads * dout, bias=False)
        self.a_src = nn.Parameter(torch.empty(1, heads, dout))
        self.a_dst = nn.Parameter(torch.empty(1, heads, dout))
        self.bias = nn.Parameter(torch.zeros(heads * dout if concat else dout))
        self.res = nn.Linear(din, heads * dout) if concat and din != heads * dout else None
        nn.init.xavier_uniform_(self.a_src)
        nn.init.xavier_uniform_(self.a_dst)

    def forward(self, x, src, dst):
        n = x.size(0)
        x = F.dropout(x, self.p, self.training)
        z = self.W(x).view(n, self.h, self.d)
        s, t = (z * self.a_src).sum(-1), (z * self.a_dst).sum(-1)
        alpha = scatter_softmax(F.leaky_relu(s[src] + t[dst], 0.2), dst, n)
        alpha = F.dropout(alpha, self.p, self.training)
        msg = z[src] * alpha.unsqueeze(-1)
        out = torch.zeros_like(z)
        out.index_add_(0, dst, msg)
        if self.concat:
            out = out.reshape(n, -1) + self.bias
            if self.res is not None:
                out = out + self.res(x)
            return out
        return out.mean(1) + self.bias


class MeanMaxPool(nn.Module):
    """neighbourhood statistics as extra features"""

    def forward(self, x, src, dst):
        n, c = x.shape
        idx = dst[:, None].expand(-1, c)
        mean = torch.zeros_like(x).scatter_reduce(0, idx, x[src], "mean", include_self=False)
        mx = torch.zeros_like(x).scatter_reduce(0, idx, x[src], "amax", include_self=False)
        return torch.cat([x, mean, mx], 1)


class Net(nn.Module):
    def __init__(self, f, hid, heads, classes):
        super().__init__()
        self.lin = nn.Linear(f, 64)
        self.stat = MeanMaxPool()
        self.g1 = GATLayer(192, hid, heads)
        self.g2 = GATLayer(hid * heads, hid, heads)
        self.g3 = GATLayer(hid * heads, classes, 4, concat=False)
        self.norm = nn.BatchNorm1d(hid * heads)

    def forward(self, x, src, dst):
        x = self.stat(self.lin(x), src, dst)
        x = F.elu(self.norm(self.g1(x, src, dst)))
        x = F.elu(self.g2(x, src, dst))
        return self.g3(x, src, dst)


if __name__ == "__main__":
    P = argparse.ArgumentParser()
    P.add_argument("--nodes", type=int, default=20000)
    P.add_argument("--edges", type=int, default=400000)
    P.add_argument("--hid", type=int, default=32)
    P.add_argument("--heads", type=int, default=8)
    P.add_argument("--epochs", type=int, default=10)
    a = P.parse_args()
    torch.manual_seed(7)
    dev = torch.device("cuda:0")
    src = (torch.rand(a.edges) ** 2 * a.nodes).long()
    dst = torch.randint(0, a.nodes, (a.edges,))
    loop = torch.arange(a.nodes)
    src = torch.cat([src, dst, loop]).to(dev)       # undirected + self loops
    dst = torch.cat([dst, src[: a.edges].cpu(), loop]).to(dev)
    x = torch.randn(a.nodes, 500, device=dev)
    y = torch.randint(0, 40, (a.nodes,), device=dev)
    train_idx = torch.randperm(a.nodes)[: a.nodes // 2].to(dev)
    val_idx = torch.arange(0, a.nodes, 10, device=dev)
    net = Net(500, a.hid, a.heads, 40).to(dev)
    opt = torch.optim.Adam(net.parameters(), lr=5e-3, weight_decay=5e-4)
    for ep in range(a.epochs):
        net.train()
        opt.zero_grad()
        out = net(x, src, dst)
        loss = F.cross_entropy(out[train_idx], y[train_idx])
        loss.backward()
        opt.step()
        if ep % 3 == 2:
            net.eval()
            with torch.no_grad():
                acc = (net(x, src, dst)[val_idx].argmax(-1) == y[val_idx]).float().mean()
            print(f"   val acc {acc:.4f}")
        print(f"epoch {ep:02d} loss {loss.item():.4f}")
