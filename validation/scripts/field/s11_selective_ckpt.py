"""Activation checkpointing: none, full (non-reentrant), or selective (save matmuls / attention)."""
import sys
from functools import partial
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, CheckpointPolicy

MODE = sys.argv[1] if len(sys.argv) > 1 else "selective"
torch.manual_seed(0)
dev = torch.device("cuda")

SAVE = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}


def policy(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op in SAVE else CheckpointPolicy.PREFER_RECOMPUTE


class SwiGLU(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(d, h, bias=False), nn.Linear(h, d, bias=False), nn.Linear(d, h, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.RMSNorm(d), nn.RMSNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.ff = SwiGLU(d, int(8 * d / 3) // 64 * 64)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.ff(self.ln2(x))


class Model(nn.Module):
    def __init__(self, v=20000, d=1024, n=12, heads=16, t=1024):
        super().__init__()
        self.emb, self.pos = nn.Embedding(v, d), nn.Embedding(t, d)
        self.layers = nn.ModuleList(Layer(d, heads) for _ in range(n))
        self.norm, self.out = nn.RMSNorm(d), nn.Linear(d, v, bias=False)

    def forward(self, ids):
        x = self.emb(ids) + self.pos.weight[: ids.size(1)]
        for i, layer in enumerate(self.layers):
            if MODE == "none" or not self.training:
                x = layer(x)
            elif MODE == "full":
                x = checkpoint(layer, x, use_reentrant=False)
            elif MODE == "alternate":
                x = checkpoint(layer, x, use_reentrant=True) if i % 2 == 0 else layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=False,
                               context_fn=partial(create_selective_checkpoint_contexts, policy))
        return self.out(self.norm(x))


model = Model().to(dev)
opt = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
for step in range(5):
    ids = torch.randint(0, 20000, (8, 1025), device=dev)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    fwd = torch.cuda.memory_allocated()
    loss.backward()
    opt.step()
    opt.zero_grad()
    print(f"{MODE} step {step} loss {loss.item():.3f} after-forward {fwd}")

print("max_memory_allocated", torch.cuda.max_memory_allocated())
print("max_memory_reserved", torch.cuda.max_memory_reserved())
