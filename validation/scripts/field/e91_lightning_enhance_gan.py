"""Speech enhancement GAN on raw audio (synthetic mixture), Lightning manual optimization."""
import os, tempfile

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric

class NoisyTones(Dataset):
    def __init__(self, n, length, seed=0):
        self.n, self.length, self.seed = n, length, seed
        self.t = torch.arange(length) / 16000.0

    def __len__(self): return self.n
    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.seed * 100003 + i)
        f = 80 + 2000 * torch.rand(3, 1, generator=g)
        clean = torch.sin(2 * torch.pi * f * self.t).mean(0, keepdim=True)
        return {"noisy": clean + 0.3 * torch.randn(1, self.length, generator=g), "clean": clean}

class AudioData(L.LightningDataModule):
    def __init__(self, batch_size=24, length=32768):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage):
        n, ln = self.hparams.batch_size, self.hparams.length
        self.sets = {"train": NoisyTones(n * 12, ln, 1), "val": NoisyTones(n * 2, ln, 2),
                     "test": NoisyTones(n * 2 + 5, ln, 3)}     # last test batch is short

    def _dl(self, split, **kw):
        return DataLoader(self.sets[split], batch_size=self.hparams.batch_size, num_workers=2, pin_memory=True, **kw)
    def train_dataloader(self): return self._dl("train", shuffle=True, drop_last=True, persistent_workers=True)
    def val_dataloader(self): return self._dl("val")
    def predict_dataloader(self): return self._dl("test")

class Generator(nn.Module):      # 1-d U-Net with GLUs, Demucs without the LSTM
    def __init__(self, ch=64, depth=5):
        super().__init__()
        self.enc, self.dec = nn.ModuleList(), nn.ModuleList()
        cin, c = 1, ch
        for i in range(depth):
            self.enc.append(nn.Sequential(nn.Conv1d(cin, c, 8, 4, 2) if i else nn.Conv1d(cin, c, 7, 1, 3), nn.ReLU(),
                                          nn.Conv1d(c, 2 * c, 1), nn.GLU(1)))
            up = nn.ConvTranspose1d(c, cin, 8, 4, 2) if i else nn.Conv1d(c, cin, 7, 1, 3)
            self.dec.insert(0, nn.Sequential(nn.Conv1d(c, 2 * c, 3, padding=1), nn.GLU(1), up,
                                             nn.ReLU() if i else nn.Identity()))
            cin, c = c, min(2 * c, 768)

    def forward(self, x):
        skips = []
        for e in self.enc:
            x = e(x)
            skips.append(x)
        for d in self.dec:
            x = d(x + skips.pop())
        return x

