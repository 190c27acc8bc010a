"""VQ-VAE with EMA codebook and dead-code revival, as a LightningModule."""
import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class BlobImages(Dataset):
    """Sums of random gaussians; deterministic per index."""

    def __init__(self, n, size=128):
        self.n, self.size = n, size
        ax = torch.linspace(-1, 1, size)
        self.yy, self.xx = torch.meshgrid(ax, ax, indexing="ij")

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        img = torch.zeros(3, self.size, self.size)
        for _ in range(5):
            cx, cy = torch.rand(2, generator=g) * 2 - 1
            s = 0.05 + 0.3 * torch.rand(1, generator=g)
            img += torch.rand(3, 1, 1, generator=g) * torch.exp(-((self.xx - cx) ** 2 + (self.yy - cy) ** 2) / s ** 2)
        return img.clamp(0, 1) * 2 - 1


class ResBlock(nn.Module):
    def __init__(self, ch):
        super().__init__()
        self.net = nn.Sequential(nn.GroupNorm(8, ch), nn.SiLU(), nn.Conv2d(ch, ch, 3, padding=1),
                                 nn.GroupNorm(8, ch), nn.SiLU(), nn.Conv2d(ch, ch, 1))

    def forward(self, x):
        return x + self.net(x)


class EMAQuantizer(nn.Module):
    def __init__(self, n_codes, dim, decay=0.9, revive_below=1.0):
        super().__init__()
        self.n_codes, self.decay, self.revive_below = n_codes, decay, revive_below
        embed = torch.randn(n_codes, dim)
        self.register_buffer("embed", embed)
        self.register_buffer("ema_count", torch.ones(n_codes))
        self.register_buffer("ema_sum", embed.clone())
        self.revived = 0

    def forward(self, z):
        z = z.float()
        flat = z.permute(0, 2, 3, 1).reshape(-1, z.size(1))
        with torch.no_grad(), torch.autocast(z.device.type, enabled=False):
            dist = flat.pow(2).sum(1, keepdim=True) - 2 * flat @ self.embed.t() + self.embed.pow(2).sum(1)
            codes = dist.argmin(1)
        q = self.embed[codes].view(z.size(0), z.size(2), z.size(3), -1).permute(0, 3, 1, 2)
        if self.training:
            self._update(flat.detach(), codes)
        commit = F.mse_loss(z, q.detach())
        return z + (q - z).detach(), commit, codes

    @torch.no_grad()
    def _update(self, flat, codes):
        counts = torch.bincount(codes, minlength=self.n_codes).float()
        sums = torch.zeros_like(self.ema_sum).index_add_(0, codes, flat)
        self.ema_count.mul_(self.decay).add_(counts, alpha=1 - self.decay)
        self.ema_sum.mul_(self.decay).add_(sums, alpha=1 - self.decay)
        self.embed.copy_(self.ema_sum / self.ema_count.clamp(min=1e-3).unsqueeze(1))
        dead = torch.nonzero(self.ema_count < self.revive_below).flatten()
        self.revived = dead.numel()
        if self.revived:
            pick = flat[torch.randperm(flat.size(0), device=flat.device)[: self.revived]]
            dead = dead[: pick.size(0)]
            self.embed[dead] = pick
            self.ema_sum[dead] = pick
            self.ema_count[dead] = 1.0


class VQVAE(L.LightningModule):
    def __init__(self, hidden=128, dim=64, n_codes=1024, lr=3e-4, beta=0.25):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, hidden, 4, 2, 1), ResBlock(hidden), nn.Conv2d(hidden, hidden, 4, 2, 1),
            ResBlock(hidden), ResBlock(hidden), nn.Conv2d(hidden, dim, 1))
        self.quantizer = EMAQuantizer(n_codes, dim)
        self.decoder = nn.Sequential(
            nn.Conv2d(dim, hidden, 3, padding=1), ResBlock(hidden), ResBlock(hidden),
            nn.ConvTranspose2d(hidden, hidden, 4, 2, 1), ResBlock(hidden), nn.SiLU(),
            nn.ConvTranspose2d(hidden, 3, 4, 2, 1))

    def forward(self, x):
        zq, commit, codes = self.quantizer(self.encoder(x))
        return self.decoder(zq), commit, codes

    def training_step(self, batch, batch_idx):
        recon, commit, codes = self(batch)
        rec = F.mse_loss(recon.float(), batch)
        loss = rec + self.hparams.beta * commit
        used = torch.unique(codes).numel()
        self.log("train/loss", loss)
        print(f"step {self.global_step} loss {loss.item():.4f} rec {rec.item():.4f} "
              f"codes used {used} revived {self.quantizer.revived}")
        return loss

    def validation_step(self, batch, batch_idx):
        recon, _, codes = self(batch)
        _, counts = torch.unique(codes, return_counts=True)
        p = counts.float() / counts.sum()
        self.log("val/rec", F.mse_loss(recon.float(), batch))
        self.log("val/perplexity", torch.exp(-(p * p.log()).sum()))

    def configure_optimizers(self):
        opt = torch.optim.Adam(self.parameters(), lr=self.hparams.lr, betas=(0.9, 0.99))
        sch = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=self.trainer.max_steps)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sch, "interval": "step"}}


if __name__ == "__main__":
    L.seed_everything(11)
    train_dl = DataLoader(BlobImages(256), batch_size=64, shuffle=True)
    val_dl = DataLoader(BlobImages(64), batch_size=64)
    trainer = L.Trainer(
        accelerator="gpu", devices=1, precision="bf16-mixed", max_steps=8, max_epochs=2,
        gradient_clip_val=1.0, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0)
    model = VQVAE()
    trainer.fit(model, train_dl, val_dl)
    print({k: round(v.item(), 4) for k, v in trainer.callback_metrics.items()})
    print("max_memory_allocated", torch.cuda.max_memory_allocated())
    print("max_memory_reserved", torch.cuda.max_memory_reserved())
