"""Day-ahead/2-day-ahead electricity load forecasting.

LSTM encoder (two weeks of hourly history) -> additive attention -> LSTM decoder
with a Student-t head (DeepAR style likelihood).  PyTorch Lightning.
"""
import math

import lightning as L
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, EarlyStopping
from torch.utils.data import DataLoader, Dataset

WINDOW = 336
HORIZON = 48
N_SERIES = 320
N_HOURS = 4000
BATCH = 384
TRAIN_WINDOWS = 4000
VAL_WINDOWS = 1000
HIDDEN = 256
EPOCHS = 3


def make_loads(seed=7):
    rng = np.random.default_rng(seed)
    t = np.arange(N_HOURS)
    base = rng.lognormal(3.0, 0.8, size=(N_SERIES, 1))
    daily = rng.uniform(0.1, 0.5, (N_SERIES, 1)) * np.sin(2 * np.pi * (t[None] - rng.integers(0, 24, (N_SERIES, 1))) / 24)
    weekly = rng.uniform(0.05, 0.3, (N_SERIES, 1)) * np.sin(2 * np.pi * t[None] / 168 + rng.uniform(0, 6, (N_SERIES, 1)))
    noise = 0.08 * rng.standard_normal((N_SERIES, N_HOURS))
    load = base * np.clip(1 + daily + weekly + noise, 0.05, None)
    cal = np.stack([np.sin(2 * np.pi * t / 24), np.cos(2 * np.pi * t / 24),
                    np.sin(2 * np.pi * t / 168), np.cos(2 * np.pi * t / 168)], -1)
    return load.astype(np.float32), cal.astype(np.float32)


class LoadWindows(Dataset):
    def __init__(self, load, cal, n, lo, hi, seed):
        rng = np.random.default_rng(seed)
        self.load, self.cal = load, cal
        self.sid = rng.integers(0, load.shape[0], n)
        self.start = rng.integers(lo, hi - WINDOW - HORIZON, n)

    def __len__(self):
        return len(self.sid)

    def __getitem__(self, i):
        s, t0 = self.sid[i], self.start[i]
        y = torch.from_numpy(self.load[s, t0:t0 + WINDOW + HORIZON])
        c = torch.from_numpy(self.cal[t0:t0 + WINDOW + HORIZON])
        scale = y[:WINDOW].abs().mean() + 1.0
        return {"sid": int(s), "past": y[:WINDOW] / scale, "future": y[WINDOW:] / scale,
                "past_cal": c[:WINDOW], "future_cal": c[WINDOW:], "scale": scale}


class AdditiveAttention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, dim)
        self.v = nn.Linear(dim, 1, bias=False)

    def forward(self, h, keys, memory):
        e = self.v(torch.tanh(self.query(h).unsqueeze(1) + keys)).squeeze(-1)
        a = F.softmax(e, dim=-1)
        return torch.bmm(a.unsqueeze(1), memory).squeeze(1), a


class Seq2SeqForecaster(L.LightningModule):
    def __init__(self, hidden=HIDDEN, emb=20, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.emb = nn.Embedding(N_SERIES, emb)
        self.encoder = nn.LSTM(1 + 4 + emb, hidden, num_layers=2, dropout=0.1, batch_first=True)
        self.bridge_h = nn.Linear(hidden, hidden)
        self.bridge_c = nn.Linear(hidden, hidden)
        self.attn = AdditiveAttention(hidden)
        self.cell = nn.LSTMCell(1 + 4 + emb + hidden, hidden)
        self.head = nn.Sequential(nn.Linear(2 * hidden, hidden), nn.ReLU(), nn.Dropout(0.1), nn.Linear(hidden, 3))
        self.lr = lr

    def forward(self, batch, teacher=None):
        emb = self.emb(batch["sid"])
        past = torch.cat([batch["past"].unsqueeze(-1), batch["past_cal"],
                          emb.unsqueeze(1).expand(-1, WINDOW, -1)], dim=-1)
        memory, (h, c) = self.encoder(past)
        h, c = torch.tanh(self.bridge_h(h[-1])), self.bridge_c(c[-1])
        keys = self.attn.key(memory)
        y = batch["past"][:, -1]
        out = []
        for t in range(HORIZON):
            ctx, _ = self.attn(h, keys, memory)
            h, c = self.cell(torch.cat([y.unsqueeze(-1), batch["future_cal"][:, t], emb, ctx], -1), (h, c))
            p = self.head(torch.cat([h, ctx], -1))
            out.append(p)
            y = teacher[:, t] if teacher is not None else p[:, 0]
        return torch.stack(out, dim=1)

    @staticmethod
    def nll(p, target):
        mu, sigma, df = p[..., 0], F.softplus(p[..., 1]) + 1e-3, 2.0 + F.softplus(p[..., 2])
        return -torch.distributions.StudentT(df, mu, sigma).log_prob(target).mean()

    def training_step(self, batch, _):
        loss = self.nll(self(batch, teacher=batch["future"]), batch["future"])
        self.log("train_nll", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, _):
        p = self(batch)  # free running
        self.log("val_nll", self.nll(p, batch["future"]), prog_bar=True, batch_size=len(batch["sid"]))
        ape = ((p[..., 0] - batch["future"]).abs() * batch["scale"][:, None]).sum()
        self.log("val_wape", ape / (batch["future"] * batch["scale"][:, None]).sum(), batch_size=len(batch["sid"]))

    def configure_optimizers(self):
        opt = torch.optim.Adam(self.parameters(), lr=self.lr, weight_decay=1e-6)
        sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=2)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "monitor": "val_nll"}}


class BestWeights(Callback):
    """keep the best weights in memory instead of writing checkpoints"""
    def __init__(self):
        self.best, self.state = math.inf, None

    def on_validation_end(self, trainer, pl_module):
        if trainer.sanity_checking:
            return
        v = trainer.callback_metrics["val_nll"].item()
        if v < self.best or self.state is None:
            self.best = v
            self.state = {k: t.detach().clone() for k, t in pl_module.state_dict().items()}
        m = trainer.callback_metrics
        print(f"epoch {trainer.current_epoch}: val_nll {v:.4f} wape {m['val_wape'].item():.4f} "
              f"max alloc {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")


def main():
    L.seed_everything(42)
    torch.set_float32_matmul_precision("high")
    load, cal = make_loads()
    train = LoadWindows(load, cal, TRAIN_WINDOWS, 0, 3200, seed=1)
    val = LoadWindows(load, cal, VAL_WINDOWS, 3200 - WINDOW, N_HOURS, seed=2)
    train_dl = DataLoader(train, BATCH, shuffle=True, num_workers=2, pin_memory=True, persistent_workers=True)
    val_dl = DataLoader(val, BATCH * 2, num_workers=2, pin_memory=True, persistent_workers=True)

    model = Seq2SeqForecaster()
    best = BestWeights()
    trainer = L.Trainer(accelerator="cuda", devices=1, max_epochs=EPOCHS, gradient_clip_val=1.0,
                        logger=False, enable_checkpointing=False, enable_progress_bar=False,
                        callbacks=[EarlyStopping("val_nll", patience=8), best])
    trainer.fit(model, train_dl, val_dl)
    model.load_state_dict(best.state)
    print(f"best val nll {best.best:.4f}")
    print("max_memory_allocated", torch.cuda.max_memory_allocated())
    print("max_memory_reserved", torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    main()
