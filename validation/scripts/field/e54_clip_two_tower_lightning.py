"""
Two-tower contrastive pretraining (CLIP loss, optional SigLIP loss) with Lightning, manual optimization.
Activation checkpointing in both towers, learnable temperature clamped at ln(100).
"""
import math
import warnings
from functools import partial

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

warnings.filterwarnings("ignore", ".*does not have many workers.*")
torch.set_float32_matmul_precision("high")


class Attention(nn.Module):
    def __init__(self, dim, heads, causal=False):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.proj(y.transpose(1, 2).reshape(b, n, c))


class ResidualAttentionBlock(nn.Module):
    def __init__(self, dim, heads, causal=False, mlp_ratio=4.0):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim, heads, causal)
        hidden = int(dim * mlp_ratio)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    def __init__(self, dim, depth, heads, causal=False, grad_checkpointing=True):
        super().__init__()
        self.blocks = nn.ModuleList(ResidualAttentionBlock(dim, heads, causal) for _ in range(depth))
        self.grad_checkpointing = grad_checkpointing

    def forward(self, x):
        for blk in self.blocks:
            if self.grad_checkpointing and self.training:
                x = checkpoint(blk, x, use_reentrant=False)
            else:
                x = blk(x)
        return x


class VisionTower(nn.Module):
    def __init__(self, img=224, patch=16, dim=768, depth=12, heads=12, out=512, ckpt=True):
        super().__init__()
        self.patch = nn.Conv2d(3, dim, patch, patch, bias=False)
        self.cls = nn.Parameter(dim ** -0.5 * torch.randn(dim))
        self.pos = nn.Parameter(dim ** -0.5 * torch.randn((img // patch) ** 2 + 1, dim))
        self.ln_pre, self.ln_post = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.tr = Transformer(dim, depth, heads, grad_checkpointing=ckpt)
        self.proj = nn.Parameter(dim ** -0.5 * torch.randn(dim, out))

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.to(x.dtype).expand(x.shape[0], 1, -1), x], 1) + self.pos.to(x.dtype)
        x = self.tr(self.ln_pre(x))
        return self.ln_post(x[:, 0]) @ self.proj


class TextTower(nn.Module):
    def __init__(self, vocab=49408, ctx=77, dim=512, depth=12, heads=8, out=512, ckpt=True):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Parameter(0.01 * torch.randn(ctx, dim))
        self.tr = Transformer(dim, depth, heads, causal=True, grad_checkpointing=ckpt)
        self.ln_final = nn.LayerNorm(dim)
        self.proj = nn.Parameter(dim ** -0.5 * torch.randn(dim, out))
        nn.init.normal_(self.tok.weight, std=0.02)

    def forward(self, ids):
        x = self.tr(self.tok(ids) + self.pos[: ids.shape[1]])
        x = self.ln_final(x)
        eot = ids.argmax(-1)
        return x[torch.arange(x.shape[0], device=x.device), eot] @ self.proj


class TwoTower(L.LightningModule):
    def __init__(self, loss="clip", lr=5e-4, wd=0.2, warmup=3, max_steps=10, clip=1.0):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.visual = None
        self.text = None

    def configure_model(self):
        if self.visual is not None:
            return
        self.visual = VisionTower()
        self.text = TextTower()
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
        self.logit_bias = nn.Parameter(torch.tensor(-10.0)) if self.hparams.loss == "siglip" else None

    def forward(self, images, ids):
        return F.normalize(self.visual(images), dim=-1), F.normalize(self.text(ids), dim=-1)

    def gather(self, t):
        g = self.all_gather(t, sync_grads=True)
        return g.flatten(0, 1) if g.ndim == t.ndim + 1 else g

    def contrastive(self, zi, zt):
        zi, zt = self.gather(zi).float(), self.gather(zt).float()
        logits = self.logit_scale.exp() * zi @ zt.t()
        n = logits.shape[0]
        if self.hparams.loss == "siglip":
            logits = logits + self.logit_bias
            sign = 2 * torch.eye(n, device=logits.device) - 1
            return -F.logsigmoid(sign * logits).sum() / n, logits
        tgt = torch.arange(n, device=logits.device)
        return 0.5 * (F.cross_entropy(logits, tgt) + F.cross_entropy(logits.t(), tgt)), logits

    def training_step(self, batch, batch_idx):
        opt, sch = self.optimizers(), self.lr_schedulers()
        zi, zt = self(*batch)
        loss, logits = self.contrastive(zi, zt)

        opt.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(opt, gradient_clip_val=self.hparams.clip, gradient_clip_algorithm="norm")
        opt.step()
        sch.step()
        with torch.no_grad():
            self.logit_scale.clamp_(0, math.log(100))

        self.log("train/loss", loss.detach(), prog_bar=False)
        if batch_idx % 2 == 0:
            acc = (logits.argmax(1) == torch.arange(len(logits), device=logits.device)).float().mean()
            self.print(
                f"step {self.global_step:3d} loss {loss.item():.4f} i2t@1 {acc.item():.4f} "
                f"T {self.logit_scale.exp().item():.2f} lr {sch.get_last_lr()[0]:.2e}"
            )

    def on_validation_epoch_start(self):
        self.bank = ([], [])

    def validation_step(self, batch, batch_idx):
        zi, zt = self(*batch)
        self.bank[0].append(zi)
        self.bank[1].append(zt)

    def on_validation_epoch_end(self):
        zi, zt = torch.cat(self.bank[0]).float(), torch.cat(self.bank[1]).float()
        sim = zi @ zt.t()
        tgt = torch.arange(len(sim), device=sim.device)
        top5 = sim.topk(5, dim=1).indices.eq(tgt[:, None]).any(1).float().mean()
        rank = (sim >= sim.diagonal()[:, None]).sum(1).float()
        self.print(f"[val] n={len(sim)} R@5 {top5.item():.4f} median rank {rank.median().item():.1f}")
        self.log("val/r5", top5)
        self.bank = None

    def configure_optimizers(self):
        hp = self.hparams
        exclude = lambda n, p: p.ndim < 2 or "ln" in n or "bias" in n or "logit_scale" in n
        named = [(n, p) for n, p in self.named_parameters() if p.requires_grad]
        opt = torch.optim.AdamW(
            [
                {"params": [p for n, p in named if exclude(n, p)], "weight_decay": 0.0},
                {"params": [p for n, p in named if not exclude(n, p)], "weight_decay": hp.wd},
            ],
            lr=hp.lr, betas=(0.9, 0.98), eps=1e-6,
        )

        def sched(s, warm, total):
            if s < warm:
                return (s + 1) / warm
            return 0.5 * (1 + math.cos(math.pi * min(1.0, (s - warm) / (total - warm))))

        return [opt], [torch.optim.lr_scheduler.LambdaLR(opt, partial(sched, warm=hp.warmup, total=hp.max_steps))]


class PairIndex(Dataset):
    """Only seeds travel through the loader; pixels get rendered on the device."""

    def __init__(self, n, offset=0):
        self.n, self.offset = n, offset

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return i + self.offset


class PairData(L.LightningDataModule):
    def __init__(self, batch_size=512, steps=10):
        super().__init__()
        self.bs, self.steps = batch_size, steps

    def train_dataloader(self):
        return DataLoader(PairIndex(self.bs * self.steps), self.bs, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return DataLoader(PairIndex(1024, 10 ** 6), 256)

    def on_after_batch_transfer(self, idx, dataloader_idx):
        bits = (idx[:, None] >> torch.arange(24, device=idx.device)) & 1
        low = (bits.float() * 2 - 1).view(-1, 1, 4, 6).expand(-1, 3, -1, -1)
        img = F.interpolate(low, size=(224, 224), mode="bilinear", align_corners=False)
        img = img + 0.3 * torch.randn_like(img)
        ids = torch.zeros(len(idx), 77, dtype=torch.long, device=idx.device)
        ids[:, 0] = 49406
        ids[:, 1:25] = 1000 + 2 * torch.arange(24, device=idx.device) + bits
        ids[:, 25] = 49407
        return img, ids


class CudaMemory(Callback):
    def show(self, tag):
        print(f"<{tag}> max_memory_allocated={torch.cuda.max_memory_allocated():,} "
              f"max_memory_reserved={torch.cuda.max_memory_reserved():,}", flush=True)

    def on_fit_start(self, trainer, pl_module):
        self.show("fit start")

    def on_validation_start(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.show("train epoch done")

    def on_fit_end(self, trainer, pl_module):
        self.show("fit end")


if __name__ == "__main__":
    L.seed_everything(2024)
    steps = 10
    trainer = L.Trainer(
        accelerator="gpu", devices=1, precision="bf16-mixed", max_epochs=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=1, log_every_n_steps=1,
        callbacks=[CudaMemory()],
    )
    model = TwoTower(loss="clip", max_steps=steps)
    trainer.fit(model, datamodule=PairData(batch_size=512, steps=steps))
    print({k: round(float(v), 5) for k, v in trainer.callback_metrics.items()})
    print("final peak allocated GiB", torch.cuda.max_memory_allocated() / 1024 ** 3)
    print("final peak reserved  GiB", torch.cuda.max_memory_reserved() / 1024 ** 3)
