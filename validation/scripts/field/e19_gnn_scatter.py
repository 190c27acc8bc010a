# GraphSAGE + GAT-style attention on a big synthetic "products"-like graph, full batch, no PyG.
import torch, torch.nn as nn, torch.nn.functional as F

torch.manual_seed(3)
N, E, D_IN, HID, C, HEADS = 150_000, 1_800_000, 100, 128, 47, 4
dev = "cuda"

def scatter_mean(src, index, n):
    out = src.new_zeros(n, src.size(-1)).index_add_(0, index, src)
    deg = torch.bincount(index, minlength=n).clamp(min=1).to(src.dtype)
    return out / deg.unsqueeze(-1)

def scatter_softmax(score, index, n):
    idx = index.unsqueeze(-1).expand_as(score)
    mx = torch.full((n, score.size(1)), float("-inf"), device=score.device, dtype=score.dtype)
    mx = mx.scatter_reduce(0, idx, score.detach(), reduce="amax")
    ex = (score - mx[index]).exp()
    den = torch.zeros(n, score.size(1), device=score.device, dtype=score.dtype).index_add(0, index, ex)
    return ex / (den[index] + 1e-16)

class SAGE(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.self_lin, self.nb_lin = nn.Linear(i, o), nn.Linear(i, o, bias=False)
    def forward(self, x, ei):
        src, dst = ei
        return self.self_lin(x) + self.nb_lin(scatter_mean(x[src], dst, x.size(0)))

class GAT(nn.Module):
    def __init__(self, i, o, heads):
        super().__init__()
        self.h, self.o = heads, o // heads
        self.lin = nn.Linear(i, o, bias=False)
        self.a_src = nn.Parameter(torch.randn(heads, self.o) * 0.1)
        self.a_dst = nn.Parameter(torch.randn(heads, self.o) * 0.1)
    def forward(self, x, ei):
        src, dst = ei
        n = x.size(0)
        z = self.lin(x).view(n, self.h, self.o)
        e = (z * self.a_src).sum(-1)[src] + (z * self.a_dst).sum(-1)[dst]
        alpha = F.dropout(scatter_softmax(F.leaky_relu(e, 0.2), dst, n), 0.2, self.training)
        msg = z[src] * alpha.unsqueeze(-1)
        out = torch.zeros_like(z).index_add(0, dst, msg)
        return out.reshape(n, -1)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1, self.c2, self.c3 = SAGE(D_IN, HID), GAT(HID, HID, HEADS), SAGE(HID, C)
        self.n1, self.n2 = nn.BatchNorm1d(HID), nn.BatchNorm1d(HID)
    def forward(self, x, ei):
        x = F.dropout(F.relu(self.n1(self.c1(x, ei))), 0.5, self.training)
        x = x + F.dropout(F.elu(self.n2(self.c2(x, ei))), 0.5, self.training)
        return self.c3(x, ei)

# power-law-ish destination distribution
dst = (torch.rand(E, device=dev) ** 2 * N).long().clamp_(max=N - 1)
src = torch.randint(0, N, (E,), device=dev)
loops = torch.arange(N, device=dev)
edge_index = torch.stack([torch.cat([src, loops]), torch.cat([dst, loops])])
del src, dst, loops
x = torch.randn(N, D_IN, device=dev)
y = torch.randint(0, C, (N,), device=dev)
perm = torch.randperm(N, device=dev)
train_idx, val_idx = perm[: N // 10], perm[N // 10: N // 5]

model = Net().to(dev)
opt = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=5e-4)

for epoch in range(1, 9):
    model.train(); opt.zero_grad()
    out = model(x, edge_index)
    loss = F.cross_entropy(out[train_idx], y[train_idx])
    loss.backward()
    opt.step()
    if epoch % 2 == 0:
        model.eval()
        with torch.no_grad():
            pred = model(x, edge_index).argmax(-1)
        acc = (pred[val_idx] == y[val_idx]).float().mean().item()
        print(f"epoch {epoch:02d} loss {loss.item():.3f} val {acc:.3f}")
    print("mem", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
