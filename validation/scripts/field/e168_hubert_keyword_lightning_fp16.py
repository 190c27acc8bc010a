# Lab 7 - speech emotion / keyword classification with HuBERT and Lightning
# (the encoder stays frozen in the first epoch, then it is trained together with the head)
import tempfile

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy
from transformers import HubertConfig, HubertForSequenceClassification

SR = 16000
NUM_CLASSES = 8
BATCH_SIZE = 24
MIN_SEC, MAX_SEC = 2.0, 6.0


class ToneDataset(Dataset):
    """Every class is a different base frequency + noise, clips have different durations."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, NUM_CLASSES, (n,), generator=g)
        secs = MIN_SEC + (MAX_SEC - MIN_SEC) * torch.rand(n, generator=g)
        self.lengths = (secs * SR).long()
        self.seed = seed

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, idx):
        g = torch.Generator().manual_seed(self.seed * 100003 + idx)
        n = int(self.lengths[idx])
        t = torch.arange(n) / SR
        freq = 200.0 * (1 + int(self.labels[idx]))
        wav = torch.sin(2 * torch.pi * freq * t) + 0.3 * torch.randn(n, generator=g)
        wav = (wav - wav.mean()) / (wav.std() + 1e-7)
        return wav, self.labels[idx]


def pad_collate(items):
    wavs, labels = zip(*items)
    longest = max(w.numel() for w in wavs)
    x = torch.zeros(len(wavs), longest)
    m = torch.zeros(len(wavs), longest, dtype=torch.long)
    for i, w in enumerate(wavs):
        x[i, : w.numel()] = w
        m[i, : w.numel()] = 1
    return {"input_values": x, "attention_mask": m, "labels": torch.stack(labels)}


class SpeechData(L.LightningDataModule):
    def setup(self, stage=None):
        self.train_set = ToneDataset(8 * BATCH_SIZE, seed=1)
        self.val_set = ToneDataset(3 * BATCH_SIZE - 5, seed=2)

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=BATCH_SIZE, shuffle=True, collate_fn=pad_collate, num_workers=2)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=BATCH_SIZE, collate_fn=pad_collate, num_workers=2)


class HubertClassifier(L.LightningModule):
    def __init__(self, lr_head=1e-3, lr_body=3e-5):
        super().__init__()
        self.save_hyperparameters()
        cfg = HubertConfig(num_labels=NUM_CLASSES, mask_time_prob=0.05, layerdrop=0.0, classifier_proj_size=256,
                           use_weighted_layer_sum=True)
        self.net = HubertForSequenceClassification(cfg)
        self.net.freeze_feature_encoder()
        self.acc = MulticlassAccuracy(NUM_CLASSES)

    def training_step(self, batch, batch_idx):
        out = self.net(**batch)
        self.log("train_loss", out.loss, on_step=True, on_epoch=True, prog_bar=True)
        return out.loss

    def validation_step(self, batch, batch_idx):
        out = self.net(**batch)
        self.acc(out.logits, batch["labels"])
        self.log("val_loss", out.loss, on_epoch=True, batch_size=len(batch["labels"]))
        self.log("val_acc", self.acc, on_epoch=True)

    def configure_optimizers(self):
        head = list(self.net.projector.parameters()) + list(self.net.classifier.parameters()) + [self.net.layer_weights]
        body = list(self.net.hubert.encoder.parameters()) + list(self.net.hubert.feature_projection.parameters())
        opt = torch.optim.AdamW([{"params": head, "lr": self.hparams.lr_head},
                                 {"params": body, "lr": self.hparams.lr_body}], weight_decay=0.01)
        sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=[self.hparams.lr_head, self.hparams.lr_body],
                                                    total_steps=self.trainer.estimated_stepping_batches)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "interval": "step"}}


class UnfreezeEncoder(Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        train_it = trainer.current_epoch >= 1
        pl_module.net.hubert.encoder.requires_grad_(train_it)
        pl_module.net.hubert.feature_projection.requires_grad_(train_it)
        print(f"epoch {trainer.current_epoch}: encoder {'trainable' if train_it else 'frozen'}")

    def on_train_epoch_end(self, trainer, pl_module):
        print(f"epoch {trainer.current_epoch}: {trainer.callback_metrics['train_loss_epoch']:.4f} "
              f"peak {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB")


def main():
    L.seed_everything(7, workers=True)
    with tempfile.TemporaryDirectory() as tmp:
        ckpt = ModelCheckpoint(dirpath=tmp, monitor="val_loss", save_top_k=1, save_weights_only=True)
        trainer = L.Trainer(
            accelerator="cuda", devices=1, precision="16-mixed", max_epochs=2,
            accumulate_grad_batches=2, gradient_clip_val=1.0, num_sanity_val_steps=1, log_every_n_steps=1,
            logger=CSVLogger(tmp), enable_progress_bar=False, default_root_dir=tmp,
            callbacks=[ckpt, UnfreezeEncoder(), EarlyStopping("val_loss", patience=3), LearningRateMonitor()])
        model = HubertClassifier()
        trainer.fit(model, datamodule=SpeechData())
        print("steps:", trainer.global_step, {k: round(float(v), 4) for k, v in trainer.callback_metrics.items()})
        best = torch.load(ckpt.best_model_path, map_location="cpu", weights_only=False)
        print("best checkpoint has", len(best["state_dict"]), "tensors")
    print(torch.cuda.memory_summary(abbreviated=True))


if __name__ == "__main__":
    main()
