"""
Tiny GPT from scratch: train a few steps on a GPU-resident token tensor, then sample with a KV cache.
"""
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class Config:
    vocab: int = 32768
    ctx: int = 1024
    d: int = 1024
    heads: int = 16
    layers: int = 12
    dropout: float = 0.1


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.h = c.heads
        self.p = c.dropout
        self.qkv = nn.Linear(c.d, 3 * c.d, bias=False)
        self.proj = nn.Linear(c.d, c.d, bias=False)
        self.drop = nn.Dropout(c.dropout)

    def forward(self, x, cache=None):
        B, T, C = x.shape
        q, k, v = self.qkv(x).split(C, dim=2)
        q = q.view(B, T, self.h, -1).transpose(1, 2)
        k = k.view(B, T, self.h, -1).transpose(1, 2)
        v = v.view(B, T, self.h, -1).transpose(1, 2)
        if cache is not None:
            if "k" in cache:
                k = torch.cat([cache["k"], k], dim=2)
                v = torch.cat([cache["v"], v], dim=2)
            cache["k"], cache["v"] = k, v
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=(T > 1), dropout_p=self.p if self.training else 0.0
        )
        y = y.transpose(1, 2).reshape(B, T, C)
        return self.drop(self.proj(y))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln1 = nn.LayerNorm(c.d)
        self.attn = Attention(c)
        self.ln2 = nn.LayerNorm(c.d)
        self.mlp = nn.Sequential(
            nn.Linear(c.d, 4 * c.d), nn.GELU(), nn.Linear(4 * c.d, c.d), nn.Dropout(c.dropout)
        )

    def forward(self, x, cache=None):
        x = x + self.attn(self.ln1(x), cache)
        x = x + self.mlp(self.ln2(x))
        return x


class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.tok = nn.Embedding(c.vocab, c.d)
        self.pos = nn.Embedding(c.ctx, c.d)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.lnf = nn.LayerNorm(c.d)
        self.head = nn.Linear(c.d, c.vocab, bias=False)
        self.head.weight = self.tok.weight
        self.apply(self._init)
        for n, p in self.named_parameters():
            if n.endswith("proj.weight"):
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * c.layers))

    def _init(self, m):
        if isinstance(m, (nn.Linear, nn.Embedding)):
            nn.init.normal_(m.weight, std=0.02)
            if getattr(m, "bias", None) is not None:
                nn.init.zeros_(m.bias)

    def forward(self, idx, targets=None, caches=None, start=0):
        T = idx.shape[1]
        pos = torch.arange(start, start + T, device=idx.device)
        x = self.tok(idx) + self.pos(pos)
        for i, b in enumerate(self.blocks):
            x = b(x, caches[i] if caches is not None else None)
        x = self.lnf(x)
        if targets is None:
            return self.head(x[:, -1:])
        logits = self.head(x)
        return F.cross_entropy(logits.float().view(-1, logits.size(-1)), targets.reshape(-1))

    @torch.no_grad()
    def sample(self, idx, n, temperature=0.8, top_k=50):
        caches = [dict() for _ in self.blocks]
        cur, start = idx, 0
        for _ in range(n):
            logits = self(cur, caches=caches, start=start)[:, -1] / temperature
            start += cur.shape[1]
            v, _ = torch.topk(logits, top_k)
            logits[logits < v[:, [-1]]] = -float("inf")
            probs = F.softmax(logits.float(), dim=-1)
            cur = torch.multinomial(probs, 1)
            idx = torch.cat([idx, cur], dim=1)
        return idx


def main():
    torch.manual_seed(1337)
    torch.set_float32_matmul_precision("high")
    dev = "cuda"
    c = Config()
    model = GPT(c).to(dev)
    print(f"params {sum(p.numel() for p in model.parameters())/1e6:.1f}M")

    data = torch.randint(0, c.vocab, (2_000_000,), device=dev)

    decay = [p for p in model.parameters() if p.dim() >= 2]
    nodecay = [p for p in model.parameters() if p.dim() < 2]
    opt = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": nodecay, "weight_decay": 0.0}],
        lr=6e-4, betas=(0.9, 0.95), fused=True,
    )

    def get_batch(bs):
        ix = torch.randint(len(data) - c.ctx - 1, (bs,))
        x = torch.stack([data[i:i + c.ctx] for i in ix])
        y = torch.stack([data[i + 1:i + 1 + c.ctx] for i in ix])
        return x, y

    for step in range(5):
        for g in opt.param_groups:
            g["lr"] = 6e-4 * min(1.0, (step + 1) / 3)
        x, y = get_batch(12)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(x, y)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        print(step, f"{loss.item():.3f}", f"{norm.item():.3f}",
              torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())

    model.eval()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = model.sample(data[:8 * 64].view(8, 64), 48)
    print(out.shape)
    print("final", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    main()
