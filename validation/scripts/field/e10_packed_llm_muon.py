"""
Own decoder (RMSNorm, RoPE, SwiGLU, GQA) trained on packed documents: block-diagonal causal mask through SDPA,
per-layer torch.utils.checkpoint on every second block, Muon for matrices, AdamW for the rest.
"""
import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

DEV = "cuda"
V, D, L, H, KV, FF, T = 50304, 1280, 14, 20, 4, 3584, 2048
HD = D // H
EOT = 0


def rope_tables(T):
    inv = 1.0 / (10000 ** (torch.arange(0, HD, 2, device=DEV).float() / HD))
    f = torch.outer(torch.arange(T, device=DEV).float(), inv)
    return f.cos(), f.sin()


def apply_rope(x, cos, sin):
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class RMSNorm(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.g = nn.Parameter(torch.ones(d))

    def forward(self, x):
        xf = x.float()
        return (xf * torch.rsqrt(xf.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.g


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = RMSNorm(D), RMSNorm(D)
        self.wq = nn.Linear(D, D, bias=False)
        self.wkv = nn.Linear(D, 2 * KV * HD, bias=False)
        self.wo = nn.Linear(D, D, bias=False)
        self.w1 = nn.Linear(D, FF, bias=False)
        self.w3 = nn.Linear(D, FF, bias=False)
        self.w2 = nn.Linear(FF, D, bias=False)

    def forward(self, x, mask, cos, sin):
        B, S, _ = x.shape
        h = self.n1(x)
        q = self.wq(h).view(B, S, H, HD).transpose(1, 2)
        k, v = self.wkv(h).view(B, S, 2, KV, HD).permute(2, 0, 3, 1, 4)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        k = k.repeat_interleave(H // KV, dim=1)
        v = v.repeat_interleave(H // KV, dim=1)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.wo(o.transpose(1, 2).reshape(B, S, D))
        h = self.n2(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(V, D)
        self.layers = nn.ModuleList([Layer() for _ in range(L)])
        self.norm = RMSNorm(D)
        self.out = nn.Linear(D, V, bias=False)
        nn.init.normal_(self.emb.weight, std=0.02)
        nn.init.zeros_(self.out.weight)

    def forward(self, ids, mask, cos, sin, labels):
        x = self.emb(ids)
        for i, layer in enumerate(self.layers):
            if i % 2 == 0:
                x = checkpoint(layer, x, mask, cos, sin, use_reentrant=False)
            else:
                x = layer(x, mask, cos, sin)
        x = self.norm(x)
        # one row at a time so that only one [T, V] fp32 block is live in the forward
        losses = []
        for row, lab in zip(x, labels):
            losses.append(checkpoint(self.row_loss, row, lab, use_reentrant=False))
        return torch.stack(losses).sum() / (labels != -100).sum()

    def row_loss(self, row, lab):
        return F.cross_entropy(self.out(row).float(), lab, ignore_index=-100, reduction="sum")


def packed_batch(b):
    ids = torch.randint(1, V, (b, T), device=DEV)
    for r in range(b):
        pos = 0
        while True:
            pos += int(torch.randint(100, 700, (1,)))
            if pos >= T:
                break
            ids[r, pos] = EOT
    doc = (ids == EOT).cumsum(1)
    same = doc[:, :, None] == doc[:, None, :]
    causal = torch.ones(T, T, dtype=torch.bool, device=DEV).tril()
    mask = (same & causal)[:, None]
    labels = torch.roll(ids, -1, dims=1)
    labels[:, -1] = -100
    labels[ids == EOT] = -100
    return ids, mask, labels


def main():
    torch.manual_seed(31)
    with torch.device(DEV):
        model = Decoder()
    model = model.to(torch.bfloat16)
    mats = [p for n, p in model.named_parameters() if p.ndim == 2 and "layers" in n]
    rest = [p for n, p in model.named_parameters() if not (p.ndim == 2 and "layers" in n)]
    opts = [
        torch.optim.Muon(mats, lr=0.02, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(rest, lr=3e-4, betas=(0.9, 0.95), fused=True),
    ]
    cos, sin = rope_tables(T)
    print(sum(p.numel() for p in model.parameters()) / 1e6, "M")
    for step in range(4):
        for _ in range(2):
            ids, mask, labels = packed_batch(4)
            loss = model(ids, mask, cos, sin, labels) / 2
            loss.backward()
        for o in opts:
            o.step()
            o.zero_grad()
        print(step, 2 * loss.item(), torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    main()
