"""Conformer-L style CTC acoustic model, written by hand, trained with Lightning in bf16-mixed."""
import math

import lightning.pytorch as pl
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

N_MELS = 80
VOCAB = 1024  # bpe pieces + blank(0)


class SyntheticSpeech(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.frames = torch.randint(800, 1601, (n,), generator=g).tolist()
        self.seed = seed

    def __len__(self):
        return len(self.frames)

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.seed * 7919 + i)
        t = self.frames[i]
        return torch.randn(t, N_MELS, generator=g), torch.randint(1, VOCAB, (t // 25,), generator=g)


def collate(batch):
    feats = pad_sequence([b[0] for b in batch], batch_first=True)
    tokens = pad_sequence([b[1] for b in batch], batch_first=True)
    return (feats, torch.tensor([len(b[0]) for b in batch]), tokens, torch.tensor([len(b[1]) for b in batch]))


class ConvSubsampling(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, d, 3, 2, 1), nn.ReLU(), nn.Conv2d(d, d, 3, 2, 1), nn.ReLU())
        self.out = nn.Linear(d * (N_MELS // 4), d)

    def forward(self, x, lengths):
        x = self.conv(x.unsqueeze(1))
        b, c, t, f = x.shape
        x = self.out(x.transpose(1, 2).reshape(b, t, c * f))
        for _ in range(2):
            lengths = (lengths - 1) // 2 + 1
        return x, lengths


class FeedForward(nn.Sequential):
    def __init__(self, d, p):
        super().__init__(nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.SiLU(), nn.Dropout(p), nn.Linear(4 * d, d),
                         nn.Dropout(p))


class ConvModule(nn.Module):
    def __init__(self, d, k, p):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.pw1 = nn.Conv1d(d, 2 * d, 1)
        self.dw = nn.Conv1d(d, d, k, padding=k // 2, groups=d)
        self.bn = nn.BatchNorm1d(d)
        self.pw2 = nn.Conv1d(d, d, 1)
        self.drop = nn.Dropout(p)

    def forward(self, x, pad):
        x = self.norm(x).transpose(1, 2)
        x = F.glu(self.pw1(x), dim=1)
        x = x.masked_fill(pad.unsqueeze(1), 0.0)
        x = self.pw2(F.silu(self.bn(self.dw(x))))
        return self.drop(x.transpose(1, 2))


class RelPosAttention(nn.Module):
    """Transformer-XL style relative positional self-attention."""

    def __init__(self, d, h, p):
        super().__init__()
        self.h, self.dk = h, d // h
        self.qkv = nn.Linear(d, 3 * d)
        self.pos = nn.Linear(d, d, bias=False)
        self.out = nn.Linear(d, d)
        self.u = nn.Parameter(torch.zeros(h, self.dk))
        self.v = nn.Parameter(torch.zeros(h, self.dk))
        self.drop = nn.Dropout(p)

    @staticmethod
    def rel_shift(x):
        b, h, t, n = x.shape
        x = F.pad(x, (1, 0)).view(b, h, n + 1, t)[:, :, 1:].reshape(b, h, t, n)
        return x[..., :t]

    def forward(self, x, pe, pad):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.h, self.dk).unbind(2)
        p = self.pos(pe).view(1, -1, self.h, self.dk).transpose(1, 2)
        ac = (q + self.u).transpose(1, 2) @ k.permute(0, 2, 3, 1)
        bd = self.rel_shift((q + self.v).transpose(1, 2) @ p.transpose(-2, -1))
        scores = (ac + bd) / math.sqrt(self.dk)
        scores = scores.masked_fill(pad[:, None, None, :], torch.finfo(scores.dtype).min)
        attn = self.drop(scores.softmax(-1))
        o = attn.to(v.dtype) @ v.transpose(1, 2)
        return self.out(o.transpose(1, 2).reshape(b, t, d))


class ConformerBlock(nn.Module):
    def __init__(self, d, h, k, p):
        super().__init__()
        self.ff1, self.ff2 = FeedForward(d, p), FeedForward(d, p)
        self.norm_att = nn.LayerNorm(d)
        self.att = RelPosAttention(d, h, p)
        self.att_drop = nn.Dropout(p)
        self.conv = ConvModule(d, k, p)
        self.norm = nn.LayerNorm(d)

    def forward(self, x, pe, pad):
        x = x + 0.5 * self.ff1(x)
        x = x + self.att_drop(self.att(self.norm_att(x), pe, pad))
        x = x + self.conv(x, pad)
        x = x + 0.5 * self.ff2(x)
        return self.norm(x)


class ConformerCTC(pl.LightningModule):
    def __init__(self, d=512, n_layers=17, heads=8, kernel=31, dropout=0.1, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.sub = ConvSubsampling(d)
        self.blocks = nn.ModuleList([ConformerBlock(d, heads, kernel, dropout) for _ in range(n_layers)])
        self.head = nn.Linear(d, VOCAB)
        self.drop = nn.Dropout(dropout)

    def rel_pe(self, t, device):
        d = self.hparams.d
        pos = torch.arange(t - 1, -t, -1.0, device=device)[:, None]
        div = torch.exp(torch.arange(0, d, 2, device=device) * (-math.log(10000.0) / d))
        pe = torch.zeros(2 * t - 1, d, device=device)
        pe[:, 0::2], pe[:, 1::2] = torch.sin(pos * div), torch.cos(pos * div)
        return pe

    def forward(self, feats, lengths):
        x, lengths = self.sub(feats, lengths)
        pad = torch.arange(x.size(1), device=x.device)[None] >= lengths[:, None]
        pe = self.rel_pe(x.size(1), x.device)
        x = self.drop(x)
        for blk in self.blocks:
            x = blk(x, pe, pad)
        return self.head(x), lengths

    def spec_augment(self, x):
        x = x.clone()
        for _ in range(2):
            f0 = int(torch.randint(0, N_MELS - 27, (1,)))
            x[:, :, f0:f0 + 27] = 0
            t0 = int(torch.randint(0, x.size(1) - 50, (1,)))
            x[:, t0:t0 + 50] = 0
        return x

    def _loss(self, batch, train):
        feats, flen, tokens, tlen = batch
        if train:
            feats = self.spec_augment(feats)
        logits, lengths = self(feats, flen)
        logp = logits.float().log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(logp, tokens, lengths, tlen, blank=0, zero_infinity=True)

    def training_step(self, batch, _):
        loss = self._loss(batch, True)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, _):
        self.log("val/loss", self._loss(batch, False), batch_size=len(batch[1]))

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, betas=(0.9, 0.98), weight_decay=1e-3)
        sch = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min((s + 1) / 10, 1.0))
        return [opt], [{"scheduler": sch, "interval": "step"}]


class PrintMemory(pl.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        print(f"step {trainer.global_step} frames {batch[0].shape[1]} loss {outputs['loss'].item():.3f} "
              f"alloc {torch.cuda.max_memory_allocated()} reserved {torch.cuda.max_memory_reserved()}", flush=True)


def main():
    pl.seed_everything(5)
    train = DataLoader(SyntheticSpeech(16 * 6, 1), batch_size=16, shuffle=True, collate_fn=collate)
    val = DataLoader(SyntheticSpeech(32, 2), batch_size=16, collate_fn=collate)
    trainer = pl.Trainer(accelerator="gpu", devices=1, precision="bf16-mixed", max_steps=6,
                         gradient_clip_val=1.0, logger=False, enable_checkpointing=False,
                         enable_progress_bar=False, callbacks=[PrintMemory()])
    trainer.fit(ConformerCTC(), train, val)
    print("max_memory_allocated", torch.cuda.max_memory_allocated())
    print("max_memory_reserved", torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    main()
