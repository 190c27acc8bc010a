"""GPT-ish LM with a hand written linear+cross entropy that never holds all logits."""
import math, sys
import torch
from torch import nn
import torch.nn.functional as F

V, D, L, H, S, B = 65536, 1024, 8, 16, 1024, 8
MODE = sys.argv[1] if len(sys.argv) > 1 else "chunked"


class LinearCE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, target, chunks):
        dx = torch.empty_like(x)
        dw = torch.zeros_like(w, dtype=torch.float32)
        loss = x.new_zeros((), dtype=torch.float32)
        n = x.shape[0]
        for xc, tc, dxc in zip(x.chunk(chunks), target.chunk(chunks), dx.chunk(chunks)):
            logits = (xc @ w.t()).float()
            lse = logits.logsumexp(-1)
            loss += (lse - logits.gather(1, tc[:, None]).squeeze(1)).sum()
            logits.sub_(lse[:, None]).exp_()
            logits.scatter_add_(1, tc[:, None], torch.full_like(logits[:, :1], -1.0))
            logits.mul_(1.0 / n)
            g = logits.to(x.dtype)
            torch.mm(g, w, out=dxc)
            dw += g.t() @ xc
        ctx.save_for_backward(dx, dw.to(w.dtype))
        return loss / n

    @staticmethod
    def backward(ctx, go):
        dx, dw = ctx.saved_tensors
        return dx * go, dw * go, None, None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(D), nn.RMSNorm(D)
        self.qkv, self.o = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.w1, self.w2, self.w3 = nn.Linear(D, 2816, bias=False), nn.Linear(2816, D, bias=False), nn.Linear(D, 2816, bias=False)

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, s, 3, H, D // H).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, D))
        h = self.n2(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(V, D), nn.Embedding(S, D)
        self.blocks = nn.ModuleList(Block() for _ in range(L))
        self.norm = nn.RMSNorm(D)
        self.head = nn.Linear(D, V, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, ids):
        x = self.tok(ids) + self.pos.weight[: ids.shape[1]]
        for b in self.blocks:
            x = b(x)
        return self.norm(x)


model = LM().to("cuda", torch.bfloat16)
opt = torch.optim.AdamW(model.parameters(), 3e-4, betas=(0.9, 0.95), fused=True)
for it in range(5):
    data = torch.randint(V, (B, S + 1), device="cuda")
    h = model(data[:, :-1])
    t = data[:, 1:].reshape(-1)
    if MODE == "chunked":
        loss = LinearCE.apply(h.reshape(-1, D), model.head.weight, t, 8)
    else:
        loss = F.cross_entropy(model.head(h).float().view(-1, V), t)
    loss.backward()
    opt.step()
    opt.zero_grad(set_to_none=True)
    print(it, round(loss.item(), 3), f"{torch.cuda.max_memory_allocated()/2**30:.2f}")
