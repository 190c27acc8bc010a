"""DINOv2 (with registers) on fine-grained classes, plain fp32.

Two optimizers with manual optimization: SGD+momentum for the head, AdamW with layer-wise
LR decay for the backbone (first step: head only = linear probe warmup).
Two validation loaders: classification accuracy and image retrieval (recall@1).
"""
import tempfile

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint, ModelSummary
from torch.utils.data import DataLoader, Dataset
from transformers import Dinov2WithRegistersConfig, Dinov2WithRegistersModel

RES = 322          # 23 x 23 patches of 14
CLASSES = 200
BS = 32
WARMUP_STEPS = 2


class Birds(Dataset):
    def __init__(self, n, seed, n_classes=CLASSES):
        g = torch.Generator().manual_seed(seed)
        self.y = torch.randint(0, n_classes, (n,), generator=g)
        self.protos = torch.randn(n_classes, 3, 16, 16, generator=torch.Generator().manual_seed(0))
        self.seed = seed

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.seed * 7919 + i)
        img = F.interpolate(self.protos[self.y[i]][None], size=(RES, RES), mode="bilinear")[0]
        return img + 0.5 * torch.randn(3, RES, RES, generator=g), self.y[i]


class FineGrained(L.LightningModule):
    def __init__(self, backbone_lr=5e-5, head_lr=0.05, decay=0.8, label_smoothing=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        cfg = Dinov2WithRegistersConfig(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, patch_size=14,
                                        image_size=518, num_register_tokens=4, drop_path_rate=0.1)
        self.backbone = Dinov2WithRegistersModel(cfg)
        self.n_reg = cfg.num_register_tokens
        self.head = nn.Sequential(nn.LayerNorm(2 * 768), nn.Linear(2 * 768, CLASSES))
        self.criterion = nn.CrossEntropyLoss(label_smoothing=label_smoothing)

    def features(self, x):
        h = self.backbone(pixel_values=x).last_hidden_state
        return torch.cat([h[:, 0], h[:, 1 + self.n_reg:].mean(1)], dim=-1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        opt_body, opt_head = self.optimizers()
        probing = batch_idx < WARMUP_STEPS
        with torch.set_grad_enabled(not probing):
            f = self.features(x)
        loss = self.criterion(self.head(f), y)
        opt_body.zero_grad()
        opt_head.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(opt_head, gradient_clip_val=5.0, gradient_clip_algorithm="norm")
        opt_head.step()
        if not probing:
            self.clip_gradients(opt_body, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
            opt_body.step()
            self.lr_schedulers().step()
        self.log("loss", loss, on_step=True, on_epoch=True)
        print(f"  batch {batch_idx} {'probe' if probing else 'full '} loss {loss.item():.4f} "
              f"peak {torch.cuda.max_memory_allocated() / 1024**3:.2f} GiB")

    def on_validation_epoch_start(self):
        self.bank = []

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        f = self.features(x)
        if dataloader_idx == 0:
            self.log("acc", (self.head(f).argmax(1) == y).float().mean(), add_dataloader_idx=False)
        else:
            self.bank.append((F.normalize(f, dim=-1), y))

    def on_validation_epoch_end(self):
        if not self.bank:
            return
        z = torch.cat([b[0] for b in self.bank])
        y = torch.cat([b[1] for b in self.bank])
        sim = z @ z.T
        sim.fill_diagonal_(-1)
        self.log("recall@1", (y[sim.argmax(1)] == y).float().mean(), prog_bar=True)
        self.bank.clear()

    def configure_optimizers(self):
        n_layers = self.backbone.config.num_hidden_layers
        groups = []
        for name, p in self.backbone.named_parameters():
            if "layer." in name:
                depth = int(name.split("layer.")[1].split(".")[0]) + 1
            else:
                depth = 0 if name.startswith("embeddings") else n_layers + 1
            scale = self.hparams.decay ** (n_layers + 1 - depth)
            groups.append({"params": [p], "lr": self.hparams.backbone_lr * scale,
                           "weight_decay": 0.05 if p.ndim > 1 else 0.0})
        body = torch.optim.AdamW(groups)
        head = torch.optim.SGD(self.head.parameters(), lr=self.hparams.head_lr, momentum=0.9, nesterov=True)
        sched = torch.optim.lr_scheduler.CosineAnnealingLR(body, T_max=10)
        return [body, head], [sched]


if __name__ == "__main__":
    L.seed_everything(5)
    tmp = tempfile.TemporaryDirectory()
    train = DataLoader(Birds(7 * BS, 1), BS, shuffle=True, drop_last=True, num_workers=4, pin_memory=True)
    val_cls = DataLoader(Birds(48, 2), 48, num_workers=2)
    val_ret = DataLoader(Birds(96, 3, n_classes=20), 48, num_workers=2)
    trainer = L.Trainer(accelerator="gpu", devices=1, precision="32-true", max_epochs=1, logger=False,
                        enable_progress_bar=False, default_root_dir=tmp.name, num_sanity_val_steps=1,
                        callbacks=[ModelCheckpoint(dirpath=tmp.name, monitor="recall@1", mode="max"), ModelSummary(2)])
    model = FineGrained()
    trainer.fit(model, train, [val_cls, val_ret])
    print({k: round(v.item(), 4) for k, v in trainer.callback_metrics.items()})
    print("max_memory_allocated:", torch.cuda.max_memory_allocated() // 2**20, "MiB")
    print("max_memory_reserved: ", torch.cuda.max_memory_reserved() // 2**20, "MiB")
    tmp.cleanup()
