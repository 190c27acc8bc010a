"""Point-cloud classification with plain-torch message passing:
radius graphs from pairwise distances, EdgeConv, TopK pooling, rebuilt graph at each level."""
import argparse
import torch
from torch import nn


# ------------------------------------------------------------------ graph utilities
def radius_graph(pos, ptr, r, max_nbrs=32):
    """Edges (src, dst) with |pos_src - pos_dst| < r inside each cloud; dense distances one cloud at a time."""
    srcs, dsts = [], []
    for lo, hi in zip(ptr[:-1].tolist(), ptr[1:].tolist()):
        d = torch.cdist(pos[lo:hi], pos[lo:hi])
        d.fill_diagonal_(float("inf"))
        k = min(max_nbrs, hi - lo)
        near, idx = d.topk(k, dim=1, largest=False)
        dst, slot = (near < r).nonzero(as_tuple=True)
        srcs.append(idx[dst, slot] + lo)
        dsts.append(dst + lo)
    return torch.stack([torch.cat(srcs), torch.cat(dsts)])


def scatter_max(msg, index, n):
    out = msg.new_zeros(n, msg.size(1))
    return out.scatter_reduce(0, index[:, None].expand_as(msg), msg, "amax", include_self=False)


def scatter_mean(x, index, n):
    s = x.new_zeros(n, x.size(1)).index_add(0, index, x)
    c = torch.bincount(index, minlength=n).clamp(min=1)
    return s / c[:, None]


# ------------------------------------------------------------------ layers
class EdgeConv(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(2 * cin + 3, cout), nn.LayerNorm(cout), nn.ReLU(), nn.Linear(cout, cout))
        self.skip = nn.Linear(cin, cout)

    def forward(self, x, pos, edge):
        src, dst = edge
        m = self.mlp(torch.cat([x[dst], x[src] - x[dst], pos[src] - pos[dst]], 1))
        return torch.relu(self.skip(x) + scatter_max(m, dst, x.size(0)))


class TopKPool(nn.Module):
    def __init__(self, c, ratio):
        super().__init__()
        self.p, self.ratio = nn.Parameter(torch.randn(c)), ratio

    def forward(self, x, pos, batch, num_graphs):
        score = (x @ self.p) / self.p.norm()
        counts = torch.bincount(batch, minlength=num_graphs)
        k = (counts * self.ratio).ceil().long()
        # sort by (graph, -score): stable sort twice
        o1 = score.argsort(descending=True)
        o2 = batch[o1].argsort(stable=True)
        order = o1[o2]
        rank = torch.arange(len(order), device=x.device) - (counts.cumsum(0) - counts)[batch[order]]
        keep = order[rank < k[batch[order]]]
        ptr = torch.cat([k.new_zeros(1), k.cumsum(0)])
        return x[keep] * torch.tanh(score[keep])[:, None], pos[keep], batch[keep], ptr


class Net(nn.Module):
    def __init__(self, width, classes, radii):
        super().__init__()
        self.radii = radii
        dims = [3, width, width * 2, width * 4]
        self.convs = nn.ModuleList([EdgeConv(a, b) for a, b in zip(dims[:-1], dims[1:])])
        self.pools = nn.ModuleList([TopKPool(d, 0.5) for d in dims[1:-1]])
        self.head = nn.Sequential(nn.Linear(2 * dims[-1], 256), nn.ReLU(), nn.Dropout(0.3), nn.Linear(256, classes))

    def forward(self, pos, batch, ptr):
        g, x, n_edges = len(ptr) - 1, pos, []
        for i, conv in enumerate(self.convs):
            with torch.no_grad():
                edge = radius_graph(pos, ptr, self.radii[i])
            n_edges.append(edge.size(1))
            x = conv(x, pos, edge)
            if i < len(self.pools):
                x, pos, batch, ptr = self.pools[i](x, pos, batch, g)
        return self.head(torch.cat([scatter_mean(x, batch, g), scatter_max(x, batch, g)], 1)), n_edges


# ------------------------------------------------------------------ data
def shape(kind, n, device):
    u, v = torch.rand(2, n, device=device) * 2 * torch.pi
    if kind == 0:      # sphere
        p = nn.functional.normalize(torch.randn(n, 3, device=device), dim=1)
    elif kind == 1:    # torus
        p = torch.stack([(0.7 + 0.25 * v.cos()) * u.cos(), (0.7 + 0.25 * v.cos()) * u.sin(), 0.25 * v.sin()], 1)
    elif kind == 2:    # cylinder
        p = torch.stack([0.6 * u.cos(), 0.6 * u.sin(), v / torch.pi - 1], 1)
    elif kind == 3:    # box surface
        p = torch.rand(n, 3, device=device) * 2 - 1
        face = torch.randint(3, (n,), device=device)
        p[torch.arange(n, device=device), face] = torch.sign(p[torch.arange(n, device=device), face])
    else:              # two planes
        p = torch.rand(n, 3, device=device) * 2 - 1
        p[:, 2] = torch.where(p[:, 2] > 0, 0.5, -0.5)
    q, _ = torch.linalg.qr(torch.randn(3, 3, device=device))
    return p @ q + 0.01 * torch.randn(n, 3, device=device)


def make_batch(size, lo, hi, device):
    y = torch.randint(5, (size,))
    ns = torch.randint(lo, hi, (size,))
    pos = torch.cat([shape(int(k), int(n), device) for k, n in zip(y, ns)])
    ns = ns.to(device)
    batch = torch.repeat_interleave(torch.arange(size, device=device), ns)
    ptr = torch.cat([ns.new_zeros(1), ns.cumsum(0)])
    return pos, batch, ptr, y.to(device)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--clouds", type=int, default=32)
    ap.add_argument("--min-pts", type=int, default=700)
    ap.add_argument("--max-pts", type=int, default=1500)
    ap.add_argument("--width", type=int, default=96)
    ap.add_argument("--steps", type=int, default=8)
    args = ap.parse_args()
    torch.manual_seed(99)
    device = "cuda"
    net = Net(args.width, 5, radii=(0.2, 0.3, 0.45)).to(device)
    opt = torch.optim.RAdam(net.parameters(), lr=2e-3)
    sched = torch.optim.lr_scheduler.StepLR(opt, step_size=3, gamma=0.5)
    lossf = nn.CrossEntropyLoss()
    for step in range(args.steps):
        pos, batch, ptr, y = make_batch(args.clouds, args.min_pts, args.max_pts, device)
        logits, ne = net(pos, batch, ptr)
        loss = lossf(logits, y)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 2.0)
        opt.step()
        sched.step()
        print(f"step {step}: loss {loss.item():.4f}  points {len(pos)}  edges {ne}")
    net.eval()
    with torch.no_grad():
        pos, batch, ptr, y = make_batch(args.clouds, args.min_pts, args.max_pts, device)
        pred = net(pos, batch, ptr)[0].argmax(1)
    print("eval acc", (pred == y).float().mean().item())
    print("max_memory_allocated", torch.cuda.max_memory_allocated(), "max_memory_reserved", torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    main()
