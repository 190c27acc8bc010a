import torch
import torch.nn as nn
import torch.nn.functional as F

# Switch/Mixtral style MoE with fixed capacity (tokens over it are dropped) -> static shapes

class Router(nn.Module):
    def __init__(self, d, n_exp, k):
        super().__init__()
        self.w = nn.Linear(d, n_exp, bias=False)
        self.k = k

    def forward(self, x):
        logits = self.w(x.float())
        probs = logits.softmax(-1)
        top, idx = probs.topk(self.k, dim=-1)
        top = top / top.sum(-1, keepdim=True)
        n = probs.size(-1)
        load = F.one_hot(idx, n).float().mean((0, 1))
        aux = n * (load * probs.mean(0)).sum() + 1e-3 * logits.logsumexp(-1).square().mean()
        return top, idx, aux


class MoE(nn.Module):
    def __init__(self, d=768, f=2048, n_exp=16, k=2, cap=1.25):
        super().__init__()
        self.router = Router(d, n_exp, k)
        self.w1 = nn.Parameter(torch.randn(n_exp, d, f) * d ** -.5)
        self.w2 = nn.Parameter(torch.randn(n_exp, f, d) * f ** -.5)
        self.n, self.k, self.cap = n_exp, k, cap

    def forward(self, x):
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        top, idx, aux = self.router(x)
        C = int(self.cap * x.size(0) * self.k / self.n)
        flat = idx.t().reshape(-1)                                  # first choices first
        pos = (F.one_hot(flat, self.n).cumsum(0) - 1).gather(1, flat[:, None]).squeeze(1)
        keep = pos < C
        slot = torch.where(keep, flat * C + pos, self.n * C)
        tok = torch.arange(x.size(0), device=x.device).repeat(self.k)
        buf = x.new_zeros(self.n * C + 1, x.size(1)).index_copy(0, slot, x[tok])
        h = torch.bmm(buf[:-1].view(self.n, C, -1), self.w1.to(x.dtype))
        h = torch.bmm(F.gelu(h), self.w2.to(x.dtype)).reshape(self.n * C, -1)
        h = torch.cat([h, h.new_zeros(1, h.size(1))])
        gate = (top.t().reshape(-1) * keep).to(x.dtype)
        out = torch.zeros_like(x).index_add(0, tok, h[slot] * gate[:, None])
        return out.view(shape), aux


class Block(nn.Module):
    def __init__(self, d=768, moe=True):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn = nn.MultiheadAttention(d, 12, batch_first=True, dropout=0.1)
        self.ff = MoE(d) if moe else nn.Sequential(nn.Linear(d, 4 * d), nn.ReLU(), nn.Linear(4 * d, d))

    def forward(self, x, mask):
        h = self.ln1(x)
        a, w = self.attn(h, h, h, attn_mask=mask)       # averaged weights come back too
        x = x + a
        h = self.ff(self.ln2(x))
        h, aux = h if isinstance(h, tuple) else (h, 0.0)
        return x + h, aux, w.detach().float().amax()


emb = nn.Embedding(30000, 768).cuda()
blocks = nn.ModuleList(Block(moe=i % 2 == 1) for i in range(6)).cuda()
opt = torch.optim.AdamW([*emb.parameters(), *blocks.parameters()], lr=1e-4)
S = 256
mask = torch.triu(torch.full((S, S), float("-inf"), device="cuda"), 1)
for it in range(5):
    ids = torch.randint(0, 30000, (16, S + 1), device="cuda")
    x, aux_total, stats = emb(ids[:, :-1]), 0.0, []
    for b in blocks:
        x, aux, st = b(x, mask)
        aux_total = aux_total + aux
        stats.append(st)
    loss = F.cross_entropy((x @ emb.weight.T).flatten(0, 1), ids[:, 1:].flatten()) + 0.01 * aux_total
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(it, loss.item(), torch.stack(stats).tolist())
