"""x4 point-cloud upsampling (PU-Net flavour) trained with chamfer + repulsion losses."""
from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class Cfg:
    batch: int = 8
    n_in: int = 2048   # the output has ratio times as many
    ratio: int = 4
    k: int = 16
    dim: int = 96
    voxels: int = 16
    steps: int = 6
    device: str = "cuda"


def gather_nb(x, idx):
    b, n, k = idx.shape
    off = torch.arange(b, device=x.device).view(b, 1, 1) * x.shape[1]
    return x.reshape(-1, x.shape[-1])[(idx + off).reshape(-1)].view(b, n, k, -1)


def knn(x, k):
    with torch.no_grad():
        return torch.cdist(x, x).topk(k + 1, largest=False).indices[..., 1:]


class EdgeConv(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(2 * cin, cout), nn.GELU(), nn.Linear(cout, cout))

    def forward(self, x, idx):
        nb = gather_nb(x, idx)
        c = x.unsqueeze(2).expand_as(nb)
        return self.mlp(torch.cat([c, nb - c], -1)).amax(2)


class VoxelContext(nn.Module):
    def __init__(self, dim, r):
        super().__init__()
        self.r = r
        self.conv = nn.Sequential(nn.Conv3d(2 * dim, dim, 3, padding=1), nn.GELU(),
                                  nn.Conv3d(dim, dim, 3, padding=1))

    def forward(self, xyz, feat):
        b, n, c = feat.shape
        r = self.r
        cell = ((xyz.clamp(-0.999, 0.999) + 1) * 0.5 * r).long()
        lin = (cell[..., 0] * r + cell[..., 1]) * r + cell[..., 2]
        lin = (lin + torch.arange(b, device=feat.device).view(b, 1) * r ** 3).view(-1)
        flat = feat.reshape(-1, c)
        total = feat.new_zeros(b * r ** 3, c).index_add_(0, lin, flat)
        count = torch.bincount(lin, minlength=b * r ** 3).clamp_min(1).unsqueeze(1)
        ix = lin.unsqueeze(1).expand(-1, c)
        mx = torch.zeros_like(total).scatter_reduce(0, ix, flat, "amax", include_self=False)
        grid = torch.cat([total / count, mx], 1).view(b, r, r, r, 2 * c).permute(0, 4, 1, 2, 3)
        out = self.conv(grid).permute(0, 2, 3, 4, 1).reshape(b * r ** 3, -1)
        return out.index_select(0, lin).view(b, n, -1)


class Upsampler(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        d = cfg.dim
        self.cfg = cfg
        self.stem = nn.Linear(3, d)
        self.edges = nn.ModuleList([EdgeConv(d, d) for _ in range(4)])
        self.vox = VoxelContext(d, cfg.voxels)
        self.code = nn.Parameter(torch.randn(cfg.ratio, 16) * 0.1)
        self.head = nn.Sequential(nn.Linear(6 * d + 16, 256), nn.GELU(), nn.Linear(256, 128),
                                  nn.GELU(), nn.Linear(128, 3))

    def forward(self, xyz):
        b, n, _ = xyz.shape
        r = self.cfg.ratio
        idx = knn(xyz, self.cfg.k)
        feats = [self.stem(xyz)]
        for e in self.edges:
            feats.append(feats[-1] + e(feats[-1], idx))
        feats.append(self.vox(xyz, feats[-1]))
        f = torch.cat(feats, -1).unsqueeze(2).expand(b, n, r, -1)
        f = torch.cat([f, self.code.expand(b, n, r, 16)], -1)
        return (xyz.unsqueeze(2) + 0.1 * self.head(f)).reshape(b, n * r, 3)


def sample_shape(cfg):
    m = cfg.n_in * cfg.ratio
    u = torch.randn(cfg.batch, m, 3, device=cfg.device)
    p = torch.rand(cfg.batch, 1, 1, device=cfg.device) * 4 + 1.5
    dense = 0.9 * u / u.abs().pow(p).sum(-1, keepdim=True).pow(1 / p)
    pick = torch.randperm(m, device=cfg.device)[:cfg.n_in]
    sparse = dense[:, pick] + 0.01 * torch.randn(cfg.batch, cfg.n_in, 3, device=cfg.device)
    return sparse, dense


def losses(pred, dense, k=8, h=0.03):
    d = torch.cdist(pred, dense)
    fwd, bwd = d.amin(2), d.amin(1)
    # the far tail of the uncovered target points counts double
    hard = bwd.topk(bwd.shape[1] // 10, dim=1).values
    chamfer = fwd.pow(2).mean() + bwd.pow(2).mean() + hard.pow(2).mean()
    sub = pred[:, torch.randperm(pred.shape[1], device=pred.device)[: pred.shape[1] // 4]]
    nb = gather_nb(sub, knn(sub, k))
    dist = (nb - sub.unsqueeze(2)).norm(dim=-1)
    close = dist[dist < h]
    rep = ((h - close) * torch.exp(-close.pow(2) / h ** 2)).sum() / dist.numel()
    return chamfer, rep, close.numel()


def run(cfg=Cfg()):
    torch.manual_seed(99)
    net = Upsampler(cfg).to(cfg.device)
    opt = torch.optim.ASGD(net.parameters(), lr=2e-2, t0=2, weight_decay=1e-5, foreach=True)
    print("params", sum(p.numel() for p in net.parameters()))
    for step in range(cfg.steps):
        torch.cuda.reset_peak_memory_stats()
        sparse, dense = sample_shape(cfg)
        pred = net(sparse)
        ch, rep, ncl = losses(pred, dense)
        (ch + 0.1 * rep).backward()
        nn.utils.clip_grad_value_(net.parameters(), 0.5)
        opt.step()
        opt.zero_grad()
        print(f"[{step}] chamfer {ch.item():.5f} repulsion {rep.item():.5f} close pairs {ncl} "
              f"peak {torch.cuda.max_memory_allocated() / 1e9:.2f} GB held {torch.cuda.memory_reserved() / 1e9:.2f} GB")
    # swap in the Polyak averages that ASGD keeps
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(opt.state[p]["ax"])
        sparse, dense = sample_shape(cfg)
        print("averaged weights, chamfer", losses(net(sparse), dense)[0].item())


if __name__ == "__main__":
    run()
