"""FT-Transformer with piecewise-linear numeric encodings on synthetic tabular data (Lightning).

Manual optimisation: two accumulated micro-batches per step, rows with too many missing
cells dropped, and only the hardest share of the rows back-propagated.
"""
import lightning as L
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.data import DataLoader, TensorDataset

ROWS, NUM, CAT, GPU = 40_000, 48, 16, 500
BINS, DIM, LAYERS, HEADS = 32, 192, 6, 8
BATCH, ACCUM, STEPS = 2048, 2, 5


def synth(seed=3):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, NUM, generator=g) * torch.rand(NUM, generator=g).mul(3).exp()
    c = torch.randint(0, GPU, (ROWS, CAT), generator=g)
    y = (x[:, :5].sum(1) + (c[:, 0] % 7).float() - 3 + torch.randn(ROWS, generator=g) > 0).float()
    x[torch.rand(ROWS, NUM, generator=g) < 0.1] = float("nan")
    return x, c, y


class PLE(nn.Module):
    """piecewise-linear encoding, one linear map per feature"""

    def __init__(self, edges):
        super().__init__()
        self.register_buffer("edges", edges.contiguous())               # F, BINS+1
        self.weight = nn.Parameter(torch.randn(NUM, BINS, DIM) * BINS ** -0.5)
        self.bias = nn.Parameter(torch.zeros(NUM, DIM))

    def forward(self, x):
        e = self.edges
        xt = x.t().contiguous()
        b = (torch.searchsorted(e, xt, right=True) - 1).clamp_(0, BINS - 1)
        lo, hi = e.gather(1, b), e.gather(1, b + 1)
        frac = ((xt - lo) / (hi - lo).clamp_min(1e-6)).clamp(0, 1)
        ar = torch.arange(BINS, device=x.device)
        code = (ar < b.unsqueeze(-1)).float()
        code.scatter_(2, b.unsqueeze(-1), frac.unsqueeze(-1))           # F, B, BINS
        return torch.einsum("fbk,fkd->bfd", code, self.weight) + self.bias


class Positive(nn.Module):
    def forward(self, x):
        return nn.functional.softplus(x)


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.temp = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x * self.temp


class FTT(L.LightningModule):
    def __init__(self, edges, keep_ratio=0.4, mask_p=0.15):
        super().__init__()
        self.automatic_optimization = False
        self.keep_ratio, self.mask_p = keep_ratio, mask_p
        self.num = PLE(edges)
        self.cat = nn.Embedding(CAT * GPU, DIM)
        self.register_buffer("shift", torch.arange(CAT) * GPU)
        self.cls = nn.Parameter(torch.zeros(1, 1, DIM))
        self.absent = nn.Parameter(torch.randn(DIM) * 0.02)
        layer = nn.TransformerEncoderLayer(DIM, HEADS, 4 * DIM, dropout=0.1, activation="gelu",
                                           batch_first=True, norm_first=True)
        self.enc = nn.TransformerEncoder(layer, LAYERS, norm=nn.LayerNorm(DIM), enable_nested_tensor=False)
        self.head = nn.Sequential(parametrizations.spectral_norm(nn.Linear(DIM, DIM)), nn.ReLU(),
                                  parametrizations.spectral_norm(nn.Linear(DIM, 1)))
        self.scale = Scale()
        parametrize.register_parametrization(self.scale, "temp", Positive())
        self.recon = nn.Linear(DIM, 1)
        self.cls.register_hook(lambda g: g.clamp(-1, 1))

    def forward(self, x, c, hidden):
        t = torch.where(hidden.unsqueeze(-1), self.absent, self.num(torch.nan_to_num(x)))
        seq = torch.cat([self.cls.expand(len(x), -1, -1), t, self.cat(c + self.shift)], 1)
        out = self.enc(seq)
        return self.scale(self.head(out[:, 0])).squeeze(-1), out[:, 1:1 + NUM]

    def training_step(self, batch, i):
        x, c, y = batch
        miss = x.isnan()
        ok = miss.float().mean(1) < 0.13                 # drops a good part of the rows
        x, c, y, miss = x[ok], c[ok], y[ok], miss[ok]
        drawn = torch.empty(x.shape, device=x.device).bernoulli_(self.mask_p).bool() & ~miss
        logit, feat = self(x, c, miss | drawn)
        per = nn.functional.binary_cross_entropy_with_logits(logit, y, reduction="none")
        hard = per.topk(max(1, int(self.keep_ratio * len(per)))).values.mean()
        target = torch.bucketize(x[drawn], self.bounds).float() / len(self.bounds)
        rec = nn.functional.smooth_l1_loss(self.recon(feat[drawn]).squeeze(-1), target)
        self.manual_backward((hard + 0.5 * rec) / ACCUM)
        if (i + 1) % ACCUM == 0:
            opt, sch = self.optimizers(), self.lr_schedulers()
            nn.utils.clip_grad_norm_(self.parameters(), 1.0)   # self.clip_gradients refuses fused optimizers
            opt.step()
            opt.zero_grad()
            sch.step()
            print(f"step {self.global_step} hard {hard.item():.4f} rec {rec.item():.4f} rows {len(x)} "
                  f"masked {target.numel()} temp {self.scale.temp.item():.3f}")

    def on_fit_start(self):
        self.bounds = torch.linspace(-8, 8, 17, device=self.device)

    def configure_optimizers(self):
        no_decay = [p for n, p in self.named_parameters() if p.ndim < 2 or n.startswith(("cat", "cls"))]
        ids = {id(p) for p in no_decay}
        opt = torch.optim.AdamW([{"params": no_decay, "weight_decay": 0.0},
                                 {"params": [p for p in self.parameters() if id(p) not in ids]}],
                                lr=3e-4, weight_decay=1e-2, fused=True)
        return [opt], [torch.optim.lr_scheduler.OneCycleLR(opt, 1e-3, total_steps=STEPS + 1)]


class Mem(L.Callback):
    def on_train_batch_end(self, trainer, *_):
        print(f"  mem {torch.cuda.memory_allocated() / 1e9:.3f} GB peak {torch.cuda.max_memory_allocated() / 1e9:.3f} GB")
        torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    L.seed_everything(8)
    x, c, y = synth()
    edges = torch.nanquantile(x[:10_000].cuda(), torch.linspace(0, 1, BINS + 1, device="cuda"), dim=0).t().cpu()
    loader = DataLoader(TensorDataset(x, c, y), batch_size=BATCH, shuffle=True, drop_last=True, pin_memory=True)
    trainer = L.Trainer(accelerator="gpu", devices=1, precision="bf16-mixed", max_steps=STEPS, logger=False,
                        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                        callbacks=[Mem()])
    trainer.fit(FTT(edges), loader)
