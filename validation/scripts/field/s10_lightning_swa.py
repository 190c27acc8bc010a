"""Lightning, automatic optimisation, bf16-mixed, gradient accumulation, SWA callback, ViT."""
import tempfile
import torch
import torch.nn.functional as F
import lightning as L
from lightning.pytorch.callbacks import StochasticWeightAveraging, ModelCheckpoint
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy
from transformers import ViTConfig, ViTForImageClassification


class FakeImages(Dataset):
    def __init__(self, n, seed):
        self.n, self.seed = n, seed

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.seed * 100003 + i)
        return torch.randn(3, 224, 224, generator=g), int(torch.randint(0, 100, (1,), generator=g))


class ViTModule(L.LightningModule):
    def __init__(self):
        super().__init__()
        cfg = ViTConfig(hidden_size=512, num_hidden_layers=8, num_attention_heads=8, intermediate_size=2048,
                        image_size=224, patch_size=16, num_labels=100, hidden_dropout_prob=0.1)
        self.model = ViTForImageClassification(cfg)
        self.acc = MulticlassAccuracy(num_classes=100)

    def forward(self, x):
        return self.model(pixel_values=x).logits

    def training_step(self, batch, idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y, label_smoothing=0.1)
        self.log("train_loss", loss, on_step=True)
        return loss

    def validation_step(self, batch, idx):
        x, y = batch
        logits = self(x)
        self.acc(logits, y)
        self.log("val_loss", F.cross_entropy(logits, y), prog_bar=True)
        self.log("val_acc", self.acc)

    def on_train_epoch_end(self):
        print(f"epoch {self.current_epoch} peak {torch.cuda.max_memory_allocated()}")

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=5e-4, weight_decay=0.05)
        sch = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=4)
        return {"optimizer": opt, "lr_scheduler": sch}


if __name__ == "__main__":
    L.seed_everything(0)
    train = DataLoader(FakeImages(192, 0), batch_size=32, num_workers=2, pin_memory=True)
    val = DataLoader(FakeImages(96, 1), batch_size=64, num_workers=2)
    with tempfile.TemporaryDirectory() as d:
        trainer = L.Trainer(
            accelerator="gpu", devices=1, precision="bf16-mixed", max_epochs=4, accumulate_grad_batches=2,
            gradient_clip_val=1.0, logger=False, default_root_dir=d, enable_progress_bar=False,
            callbacks=[
                StochasticWeightAveraging(swa_lrs=1e-4, swa_epoch_start=2),
                ModelCheckpoint(dirpath=d, monitor="val_loss", save_last=True),
            ],
        )
        trainer.fit(ViTModule(), train, val)
    print("max_memory_allocated", torch.cuda.max_memory_allocated())
    print("max_memory_reserved", torch.cuda.max_memory_reserved())
