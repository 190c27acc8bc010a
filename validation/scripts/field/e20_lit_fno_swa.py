"""Fourier Neural Operator for Darcy flow with Lightning + Stochastic Weight Averaging."""
import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class SpectralConv2d(nn.Module):
    def __init__(self, cin, cout, m1, m2):
        super().__init__()
        self.m1, self.m2, self.cout = m1, m2, cout
        s = 1 / (cin * cout)
        self.w1 = nn.Parameter(s * torch.rand(cin, cout, m1, m2, dtype=torch.cfloat))
        self.w2 = nn.Parameter(s * torch.rand(cin, cout, m1, m2, dtype=torch.cfloat))

    def forward(self, x):
        B, _, H, W = x.shape
        xf = torch.fft.rfft2(x)
        out = torch.zeros(B, self.cout, H, W // 2 + 1, dtype=torch.cfloat, device=x.device)
        out[:, :, : self.m1, : self.m2] = torch.einsum("bixy,ioxy->boxy", xf[:, :, : self.m1, : self.m2], self.w1)
        out[:, :, -self.m1:, : self.m2] = torch.einsum("bixy,ioxy->boxy", xf[:, :, -self.m1:, : self.m2], self.w2)
        return torch.fft.irfft2(out, s=(H, W))


class FNO2d(nn.Module):
    def __init__(self, modes=20, width=64, layers=4, pad=9):
        super().__init__()
        self.pad = pad
        self.lift = nn.Linear(3, width)
        self.spec = nn.ModuleList(SpectralConv2d(width, width, modes, modes) for _ in range(layers))
        self.w = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(layers))
        self.q = nn.Sequential(nn.Linear(width, 128), nn.GELU(), nn.Linear(128, 1))

    def grid(self, x):
        B, H, W = x.shape[:3]
        gy = torch.linspace(0, 1, H, device=x.device).view(1, H, 1, 1).expand(B, H, W, 1)
        gx = torch.linspace(0, 1, W, device=x.device).view(1, 1, W, 1).expand(B, H, W, 1)
        return torch.cat([x, gy, gx], -1)

    def forward(self, a):
        x = self.lift(self.grid(a)).permute(0, 3, 1, 2)
        x = F.pad(x, [0, self.pad, 0, self.pad])
        for i, (s, w) in enumerate(zip(self.spec, self.w)):
            x = s(x) + w(x)
            if i < len(self.spec) - 1:
                x = F.gelu(x)
        x = x[..., : -self.pad, : -self.pad].permute(0, 2, 3, 1)
        return self.q(x)


def rel_l2(pred, y):
    diff = (pred - y).flatten(1).norm(dim=1)
    return (diff / y.flatten(1).norm(dim=1)).mean()


class LitFNO(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = FNO2d()

    def forward(self, a):
        return self.model(a)

    def training_step(self, batch, i):
        a, u = batch
        loss = rel_l2(self(a), u)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, i):
        a, u = batch
        pred = self(a)
        self.log_dict({"val_rel": rel_l2(pred, u), "val_mse": F.mse_loss(pred, u)})

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3, weight_decay=1e-4)


class DarcyData(pl.LightningDataModule):
    def __init__(self, res=241, bs=8):
        super().__init__()
        self.res, self.bs = res, bs

    def setup(self, stage=None):
        g = torch.Generator().manual_seed(0)
        a = (torch.randn(40, self.res, self.res, 1, generator=g) > 0).float() * 9 + 3
        u = F.avg_pool2d(a.permute(0, 3, 1, 2), 9, 1, 4).permute(0, 2, 3, 1).contiguous() / 10
        self.train, self.val = TensorDataset(a[:24], u[:24]), TensorDataset(a[24:], u[24:])

    def train_dataloader(self):
        return DataLoader(self.train, self.bs, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, self.bs * 2)


class MemReport(Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        print(f"epoch {trainer.current_epoch} {float(trainer.callback_metrics['loss']):.4f} "
              f"alloc {torch.cuda.max_memory_allocated()} res {torch.cuda.max_memory_reserved()}")


def main():
    pl.seed_everything(123, workers=True)
    trainer = pl.Trainer(
        accelerator="auto", devices=1, max_epochs=3, logger=False, enable_checkpointing=False,
        enable_model_summary=False, enable_progress_bar=False,
        callbacks=[StochasticWeightAveraging(swa_lrs=5e-4, swa_epoch_start=1), MemReport()],
    )
    trainer.fit(LitFNO(), datamodule=DarcyData())
    print("final", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())


main()
