"""compare activation checkpointing flavours on a deep prefix-LM

  none        : no checkpointing, MLPs compiled with torch.compile
  selective   : keep matmul / attention outputs, recompute the rest
  sequential  : checkpoint_sequential over chunks of blocks
"""
import functools
import gc
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

aten = torch.ops.aten

DEPTH, DIM, HEADS, SEQ, BS, VOCAB = 28, 1024, 16, 1024, 8, 16384
PREFIX = 256
COMPILE_MLP = True

SAVE_OPS = {
    aten.mm.default,
    aten.addmm.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
}


class Policy:
    """save every attention and every second matmul"""

    def __init__(self):
        self.mm = {True: 0, False: 0}
        self.hits = 0

    def __call__(self, ctx, op, *args, **kwargs):
        if op in (aten.mm.default, aten.addmm.default):
            self.mm[ctx.is_recompute] += 1
            keep = self.mm[ctx.is_recompute] % 2 == 1
        else:
            keep = op in SAVE_OPS
        if keep:
            self.hits += 1
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE


def context_fn():
    return create_selective_checkpoint_contexts(Policy())


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return (h * self.weight).to(x.dtype)


class SwiGLU(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class PrefixAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.h = heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wkv = nn.Linear(dim, 2 * dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x, mask):
        b, t, c = x.shape
        q = self.wq(x).view(b, t, self.h, c // self.h).transpose(1, 2)
        k, v = self.wkv(x).view(b, t, 2, self.h, c // self.h).unbind(2)
        o = F.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask)
        return self.wo(o.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dim, heads, mask):
        super().__init__()
        self.n1, self.n2 = RMSNorm(dim), RMSNorm(dim)
        self.attn = PrefixAttention(dim, heads)
        self.mlp = SwiGLU(dim, int(dim * 8 / 3 / 128) * 128)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x):
        x = x + self.attn(self.n1(x), self.mask)
        return x + self.mlp(self.n2(x))


class DeepLM(nn.Module):
    def __init__(self, variant):
        super().__init__()
        self.variant = variant
        # bidirectional over the prefix, causal afterwards; additive mask shared by all blocks
        i = torch.arange(SEQ)
        allowed = (i[None, :] <= i[:, None]) | (i[None, :] < PREFIX)
        mask = torch.zeros(SEQ, SEQ, dtype=torch.bfloat16).masked_fill_(~allowed, float("-inf"))
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.Sequential(*[Block(DIM, HEADS, mask) for _ in range(DEPTH)])
        self.norm = RMSNorm(DIM)
        self.out = nn.Linear(DIM, VOCAB, bias=False)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.trunc_normal_(p, std=0.02)

    def forward(self, idx, targets):
        x = self.embed(idx)
        if self.variant == "selective":
            for blk in self.blocks:
                x = checkpoint(blk, x, use_reentrant=False, context_fn=context_fn)
        elif self.variant == "sequential":
            x = checkpoint_sequential(self.blocks, 7, x, use_reentrant=False)
        else:
            x = self.blocks(x)
        logits = self.out(self.norm(x[:, PREFIX:]))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets[:, PREFIX:].flatten())


def train(variant, steps=6):
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(42)
    with torch.device("cuda"):
        model = DeepLM(variant)
    model.to(torch.bfloat16)
    if variant == "none" and COMPILE_MLP:
        # only the MLPs; one graph shared by every block
        for blk in model.blocks:
            blk.mlp.compile(dynamic=False)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-4, fused=True)
    model_bytes = torch.cuda.memory_allocated()

    data = torch.randint(0, VOCAB, (4, BS, SEQ + 1), device="cuda")
    losses, acts = [], 0
    t_start = None
    for step in range(steps):
        if step == 1:
            torch.cuda.synchronize()
            t_start = time.perf_counter()
        toks = data[step % 4]
        before = torch.cuda.memory_allocated()
        loss = model(toks[:, :-1], toks[:, 1:])
        acts = torch.cuda.memory_allocated() - before
        loss.backward()
        opt.step()
        opt.zero_grad(set_to_none=True)
        losses.append(loss.item())
    torch.cuda.synchronize()
    per_step = (time.perf_counter() - t_start) / (steps - 1)
    peak, res = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    print(f"{variant:>11}: model {model_bytes / 1e9:5.2f} GB  held after forward {acts / 1e9:6.2f} GB  "
          f"max_memory_allocated {peak / 1e9:6.2f} GB  max_memory_reserved {res / 1e9:6.2f} GB  "
          f"{per_step * 1e3:6.1f} ms/step")
    print(f"{'':>11}  loss " + " ".join(f"{l:.3f}" for l in losses))
    return peak, res, losses


def main():
    torch.set_float32_matmul_precision("high")
    results = {}
    for variant in ("sequential", "selective", "none"):
        results[variant] = train(variant)

    base = results["none"][0]
    print("\nsummary")
    for k, (p, r, l) in sorted(results.items(), key=lambda kv: kv[1][0]):
        print(f"  {k:<11} peak {p / 2**30:6.2f} GiB ({100 * p / base:5.1f}% of none) last loss {l[-1]:.4f}")
    d = max(abs(a - b) for a, b in zip(results["sequential"][2], results["selective"][2]))
    print(f"  max |loss(sequential) - loss(selective)| = {d:.5f}")
    print("max over variants: allocated", max(v[0] for v in results.values()),
          "reserved", max(v[1] for v in results.values()))
    print("last variant: max_memory_allocated", torch.cuda.max_memory_allocated(),
          "max_memory_reserved", torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    main()
