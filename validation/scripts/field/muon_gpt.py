"""modded-nanogpt flavoured: Muon for matrices, AdamW for the rest; GQA + RoPE + relu^2 + logit soft cap; varying lengths."""
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

D, H, KV, L, V = 1024, 16, 4, 10, 50304
fmt = sys.argv[1] if len(sys.argv) > 1 else "gqa"


def rope(x, cos, sin):
    x1, x2 = x.float().chunk(2, dim=-1)
    return torch.cat((x1 * cos + x2 * sin, -x1 * sin + x2 * cos), -1).type_as(x)


class Attn(nn.Module):
    def __init__(self):
        super().__init__()
        hd = D // H
        self.q, self.k, self.v = nn.Linear(D, D, bias=False), nn.Linear(D, KV * hd, bias=False), nn.Linear(D, KV * hd, bias=False)
        self.o = nn.Linear(D, D, bias=False)
        self.o.weight.data.zero_()

    def forward(self, x, cos, sin, doc):
        B, T, _ = x.shape
        q = self.q(x).view(B, T, H, -1)
        k, v = self.k(x).view(B, T, KV, -1), self.v(x).view(B, T, KV, -1)
        q, k = F.rms_norm(q, (q.size(-1),)), F.rms_norm(k, (k.size(-1),))
        q, k = rope(q, cos, sin), rope(k, cos, sin)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if doc is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            k, v = k.repeat_interleave(H // KV, 1), v.repeat_interleave(H // KV, 1)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=doc)
        return self.o(y.transpose(1, 2).reshape(B, T, D))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = Attn()
        self.up, self.down = nn.Linear(D, 4 * D, bias=False), nn.Linear(4 * D, D, bias=False)
        self.lam = nn.Parameter(torch.tensor([1.0, 0.0]))

    def forward(self, x, x0, *rest):
        x = self.lam[0] * x + self.lam[1] * x0
        x = x + self.attn(F.rms_norm(x, (D,)), *rest)
        return x + self.down(F.relu(self.up(F.rms_norm(x, (D,)))).square())


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(V, D).bfloat16()
        self.blocks = nn.ModuleList(Block() for _ in range(L))
        self.head = nn.Linear(D, V, bias=False)
        inv = (1 / 10000) ** torch.linspace(0, 1, D // H // 2)
        self.register_buffer("inv", inv, persistent=False)

    def forward(self, idx, tgt):
        T = idx.size(1)
        ang = torch.outer(torch.arange(T, device=idx.device).float(), self.inv)
        cos, sin = ang.cos()[None, :, None], ang.sin()[None, :, None]
        doc = None
        if fmt == "docmask":
            ids = (idx == 50256).cumsum(1)
            doc = (ids[:, :, None] == ids[:, None, :]).tril()[:, None]
        x = x0 = F.rms_norm(self.emb(idx), (D,))
        for b in self.blocks:
            x = b(x, x0, cos, sin, doc)
        logits = self.head(F.rms_norm(x, (D,)))
        logits = 30 * torch.tanh(logits / 30)
        return F.cross_entropy(logits.float().view(-1, V), tgt.reshape(-1))


torch.manual_seed(1337)
model = GPT().cuda()
hidden = [p for p in model.blocks.parameters() if p.ndim == 2]
other = [p for n, p in model.named_parameters() if p.ndim < 2 or not n.startswith("blocks")]
opts = [torch.optim.Muon(hidden, lr=0.02, momentum=0.95, weight_decay=0.0),
        torch.optim.AdamW(other, lr=3e-3, betas=(0.8, 0.95), fused=True)]
for step, T in enumerate([512, 768, 1024, 640, 1280]):
    batch = torch.randint(0, V, (6, T + 1)).cuda(non_blocking=True)
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(batch[:, :-1], batch[:, 1:])
    loss.backward()
    for o in opts:
        for g in o.param_groups:
            g["lr"] *= 0.95
        o.step()
    model.zero_grad(set_to_none=True)
    print(step, T, loss.item(), torch.cuda.max_memory_reserved() // 1024 // 1024, "MiB")
