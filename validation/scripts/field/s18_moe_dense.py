"""Mixture of experts, top-2 routing with dense dispatch/combine einsums (GShard style), Muon + AdamW."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
dev = torch.device("cuda")
D, FF, E, K, T, B, V = 512, 1536, 8, 2, 512, 8, 8192
CAP = int(1.25 * K * T / E)


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.w1 = nn.Parameter(torch.randn(E, D, FF) * D ** -0.5)
        self.w2 = nn.Parameter(torch.randn(E, FF, D) * FF ** -0.5)

    def forward(self, x):
        probs = F.softmax(self.gate(x).float(), dim=-1)
        top, idx = probs.topk(K, dim=-1)
        top = top / top.sum(-1, keepdim=True)
        onehot = F.one_hot(idx, E).to(x.dtype)                     # B T K E
        flat = onehot.transpose(1, 2).reshape(x.size(0), K * x.size(1), E)
        pos = (flat.cumsum(1) - flat).view(x.size(0), K, x.size(1), E).transpose(1, 2)
        pos = (pos * onehot).sum(-1)                                # B T K
        keep = (pos < CAP).to(x.dtype)
        slot = F.one_hot(pos.long().clamp(max=CAP - 1), CAP).to(x.dtype) * keep.unsqueeze(-1)
        combine = torch.einsum("btk,btke,btkc->btec", top.to(x.dtype), onehot, slot)
        dispatch = (combine > 0).to(x.dtype)
        h = torch.einsum("btec,btd->ebcd", dispatch, x)
        h = F.gelu(torch.einsum("ebcd,edf->ebcf", h, self.w1))
        h = torch.einsum("ebcf,efd->ebcd", h, self.w2)
        y = torch.einsum("btec,ebcd->btd", combine, h)
        load = onehot.sum(2).mean((0, 1))
        aux = E * (load * probs.mean((0, 1))).sum()
        return y, aux


class Block(nn.Module):
    def __init__(self, moe):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.att = nn.MultiheadAttention(D, 8, batch_first=True, bias=False)
        self.moe = MoE() if moe else None
        self.ff = None if moe else nn.Sequential(nn.Linear(D, FF), nn.GELU(), nn.Linear(FF, D))

    def forward(self, x, mask):
        h = self.n1(x)
        x = x + self.att(h, h, h, attn_mask=mask, need_weights=False, is_causal=True)[0]
        if self.moe is None:
            return x + self.ff(self.n2(x)), x.new_zeros(())
        y, aux = self.moe(self.n2(x))
        return x + y, aux


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(V, D)
        self.blocks = nn.ModuleList(Block(i % 2 == 1) for i in range(8))
        self.head = nn.Linear(D, V, bias=False)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.size(1), device=ids.device)
        x, aux = self.emb(ids), 0.0
        for b in self.blocks:
            x, a = b(x, mask)
            aux = aux + a
        return self.head(x), aux


model = LM().to(dev)
matrices = [p for n, p in model.blocks.named_parameters() if p.ndim == 2]
ids_m = {id(p) for p in matrices}
others = [p for p in model.parameters() if id(p) not in ids_m]
opts = [torch.optim.Muon(matrices, lr=2e-2, weight_decay=0.1), torch.optim.AdamW(others, lr=3e-4)]
for step in range(8):
    ids = torch.randint(0, V, (B, T + 1), device=dev)
    logits, aux = model(ids[:, :-1])
    loss = F.cross_entropy(logits.reshape(-1, V), ids[:, 1:].reshape(-1)) + 0.01 * aux
    loss.backward()
    for o in opts:
        o.step()
    for o in opts:
        o.zero_grad()
    print(f"step {step} loss {loss.item():.4f}")

print("max_memory_allocated", torch.cuda.max_memory_allocated())
print("max_memory_reserved", torch.cuda.max_memory_reserved())
