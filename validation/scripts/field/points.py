"""DGCNN on point clouds: cdist + topk neighbours + gather, chamfer loss decoder."""
import torch
from torch import nn

B, N, K = 16, 1024, 20

def knn(x, k):
    return torch.cdist(x, x).topk(k, largest=False).indices

def edge(x, idx):
    b, n, c = x.shape
    nb = torch.gather(x.unsqueeze(1).expand(b, n, n, c), 2, idx.unsqueeze(-1).expand(b, n, idx.size(-1), c))
    return torch.cat([nb - x.unsqueeze(2), x.unsqueeze(2).expand_as(nb)], -1).permute(0, 3, 1, 2)

class EdgeConv(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.f = nn.Sequential(nn.Conv2d(2 * i, o, 1, bias=False), nn.BatchNorm2d(o), nn.LeakyReLU(.2))
    def forward(self, x):
        with torch.no_grad():
            idx = knn(x, K)
        return self.f(edge(x, idx)).amax(-1).transpose(1, 2)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        dims = [3, 64, 64, 128, 256]
        self.e = nn.ModuleList(EdgeConv(a, b) for a, b in zip(dims, dims[1:]))
        self.g = nn.Linear(512, 1024)
        self.d = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048 * 3))
        self.bil = nn.Bilinear(1024, 1024, 32)
    def forward(self, x):
        hs = []
        for e in self.e:
            x = e(x); hs.append(x)
        h = self.g(torch.cat(hs, -1))
        z = h.max(1).values
        return self.d(z).view(len(z), -1, 3), self.bil(z, h.mean(1))

m = Model().cuda()
o = torch.optim.ASGD(m.parameters(), lr=1e-3)
for i in range(5):
    p = torch.randn(B, N, 3, device="cuda")
    p = p / p.norm(dim=-1, keepdim=True)
    q, s = m(p)
    d = torch.cdist(q, p)
    med = torch.quantile(d.min(2).values.flatten(), 0.9)
    loss = d.min(1)[0].mean() + d.min(2)[0].clamp(max=1e3).mean() + 1e-3 * s.logsumexp(1).mean() + 0 * med
    o.zero_grad(); loss.backward(); o.step()
    print(i, loss.item(), torch.histc(q.detach(), 8).tolist()[:2])
