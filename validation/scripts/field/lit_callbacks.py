import sys, tempfile
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import lightning.pytorch as pl
from lightning.pytorch.callbacks import (EarlyStopping, GradientAccumulationScheduler, LearningRateMonitor, ModelCheckpoint,
                                         StochasticWeightAveraging, DeviceStatsMonitor)
from lightning.pytorch.loggers import CSVLogger
from torchmetrics import Accuracy

mode = sys.argv[1] if len(sys.argv) > 1 else "swa"


class InvertedResidual(nn.Module):
    def __init__(self, i, o, s, t=4):
        super().__init__()
        self.use = s == 1 and i == o
        self.f = nn.Sequential(nn.Conv2d(i, i * t, 1, bias=False), nn.BatchNorm2d(i * t), nn.Hardswish(),
                               nn.Conv2d(i * t, i * t, 5, s, 2, groups=i * t, bias=False), nn.BatchNorm2d(i * t), nn.Hardswish(),
                               nn.Conv2d(i * t, o, 1, bias=False), nn.BatchNorm2d(o))

    def forward(self, x):
        return x + self.f(x) if self.use else self.f(x)


class Lit(pl.LightningModule):
    def __init__(self, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        cfg = [(32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1)]
        self.backbone = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), nn.BatchNorm2d(32), *[InvertedResidual(*c) for c in cfg])
        self.cls = nn.Linear(256, 50)
        self.reg = nn.Linear(256, 4)
        self.train_acc = Accuracy(task="multiclass", num_classes=50)
        self.val_acc = Accuracy(task="multiclass", num_classes=50)

    def forward(self, x):
        return (lambda h: (self.cls(h), self.reg(h)))(self.backbone(x).mean((2, 3)))

    def training_step(self, batch, i):
        x, y = batch["cls"]
        logits, _ = self(x)
        loss = nn.functional.cross_entropy(logits, y)
        xr, t = batch["reg"]
        loss = loss + nn.functional.huber_loss(self(xr)[1], t)
        self.train_acc(logits, y)
        self.log("train/loss", loss)
        self.log("train/acc", self.train_acc, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, i, dataloader_idx=0):
        x, y = batch
        logits, _ = self(x)
        self.val_acc(logits, y)
        self.log("val/loss", nn.functional.cross_entropy(logits, y), add_dataloader_idx=True)

    def configure_optimizers(self):
        o = torch.optim.RMSprop(self.parameters(), lr=self.hparams.lr, momentum=0.9)
        return {"optimizer": o, "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.OneCycleLR(o, 0.01, total_steps=100), "interval": "step"}}


pl.seed_everything(0, workers=True)
mk = lambda n, size, y: TensorDataset(torch.randn(n, 3, size, size), y)
train = {"cls": DataLoader(mk(96, 160, torch.randint(0, 50, (96,))), 32, shuffle=True), "reg": DataLoader(mk(48, 128, torch.randn(48, 4)), 16)}
vals = [DataLoader(mk(40, 160, torch.randint(0, 50, (40,))), 24), DataLoader(mk(20, 192, torch.randint(0, 50, (20,))), 20)]
with tempfile.TemporaryDirectory() as d:
    cbs = [ModelCheckpoint(d, monitor="val/loss/dataloader_idx_0", save_top_k=1, save_last=True), LearningRateMonitor(),
           EarlyStopping("val/loss/dataloader_idx_0", patience=10)]
    if mode == "swa":
        cbs.append(StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=1))
    else:
        cbs += [GradientAccumulationScheduler({0: 1, 1: 2}), DeviceStatsMonitor()]
    tr = pl.Trainer(accelerator="cuda", devices=[0], max_epochs=3, callbacks=cbs,
                    **({"precision": "bf16-mixed"} if mode == "swa" else
                       {"plugins": [pl.plugins.MixedPrecision("16-mixed", "cuda", torch.amp.GradScaler("cuda", init_scale=64.0))]}),
                    logger=CSVLogger(d), log_every_n_steps=1, gradient_clip_val=1.0, enable_progress_bar=False)
    m = Lit()
    tr.fit(m, train, vals)
    print(tr.validate(m, vals, verbose=False))
