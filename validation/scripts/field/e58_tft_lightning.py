# Temporal Fusion Transformer, written after Lim et al. 2019, on a synthetic electricity-like panel.
# Lightning Trainer, quantile (pinball) loss, ReduceLROnPlateau on val_loss.
import lightning as L
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, Dataset

torch.set_float32_matmul_precision("high")

ENC_LEN = 336
DEC_LEN = 96
N_SERIES = 370
QUANTILES = (0.1, 0.5, 0.9)


def make_panel(n_series=N_SERIES, n_hours=24 * 90, seed=0):
    rng = np.random.default_rng(seed)
    t = np.arange(n_hours)
    base = rng.gamma(4.0, 1.0, size=(n_series, 1))
    daily = np.sin(2 * np.pi * t / 24 + rng.uniform(0, 6.28, (n_series, 1)))
    weekly = np.sin(2 * np.pi * t / 168 + rng.uniform(0, 6.28, (n_series, 1)))
    temp = 10 + 8 * np.sin(2 * np.pi * t / (24 * 60)) + rng.normal(0, 1.0, n_hours)
    y = base * (1 + 0.4 * daily + 0.2 * weekly) + 0.05 * base * temp + rng.normal(0, 0.3, (n_series, n_hours))
    mu, sd = y.mean(1, keepdims=True), y.std(1, keepdims=True)
    return ((y - mu) / sd).astype(np.float32), (temp / 10).astype(np.float32)


