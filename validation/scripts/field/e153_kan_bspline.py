import torch
import torch.nn as nn
import torch.nn.functional as F


class KANLinear(nn.Module):
    def __init__(self, fin, fout, grid_size=8, order=3, scale_noise=0.1, rng=(-1.0, 1.0)):
        super().__init__()
        self.fin, self.fout, self.grid_size, self.order = fin, fout, grid_size, order
        h = (rng[1] - rng[0]) / grid_size
        grid = torch.arange(-order, grid_size + order + 1) * h + rng[0]
        self.register_buffer("grid", grid.expand(fin, -1).contiguous())
        self.base_weight = nn.Parameter(torch.empty(fout, fin))
        self.spline_weight = nn.Parameter(torch.empty(fout, fin, grid_size + order))
        self.spline_scaler = nn.Parameter(torch.empty(fout, fin))
        nn.init.kaiming_uniform_(self.base_weight, a=5 ** 0.5)
        nn.init.kaiming_uniform_(self.spline_scaler, a=5 ** 0.5)
        with torch.no_grad():
            self.spline_weight.normal_(0, scale_noise / grid_size)

    def b_splines(self, x):
        grid = self.grid
        x = x.unsqueeze(-1)
        bases = ((x >= grid[:, :-1]) & (x < grid[:, 1:])).to(x.dtype)
        for k in range(1, self.order + 1):
            left = (x - grid[:, :-(k + 1)]) / (grid[:, k:-1] - grid[:, :-(k + 1)])
            right = (grid[:, k + 1:] - x) / (grid[:, k + 1:] - grid[:, 1:-k])
            bases = left * bases[:, :, :-1] + right * bases[:, :, 1:]
        return bases.contiguous()                      # batch, fin, grid_size + order

    def curve2coeff(self, x, y):
        A = self.b_splines(x).transpose(0, 1)          # fin, batch, coeff
        B = y.transpose(0, 1)                          # fin, batch, fout
        eye = 1e-4 * torch.eye(A.shape[-1], device=A.device)
        sol = torch.linalg.solve(A.transpose(1, 2) @ A + eye, A.transpose(1, 2) @ B)
        return sol.permute(2, 0, 1).contiguous()

    @property
    def scaled_spline_weight(self):
        return self.spline_weight * self.spline_scaler.unsqueeze(-1)

    def forward(self, x):
        base = F.linear(F.silu(x), self.base_weight)
        spline = F.linear(self.b_splines(x).flatten(1), self.scaled_spline_weight.flatten(1))
        return base + spline

    @torch.no_grad()
    def update_grid(self, x, margin=0.01, eps=0.02):
        batch = x.shape[0]
        splines = self.b_splines(x).permute(1, 0, 2)
        coeff = self.scaled_spline_weight.permute(1, 2, 0)
        y = torch.bmm(splines, coeff).permute(1, 0, 2)     # batch, fin, fout
        xs = torch.sort(x, dim=0)[0]
        adaptive = xs[torch.linspace(0, batch - 1, self.grid_size + 1, dtype=torch.int64, device=x.device)]
        step = (xs[-1] - xs[0] + 2 * margin) / self.grid_size
        uniform = torch.arange(self.grid_size + 1, device=x.device).unsqueeze(1) * step + xs[0] - margin
        grid = eps * uniform + (1 - eps) * adaptive
        ar = torch.arange(1, self.order + 1, device=x.device).unsqueeze(1)
        grid = torch.cat([grid[:1] - step * ar.flip(0), grid, grid[-1:] + step * ar])
        self.grid.copy_(grid.T)
        self.spline_weight.copy_(self.curve2coeff(x, y))
        self.spline_scaler.fill_(1.0)

    def regularization(self):
        l1 = self.spline_weight.abs().mean(-1)
        total = l1.sum()
        p = l1 / total
        return total - (p * (p + 1e-12).log()).sum()


class KAN(nn.Module):
    def __init__(self, widths, **kw):
        super().__init__()
        self.layers = nn.ModuleList(KANLinear(a, b, **kw) for a, b in zip(widths[:-1], widths[1:]))

    def forward(self, x, update_grid=False):
        for layer in self.layers:
            if update_grid:
                layer.update_grid(x[:4096])
            x = layer(x)
        return x

    def regularization(self):
        return sum(layer.regularization() for layer in self.layers)


def target_fn(x):
    a = torch.exp(torch.sin(torch.pi * x[:, :16]).mean(1) + (x[:, 16:32] ** 2).mean(1))
    b = (x[:, 32:48] * x[:, 48:64]).sum(1).tanh()
    return torch.stack([a, b, a * b, (a - b).abs().sqrt()], 1)


def main():
    torch.manual_seed(5)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    n_train, n_test, bs, steps = 400_000, 65_536, 32_768, 8

    x_train = torch.rand(n_train, 64, device=device) * 2 - 1
    x_test = torch.rand(n_test, 64, device=device) * 2 - 1
    y_train, y_test = target_fn(x_train), target_fn(x_test)

    model = KAN([64, 192, 192, 4], grid_size=8, order=3).to(device)
    print(model)
    print(sum(p.numel() for p in model.parameters()), "parameters")
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-5)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)

    order = torch.randperm(n_train, device=device)
    for step in range(steps):
        idx = order[step * bs:(step + 1) * bs]
        x, y = x_train[idx], y_train[idx]
        if step in (1, 4):
            with torch.no_grad():
                model(x[:8192], update_grid=True)
            print("  grids refreshed, peak", round(torch.cuda.max_memory_allocated() / 2**20), "MiB")
        pred = model(x)
        mse = F.mse_loss(pred, y)
        loss = mse + 1e-5 * model.regularization()
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        print(f"step {step} mse {mse.item():.5f} loss {loss.item():.5f} "
              f"alloc {torch.cuda.memory_allocated() / 2**20:.0f} MiB peak {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB")

    model.eval()
    with torch.no_grad():
        se = sum(F.mse_loss(model(xb), yb, reduction="sum") for xb, yb in zip(x_test.split(16384), y_test.split(16384)))
    print("test rmse", (se / y_test.numel()).sqrt().item())


if __name__ == "__main__":
    main()
