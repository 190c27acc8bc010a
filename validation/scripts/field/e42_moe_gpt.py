"""
nanoGPT-flavoured model where every second MLP is a GShard-style mixture of experts
(top-2 routing, fixed capacity, dispatch and combine through einsum).
"""
import inspect
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F

# config -----------------------------------------------------------------
batch_size = 8
gradient_accumulation_steps = 2
block_size = 1024
max_iters = 5
learning_rate = 3e-4
min_lr = 3e-5
warmup_iters = 2
weight_decay = 0.1
grad_clip = 1.0
seed = 1337


@dataclass
class GPTConfig:
    block_size: int = 1024
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    n_experts: int = 8
    capacity_factor: float = 1.25
    aux_coef: float = 0.01
    group_size: int = 1024


class CausalSelfAttention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c_attn = nn.Linear(c.n_embd, 3 * c.n_embd, bias=False)
        self.c_proj = nn.Linear(c.n_embd, c.n_embd, bias=False)
        self.n_head = c.n_head

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c_fc = nn.Linear(c.n_embd, 4 * c.n_embd, bias=False)
        self.c_proj = nn.Linear(4 * c.n_embd, c.n_embd, bias=False)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x))), 0.0


class MoE(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.E, self.S = c.n_experts, c.group_size
        self.capacity = int(2 * c.capacity_factor * c.group_size / c.n_experts)
        self.router = nn.Linear(c.n_embd, c.n_experts, bias=False)
        self.w1 = nn.Parameter(torch.randn(c.n_experts, c.n_embd, 4 * c.n_embd) * 0.02)
        self.w2 = nn.Parameter(torch.randn(c.n_experts, 4 * c.n_embd, c.n_embd) * 0.02 / math.sqrt(2 * c.n_layer))

    def route(self, x):
        # routing in fp32; x: (G, S, M)
        with torch.autocast("cuda", enabled=False):
            gates = F.softmax(F.linear(x.float(), self.router.weight), dim=-1)      # G S E
        g1, i1 = gates.max(-1)
        m1 = F.one_hot(i1, self.E).float()
        g2, i2 = (gates * (1 - m1)).max(-1)
        m2 = F.one_hot(i2, self.E).float()
        aux = (gates.mean(1) * m1.mean(1)).sum(-1).mean() * self.E

        pos1 = torch.cumsum(m1, dim=1) * m1 - m1
        m1 = m1 * (pos1 < self.capacity)
        pos2 = (torch.cumsum(m2, dim=1) - m2 + m1.sum(1, keepdim=True)) * m2
        m2 = m2 * (pos2 < self.capacity)
        g1, g2 = g1 * m1.sum(-1), g2 * m2.sum(-1)
        denom = (g1 + g2).clamp(min=1e-9)
        g1, g2 = g1 / denom, g2 / denom
        c1 = F.one_hot((pos1 * m1).sum(-1).long(), self.capacity).float()           # G S C
        c2 = F.one_hot((pos2 * m2).sum(-1).long(), self.capacity).float()
        combine = (torch.einsum("gs,gse,gsc->gsec", g1, m1, c1)
                   + torch.einsum("gs,gse,gsc->gsec", g2, m2, c2))
        return combine, (combine > 0), aux

    def forward(self, x):
        B, T, M = x.shape
        xg = x.reshape(-1, self.S, M)
        combine, dispatch, aux = self.route(xg)
        inp = torch.einsum("gsec,gsm->egcm", dispatch.to(x.dtype), xg)
        h = F.gelu(torch.einsum("egcm,emh->egch", inp, self.w1))
        out = torch.einsum("egch,ehm->egcm", h, self.w2)
        y = torch.einsum("gsec,egcm->gsm", combine.to(out.dtype), out)
        return y.reshape(B, T, M), aux


class Block(nn.Module):
    def __init__(self, c, moe):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(c.n_embd, bias=False), nn.LayerNorm(c.n_embd, bias=False)
        self.attn = CausalSelfAttention(c)
        self.mlp = MoE(c) if moe else MLP(c)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        y, aux = self.mlp(self.ln_2(x))
        return x + y, aux


class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.wte = nn.Embedding(c.vocab_size, c.n_embd)
        self.wpe = nn.Embedding(c.block_size, c.n_embd)
        self.h = nn.ModuleList([Block(c, moe=(i % 2 == 1)) for i in range(c.n_layer)])
        self.ln_f = nn.LayerNorm(c.n_embd, bias=False)
        self.lm_head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)

    def _init_weights(self, m):
        if isinstance(m, (nn.Linear, nn.Embedding)):
            nn.init.normal_(m.weight, mean=0.0, std=0.02)

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        aux_total = 0.0
        for blk in self.h:
            x, aux = blk(x)
            aux_total = aux_total + aux
        logits = self.lm_head(self.ln_f(x))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
            loss = loss + self.c.aux_coef * aux_total
        return logits, loss

    def configure_optimizers(self):
        decay = [p for p in self.parameters() if p.dim() >= 2]
        nodecay = [p for p in self.parameters() if p.dim() < 2]
        extra = dict(fused=True) if "fused" in inspect.signature(torch.optim.AdamW).parameters else {}
        return torch.optim.AdamW([{"params": decay, "weight_decay": weight_decay},
                                  {"params": nodecay, "weight_decay": 0.0}],
                                 lr=learning_rate, betas=(0.9, 0.95), **extra)


torch.manual_seed(seed)
torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cudnn.allow_tf32 = True
device = "cuda"
ctx = torch.amp.autocast(device_type="cuda", dtype=torch.bfloat16)

with torch.device(device):
    model = GPT(GPTConfig(block_size=block_size))
print("number of parameters: %.2fM" % (sum(p.numel() for p in model.parameters()) / 1e6))
optimizer = model.configure_optimizers()
data = torch.randint(0, 50257, (200_000,))


def get_batch():
    ix = torch.randint(len(data) - block_size - 1, (batch_size,))
    x = torch.stack([data[i:i + block_size] for i in ix])
    y = torch.stack([data[i + 1:i + 1 + block_size] for i in ix])
    return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / warmup_iters
    ratio = (it - warmup_iters) / max(1, max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


X, Y = get_batch()
for it in range(max_iters):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(it)
    for micro in range(gradient_accumulation_steps):
        with ctx:
            logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch()
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(f"iter {it}: loss {loss.item() * gradient_accumulation_steps:.4f} "
          f"alloc {torch.cuda.max_memory_allocated()} reserved {torch.cuda.max_memory_reserved()}")

print("max_memory_allocated", torch.cuda.max_memory_allocated())
print("max_memory_reserved", torch.cuda.max_memory_reserved())
