import tempfile

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset


class Volumes(Dataset):
    """Synthetic CT-like patches: gaussian noise with a few bright spheres as organs."""

    def __init__(self, n, size=96, classes=4, seed=0):
        self.n, self.size, self.classes, self.seed = n, size, classes, seed

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.seed + i)
        s = self.size
        vol = torch.randn(1, s, s, s, generator=g)
        lab = torch.zeros(s, s, s, dtype=torch.long)
        zz, yy, xx = torch.meshgrid(*[torch.arange(s)] * 3, indexing="ij")
        for c in range(1, self.classes):
            cz, cy, cx = torch.randint(s // 4, 3 * s // 4, (3,), generator=g).tolist()
            m = (zz - cz) ** 2 + (yy - cy) ** 2 + (xx - cx) ** 2 < (s // 8) ** 2
            lab[m] = c
            vol[0][m] += c
        return {"image": vol, "label": lab}


class DoubleConv(nn.Sequential):
    def __init__(self, i, o):
        super().__init__(
            nn.Conv3d(i, o, 3, padding=1, bias=False), nn.InstanceNorm3d(o, affine=True), nn.LeakyReLU(0.01, inplace=True),
            nn.Conv3d(o, o, 3, padding=1, bias=False), nn.InstanceNorm3d(o, affine=True), nn.LeakyReLU(0.01, inplace=True),
        )


class UNet3D(nn.Module):
    def __init__(self, classes=4, widths=(32, 64, 128, 256, 320), ckpt_levels=1):
        super().__init__()
        self.ckpt_levels = ckpt_levels
        self.enc = nn.ModuleList()
        prev = 1
        for w in widths:
            self.enc.append(DoubleConv(prev, w))
            prev = w
        self.up, self.dec = nn.ModuleList(), nn.ModuleList()
        for hi, lo in zip(widths[::-1][:-1], widths[::-1][1:]):
            self.up.append(nn.ConvTranspose3d(hi, lo, 2, stride=2))
            self.dec.append(DoubleConv(lo * 2, lo))
        self.heads = nn.ModuleList([nn.Conv3d(widths[i], classes, 1) for i in (2, 1, 0)])

    def run(self, block, x, level):
        if self.training and level < self.ckpt_levels:
            return checkpoint(block, x, use_reentrant=False)
        return block(x)

    def forward(self, x):
        skips = []
        for lvl, block in enumerate(self.enc):
            x = self.run(block, x, lvl)
            if lvl < len(self.enc) - 1:
                skips.append(x)
                x = F.max_pool3d(x, 2)
        outs = []
        n = len(self.up)
        for i in range(n):
            x = self.up[i](x)
            x = self.run(self.dec[i], torch.cat([skips.pop(), x], dim=1), n - 1 - i)
            if i >= n - 3:
                outs.append(self.heads[i - (n - 3)](x))
        return outs[::-1] if self.training else outs[-1]


def soft_dice(logits, target, eps=1e-5):
    p = logits.float().softmax(1)
    onehot = F.one_hot(target, logits.shape[1]).permute(0, 4, 1, 2, 3).to(p.dtype)
    inter = (p * onehot).sum((2, 3, 4))
    denom = p.sum((2, 3, 4)) + onehot.sum((2, 3, 4))
    return 1 - ((2 * inter + eps) / (denom + eps))[:, 1:].mean()


class SegModule(L.LightningModule):
    def __init__(self, lr=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.net = UNet3D()

    def training_step(self, batch, _):
        outs = self.net(batch["image"])
        y = batch["label"]
        loss = 0.0
        for k, o in enumerate(outs):
            yk = y if k == 0 else F.interpolate(y[:, None].float(), size=o.shape[2:], mode="nearest")[:, 0].long()
            loss = loss + 0.5 ** k * (F.cross_entropy(o, yk) + soft_dice(o, yk))
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        print(f"\nbatch {batch_idx} max_alloc {torch.cuda.max_memory_allocated()} "
              f"max_reserved {torch.cuda.max_memory_reserved()}")

    def validation_step(self, batch, _):
        logits = self.net(batch["image"])
        self.log("val_dice", 1 - soft_dice(logits, batch["label"]), batch_size=len(batch["image"]))

    def configure_optimizers(self):
        opt = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.99, nesterov=True, weight_decay=3e-5)
        sched = torch.optim.lr_scheduler.PolynomialLR(opt, total_iters=10, power=0.9)
        return [opt], [sched]


if __name__ == "__main__":
    L.seed_everything(7)
    train = DataLoader(Volumes(10), batch_size=2, shuffle=True)
    val = DataLoader(Volumes(2, seed=900), batch_size=1)
    with tempfile.TemporaryDirectory() as d:
        trainer = L.Trainer(
            accelerator="gpu", devices=1, max_epochs=1, precision="16-mixed", gradient_clip_val=12.0,
            benchmark=True, logger=False, default_root_dir=d, enable_progress_bar=False,
            num_sanity_val_steps=1, log_every_n_steps=1,
        )
        trainer.fit(SegModule(), train, val)
        print("val", {k: float(v) for k, v in trainer.callback_metrics.items()})
    print("FINAL", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
