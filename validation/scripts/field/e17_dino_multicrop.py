#!/usr/bin/env python
"""
Self-distillation with no labels (DINO), ViT-S/16, 2 global + 6 local crops.
Trimmed-down re-implementation for a reading group.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class Cfg:
    dim: int = 384
    depth: int = 12
    heads: int = 6
    patch: int = 16
    out_dim: int = 65536
    batch: int = 48
    n_local: int = 6
    student_temp: float = 0.1
    teacher_temp: float = 0.04
    momentum: float = 0.996
    freeze_last_layer_steps: int = 2
    steps: int = 5
    device: str = "cuda"


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.h = heads
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.h, C // self.h).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(B, N, C))


def drop_path(x, p: float, training: bool):
    if p == 0.0 or not training:
        return x
    keep = 1 - p
    mask = x.new_empty(x.shape[0], 1, 1).bernoulli_(keep)
    return x.div(keep) * mask


class Block(nn.Module):
    def __init__(self, dim, heads, dpr=0.0, norm=partial(nn.LayerNorm, eps=1e-6)):
        super().__init__()
        self.norm1, self.norm2 = norm(dim), norm(dim)
        self.attn = Attention(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, dim * 4), nn.GELU(), nn.Linear(dim * 4, dim))
        self.dpr = dpr

    def forward(self, x):
        x = x + drop_path(self.attn(self.norm1(x)), self.dpr, self.training)
        return x + drop_path(self.mlp(self.norm2(x)), self.dpr, self.training)


class ViT(nn.Module):
    def __init__(self, cfg: Cfg, dpr=0.0):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, cfg.dim, cfg.patch, cfg.patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, cfg.dim))
        self.pos = nn.Parameter(torch.zeros(1, (224 // cfg.patch) ** 2 + 1, cfg.dim))
        rates = torch.linspace(0, dpr, cfg.depth).tolist()
        self.blocks = nn.ModuleList([Block(cfg.dim, cfg.heads, r) for r in rates])
        self.norm = nn.LayerNorm(cfg.dim, eps=1e-6)
        nn.init.trunc_normal_(self.pos, std=0.02)
        nn.init.trunc_normal_(self.cls, std=0.02)

    def interp_pos(self, h, w):
        n = self.pos.shape[1] - 1
        if h * w == n:
            return self.pos
        s = int(math.sqrt(n))
        grid = self.pos[:, 1:].reshape(1, s, s, -1).permute(0, 3, 1, 2)
        grid = F.interpolate(grid, size=(h, w), mode="bicubic", align_corners=False)
        return torch.cat([self.pos[:, :1], grid.permute(0, 2, 3, 1).flatten(1, 2)], 1)

    def forward(self, x):
        x = self.patch_embed(x)
        h, w = x.shape[-2:]
        x = x.flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.interp_pos(h, w)
        for b in self.blocks:
            x = b(x)
        return self.norm(x)[:, 0]


class DINOHead(nn.Module):
    def __init__(self, dim, out_dim, hidden=2048, bottleneck=256):
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(dim, hidden), nn.GELU(),
            nn.Linear(hidden, hidden), nn.GELU(),
            nn.Linear(hidden, bottleneck))
        self.last = nn.utils.parametrizations.weight_norm(nn.Linear(bottleneck, out_dim, bias=False))
        self.last.parametrizations.weight.original0.data.fill_(1)
        self.last.parametrizations.weight.original0.requires_grad = False

    def forward(self, x):
        return self.last(F.normalize(self.mlp(x), dim=-1))


class MultiCrop(nn.Module):
    def __init__(self, backbone, head):
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, crops):
        sizes = torch.tensor([c.shape[-1] for c in crops])
        _, counts = torch.unique_consecutive(sizes, return_counts=True)
        feats, start = [], 0
        for n in counts.tolist():
            feats.append(self.backbone(torch.cat(crops[start:start + n])))
            start += n
        return self.head(torch.cat(feats))


class DINOLoss(nn.Module):
    def __init__(self, cfg: Cfg):
        super().__init__()
        self.cfg = cfg
        self.ncrops = 2 + cfg.n_local
        self.register_buffer("center", torch.zeros(1, cfg.out_dim))

    def forward(self, student, teacher):
        s = (student.float() / self.cfg.student_temp).chunk(self.ncrops)
        t = F.softmax((teacher.float() - self.center) / self.cfg.teacher_temp, dim=-1).detach().chunk(2)
        total, n = 0.0, 0
        for i, q in enumerate(t):
            for v in range(len(s)):
                if v == i:
                    continue
                total = total + torch.sum(-q * F.log_softmax(s[v], dim=-1), dim=-1).mean()
                n += 1
        self.update_center(teacher)
        return total / n

    @torch.no_grad()
    def update_center(self, teacher):
        self.center.mul_(0.9).add_(teacher.float().mean(0, keepdim=True), alpha=0.1)


def augment(images, cfg):
    """crude GPU multi-crop: random resized windows, flips"""
    crops = []
    for i in range(2 + cfg.n_local):
        size = 224 if i < 2 else 96
        win = int(torch.randint(160 if i < 2 else 64, 256 if i < 2 else 128, (1,)))
        y, x = torch.randint(0, images.shape[-1] - win + 1, (2,)).tolist()
        c = F.interpolate(images[..., y:y + win, x:x + win], size=(size, size), mode="bilinear", align_corners=False)
        crops.append(c.flip(-1) if torch.rand(()) < 0.5 else c)
    return crops


def main(cfg=Cfg()):
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    student = MultiCrop(ViT(cfg, dpr=0.1), DINOHead(cfg.dim, cfg.out_dim)).to(cfg.device)
    teacher = MultiCrop(ViT(cfg), DINOHead(cfg.dim, cfg.out_dim)).to(cfg.device)
    teacher.load_state_dict(student.state_dict())
    teacher.requires_grad_(False)
    criterion = DINOLoss(cfg).to(cfg.device)

    reg = [p for n, p in student.named_parameters() if p.requires_grad and p.ndim > 1]
    noreg = [p for n, p in student.named_parameters() if p.requires_grad and p.ndim <= 1]
    opt = torch.optim.AdamW([{"params": reg}, {"params": noreg, "weight_decay": 0.0}],
                            lr=5e-4 * cfg.batch / 256, weight_decay=0.04)

    for it in range(cfg.steps):
        images = torch.rand(cfg.batch, 3, 256, 256, device=cfg.device)
        crops = augment(images, cfg)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            with torch.no_grad():
                t_out = teacher(crops[:2])
            s_out = student(crops)
            loss = criterion(s_out, t_out)
        if not math.isfinite(loss.item()):
            raise RuntimeError("loss is not finite")
        opt.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(student.parameters(), 3.0)
        if it < cfg.freeze_last_layer_steps:
            for n, p in student.named_parameters():
                if "head.last" in n:
                    p.grad = None
        opt.step()
        with torch.no_grad():
            m = cfg.momentum
            for ps, pt in zip(student.parameters(), teacher.parameters()):
                pt.data.mul_(m).add_((1 - m) * ps.detach().data)
        print(f"it={it} loss={loss.item():.4f} alloc={torch.cuda.max_memory_allocated()} "
              f"reserved={torch.cuda.max_memory_reserved()}", flush=True)


if __name__ == "__main__":
    main()
