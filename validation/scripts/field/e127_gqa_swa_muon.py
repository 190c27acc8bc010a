import math
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

# GPT with grouped-query attention; even layers use a block-local sliding window, odd ones are global.
# Muon for the matrices, AdamW for the rest. Evaluation generates with a preallocated KV cache.
V, D, L, NH, NKV, W, SEQ, B = 32768, 1024, 12, 16, 4, 256, 2048, 4
STEPS, EVAL_EVERY, GEN_B, PROMPT, NEW = 6, 3, 32, 256, 24
HD = D // NH


def rotate(x, pos):
    f = 1.0 / 10000 ** (torch.arange(0, HD, 2, device=x.device) / HD)
    a = pos[:, None] * f
    c, s = a.cos().to(x.dtype), a.sin().to(x.dtype)
    x1, x2 = x.chunk(2, -1)
    return torch.cat([x1 * c - x2 * s, x1 * s + x2 * c], -1)


def sliding_window(q, k, v, w):
    """query block i looks at key blocks i-1 and i, banded so that each query sees w keys"""
    b, h, t, d = q.shape
    n = t // w
    qb = q.reshape(b, h, n, w, d)
    kb, vb = k.reshape(b, h, n, w, d), v.reshape(b, h, n, w, d)
    kk = torch.cat([F.pad(kb, (0, 0, 0, 0, 1, 0))[:, :, :-1], kb], dim=3)
    vv = torch.cat([F.pad(vb, (0, 0, 0, 0, 1, 0))[:, :, :-1], vb], dim=3)
    i = torch.arange(w, device=q.device)[:, None] + w
    j = torch.arange(2 * w, device=q.device)[None]
    band = (j <= i) & (j > i - w)
    mask = band.expand(n, w, 2 * w).clone()
    mask[0, :, :w] = False
    s = (qb @ kk.transpose(-1, -2)) / math.sqrt(d)
    s = s.masked_fill(~mask, float("-inf"))
    p = s.float().softmax(-1).to(q.dtype)
    return (p @ vv).reshape(b, h, t, d)


class Attention(nn.Module):
    def __init__(self, local):
        super().__init__()
        self.local = local
        self.wq = nn.Linear(D, NH * HD, bias=False)
        self.wkv = nn.Linear(D, 2 * NKV * HD, bias=False)
        self.wo = nn.Linear(NH * HD, D, bias=False)

    def forward(self, x, cache=None, start=0):
        b, t, _ = x.shape
        pos = torch.arange(start, start + t, device=x.device)
        q = self.wq(x).view(b, t, NH, HD).transpose(1, 2)
        k, v = self.wkv(x).view(b, t, 2, NKV, HD).permute(2, 0, 3, 1, 4)
        q, k = rotate(F.rms_norm(q, (HD,)), pos), rotate(F.rms_norm(k, (HD,)), pos)
        if cache is not None:
            cache[0][:, :, start:start + t] = k
            cache[1][:, :, start:start + t] = v
            k, v = cache[0][:, :, :start + t], cache[1][:, :, :start + t]
            kpos = torch.arange(start + t, device=x.device)
            m = kpos[None] <= pos[:, None]
            if self.local:
                m &= kpos[None] > pos[:, None] - W
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=m, enable_gqa=True)
        elif self.local:
            r = NH // NKV
            y = sliding_window(q, k.repeat_interleave(r, 1), v.repeat_interleave(r, 1), W)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).reshape(b, t, -1))


class Block(nn.Module):
    def __init__(self, local):
        super().__init__()
        self.attn = Attention(local)
        self.up = nn.Linear(D, 4 * D, bias=False)
        self.down = nn.Linear(4 * D, D, bias=False)

    def forward(self, x, cache=None, start=0):
        x = x + self.attn(F.rms_norm(x, (D,)), cache, start)
        return x + self.down(F.relu(self.up(F.rms_norm(x, (D,)))).square())


SAVE = {torch.ops.aten.mm.default, torch.ops.aten._scaled_dot_product_flash_attention.default}


def policy(ctx, op, *args, **kw):
    return CheckpointPolicy.MUST_SAVE if op in SAVE else CheckpointPolicy.PREFER_RECOMPUTE


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(V, D)
        self.blocks = nn.ModuleList([Block(i % 2 == 0) for i in range(L)])
        self.head = nn.Linear(D, V, bias=False)
        nn.init.normal_(self.head.weight, std=0.002)

    def forward(self, ids, caches=None, start=0):
        x = self.emb(ids)
        for i, blk in enumerate(self.blocks):
            if self.training:
                x = checkpoint(blk, x, use_reentrant=False,
                               context_fn=partial(create_selective_checkpoint_contexts, policy))
            else:
                x = blk(x, caches[i] if caches else None, start)
        return F.rms_norm(x, (D,))


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95, ns=5):
        super().__init__(params, dict(lr=lr, momentum=momentum, ns=ns))

    @torch.no_grad()
    def step(self):
        for g in self.param_groups:
            for p in g["params"]:
                st = self.state[p]
                if "buf" not in st:
                    st["buf"] = torch.zeros_like(p.grad)
                st["buf"].lerp_(p.grad, 1 - g["momentum"])
                u = p.grad.lerp(st["buf"], g["momentum"]).bfloat16()
                tall = u.size(0) > u.size(1)
                x = u.T if tall else u
                x = x / (x.norm() + 1e-7)
                for _ in range(g["ns"]):
                    a = x @ x.T
                    x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
                x = x.T if tall else x
                p.add_(x.to(p.dtype), alpha=-g["lr"] * max(1, p.size(0) / p.size(1)) ** 0.5)


@torch.no_grad()
def generate(model, prompt, n):
    b, t = prompt.shape
    kv = [torch.zeros(2, b, NKV, t + n, HD, device=prompt.device, dtype=torch.bfloat16) for _ in range(L)]
    out, cur, start = [prompt], prompt, 0
    for _ in range(n):
        h = model(cur, kv, start)
        start += cur.size(1)
        probs = (model.head(h[:, -1]).float() / 0.8).softmax(-1)
        cur = torch.multinomial(probs, 1)
        out.append(cur)
    return torch.cat(out, 1)


torch.manual_seed(99)
with torch.device("cuda"):
    model = GPT()
mats = [p for p in model.blocks.parameters() if p.ndim == 2]
opts = [Muon(mats), torch.optim.AdamW([model.emb.weight, model.head.weight], lr=3e-3, betas=(0.8, 0.95), fused=True)]
for step in range(1, STEPS + 1):
    model.train()
    ids = torch.randint(0, V // 16, (B, SEQ + 1), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        h = model(ids[:, :-1])
        loss = F.cross_entropy(model.head(h).flatten(0, 1).float(), ids[:, 1:].flatten())
    loss.backward()
    for o in opts:
        o.step()
        o.zero_grad()
    print(f"step {step} loss {loss.item():.4f}")
    if step % EVAL_EVERY == 0:
        model.eval()
        with torch.autocast("cuda", torch.bfloat16):
            seq = generate(model, ids[:1, :PROMPT].repeat(GEN_B, 1), NEW)
        print("generated", tuple(seq.shape), "distinct", seq[:, PROMPT:].unique().numel())
print("max_memory_allocated", torch.cuda.max_memory_allocated())
print("max_memory_reserved", torch.cuda.max_memory_reserved())
