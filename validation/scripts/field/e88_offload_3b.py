#!/usr/bin/env python3
"""Full-parameter tuning of a ~3B decoder in bf16 with as little device memory as I can get away with.

  * Lion momentum lives in one flat pinned host buffer and visits the GPU one tensor at a time
  * every gradient is consumed (and freed) in a post-accumulate hook, so grads never coexist
  * the first N_OFFLOAD blocks run normally but their saved tensors go to pinned host memory
  * the remaining blocks are checkpointed, with the block inputs offloaded too
"""
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

DIM = 2816
N_LAYERS = 30
N_HEADS = 22
N_KV = 2
FFN = 7680
VOCAB = 49152
SEQ = 2048
BATCH = 4
STEPS = 4
N_OFFLOAD = 3
LR, BETA1, BETA2, WD = 1e-5, 0.9, 0.98, 0.1
DTYPE = torch.bfloat16


def mib(n):
    return f"{n / 2**20:,.0f} MiB"


def rope_cache(seq, dim, base=500000.0):
    inv = 1.0 / base ** (torch.arange(0, dim, 2, device="cuda").float() / dim)
    ang = torch.outer(torch.arange(seq, device="cuda").float(), inv)
    return torch.polar(torch.ones_like(ang), ang)            # complex64


def apply_rope(x, freqs):
    xc = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(xc * freqs[:, None, :]).flatten(-2).to(x.dtype)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.hd = DIM // N_HEADS
        self.ln1 = nn.RMSNorm(DIM, eps=1e-5)
        self.ln2 = nn.RMSNorm(DIM, eps=1e-5)
        self.wq = nn.Linear(DIM, DIM, bias=False)
        self.wkv = nn.Linear(DIM, 2 * N_KV * self.hd, bias=False)
        self.wo = nn.Linear(DIM, DIM, bias=False)
        self.w13 = nn.Linear(DIM, 2 * FFN, bias=False)
        self.w2 = nn.Linear(FFN, DIM, bias=False)

    def forward(self, x, freqs):
        b, t, _ = x.shape
        h = self.ln1(x)
        q = apply_rope(self.wq(h).view(b, t, N_HEADS, self.hd), freqs)
        k, v = self.wkv(h).view(b, t, 2 * N_KV, self.hd).chunk(2, dim=2)
        k = apply_rope(k, freqs)
        o = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
                                           is_causal=True, enable_gqa=True)
        x = x + self.wo(o.transpose(1, 2).reshape(b, t, -1))
        g, u = self.w13(self.ln2(x)).chunk(2, dim=-1)
        return x + self.w2(F.silu(g) * u)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(N_LAYERS))
        self.ln_f = nn.RMSNorm(DIM, eps=1e-5)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids, freqs):
        x = self.emb(ids)
        for i, blk in enumerate(self.blocks):
            with save_on_cpu(pin_memory=True):
                if i < N_OFFLOAD:
                    x = blk(x, freqs)
                else:
                    x = checkpoint(blk, x, freqs, use_reentrant=False)
        return self.ln_f(x)

    def loss(self, ids, targets, freqs, n_chunks=4):
        h = self.forward(ids, freqs)
        total = h.new_zeros((), dtype=torch.float32)

        def ce(hc, tc):
            return F.cross_entropy(self.head(hc).float(), tc, reduction="sum")

        for hc, tc in zip(h.flatten(0, 1).chunk(n_chunks), targets.flatten().chunk(n_chunks)):
            total = total + checkpoint(ce, hc, tc, use_reentrant=False)
        return total / targets.numel()


class HostLion:
    """Lion whose only state is a bf16 momentum in pinned host memory."""

    def __init__(self, model):
        params = [p for p in model.parameters() if p.requires_grad]
        n = sum(p.numel() for p in params)
        self.flat = torch.empty(n, dtype=DTYPE, pin_memory=True).zero_()
        self.slots, off = {}, 0
        for p in params:
            self.slots[p] = self.flat[off:off + p.numel()].view_as(p)
            off += p.numel()
            p.register_post_accumulate_grad_hook(self.hook)
        self.n_updates = 0

    @torch.no_grad()
    def hook(self, p):
        host = self.slots[p]
        m = host.to("cuda", non_blocking=True)
        update = torch.lerp(p.grad, m, BETA1).sign_()
        p.mul_(1 - LR * WD).add_(update, alpha=-LR)
        m.lerp_(p.grad, 1 - BETA2)
        host.copy_(m, non_blocking=True)
        p.grad = None
        self.n_updates += 1


def main():
    torch.manual_seed(0)
    torch.set_default_dtype(DTYPE)
    with torch.device("cuda"):
        model = Decoder()
    torch.set_default_dtype(torch.float32)
    for p in model.parameters():
        if p.dim() == 2:
            nn.init.normal_(p, std=0.02)
    n = sum(p.numel() for p in model.parameters())
    print(f"{n / 1e9:.2f}B params, weights on device: {mib(torch.cuda.memory_allocated())}")

    opt = HostLion(model)
    print(f"momentum on host: {mib(opt.flat.nbytes)}")
    freqs = rope_cache(SEQ, DIM // N_HEADS)
    gen = torch.Generator().manual_seed(1)

    for step in range(STEPS):
        t = time.time()
        chunk = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=gen).pin_memory().cuda(non_blocking=True)
        loss = model.loss(chunk[:, :-1], chunk[:, 1:], freqs)
        at_fwd = torch.cuda.memory_allocated()
        loss.backward()
        torch.cuda.synchronize()
        s = torch.cuda.memory_stats()
        print(f"step {step} loss {loss.item():.3f} {time.time() - t:.2f}s  after fwd {mib(at_fwd)}  "
              f"alloc peak {mib(s['allocated_bytes.all.peak'])}  requested peak {mib(s['requested_bytes.all.peak'])}  "
              f"active peak {mib(s['active_bytes.all.peak'])}  inactive split {mib(s['inactive_split_bytes.all.current'])}  "
              f"segments {s['segment.all.current']}  retries {s['num_alloc_retries']}")

    print(f"{opt.n_updates} tensor updates in hooks")
    print(torch.cuda.memory_summary(abbreviated=True))
    print("max_memory_allocated", torch.cuda.max_memory_allocated())
    print("max_memory_reserved", torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    main()
