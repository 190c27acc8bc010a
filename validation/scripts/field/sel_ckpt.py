"""torch.utils.checkpoint with selective policies, ModernBERT-like pre-norm blocks."""
import sys
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

KIND = sys.argv[1]          # selective | sequential | everyother
aten = torch.ops.aten
SAVE = {aten.mm.default, aten.addmm.default, aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default, aten._scaled_dot_product_cudnn_attention.default}


def policy(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op in SAVE else CheckpointPolicy.PREFER_RECOMPUTE


class GEGLU(nn.Module):
    def __init__(self, d, f):
        super().__init__()
        self.i, self.o = nn.Linear(d, 2 * f, bias=False), nn.Linear(f, d, bias=False)

    def forward(self, x):
        a, b = self.i(x).chunk(2, -1)
        return self.o(F.gelu(a) * b)


class Layer(nn.Module):
    def __init__(self, d=1024, h=16, f=2624):
        super().__init__()
        self.h = h
        self.n1, self.n2 = nn.LayerNorm(d, bias=False), nn.LayerNorm(d, bias=False)
        self.wqkv, self.wo, self.ff = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False), GEGLU(d, f)

    def forward(self, x):
        b, s, d = x.shape
        q, k, v = (t.view(b, s, self.h, -1).transpose(1, 2) for t in self.wqkv(self.n1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0)
        x = x + F.dropout(self.wo(y.transpose(1, 2).reshape(b, s, d)), 0.1, self.training)
        return x + self.ff(self.n2(x))


layers = nn.Sequential(*[Layer() for _ in range(16)]).cuda()
emb = nn.Embedding(50368, 1024).cuda()
opt = torch.optim.AdamW([*layers.parameters(), *emb.parameters()], lr=1e-4, weight_decay=1e-5)
for it in range(4):
    ids = torch.randint(50368, (8, 1024), device="cuda")
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[:, ::4] = True
    with torch.autocast("cuda", torch.bfloat16):
        x = emb(ids.masked_fill(mask, 4))
        if KIND == "selective":
            for l in layers:
                x = checkpoint(l, x, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, policy))
        elif KIND == "sequential":
            x = checkpoint_sequential(layers, 4, x, use_reentrant=False)
        else:
            for i, l in enumerate(layers):
                x = checkpoint(l, x, use_reentrant=False, preserve_rng_state=False) if i % 2 else l(x)
        logits = F.linear(x[:, ::4], emb.weight)
        loss = F.cross_entropy(logits.reshape(-1, 50368), ids[:, ::4].reshape(-1))
    loss.backward()
    opt.step()
    opt.zero_grad()
    print(it, loss.item(), torch.cuda.max_memory_allocated() / 2**30)
