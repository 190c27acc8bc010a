import argparse
import copy
import tempfile

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class Generator(nn.Module):
    def __init__(self, z=128, ch=512):
        super().__init__()
        self.fc = nn.Linear(z, ch * 4 * 4)
        self.ch = ch
        layers, c = [], ch
        for _ in range(4):
            layers += [nn.Upsample(scale_factor=2, mode="nearest"), nn.Conv2d(c, c // 2, 3, padding=1),
                       nn.BatchNorm2d(c // 2), nn.ReLU(True)]
            c //= 2
        self.net = nn.Sequential(*layers, nn.Conv2d(c, 3, 3, padding=1), nn.Tanh())

    def forward(self, z):
        return self.net(self.fc(z).view(-1, self.ch, 4, 4))


class Discriminator(nn.Module):
    def __init__(self, ch=64):
        super().__init__()
        layers, i = [], 3
        for k in range(4):
            o = ch * 2 ** k
            layers += [nn.utils.parametrizations.spectral_norm(nn.Conv2d(i, o, 4, 2, 1)), nn.LeakyReLU(0.2, inplace=True)]
            i = o
        self.net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(i * 16, 1))

    def forward(self, x):
        return self.net(x)


class EMACallback(L.Callback):
    def __init__(self, decay=0.99):
        self.decay = decay

    def on_fit_start(self, trainer, pl_module):
        self.ema = copy.deepcopy(pl_module.gen).eval().requires_grad_(False)

    @torch.no_grad()
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        for e, p in zip(self.ema.state_dict().values(), pl_module.gen.state_dict().values()):
            if e.dtype.is_floating_point:
                e.mul_(self.decay).add_(p.detach(), alpha=1 - self.decay)
            else:
                e.copy_(p)

    def on_validation_start(self, trainer, pl_module):
        if not hasattr(self, "ema"):
            return
        self.backup = {k: v.clone() for k, v in pl_module.gen.state_dict().items()}
        pl_module.gen.load_state_dict(self.ema.state_dict())

    def on_validation_end(self, trainer, pl_module):
        if hasattr(self, "backup"):
            pl_module.gen.load_state_dict(self.backup)
            del self.backup


class GAN(L.LightningModule):
    def __init__(self, accumulate=2, ch=512):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.gen, self.disc = Generator(ch=ch), Discriminator()

    def training_step(self, batch, batch_idx):
        (real,) = batch
        g_opt, d_opt = self.optimizers()
        n = self.hparams.accumulate
        last = (batch_idx + 1) % n == 0
        z = torch.randn(real.size(0), 128, device=self.device)

        self.toggle_optimizer(d_opt)
        fake = self.gen(z).detach()
        d_loss = (F.relu(1 - self.disc(real)).mean() + F.relu(1 + self.disc(fake)).mean()) / n
        self.manual_backward(d_loss)
        if last:
            self.clip_gradients(d_opt, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
            d_opt.step()
            d_opt.zero_grad()
        self.untoggle_optimizer(d_opt)

        self.toggle_optimizer(g_opt)
        g_loss = -self.disc(self.gen(z)).mean() / n
        self.manual_backward(g_loss)
        if last:
            g_opt.step()
            g_opt.zero_grad()
            for s in self.lr_schedulers():
                s.step()
        self.untoggle_optimizer(g_opt)
        self.log_dict({"g": g_loss, "d": d_loss})
        print(f"batch {batch_idx}: g {g_loss.item():.4f} d {d_loss.item():.4f}")

    def validation_step(self, batch, batch_idx):
        (real,) = batch
        fake = self.gen(torch.randn(real.size(0), 128, device=self.device))
        fid_ish = (fake.mean((0, 2, 3)) - real.mean((0, 2, 3))).pow(2).sum()
        self.log("val_fid_ish", fid_ish, prog_bar=False)
        return fid_ish

    def configure_optimizers(self):
        g = torch.optim.Adam(self.gen.parameters(), lr=2e-4, betas=(0.0, 0.9))
        d = torch.optim.RMSprop(self.disc.parameters(), lr=1e-4, momentum=0.5)
        return [g, d], [torch.optim.lr_scheduler.ExponentialLR(g, 0.99), torch.optim.lr_scheduler.ExponentialLR(d, 0.99)]


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--precision", default="32-true")
    ap.add_argument("--accumulate", type=int, default=2)
    ap.add_argument("--batch", type=int, default=64)
    a = ap.parse_args()
    L.seed_everything(5)
    imgs = torch.rand(a.batch * 6, 3, 64, 64) * 2 - 1
    train = DataLoader(TensorDataset(imgs), a.batch, shuffle=True, drop_last=True)
    val = DataLoader(TensorDataset(imgs[: a.batch * 3 // 2]), a.batch)
    with tempfile.TemporaryDirectory() as d:
        tr = L.Trainer(accelerator="gpu", devices=1, max_epochs=2, precision=a.precision, callbacks=[EMACallback()],
                       logger=False, enable_checkpointing=False, enable_progress_bar=False, default_root_dir=d)
        tr.fit(GAN(a.accumulate), train, val)
    print({k: float(v) for k, v in tr.callback_metrics.items()})
