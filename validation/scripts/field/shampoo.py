"""Shampoo written from the paper, eigh every step, on a wide MLP-mixer."""
import torch, torch.nn as nn, torch.nn.functional as F
from torch.optim import Optimizer


class Shampoo(Optimizer):
    def __init__(self, params, lr=1e-2, momentum=0.9, eps=1e-4, every=2):
        super().__init__(params, dict(lr=lr, momentum=momentum, eps=eps, every=every))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                g, st = p.grad, self.state[p]
                if not st:
                    st["step"] = 0
                    st["m"] = g.clone()
                    for d, n in enumerate(g.shape):
                        if n <= 2048:
                            st[f"pre{d}"] = group["eps"] * torch.eye(n, out=g.new(n, n))
                            st[f"inv{d}"] = g.new(n, n).zero_()
                order = sum(1 for n in g.shape if n <= 2048)
                out = g.mul(1.0)
                for d, n in enumerate(g.shape):
                    if n > 2048:
                        continue
                    mat = g.transpose(0, d).contiguous().view(n, -1)
                    st[f"pre{d}"].add_(mat @ mat.t())
                    if st["step"] % group["every"] == 0:
                        w, v = torch.linalg.eigh(st[f"pre{d}"])
                        w = w.clamp_min(group["eps"]).pow(-1 / (2 * order))
                        st[f"inv{d}"].copy_(v @ torch.diag(w) @ v.mH)
                    out = out.transpose(0, d).contiguous()
                    shp = out.shape
                    out = (st[f"inv{d}"] @ out.view(n, -1)).view(shp).transpose(0, d)
                st["m"].mul_(group["momentum"]).add_(out, alpha=1 - group["momentum"])
                st["step"] += 1
                p.add_(st["m"], alpha=-group["lr"])


class Mixer(nn.Module):
    def __init__(self, n, d):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.t1, self.t2 = nn.Linear(n, 2 * n), nn.Linear(2 * n, n)
        self.c1, self.c2 = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        x = x + self.t2(F.mish(self.t1(self.n1(x).mT))).mT
        return x + self.c2(F.mish(self.c1(self.n2(x))))


N, D = 256, 512
net = nn.Sequential(nn.Linear(48, D), *[Mixer(N, D) for _ in range(6)], nn.LayerNorm(D)).cuda()
head = nn.Linear(D, 100).cuda()
opt = Shampoo([*net.parameters(), *head.parameters()])
for i in range(4):
    x, y = torch.randn(64, 3, 64, 64).cuda(), torch.randint(100, (64,)).cuda()
    tok = F.unfold(x, 4, stride=4).mT
    loss = F.cross_entropy(head(net(tok).mean(1)), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(i, loss.item())
