"""Deep equilibrium image classifier.

z* = f(z*, x) is found by Anderson acceleration without a graph; the gradient is obtained by
solving the adjoint fixed point inside a backward hook (implicit function theorem).
"""
import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F


class ResNetLayer(nn.Module):
    def __init__(self, n_channels, n_inner, kernel_size=3, num_groups=8):
        super().__init__()
        pad = kernel_size // 2
        self.conv1 = nn.Conv2d(n_channels, n_inner, kernel_size, padding=pad, bias=False)
        self.conv2 = nn.Conv2d(n_inner, n_channels, kernel_size, padding=pad, bias=False)
        self.norm1 = nn.GroupNorm(num_groups, n_inner)
        self.norm2 = nn.GroupNorm(num_groups, n_channels)
        self.norm3 = nn.GroupNorm(num_groups, n_channels)
        self.conv1.weight.data.normal_(0, 0.01)
        self.conv2.weight.data.normal_(0, 0.01)

    def forward(self, z, x):
        y = self.norm1(F.relu(self.conv1(z)))
        return self.norm3(F.relu(z + self.norm2(x + self.conv2(y))))


def anderson(f, x0, m=6, lam=1e-4, max_iter=30, tol=1e-2, beta=1.0):
    bsz, d, h, w = x0.shape
    X = torch.zeros(bsz, m, d * h * w, dtype=x0.dtype, device=x0.device)
    Fx = torch.zeros(bsz, m, d * h * w, dtype=x0.dtype, device=x0.device)
    X[:, 0], Fx[:, 0] = x0.reshape(bsz, -1), f(x0).reshape(bsz, -1)
    X[:, 1], Fx[:, 1] = Fx[:, 0], f(Fx[:, 0].view_as(x0)).reshape(bsz, -1)

    H = torch.zeros(bsz, m + 1, m + 1, dtype=x0.dtype, device=x0.device)
    H[:, 0, 1:] = H[:, 1:, 0] = 1
    y = torch.zeros(bsz, m + 1, 1, dtype=x0.dtype, device=x0.device)
    y[:, 0] = 1

    res = []
    for k in range(2, max_iter):
        n = min(k, m)
        G = Fx[:, :n] - X[:, :n]
        H[:, 1:n + 1, 1:n + 1] = torch.bmm(G, G.transpose(1, 2)) + lam * torch.eye(n, device=x0.device)[None]
        alpha = torch.linalg.solve(H[:, :n + 1, :n + 1], y[:, :n + 1])[:, 1:n + 1, 0]
        X[:, k % m] = beta * (alpha[:, None] @ Fx[:, :n])[:, 0] + (1 - beta) * (alpha[:, None] @ X[:, :n])[:, 0]
        Fx[:, k % m] = f(X[:, k % m].view_as(x0)).reshape(bsz, -1)
        res.append((Fx[:, k % m] - X[:, k % m]).norm().item() / (1e-5 + Fx[:, k % m].norm().item()))
        if res[-1] < tol:
            break
    return X[:, k % m].view_as(x0), res


class DEQFixedPoint(nn.Module):
    def __init__(self, f, solver, **kwargs):
        super().__init__()
        self.f, self.solver, self.kwargs = f, solver, kwargs
        self.forward_res, self.backward_res = [], []

    def forward(self, x):
        with torch.no_grad():
            z, self.forward_res = self.solver(lambda z: self.f(z, x), torch.zeros_like(x), **self.kwargs)
        z = self.f(z, x)
        if not torch.is_grad_enabled():
            return z

        z0 = z.clone().detach().requires_grad_()
        f0 = self.f(z0, x)

        def backward_hook(grad):
            g, self.backward_res = self.solver(
                lambda y: torch.autograd.grad(f0, z0, y, retain_graph=True)[0] + grad, grad, **self.kwargs)
            return g

        z.register_hook(backward_hook)
        return z


def build(chan, inner, classes, max_iter):
    f = ResNetLayer(chan, inner)
    return nn.Sequential(
        nn.Conv2d(3, chan, 3, padding=1, bias=True),
        nn.BatchNorm2d(chan),
        DEQFixedPoint(f, anderson, tol=1e-3, max_iter=max_iter, m=6),
        nn.BatchNorm2d(chan),
        nn.AvgPool2d(8, 8),
        nn.Flatten(),
        nn.LazyLinear(classes),
    )


def epoch(loader, model, device, opt=None):
    loss_sum = err = n = 0
    model.train(opt is not None)
    for i, (X, y) in enumerate(loader):
        X, y = X.to(device), y.to(device)
        with torch.set_grad_enabled(opt is not None):
            yp = model(X)
            loss = F.cross_entropy(yp, y)
        if opt is not None:
            opt.zero_grad()
            loss.backward()
            opt.step()
            print(f"  it {i} loss {loss.item():.4f} fwd iters {len(model[2].forward_res)} bwd iters "
                  f"{len(model[2].backward_res)} peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
        loss_sum += loss.item() * len(y)
        err += (yp.argmax(1) != y).sum().item()
        n += len(y)
    return err / n, loss_sum / n


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--bs", type=int, default=128)
    p.add_argument("--res", type=int, default=64)
    p.add_argument("--chan", type=int, default=64)
    p.add_argument("--inner", type=int, default=96)
    p.add_argument("--max-iter", type=int, default=25)
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--train-batches", type=int, default=3)
    a = p.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    n = a.bs * a.train_batches
    proto = torch.randn(10, 3, a.res, a.res)
    y = torch.randint(10, (n + a.bs,))
    x = proto[y] + 0.8 * torch.randn(n + a.bs, 3, a.res, a.res)
    ds = torch.utils.data.TensorDataset(x, y)
    train = torch.utils.data.DataLoader(torch.utils.data.Subset(ds, range(n)), batch_size=a.bs, shuffle=True)
    test = torch.utils.data.DataLoader(torch.utils.data.Subset(ds, range(n, n + a.bs)), batch_size=a.bs)

    model = build(a.chan, a.inner, 10, a.max_iter).to(device)
    with torch.no_grad():
        model(x[:2].to(device))
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, a.epochs * len(train), eta_min=1e-6)
    for ep in range(a.epochs):
        tr = epoch(train, model, device, opt)
        te = epoch(test, model, device)
        sched.step()
        print(f"epoch {ep} train err {tr[0]:.3f} loss {tr[1]:.3f} | test err {te[0]:.3f} loss {te[1]:.3f} "
              f"| allocated {torch.cuda.memory_allocated() / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
