"""ODE-Net: a small image classifier whose middle is dx/dt=f(x,t) integrated by RK4."""
import argparse
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class ConcatConv(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.layer = nn.Conv2d(c + 1, c, 3, padding=1)

    def forward(self, t, x):
        tt = torch.ones_like(x[:, :1]) * t
        return self.layer(torch.cat([tt, x], 1))


class ODEFunc(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.n1, self.n2, self.n3 = (nn.GroupNorm(min(32, c), c) for _ in range(3))
        self.c1, self.c2 = ConcatConv(c), ConcatConv(c)
        self.nfe = 0

    def forward(self, t, x):
        self.nfe += 1
        h = self.c1(t, torch.relu(self.n1(x)))
        h = self.c2(t, torch.relu(self.n2(h)))
        return self.n3(h)


def rk4_step(f, t, dt, x):
    k1 = f(t, x)
    k2 = f(t + dt / 2, x + dt / 2 * k1)
    k3 = f(t + dt / 2, x + dt / 2 * k2)
    k4 = f(t + dt, x + dt * k3)
    return x + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)


class ODEBlock(nn.Module):
    def __init__(self, c, n_steps, ckpt, reentrant):
        super().__init__()
        self.f, self.n, self.ckpt, self.reentrant = ODEFunc(c), n_steps, ckpt, reentrant

    def forward(self, x):
        ts = torch.linspace(0., 1., self.n + 1, device=x.device)
        for i in range(self.n):
            t, dt = ts[i], ts[i + 1] - ts[i]
            if self.ckpt and self.training:
                x = checkpoint(rk4_step, self.f, t, dt, x, use_reentrant=self.reentrant)
            else:
                x = rk4_step(self.f, t, dt, x)
        return x


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--no-ckpt", action="store_true")
    ap.add_argument("--reentrant", action="store_true")
    ap.add_argument("--steps-ode", type=int, default=8)
    ap.add_argument("--batch", type=int, default=128)
    args = ap.parse_args()
    torch.manual_seed(0)
    c = 64
    model = nn.Sequential(
        nn.Conv2d(3, c, 3, 1), nn.GroupNorm(32, c), nn.ReLU(), nn.Conv2d(c, c, 4, 2, 1),
        ODEBlock(c, args.steps_ode, not args.no_ckpt, args.reentrant),
        nn.GroupNorm(32, c), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, 10)).cuda()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for step in range(6):
        x = torch.randn(args.batch, 3, 64, 64, device="cuda")
        y = torch.randint(0, 10, (args.batch,), device="cuda")
        model[4].f.nfe = 0
        loss = nn.functional.cross_entropy(model(x), y)
        fwd = model[4].f.nfe
        loss.backward()
        opt.step()
        opt.zero_grad()
        print(f"step {step} loss {loss.item():.4f} nfe fwd {fwd} total {model[4].f.nfe}")


main()
