# NeRF (coarse + fine networks, hierarchical sampling) as a LightningModule.
# "Photos" are analytic renderings of three fuzzy coloured balls.
import math

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

H = W = 200
N_VIEWS = 20
RAYS = 4096
N_COARSE, N_FINE = 64, 128
NEAR, FAR = 2.0, 6.0
CHUNK = 8192
STEPS = 6


def camera(theta, phi=-0.5, radius=4.0):
    c = torch.tensor([radius * math.cos(phi) * math.sin(theta), radius * -math.sin(phi),
                      radius * math.cos(phi) * math.cos(theta)])
    fwd = F.normalize(-c, dim=0)
    right = F.normalize(torch.linalg.cross(fwd, torch.tensor([0.0, 1.0, 0.0])), dim=0)
    up = torch.linalg.cross(right, fwd)
    return torch.stack([right, up, -fwd], 1), c


def get_rays(theta):
    rot, origin = camera(theta)
    f = 0.5 * W / math.tan(0.4)
    j, i = torch.meshgrid(torch.arange(H), torch.arange(W), indexing="ij")
    d = torch.stack([(i - W / 2) / f, -(j - H / 2) / f, -torch.ones_like(i)], -1).float()
    d = F.normalize(d @ rot.T, dim=-1).reshape(-1, 3)
    return origin.expand_as(d), d


def ground_truth(o, d):
    centers = torch.tensor([[0.0, 0.0, 0.0], [0.8, 0.3, 0.2], [-0.6, -0.2, 0.7]])
    rgb = torch.ones_like(o)
    for c, col in zip(centers, torch.eye(3)):
        t = ((c - o) * d).sum(-1, keepdim=True)
        dist = (o + t * d - c).norm(dim=-1, keepdim=True)
        a = torch.sigmoid((0.5 - dist) * 20)
        rgb = rgb * (1 - a) + col * a
    return rgb


def posenc(x, n):
    ang = x[..., None] * 2.0 ** torch.arange(n, device=x.device)
    return torch.cat([x, ang.sin().flatten(-2), ang.cos().flatten(-2)], -1)


class Field(nn.Module):
    def __init__(self, width=256, lx=10, ld=4):
        super().__init__()
        self.lx, self.ld = lx, ld
        dx, dd = 3 + 6 * lx, 3 + 6 * ld
        self.trunk = nn.ModuleList([nn.Linear(dx, width)] + [
            nn.Linear(width + (dx if i == 4 else 0), width) for i in range(7)])
        self.sigma = nn.Linear(width, 1)
        self.bottleneck = nn.Linear(width, width)
        self.color = nn.Sequential(nn.Linear(width + dd, width // 2), nn.ReLU(), nn.Linear(width // 2, 3))

    def forward(self, pts, dirs):
        e = posenc(pts, self.lx)
        h = F.relu(self.trunk[0](e))
        for i, lin in enumerate(self.trunk[1:]):
            if i == 4:
                h = torch.cat([e, h], -1)
            h = F.relu(lin(h))
        de = posenc(dirs, self.ld)[:, None].expand(-1, pts.shape[1], -1)
        rgb = torch.sigmoid(self.color(torch.cat([self.bottleneck(h), de], -1)))
        return rgb, self.sigma(h).squeeze(-1)


def composite(rgb, sigma, z, noise):
    delta = torch.cat([z[:, 1:] - z[:, :-1], torch.full_like(z[:, :1], 1e10)], -1)
    if noise > 0:
        sigma = sigma + torch.randn_like(sigma) * noise
    alpha = 1 - torch.exp(-F.relu(sigma) * delta)
    trans = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], -1), -1)[:, :-1]
    w = alpha * trans
    return (w[..., None] * rgb).sum(1) + 1 - w.sum(1, keepdim=True), w


def sample_pdf(bins, weights, n, det):
    pdf = (weights + 1e-5) / (weights + 1e-5).sum(-1, keepdim=True)
    cdf = torch.cat([torch.zeros_like(pdf[:, :1]), pdf.cumsum(-1)], -1)
    if det:
        u = torch.linspace(0, 1, n, device=bins.device).expand(len(bins), n).contiguous()
    else:
        u = torch.rand(len(bins), n, device=bins.device)
    idx = torch.searchsorted(cdf, u, right=True)
    lo, hi = (idx - 1).clamp(min=0), idx.clamp(max=cdf.shape[-1] - 1)
    c0, c1 = cdf.gather(1, lo), cdf.gather(1, hi)
    b0, b1 = bins.gather(1, lo.clamp(max=bins.shape[1] - 1)), bins.gather(1, hi.clamp(max=bins.shape[1] - 1))
    den = torch.where(c1 - c0 < 1e-5, torch.ones_like(c0), c1 - c0)
    return b0 + (u - c0) / den * (b1 - b0)


class NeRF(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.coarse, self.fine = Field(), Field()

    def render(self, o, d):
        z = torch.linspace(NEAR, FAR, N_COARSE, device=o.device).expand(len(o), -1)
        if self.training:
            z = z + torch.rand_like(z) * (FAR - NEAR) / N_COARSE
        noise = 1.0 if self.training else 0.0
        rgb, sig = self.coarse(o[:, None] + d[:, None] * z[..., None], d)
        c_img, w = composite(rgb, sig, z, noise)
        mids = 0.5 * (z[:, 1:] + z[:, :-1])
        zf = sample_pdf(mids, w[:, 1:-1].detach(), N_FINE, det=not self.training)
        z, _ = torch.sort(torch.cat([z, zf], -1), -1)
        rgb, sig = self.fine(o[:, None] + d[:, None] * z[..., None], d)
        f_img, _ = composite(rgb, sig, z, noise)
        return c_img, f_img

    def training_step(self, batch, batch_idx):
        o, d, target = batch
        c, f = self.render(o, d)
        loss_f = F.mse_loss(f, target)
        loss = F.mse_loss(c, target) + loss_f
        print(f"step {self.global_step} loss {loss.item():.4f} psnr {-10 * math.log10(loss_f.item()):.2f} "
              f"mem {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
        return loss

    def validation_step(self, batch, batch_idx):
        o, d, target = batch
        f = self.render(o, d)[1]
        self.log("val_psnr", -10 * torch.log10(F.mse_loss(f, target)), prog_bar=False)

    def on_validation_epoch_end(self):
        print("val psnr", self.trainer.callback_metrics["val_psnr"].item())

    def configure_optimizers(self):
        opt = torch.optim.Adam(self.parameters(), lr=5e-4)
        return {"optimizer": opt, "lr_scheduler": {
            "scheduler": torch.optim.lr_scheduler.ExponentialLR(opt, 0.999), "interval": "step"}}


def views(thetas):
    o, d = zip(*[get_rays(t) for t in thetas])
    o, d = torch.cat(o), torch.cat(d)
    return TensorDataset(o, d, ground_truth(o, d))


if __name__ == "__main__":
    L.seed_everything(1234)
    train = DataLoader(views([2 * math.pi * k / N_VIEWS for k in range(N_VIEWS)]), batch_size=RAYS,
                       sampler=torch.utils.data.RandomSampler(range(H * W * N_VIEWS), num_samples=RAYS * STEPS))
    val = DataLoader(views([0.123]), batch_size=CHUNK)
    trainer = L.Trainer(max_steps=STEPS, accelerator="gpu", devices=1, logger=False, enable_checkpointing=False,
                        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
                        gradient_clip_val=1.0)
    trainer.fit(NeRF(), train, val)
    print(f"peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
