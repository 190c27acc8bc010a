"""
Mixture-of-Depths language model with multi-head latent attention (MLA).

Every second block only processes the top-k tokens picked by a linear router
(expert-choice over the sequence); the rest go through the residual path.
An auxiliary BCE trains the router so that it can be used causally at sampling.
"""
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class Config:
    vocab: int = 50304
    dim: int = 1024
    layers: int = 16
    heads: int = 16
    q_rank: int = 512
    kv_rank: int = 256
    nope_dim: int = 64
    rope_dim: int = 32
    v_dim: int = 64
    ffn: int = 2816
    seq: int = 2048
    capacity: float = 0.125
    batch: int = 8
    steps: int = 6
    lr: float = 3e-4


def rope_table(n, dim, base=10000.0):
    inv = base ** (-torch.arange(0, dim, 2).float() / dim)
    ang = torch.outer(torch.arange(n).float(), inv)
    return torch.cat([ang, ang], -1)


def apply_rope(x, ang):
    cos, sin = ang.cos()[:, None], ang.sin()[:, None]
    a, b = x.chunk(2, -1)
    return (x * cos + torch.cat([-b, a], -1) * sin).type_as(x)


class MLA(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.q_down = nn.Linear(c.dim, c.q_rank, bias=False)
        self.q_norm = nn.RMSNorm(c.q_rank)
        self.q_up = nn.Linear(c.q_rank, c.heads * (c.nope_dim + c.rope_dim), bias=False)
        self.kv_down = nn.Linear(c.dim, c.kv_rank + c.rope_dim, bias=False)
        self.kv_norm = nn.RMSNorm(c.kv_rank)
        self.kv_up = nn.Linear(c.kv_rank, c.heads * (c.nope_dim + c.v_dim), bias=False)
        self.o = nn.Linear(c.heads * c.v_dim, c.dim, bias=False)

    def forward(self, x, ang):
        c = self.c
        B, T, _ = x.shape
        q = self.q_up(self.q_norm(self.q_down(x))).view(B, T, c.heads, -1).transpose(1, 2)
        q_nope, q_rope = q.split([c.nope_dim, c.rope_dim], -1)
        latent, k_rope = self.kv_down(x).split([c.kv_rank, c.rope_dim], -1)
        kv = self.kv_up(self.kv_norm(latent)).view(B, T, c.heads, -1).transpose(1, 2)
        k_nope, v = kv.split([c.nope_dim, c.v_dim], -1)
        k_rope = apply_rope(k_rope[:, None], ang).expand(-1, c.heads, -1, -1)
        q = torch.cat([q_nope, apply_rope(q_rope, ang)], -1)
        k = torch.cat([k_nope, k_rope], -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(B, T, -1))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(c.dim), nn.RMSNorm(c.dim)
        self.attn = MLA(c)
        self.w13 = nn.Linear(c.dim, 2 * c.ffn, bias=False)
        self.w2 = nn.Linear(c.ffn, c.dim, bias=False)

    def forward(self, x, ang):
        x = x + self.attn(self.n1(x), ang)
        g, u = self.w13(self.n2(x)).chunk(2, -1)
        return x + self.w2(F.silu(g) * u)


class DepthRouted(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.block, self.router, self.capacity = Block(c), nn.Linear(c.dim, 1, bias=False), c.capacity

    def forward(self, x, ang):
        B, T, D = x.shape
        k = max(1, int(T * self.capacity))
        scores = self.router(x).squeeze(-1).float()
        top = scores.topk(k, dim=-1).indices.sort(-1).values
        picked = x.gather(1, top[..., None].expand(-1, -1, D))
        delta = self.block(picked, ang.gather(1, top[..., None].expand(-1, -1, ang.size(-1)))) - picked
        weight = torch.sigmoid(scores.gather(1, top))[..., None]
        out = x.scatter_add(1, top[..., None].expand(-1, -1, D), (weight * delta).to(x.dtype))
        target = torch.zeros_like(scores).scatter_(1, top, 1.0)
        return out, F.binary_cross_entropy_with_logits(scores, target)


class MoDGPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.emb = nn.Embedding(c.vocab, c.dim)
        self.blocks = nn.ModuleList(DepthRouted(c) if i % 2 else Block(c) for i in range(c.layers))
        self.norm = nn.RMSNorm(c.dim)
        self.head = nn.Linear(c.dim, c.vocab, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("ang", rope_table(c.seq, c.rope_dim), persistent=False)
        nn.init.normal_(self.emb.weight, std=0.02)

    def forward(self, idx, labels):
        B, T = idx.shape
        x, aux = self.emb(idx), 0.0
        ang = self.ang[None, :T].expand(B, -1, -1)
        for blk in self.blocks:
            if isinstance(blk, DepthRouted):
                x, a = blk(x, ang)
                aux = aux + a
            else:
                x = blk(x, ang)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().view(-1, logits.size(-1)), labels.reshape(-1)), aux


def main():
    c = Config()
    torch.manual_seed(134)
    model = MoDGPT(c).to("cuda")
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters")
    opt = torch.optim.AdamW([{"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
                             {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}],
                            lr=c.lr, betas=(0.9, 0.95), fused=True)
    corpus = torch.randint(0, c.vocab, (400_000,))
    for step in range(c.steps):
        for g in opt.param_groups:
            g["lr"] = c.lr * min(1.0, (step + 1) / 3) * 0.5 * (1 + math.cos(math.pi * step / c.steps))
        start = torch.randint(0, len(corpus) - c.seq - 1, (c.batch,)).tolist()
        chunk = torch.stack([corpus[s:s + c.seq + 1] for s in start]).pin_memory().to("cuda", non_blocking=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            lm, aux = model(chunk[:, :-1], chunk[:, 1:])
        (lm + 0.01 * aux).backward()
        gn = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        print(f"step {step} lm {lm.item():.4f} router {aux.item():.4f} gnorm {gn.item():.2f} "
              f"peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
    model.eval()
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
        lm, _ = model(chunk[:4, :-1], chunk[:4, 1:])
    print(f"eval loss {lm.item():.4f}, reserved {torch.cuda.memory_reserved() / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
