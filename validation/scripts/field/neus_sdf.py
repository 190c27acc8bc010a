"""Neural SDF rendering: eikonal loss through torch.autograd.grad(create_graph=True), chunked no-grad rendering."""
import numpy as np
import torch
import torch.nn as nn

torch.set_default_dtype(torch.float32)
torch.set_default_device("cuda")


class PosEnc(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.register_buffer("f", 2.0 ** torch.arange(n) * np.pi)

    def forward(self, x):
        y = x[..., None, :] * self.f[:, None]
        return torch.cat([x, y.sin().flatten(-2), y.cos().flatten(-2)], -1)


class SDF(nn.Module):
    def __init__(self, w=256, d=6, n=6):
        super().__init__()
        self.pe = PosEnc(n)
        cin = 3 + 6 * n
        self.layers = nn.ModuleList()
        for i in range(d):
            self.layers.append(nn.Linear(w + cin if i == d // 2 else (cin if i == 0 else w), w))
        self.out = nn.Linear(w, 1 + w)
        self.act = nn.Softplus(beta=100)

    def forward(self, x):
        e = h = self.pe(x)
        for i, l in enumerate(self.layers):
            if i == len(self.layers) // 2:
                h = torch.cat([h, e], -1)
            h = self.act(l(h))
        return self.out(h)

    def with_gradient(self, x):
        x.requires_grad_(True)
        y = self(x)
        g, = torch.autograd.grad(y[..., :1], x, torch.ones_like(y[..., :1]), create_graph=True, retain_graph=True)
        return y, g


class Color(nn.Module):
    def __init__(self, w=256):
        super().__init__()
        self.pe = PosEnc(4)
        self.net = nn.Sequential(nn.Linear(3 + 3 + 27 + w, w), nn.ReLU(), nn.Linear(w, w), nn.ReLU(), nn.Linear(w, 3), nn.Sigmoid())

    def forward(self, x, n, d, f):
        return self.net(torch.cat([x, n, self.pe(d), f], -1))


sdf, color = SDF(), Color()
inv_s = nn.Parameter(torch.tensor(3.0))
optim = torch.optim.Adam([{"params": sdf.parameters()}, {"params": color.parameters()}, {"params": [inv_s], "lr": 1e-3}], lr=5e-4)


def render(o, d, n=64, train=True):
    t = torch.linspace(0.5, 3.5, n).expand(o.shape[0], n)
    if train:
        t = t + torch.rand_like(t) * 3.0 / n
    x = o[:, None] + d[:, None] * t[..., None]
    with torch.enable_grad():
        y, g = sdf.with_gradient(x.detach().reshape(-1, 3))
    if not train:
        y, g = y.detach(), g.detach()
    c = color(x.reshape(-1, 3), g, d[:, None].expand_as(x).reshape(-1, 3), y[:, 1:]).view(-1, n, 3)
    s = torch.sigmoid(y[:, 0].view(-1, n) * inv_s.exp())
    alpha = ((s[:, :-1] - s[:, 1:] + 1e-5) / (s[:, :-1] + 1e-5)).clamp(0, 1)
    T = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-7], -1), -1)[:, :-1]
    w = alpha * T
    rgb = (w[..., None] * c[:, :-1]).sum(1)
    return rgb, g


for i in range(6):
    o = torch.randn(1024, 3) * 0.1 + torch.tensor([0.0, 0.0, -2.0])
    d = nn.functional.normalize(torch.randn(1024, 3) * 0.2 + torch.tensor([0.0, 0.0, 1.0]), dim=-1)
    target = torch.rand(1024, 3)
    rgb, g = render(o, d)
    eik = ((g.norm(dim=-1) - 1) ** 2).mean()
    loss = nn.functional.l1_loss(rgb, target) + 0.1 * eik
    optim.zero_grad()
    loss.backward()
    optim.step()
    print(i, loss.item(), eik.item())

rays = torch.randn(6000, 3)
with torch.no_grad():
    img = torch.cat([render(torch.zeros_like(r), nn.functional.normalize(r, dim=-1), 96, train=False)[0].cpu() for r in rays.split(1500)])
print(img.shape, f"{torch.cuda.max_memory_allocated() / 2**20:.0f} MiB")
