"""Lightning, manual optimisation with two optimisers (an MLP GAN), manual clipping, val + checkpoint."""
import tempfile
import torch
import torch.nn as nn
import torch.nn.functional as F
import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset


def mlp(sizes, norm=False, out=None):
    layers = []
    for i, (a, b) in enumerate(zip(sizes[:-1], sizes[1:])):
        layers.append(nn.Linear(a, b))
        if i < len(sizes) - 2:
            if norm:
                layers.append(nn.BatchNorm1d(b))
            layers.append(nn.LeakyReLU(0.2, inplace=True))
    if out is not None:
        layers.append(out)
    return nn.Sequential(*layers)


class GAN(L.LightningModule):
    def __init__(self, latent=256, dim=3 * 64 * 64, lr=2e-4):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.G = mlp([latent, 1024, 2048, 4096, dim], norm=True, out=nn.Tanh())
        self.D = mlp([dim, 4096, 2048, 1024, 1])

    def forward(self, z):
        return self.G(z)

    def training_step(self, batch, batch_idx):
        (real,) = batch
        real = real.flatten(1)
        opt_g, opt_d = self.optimizers()
        z = torch.randn(real.size(0), self.hparams.latent, device=self.device)

        self.toggle_optimizer(opt_d)
        fake = self.G(z).detach()
        d_loss = F.softplus(-self.D(real)).mean() + F.softplus(self.D(fake)).mean()
        opt_d.zero_grad()
        self.manual_backward(d_loss)
        self.clip_gradients(opt_d, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        opt_d.step()
        self.untoggle_optimizer(opt_d)

        self.toggle_optimizer(opt_g)
        g_loss = F.softplus(-self.D(self.G(z))).mean()
        opt_g.zero_grad()
        self.manual_backward(g_loss)
        self.clip_gradients(opt_g, gradient_clip_val=0.5, gradient_clip_algorithm="value")
        opt_g.step()
        self.untoggle_optimizer(opt_g)
        self.log_dict({"g_loss": g_loss, "d_loss": d_loss})

    def validation_step(self, batch, batch_idx):
        (real,) = batch
        z = torch.randn(real.size(0), self.hparams.latent, device=self.device)
        gap = self.D(real.flatten(1)).mean() - self.D(self(z)).mean()
        self.log("val_gap", gap)

    def configure_optimizers(self):
        g = torch.optim.Adam(self.G.parameters(), lr=self.hparams.lr, betas=(0.5, 0.999))
        d = torch.optim.RAdam(self.D.parameters(), lr=self.hparams.lr)
        return [g, d], []


if __name__ == "__main__":
    L.seed_everything(1)
    data = torch.rand(1536, 3, 64, 64) * 2 - 1
    train = DataLoader(TensorDataset(data[:1024]), batch_size=256, shuffle=True)
    val = DataLoader(TensorDataset(data[1024:]), batch_size=256)
    with tempfile.TemporaryDirectory() as d:
        trainer = L.Trainer(
            accelerator="gpu", devices=1, precision="32-true", max_epochs=2, logger=False,
            callbacks=[ModelCheckpoint(dirpath=d, monitor="val_gap", save_top_k=1)],
            default_root_dir=d, enable_progress_bar=False, log_every_n_steps=1,
        )
        model = GAN()
        trainer.fit(model, train, val)
        print({k: float(v) for k, v in trainer.callback_metrics.items()})
    print("max_memory_allocated", torch.cuda.max_memory_allocated())
    print("max_memory_reserved", torch.cuda.max_memory_reserved())
