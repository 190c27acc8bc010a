"""Switch/GShard-like sparse MoE LM.  --impl dispatch : einsum with capacity; --impl loop : gather per expert"""
import argparse, math
import torch
from torch import nn, einsum
from torch.nn import functional as F


class DispatchMoE(nn.Module):
    def __init__(self, d, ff, E, k, cf):
        super().__init__()
        self.E, self.k, self.cf = E, k, cf
        self.gate = nn.Linear(d, E, bias=False)
        self.w1 = nn.Parameter(torch.randn(E, d, ff) / math.sqrt(d))
        self.w2 = nn.Parameter(torch.randn(E, ff, d) / math.sqrt(ff))

    def forward(self, x):
        B, T, D = x.shape
        x = x.reshape(-1, D)
        N = x.size(0)
        with torch.autocast("cuda", enabled=False):
            logits = F.linear(x.float(), self.gate.weight.float())
            probs = logits.softmax(-1)
        cap = int(math.ceil(self.cf * self.k * N / self.E))
        topv, topi = probs.topk(self.k, dim=-1)
        topv = topv / topv.sum(-1, keepdim=True)
        oh = F.one_hot(topi, self.E)                                     # N k E
        pos = (oh.transpose(0, 1).reshape(-1, self.E).cumsum(0) - 1).view(self.k, N, self.E).transpose(0, 1)
        pos = (pos * oh).sum(-1)                                         # N k
        keep = pos < cap
        flat = (topi * cap + pos).masked_fill(~keep, self.E * cap)
        buf = torch.zeros(self.E * cap + 1, D, device=x.device, dtype=x.dtype)
        buf = buf.index_add(0, flat.reshape(-1), x.repeat_interleave(self.k, 0))
        h = buf[:-1].view(self.E, cap, D)
        h = F.gelu(torch.bmm(h, self.w1))
        h = torch.bmm(h, self.w2).view(self.E * cap, D)
        h = torch.cat([h, h.new_zeros(1, D)])
        out = h[flat] * topv.unsqueeze(-1).to(h.dtype)
        out = out.sum(1)
        frac = oh[:, 0].float().mean(0)
        aux = self.E * (frac * probs.mean(0)).sum()
        z = logits.logsumexp(-1).pow(2).mean()
        return out.view(B, T, D), aux + 1e-3 * z, 1 - keep.float().mean()


class LoopMoE(nn.Module):
    def __init__(self, d, ff, E, k, cf):
        super().__init__()
        self.E, self.k, self.cf = E, k, cf
        self.gate = nn.Linear(d, E, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(d, ff), nn.GELU(), nn.Linear(ff, d)) for _ in range(E))

    def forward(self, x):
        B, T, D = x.shape
        x = x.reshape(-1, D)
        probs = self.gate(x).float().softmax(-1)
        cap = int(self.cf * self.k * x.size(0) / self.E)
        topv, topi = probs.topk(self.k, dim=-1)
        sel = torch.zeros_like(probs).scatter(1, topi, topv)
        out = torch.zeros_like(x)
        dropped = 0.0
        for e, expert in enumerate(self.experts):
            w, tok = sel[:, e].topk(cap)           # each expert keeps its `cap` best tokens
            y = expert(x[tok]) * w.unsqueeze(-1)
            out = out.index_add(0, tok, y.to(out.dtype))
        aux = self.E * ((sel > 0).float().mean(0) * probs.mean(0)).sum()
        return out.view(B, T, D), aux, torch.tensor(dropped)


class Layer(nn.Module):
    def __init__(self, d, heads, moe):
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(d), nn.RMSNorm(d)
        self.attn = nn.MultiheadAttention(d, heads, batch_first=True)
        self.moe = moe

    def forward(self, x, mask):
        h = self.n1(x)
        x = x + self.attn(h, h, h, attn_mask=mask, is_causal=True, need_weights=False)[0]
        y, aux, drop = self.moe(self.n2(x))
        return x + y, aux, drop


class LM(nn.Module):
    def __init__(self, a):
        super().__init__()
        cls = DispatchMoE if a.impl == "dispatch" else LoopMoE
        self.emb = nn.Embedding(a.vocab, a.d)
        self.pos = nn.Parameter(torch.zeros(1, a.seq, a.d))
        self.layers = nn.ModuleList(Layer(a.d, 8, cls(a.d, 4 * a.d, a.experts, a.k, a.cf)) for _ in range(a.layers))
        self.norm = nn.RMSNorm(a.d)
        self.register_buffer("mask", torch.triu(torch.full((a.seq, a.seq), float("-inf")), 1), persistent=False)

    def forward(self, ids):
        x = self.emb(ids) + self.pos
        aux, drops = 0.0, []
        for l in self.layers:
            x, a, d = l(x, self.mask)
            aux = aux + a
            drops.append(d)
        return self.norm(x) @ self.emb.weight.t(), aux, drops


p = argparse.ArgumentParser()
p.add_argument("--impl", default="dispatch")
p.add_argument("--d", type=int, default=512)
p.add_argument("--layers", type=int, default=4)
p.add_argument("--experts", type=int, default=8)
p.add_argument("--k", type=int, default=2)
p.add_argument("--cf", type=float, default=1.25)
p.add_argument("--seq", type=int, default=512)
p.add_argument("--bs", type=int, default=8)
p.add_argument("--vocab", type=int, default=16384)
a = p.parse_args()
torch.manual_seed(0)
m = LM(a).cuda()
print("params %.1fM" % (sum(q.numel() for q in m.parameters()) / 1e6))
opt = torch.optim.AdamW(m.parameters(), lr=3e-4, betas=(0.9, 0.95), foreach=True)
for s in range(7):
    t = torch.randint(a.vocab, (a.bs, a.seq), device="cuda")
    with torch.autocast(device_type="cuda", dtype=torch.bfloat16):
        logits, aux, drops = m(t)
        ce = F.cross_entropy(logits[:, :-1].reshape(-1, a.vocab), t[:, 1:].reshape(-1))
        loss = ce + 0.01 * aux
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
    print(s, "loss %.4f ce %.4f aux %.4f drop %.3f" % (loss.item(), ce.item(), float(aux), float(sum(float(d) for d in drops) / len(drops))))