class PanelDataset(Dataset):
    def __init__(self, y, temp, start, stop, n_samples, seed):
        self.y, self.temp = torch.from_numpy(y), torch.from_numpy(temp)
        rng = np.random.default_rng(seed)
        self.series = rng.integers(0, y.shape[0], n_samples)
        self.offset = rng.integers(start, stop - ENC_LEN - DEC_LEN, n_samples)
        hours = torch.arange(y.shape[1])
        self.known = torch.stack(
            [torch.sin(2 * torch.pi * hours / 24), torch.cos(2 * torch.pi * hours / 24),
             (hours // 24 % 7).float() / 6.0, hours / hours.numel()], dim=-1)

    def __len__(self):
        return len(self.series)

    def __getitem__(self, i):
        s, o = int(self.series[i]), int(self.offset[i])
        mid, end = o + ENC_LEN, o + ENC_LEN + DEC_LEN
        past = torch.stack([self.y[s, o:mid], self.temp[o:mid]], dim=-1)
        return {"static": torch.tensor(s), "past": past, "known": self.known[o:end], "target": self.y[s, mid:end]}


class PanelData(L.LightningDataModule):
    def __init__(self, batch_size=512):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage=None):
        y, temp = make_panel()
        cut = int(y.shape[1] * 0.75)
        self.train_ds = PanelDataset(y, temp, 0, cut, n_samples=self.batch_size * 4, seed=1)
        self.val_ds = PanelDataset(y, temp, cut - ENC_LEN, y.shape[1], n_samples=self.batch_size + 200, seed=2)

    def train_dataloader(self):
        return DataLoader(self.train_ds, batch_size=self.batch_size, shuffle=True, drop_last=True, pin_memory=True)

    def val_dataloader(self):
        return DataLoader(self.val_ds, batch_size=self.batch_size, pin_memory=True)


class GLU(nn.Module):
    def __init__(self, d_in, d_out, dropout=0.0):
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.fc = nn.Linear(d_in, 2 * d_out)

    def forward(self, x):
        return F.glu(self.fc(self.drop(x)), dim=-1)


class GRN(nn.Module):
    def __init__(self, d_in, d_hidden, d_out=None, d_ctx=None, dropout=0.1):
        super().__init__()
        d_out = d_out or d_hidden
        self.fc1 = nn.Linear(d_in, d_hidden)
        self.ctx = nn.Linear(d_ctx, d_hidden, bias=False) if d_ctx else None
        self.fc2 = nn.Linear(d_hidden, d_hidden)
        self.gate = GLU(d_hidden, d_out, dropout)
        self.skip = nn.Linear(d_in, d_out) if d_in != d_out else nn.Identity()
        self.norm = nn.LayerNorm(d_out)

    def forward(self, x, c=None):
        h = self.fc1(x)
        if c is not None:
            if c.dim() < h.dim():
                c = c.unsqueeze(1)
            h = h + self.ctx(c)
        h = self.fc2(F.elu(h))
        return self.norm(self.skip(x) + self.gate(h))


class VariableSelection(nn.Module):
    def __init__(self, n_vars, d, dropout):
        super().__init__()
        self.embed = nn.ModuleList(nn.Linear(1, d) for _ in range(n_vars))
        self.var_grns = nn.ModuleList(GRN(d, d, dropout=dropout) for _ in range(n_vars))
        self.weight_grn = GRN(n_vars * d, d, d_out=n_vars, d_ctx=d, dropout=dropout)

    def forward(self, x, ctx):
        e = [emb(x[..., i:i + 1]) for i, emb in enumerate(self.embed)]
        w = self.weight_grn(torch.cat(e, dim=-1), ctx).softmax(-1)
        v = torch.stack([g(z) for g, z in zip(self.var_grns, e)], dim=-1)
        return (v * w.unsqueeze(-2)).sum(-1), w


class InterpretableMHA(nn.Module):
    """Value projection is shared between heads, attention is averaged."""

    def __init__(self, d, n_heads, dropout):
        super().__init__()
        self.h, self.dk = n_heads, d // n_heads
        self.q, self.k = nn.Linear(d, d), nn.Linear(d, d)
        self.v = nn.Linear(d, self.dk)
        self.out = nn.Linear(self.dk, d, bias=False)
        self.drop = nn.Dropout(dropout)

    def forward(self, q, kv, mask):
        b, tq, _ = q.shape
        tk = kv.size(1)
        qh = self.q(q).view(b, tq, self.h, self.dk).transpose(1, 2)
        kh = self.k(kv).view(b, tk, self.h, self.dk).transpose(1, 2)
        att = (qh @ kh.transpose(-1, -2)) / self.dk ** 0.5
        att = att.masked_fill(mask, float("-inf")).softmax(-1)
        att = self.drop(att)
        heads = att @ self.v(kv).unsqueeze(1)
        return self.out(heads.mean(1)), att.mean(1)


def pinball(pred, target, quantiles):
    err = target.unsqueeze(-1) - pred
    q = torch.as_tensor(quantiles, device=pred.device, dtype=pred.dtype)
    return torch.maximum(q * err, (q - 1) * err).sum(-1).mean()


class TFT(L.LightningModule):
    def __init__(self, d=256, heads=4, lstm_layers=2, dropout=0.1, lr=2e-3, n_past=2, n_known=4):
        super().__init__()
        self.save_hyperparameters()
        self.static_emb = nn.Embedding(N_SERIES, d)
        self.ctx_select = GRN(d, d, dropout=dropout)
        self.ctx_enrich = GRN(d, d, dropout=dropout)
        self.ctx_h = GRN(d, d, dropout=dropout)
        self.ctx_c = GRN(d, d, dropout=dropout)
        self.vsn_past = VariableSelection(n_past + n_known, d, dropout)
        self.vsn_future = VariableSelection(n_known, d, dropout)
        self.encoder = nn.LSTM(d, d, lstm_layers, batch_first=True, dropout=dropout)
        self.decoder = nn.LSTM(d, d, lstm_layers, batch_first=True, dropout=dropout)
        self.lstm_gate, self.lstm_norm = GLU(d, d, dropout), nn.LayerNorm(d)
        self.enrich = GRN(d, d, d_ctx=d, dropout=dropout)
        self.attn = InterpretableMHA(d, heads, dropout)
        self.attn_gate, self.attn_norm = GLU(d, d, dropout), nn.LayerNorm(d)
        self.ff = GRN(d, d, dropout=dropout)
        self.out_gate, self.out_norm = GLU(d, d), nn.LayerNorm(d)
        self.head = nn.Linear(d, len(QUANTILES))
        mask = torch.ones(DEC_LEN, ENC_LEN + DEC_LEN).triu(ENC_LEN + 1).bool()
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, batch):
        s = self.static_emb(batch["static"])
        cs, ce = self.ctx_select(s), self.ctx_enrich(s)
        n = self.hparams.lstm_layers
        h0 = self.ctx_h(s).unsqueeze(0).repeat(n, 1, 1)
        c0 = self.ctx_c(s).unsqueeze(0).repeat(n, 1, 1)
        past_in = torch.cat([batch["past"], batch["known"][:, :ENC_LEN]], dim=-1)
        past, w_past = self.vsn_past(past_in, cs)
        fut, _ = self.vsn_future(batch["known"][:, ENC_LEN:], cs)
        enc, state = self.encoder(past, (h0, c0))
        dec, _ = self.decoder(fut, state)
        seq_in = torch.cat([past, fut], 1)
        seq = self.lstm_norm(seq_in + self.lstm_gate(torch.cat([enc, dec], 1)))
        rich = self.enrich(seq, ce)
        att, _ = self.attn(rich[:, ENC_LEN:], rich, self.mask)
        x = self.attn_norm(rich[:, ENC_LEN:] + self.attn_gate(att))
        x = self.out_norm(seq[:, ENC_LEN:] + self.out_gate(self.ff(x)))
        return self.head(x), w_past

    def training_step(self, batch, batch_idx):
        pred, _ = self(batch)
        loss = pinball(pred, batch["target"], QUANTILES)
        self.log("train_loss", loss, prog_bar=True)
        print(f"step {self.global_step} train_loss {loss.item():.4f} "
              f"peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
        return loss

    def validation_step(self, batch, batch_idx):
        pred, w = self(batch)
        loss = pinball(pred, batch["target"], QUANTILES)
        cover = ((batch["target"] >= pred[..., 0]) & (batch["target"] <= pred[..., -1])).float().mean()
        self.log_dict({"val_loss": loss, "val_coverage": cover}, prog_bar=True, batch_size=pred.size(0))

    def configure_optimizers(self):
        opt = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=0, threshold=1e-2)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "monitor": "val_loss", "interval": "epoch"}}


class MemoryReport(Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        self._show(trainer, "train epoch")

    def on_validation_epoch_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self._show(trainer, "validation")

    def _show(self, trainer, what):
        metrics = {k: round(float(v), 4) for k, v in trainer.callback_metrics.items()}
        print(f"[epoch {trainer.current_epoch}] {what}: "
              f"max_alloc={torch.cuda.max_memory_allocated() / 2**20:.0f}MiB "
              f"max_reserved={torch.cuda.max_memory_reserved() / 2**20:.0f}MiB {metrics}")


if __name__ == "__main__":
    L.seed_everything(7)
    trainer = L.Trainer(
        accelerator="gpu", devices=1, max_epochs=3, gradient_clip_val=0.5,
        num_sanity_val_steps=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, callbacks=[MemoryReport()],
    )
    model = TFT()
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters")
    trainer.fit(model, datamodule=PanelData(batch_size=512))
    print("final lr", trainer.optimizers[0].param_groups[0]["lr"])
    print("max_memory_allocated:", torch.cuda.max_memory_allocated())
    print("max_memory_reserved:", torch.cuda.max_memory_reserved())