class Discriminator(nn.Module):
    def __init__(self, ch=32):
        super().__init__()
        spec = [(1, ch, 15, 1, 1), (ch, ch * 4, 41, 4, 4), (ch * 4, ch * 16, 41, 4, 16),
                (ch * 16, ch * 32, 41, 4, 64), (ch * 32, ch * 32, 5, 1, 1)]
        self.convs = nn.ModuleList([weight_norm(nn.Conv1d(i, o, k, s, k // 2, groups=g)) for i, o, k, s, g in spec])
        self.post = weight_norm(nn.Conv1d(ch * 32, 1, 3, padding=1))

    def forward(self, x):
        feats = []
        for c in self.convs:
            feats.append(x := nn.functional.leaky_relu(c(x), 0.2))
        return self.post(x), feats

class EnhanceGAN(L.LightningModule):
    def __init__(self, lr_g=2e-4, lr_d=1e-4, accumulate=2, lambda_l1=45.0, gen_ch=64):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.G, self.D = Generator(gen_ch), Discriminator()
        self.val_l1, self.val_snr = MeanMetric(), MeanMetric()

    def configure_optimizers(self):
        return [torch.optim.AdamW(net.parameters(), lr=lr, betas=(0.8, 0.99))
                for net, lr in ((self.G, self.hparams.lr_g), (self.D, self.hparams.lr_d))]

    def training_step(self, batch, batch_idx):
        opt_g, opt_d = self.optimizers()
        n = self.hparams.accumulate
        clean, last = batch["clean"], (batch_idx + 1) % n == 0
        fake = self.G(batch["noisy"])
        self.toggle_optimizer(opt_d)
        real_s, _ = self.D(clean)
        fake_s, _ = self.D(fake.detach())
        loss_d = ((real_s - 1) ** 2).mean() + (fake_s ** 2).mean()
        self.manual_backward(loss_d / n)
        if last:
            self.clip_gradients(opt_d, 1.0, "norm")
            opt_d.step()
            opt_d.zero_grad()
        self.untoggle_optimizer(opt_d)
        self.toggle_optimizer(opt_g)
        score, f_fake = self.D(fake)
        with torch.no_grad():
            _, f_real = self.D(clean)
        fm = sum(nn.functional.l1_loss(a, b) for a, b in zip(f_fake, f_real))
        loss_g = ((score - 1) ** 2).mean() + 2 * fm + self.hparams.lambda_l1 * nn.functional.l1_loss(fake, clean)
        self.manual_backward(loss_g / n)
        if last:
            opt_g.step()
            opt_g.zero_grad()
        self.untoggle_optimizer(opt_g)
        self.log_dict({"loss_g": loss_g, "loss_d": loss_d, "fm": fm}, on_step=True, on_epoch=True)

    def validation_step(self, batch, batch_idx):
        err = (self.G(batch["noisy"]) - batch["clean"]).float()
        self.val_l1.update(err.abs().mean())
        self.val_snr.update(-10 * err.square().mean(dim=(1, 2)).log10())
        self.log_dict({"val_l1": self.val_l1, "val_snr": self.val_snr})

    def predict_step(self, batch, batch_idx):
        return self.G(batch["noisy"]).float().cpu()

class EMA(Callback):     # of the generator; swapped in for validation and prediction
    def __init__(self, decay=0.99):
        self.decay, self.ema, self.backup, self._pending = decay, None, None, None

    def on_train_start(self, trainer, pl_module):
        self.ema = AveragedModel(pl_module.G, multi_avg_fn=get_ema_multi_avg_fn(self.decay), use_buffers=True)
        if self._pending is not None:
            self.ema.load_state_dict(self._pending)

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.ema.update_parameters(pl_module.G)

    def _swap_in(self, trainer, pl_module):
        if self.ema is not None and not trainer.sanity_checking:
            self.backup = {k: v.clone() for k, v in pl_module.G.state_dict().items()}
            pl_module.G.load_state_dict(self.ema.module.state_dict())

    def _swap_out(self, trainer, pl_module):
        if self.backup is not None:
            pl_module.G.load_state_dict(self.backup)
            self.backup = None

    on_validation_start = on_predict_start = _swap_in
    on_validation_end = on_predict_end = _swap_out

    def state_dict(self): return {"ema": None if self.ema is None else self.ema.state_dict()}
    def load_state_dict(self, state): self._pending = state["ema"]

def make_trainer(root, epochs):
    return L.Trainer(
        accelerator="cuda", devices=1, precision="bf16-true", max_epochs=epochs, default_root_dir=root,
        callbacks=[EMA(), ModelCheckpoint(os.path.join(root, "ckpt"), monitor="val_l1", save_last=True)],
        logger=CSVLogger(root, name="csv"), log_every_n_steps=4, enable_progress_bar=False, enable_model_summary=False)

def peak(tag):
    print(f"{tag}: max_memory_allocated={torch.cuda.max_memory_allocated()} max_memory_reserved={torch.cuda.max_memory_reserved()}")

if __name__ == "__main__":
    L.seed_everything(11)
    torch.set_float32_matmul_precision("medium")
    with tempfile.TemporaryDirectory() as root:
        trainer = make_trainer(root, 1)
        trainer.fit(EnhanceGAN(), datamodule=AudioData())
        peak("first fit")
        model = EnhanceGAN()
        trainer = make_trainer(root, 2)
        trainer.fit(model, datamodule=AudioData(), ckpt_path=os.path.join(root, "ckpt", "last.ckpt"))
        print({k: round(v.item(), 4) for k, v in trainer.callback_metrics.items()})
        peak("resumed fit")
        preds = trainer.predict(model, datamodule=AudioData())
        print("predicted", sum(p.shape[0] for p in preds), "clips")
        best = EnhanceGAN.load_from_checkpoint(trainer.checkpoint_callback.best_model_path, map_location="cuda")
        print("restored", sum(p.numel() for p in best.parameters()), best.dtype)
    peak("end")
