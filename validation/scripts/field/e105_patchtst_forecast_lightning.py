"""PatchTST long-horizon forecasting on a synthetic 'weather' series (21 channels), fp32."""
import copy

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelSummary
from torch.utils.data import DataLoader, Dataset
from transformers import PatchTSTConfig, PatchTSTForPrediction

CONTEXT = 512
HORIZON = 96
CHANNELS = 21
BATCH = 32
EPOCHS = 2
TOTAL_HOURS = 4200


def synthetic_weather(T, C, seed=0):
    rng = np.random.default_rng(seed)
    t = np.arange(T)[:, None]
    phase = rng.uniform(0, 2 * np.pi, (1, C))
    daily = np.sin(2 * np.pi * t / 24 + phase)
    weekly = 0.5 * np.sin(2 * np.pi * t / 168 + 2 * phase)
    walk = np.cumsum(rng.normal(0, 0.02, (T, C)), axis=0)
    return (daily + weekly + walk + rng.normal(0, 0.1, (T, C))).astype(np.float32)


class WindowDataset(Dataset):
    def __init__(self, series, start, end, context, horizon):
        self.x = torch.from_numpy(series[start:end])
        self.context, self.horizon = context, horizon

    def __len__(self):
        return len(self.x) - self.context - self.horizon + 1

    def __getitem__(self, i):
        past = self.x[i : i + self.context]
        future = self.x[i + self.context : i + self.context + self.horizon]
        return past, future


class WeatherDataModule(pl.LightningDataModule):
    def __init__(self, batch_size):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        raw = synthetic_weather(TOTAL_HOURS, CHANNELS)
        n, a, b = len(raw), int(len(raw) * 0.7), int(len(raw) * 0.85)
        mean, std = raw[:a].mean(0), raw[:a].std(0)
        z = (raw - mean) / std
        # borders overlap by the context length, same as in the Informer splits
        self.train = WindowDataset(z, 0, a, CONTEXT, HORIZON)
        self.val = WindowDataset(z, a - CONTEXT, b, CONTEXT, HORIZON)
        self.test = WindowDataset(z, b - CONTEXT, n, CONTEXT, HORIZON)

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.val, 2 * self.batch_size)

    def test_dataloader(self):
        return DataLoader(self.test, 2 * self.batch_size)


class Forecaster(pl.LightningModule):
    def __init__(self, lr=1e-4):
        super().__init__()
        self.save_hyperparameters()
        self.net = PatchTSTForPrediction(
            PatchTSTConfig(
                num_input_channels=CHANNELS,
                context_length=CONTEXT,
                prediction_length=HORIZON,
                patch_length=16,
                patch_stride=8,
                d_model=128,
                num_hidden_layers=3,
                num_attention_heads=16,
                ffn_dim=256,
                attention_dropout=0.2,
                ff_dropout=0.2,
                head_dropout=0.2,
                norm_type="batchnorm",
                scaling="std",
                loss="mse",
            )
        )

    def forward(self, past):
        return self.net(past_values=past).prediction_outputs

    def training_step(self, batch, _):
        past, future = batch
        loss = self.net(past_values=past, future_values=future).loss
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def _shared_eval(self, batch, prefix):
        past, future = batch
        pred = self(past)
        self.log_dict(
            {f"{prefix}_mse": torch.mean((pred - future) ** 2), f"{prefix}_mae": torch.mean((pred - future).abs())},
            batch_size=past.size(0),
        )

    def validation_step(self, batch, _):
        self._shared_eval(batch, "val")

    def test_step(self, batch, _):
        self._shared_eval(batch, "test")

    def configure_optimizers(self):
        opt = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        sched = torch.optim.lr_scheduler.ExponentialLR(opt, gamma=0.9)
        return [opt], [sched]


class EMA(Callback):
    """Exponential moving average of the weights, swapped in for validation and test."""

    def __init__(self, decay=0.99):
        self.decay, self.shadow, self.backup = decay, None, None

    def on_train_start(self, trainer, module):
        self.shadow = {k: v.detach().clone() for k, v in module.state_dict().items()}

    def on_train_batch_end(self, trainer, module, *args):
        for k, v in module.state_dict().items():
            if v.dtype.is_floating_point:
                self.shadow[k].lerp_(v, 1 - self.decay)
            else:
                self.shadow[k].copy_(v)

    def on_validation_start(self, trainer, module):
        if trainer.sanity_checking:
            return
        self.backup = copy.deepcopy(module.state_dict())
        module.load_state_dict(self.shadow)

    def on_validation_end(self, trainer, module):
        if trainer.sanity_checking:
            return
        module.load_state_dict(self.backup)
        self.backup = None

    def on_test_start(self, trainer, module):
        module.load_state_dict(self.shadow)


if __name__ == "__main__":
    pl.seed_everything(2021)
    trainer = pl.Trainer(
        accelerator="cuda",
        devices=1,
        precision="32-true",
        max_epochs=EPOCHS,
        callbacks=[EMA(0.99), EarlyStopping("val_mse", patience=5), ModelSummary(max_depth=3)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    dm = WeatherDataModule(BATCH)
    model = Forecaster()
    trainer.fit(model, datamodule=dm)
    trainer.test(model, datamodule=dm)
    print("max_memory_allocated =", torch.cuda.max_memory_allocated())
    print("max_memory_reserved  =", torch.cuda.max_memory_reserved())
