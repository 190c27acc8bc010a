"""Exact Gaussian process with deep kernel, double precision; Cholesky marginal likelihood, then batched SVD whitening and QR."""
import math
import torch
from torch import nn
from torch.distributions import MultivariateNormal, kl_divergence, Normal

device, dt = "cuda", torch.float64
n = 4000
X = torch.randn(n, 32, device=device, dtype=dt)
y = torch.sin(X.sum(1)) + 0.1 * torch.randn(n, device=device, dtype=dt)
feat = nn.Sequential(nn.Linear(32, 512), nn.Tanh(), nn.Linear(512, 16)).to(device, dt)
log_ls = nn.Parameter(torch.zeros(16, device=device, dtype=dt))
log_noise = nn.Parameter(torch.tensor(-2.0, device=device, dtype=dt))
opt = torch.optim.Rprop([*feat.parameters(), log_ls, log_noise], lr=1e-3)


def rbf(a, b):
    d = (a.pow(2).sum(1)[:, None] + b.pow(2).sum(1)[None] - 2 * a @ b.T).clamp_min(0)
    return torch.exp(-0.5 * d)


for it in range(4):
    z = feat(X) / log_ls.exp()
    K = rbf(z, z) + (log_noise.exp() ** 2 + 1e-4) * torch.eye(n, device=device, dtype=dt)
    Lc = torch.linalg.cholesky(K)
    alpha = torch.cholesky_solve(y[:, None], Lc)
    nll = 0.5 * (y[:, None] * alpha).sum() + Lc.diagonal().log().sum() + 0.5 * n * math.log(2 * math.pi)
    loss = nll / n
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(it, loss.item())

with torch.no_grad():
    z = feat(X) / log_ls.exp()
    xs = torch.randn(1500, 32, device=device, dtype=dt)
    ks = rbf(z, feat(xs) / log_ls.exp())
    mean = ks.T @ alpha
    v = torch.linalg.solve_triangular(Lc, ks, upper=False)
    cov = rbf(*(feat(xs) / log_ls.exp(),) * 2) - v.T @ v + 1e-3 * torch.eye(1500, device=device, dtype=dt)
    print(mean.shape, torch.linalg.slogdet(cov).logabsdet.shape)
    U, S, Vh = torch.linalg.svd(torch.randn(64, 256, 128, device=device), full_matrices=False)
    Q, R = torch.linalg.qr(torch.randn(64, 256, 128, device=device))
    w, V = torch.linalg.eigh(cov.float())
    print((U @ torch.diag_embed(S) @ Vh).shape, Q.shape, w.shape)
    p = MultivariateNormal(torch.zeros(256, device=device), scale_tril=torch.eye(256, device=device))
    print(p.log_prob(p.sample((1000,))).mean().item(), kl_divergence(Normal(0.0, 1.0), Normal(1.0, 2.0)).item())
