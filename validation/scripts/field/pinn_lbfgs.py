"""Physics-informed network for Burgers, float64, Adam warm up then L-BFGS."""
import torch
import torch.nn as nn
from torch.autograd import grad

torch.set_default_dtype(torch.double)
dev = torch.device("cuda")


class MLP(nn.Module):
    def __init__(self, width=512, depth=7):
        super().__init__()
        dims = [2] + [width] * depth + [1]
        self.lin = nn.ModuleList(nn.Linear(a, b) for a, b in zip(dims, dims[1:]))
        for l in self.lin:
            nn.init.xavier_normal_(l.weight)
            nn.init.zeros_(l.bias)

    def forward(self, t, x):
        h = torch.hstack([t, x])
        for l in self.lin[:-1]:
            h = torch.tanh(l(h))
        return self.lin[-1](h)


u = MLP().to(dev)
nu = 0.01 / torch.pi
t_f, x_f = torch.rand(12000, 1, device=dev), torch.rand(12000, 1, device=dev) * 2 - 1
t_f.requires_grad_(); x_f.requires_grad_()
x0 = torch.linspace(-1, 1, 512, device=dev)[:, None]
u0 = -torch.sin(torch.pi * x0)


def residual():
    y = u(t_f, x_f)
    ut, ux = grad(y.sum(), (t_f, x_f), create_graph=True)
    uxx, = grad(ux.sum(), x_f, create_graph=True)
    return ut + y * ux - nu * uxx


def total():
    return residual().square().mean() + (u(torch.zeros_like(x0), x0) - u0).square().mean()


adam = torch.optim.Adam(u.parameters(), lr=1e-3)
for it in range(4):
    adam.zero_grad()
    l = total()
    l.backward()
    adam.step()
    print("adam", it, l.item())

lbfgs = torch.optim.LBFGS(u.parameters(), lr=0.1, max_iter=4, history_size=10)   # no line search: steps don't depend on values


def closure():
    lbfgs.zero_grad()
    l = total()
    l.backward()
    return l


for it in range(2):
    l = lbfgs.step(closure)
    print("lbfgs", it, float(l))
