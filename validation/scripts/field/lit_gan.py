"""Lightning, manual optimisation with two optimizers (pix2pix-like)."""
import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F


def conv(i, o, norm=True):
    return nn.Sequential(nn.Conv2d(i, o, 4, 2, 1, bias=not norm), nn.InstanceNorm2d(o) if norm else nn.Identity(), nn.LeakyReLU(0.2))


class Gen(nn.Module):
    def __init__(self, f=64):
        super().__init__()
        ch = [f, 2 * f, 4 * f, 8 * f, 8 * f, 8 * f]
        self.down = nn.ModuleList([conv(i, o, k > 0) for k, (i, o) in enumerate(zip([3] + ch, ch))])
        rev = ch[::-1]
        self.up = nn.ModuleList()
        for k in range(len(rev) - 1):
            self.up.append(nn.Sequential(nn.ConvTranspose2d(rev[k] * (1 if k == 0 else 2), rev[k + 1], 4, 2, 1, bias=False),
                                         nn.InstanceNorm2d(rev[k + 1]), nn.Dropout(0.5) if k < 2 else nn.Identity(), nn.ReLU()))
        self.last = nn.ConvTranspose2d(2 * f, 3, 4, 2, 1)

    def forward(self, x):
        s = []
        for d in self.down:
            x = d(x)
            s.append(x)
        s.pop()
        for u in self.up:
            x = torch.cat([u(x), s.pop()], 1)
        return torch.tanh(self.last(x))


class Pix2Pix(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.save_hyperparameters()
        self.gen = Gen()
        self.disc = nn.Sequential(conv(6, 64, False), conv(64, 128), conv(128, 256), nn.Conv2d(256, 512, 4, 1, 1), nn.LeakyReLU(0.2), nn.Conv2d(512, 1, 4, 1, 1))

    def training_step(self, batch, batch_idx):
        a, b = batch
        og, od = self.optimizers()
        fake = self.gen(a)
        self.toggle_optimizer(od)
        real_s, fake_s = self.disc(torch.cat([a, b], 1)), self.disc(torch.cat([a, fake.detach()], 1))
        d_loss = 0.5 * (F.mse_loss(real_s, torch.ones_like(real_s)) + F.mse_loss(fake_s, torch.zeros_like(fake_s)))
        od.zero_grad()
        self.manual_backward(d_loss)
        self.clip_gradients(od, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        od.step()
        self.untoggle_optimizer(od)
        self.toggle_optimizer(og)
        s = self.disc(torch.cat([a, fake], 1))
        g_loss = F.mse_loss(s, torch.ones_like(s)) + 100 * F.l1_loss(fake, b)
        og.zero_grad()
        self.manual_backward(g_loss)
        og.step()
        self.untoggle_optimizer(og)
        self.log_dict({"g": g_loss, "d": d_loss}, prog_bar=True)

    def on_train_epoch_end(self):
        for s in self.lr_schedulers():
            s.step()

    def configure_optimizers(self):
        g = torch.optim.Adam(self.gen.parameters(), 2e-4, (0.5, 0.999))
        d = torch.optim.Adam(self.disc.parameters(), 2e-4, (0.5, 0.999))
        return [g, d], [torch.optim.lr_scheduler.StepLR(g, 1, 0.5), torch.optim.lr_scheduler.StepLR(d, 1, 0.5)]


class Pairs(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, i):
        return torch.rand(3, 256, 256) * 2 - 1, torch.rand(3, 256, 256) * 2 - 1


if __name__ == "__main__":
    L.seed_everything(1)
    dl = torch.utils.data.DataLoader(Pairs(), 16, num_workers=2, persistent_workers=True, pin_memory=True)
    L.Trainer(accelerator="gpu", devices=1, max_epochs=2, precision="bf16-mixed", logger=False, enable_checkpointing=False,
              enable_progress_bar=False, enable_model_summary=True).fit(Pix2Pix(), dl)
    print(torch.cuda.max_memory_allocated())
