"""Density estimation three ways on the same synthetic data:
  A  RealNVP-type flow with Adam
  B  the same flow polished with L-BFGS (strong Wolfe closure)
  C  FFJORD-like continuous flow: RK4 by hand, Hutchinson trace (double backward), checkpoint per step
Each phase prints its own peak."""
import contextlib
import math
import sys

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

SMALL = "--small" in sys.argv
DIM = 64
HID = 64 if SMALL else 1024
N = 64 if SMALL else 32768
N_ODE = 32 if SMALL else 16384
COUPLINGS = 2 if SMALL else 8
DEV = "cuda"
LOG2PI = math.log(2 * math.pi)


@contextlib.contextmanager
def phase(name):
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    yield
    torch.cuda.synchronize()
    PEAKS[name] = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
    print(f"-- {name}: peak allocated {PEAKS[name][0]}, reserved {PEAKS[name][1]}")


PEAKS = {}


class Coupling(nn.Module):
    def __init__(self, flip):
        super().__init__()
        self.flip = flip
        half = DIM // 2
        self.logs, self.bias = nn.Parameter(torch.zeros(DIM)), nn.Parameter(torch.zeros(DIM))
        self.net = nn.Sequential(nn.Linear(half, HID), nn.SiLU(), nn.Linear(HID, HID), nn.SiLU(), nn.Linear(HID, DIM))
        nn.init.zeros_(self.net[-1].weight)
        nn.init.zeros_(self.net[-1].bias)

    def forward(self, x):
        x = (x + self.bias) * self.logs.exp()
        a, b = x.chunk(2, -1)
        if self.flip:
            a, b = b, a
        s, t = self.net(a).chunk(2, -1)
        s = 2 * torch.tanh(s / 2)
        b = b * s.exp() + t
        y = torch.cat([b, a] if self.flip else [a, b], -1)
        return y, s.sum(-1) + self.logs.sum()

    @torch.no_grad()
    def inverse(self, y):
        a, b = y.chunk(2, -1)
        if self.flip:
            a, b = b, a
        s, t = self.net(a).chunk(2, -1)
        b = (b - t) * (-2 * torch.tanh(s / 2)).exp()
        x = torch.cat([b, a] if self.flip else [a, b], -1)
        return x * (-self.logs).exp() - self.bias


class RealNVP(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = nn.ModuleList([Coupling(i % 2 == 1) for i in range(COUPLINGS)])

    def nll(self, x):
        ld = 0
        for s in self.steps:
            x, d = s(x)
            ld = ld + d
        return -(-0.5 * (x.square() + LOG2PI).sum(-1) + ld).mean()

    def sample(self, n):
        z = torch.randn(n, DIM, device=DEV)
        for s in reversed(self.steps):
            z = s.inverse(z)
        return z


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.ModuleList([nn.Linear(DIM + 1, HID), nn.Linear(HID, HID), nn.Linear(HID, DIM)])

    def forward(self, t, x):
        h = torch.cat([x, t.expand(len(x), 1)], -1)
        return self.l[2](torch.tanh(self.l[1](torch.tanh(self.l[0](h)))))


class CNF(nn.Module):
    def __init__(self, steps=6):
        super().__init__()
        self.f, self.n = Field(), steps

    def rhs(self, t, x, e):
        with torch.enable_grad():
            if not x.requires_grad:
                x = x.requires_grad_(True)
            dx = self.f(t, x)
            vjp, = torch.autograd.grad(dx, x, e, create_graph=True)
        return dx, (vjp * e).sum(-1)

    def rk4(self, t, h, x, ld, e):
        k1, d1 = self.rhs(t, x, e)
        k2, d2 = self.rhs(t + h / 2, x + h / 2 * k1, e)
        k3, d3 = self.rhs(t + h / 2, x + h / 2 * k2, e)
        k4, d4 = self.rhs(t + h, x + h * k3, e)
        return x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4), ld + h / 6 * (d1 + 2 * d2 + 2 * d3 + d4)

    def nll(self, x):
        e = torch.randn_like(x)
        ld, h = torch.zeros(len(x), device=x.device), 1.0 / self.n
        for i in range(self.n):
            t = torch.tensor(i * h, device=x.device)
            x, ld = checkpoint(self.rk4, t, h, x, ld, e, use_reentrant=False)
        return -(-0.5 * (x.square() + LOG2PI).sum(-1) + ld).mean()


def main():
    torch.manual_seed(8)
    mix = torch.randn(DIM, DIM, device=DEV) / 8
    draw = lambda n: torch.tanh(torch.randn(n, DIM, device=DEV) @ mix) + 0.1 * torch.randn(n, DIM, device=DEV)

    flow = RealNVP().to(DEV)
    with phase("A adam"):
        opt = torch.optim.Adam(flow.parameters(), lr=1e-3)
        for i in range(5):
            loss = flow.nll(draw(N))
            opt.zero_grad()
            loss.backward()
            opt.step()
            print(f"A step {i} loss {loss.item():.4f}")
        del opt, loss

    with phase("B lbfgs"):
        flow.zero_grad(set_to_none=True)
        data = draw(N)
        opt = torch.optim.LBFGS(flow.parameters(), lr=1.0, max_iter=4, history_size=8, line_search_fn="strong_wolfe")

        def closure():
            opt.zero_grad()
            loss = flow.nll(data)
            loss.backward()
            return loss

        for i in range(4):
            print(f"B step {i} loss {opt.step(closure).item():.4f}")
        print("samples std", flow.sample(4 * N).std().item())
        del opt, data, closure

    del flow
    with phase("C cnf"):
        cnf = CNF().to(DEV)
        opt = torch.optim.AdamW(cnf.parameters(), lr=1e-3)
        for i in range(4):
            loss = cnf.nll(draw(N_ODE))
            opt.zero_grad()
            loss.backward()
            opt.step()
            print(f"C step {i} loss {loss.item():.4f}")

    print("max_memory_allocated", max(a for a, _ in PEAKS.values()))
    print("max_memory_reserved", max(r for _, r in PEAKS.values()))


if __name__ == "__main__":
    main()
