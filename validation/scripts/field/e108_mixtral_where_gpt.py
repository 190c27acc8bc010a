"""nanoGPT-flavoured language model with Mixtral-style sparse FFNs.
Each expert picks its own tokens with torch.where and scatters back with index_add_."""
import math, time
from dataclasses import dataclass
import torch
import torch.nn as nn
import torch.nn.functional as F

# -----------------------------------------------------------------------------
batch_size = 16; block_size = 512
max_iters = 8
eval_interval = 4; eval_iters = 2; learning_rate = 6e-4
grad_clip = 1.0; device = 'cuda'
# -----------------------------------------------------------------------------
torch.manual_seed(1337)
torch.backends.cuda.matmul.allow_tf32 = True


@dataclass
class GPTConfig:
    vocab_size: int = 16384; block_size: int = block_size
    n_layer: int = 8; n_head: int = 12
    n_embd: int = 768
    n_inner: int = 2048
    n_expert: int = 8; top_k: int = 2
    aux_coef: float = 0.01


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


class Expert(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(c.n_embd, c.n_inner, bias=False) for _ in range(2))
        self.w2 = nn.Linear(c.n_inner, c.n_embd, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class SparseMoE(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.n_expert, self.top_k = c.n_expert, c.top_k
        self.gate = nn.Linear(c.n_embd, c.n_expert, bias=False)
        self.experts = nn.ModuleList([Expert(c) for _ in range(c.n_expert)])

    def forward(self, x):
        B, T, C = x.shape
        x = x.reshape(-1, C)
        probs = F.softmax(self.gate(x), dim=-1, dtype=torch.float)
        weights, selected = torch.topk(probs, self.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)

        out = torch.zeros_like(x)
        expert_mask = F.one_hot(selected, self.n_expert).permute(2, 1, 0)   # (E, K, N)
        for e in range(self.n_expert):
            slot, tok = torch.where(expert_mask[e])
            if tok.shape[0] == 0:
                continue
            h = self.experts[e](x[tok]) * weights[tok, slot, None]
            out.index_add_(0, tok, h.to(out.dtype))

        frac = expert_mask.float().mean(dim=(1, 2)) * self.top_k
        aux = self.n_expert * (frac * probs.mean(0)).sum()
        return out.view(B, T, C), aux


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln_1, self.ln_2 = nn.RMSNorm(c.n_embd), nn.RMSNorm(c.n_embd)
        self.attn, self.moe = CausalSelfAttention(c), SparseMoE(c)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        y, aux = self.moe(self.ln_2(x))
        return x + y, aux


class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.wte = nn.Embedding(c.vocab_size, c.n_embd)
        self.wpe = nn.Embedding(c.block_size, c.n_embd)
        self.h = nn.ModuleList([Block(c) for _ in range(c.n_layer)])
        self.ln_f = nn.RMSNorm(c.n_embd)
        self.lm_head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight
        self.apply(lambda m: nn.init.normal_(m.weight, std=0.02) if isinstance(m, (nn.Linear, nn.Embedding)) else None)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        aux_total = 0.0
        for blk in self.h:
            x, aux = blk(x)
            aux_total = aux_total + aux
        logits = self.lm_head(self.ln_f(x))
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return loss, self.c.aux_coef * aux_total / len(self.h)


# synthetic "corpus": zipfian tokens with local repetition
config = GPTConfig()
zipf = 1.0 / torch.arange(1, config.vocab_size + 1).float()
corpus = torch.multinomial(zipf, 400_000, replacement=True)
rep = torch.rand(corpus.numel()) < 0.3
corpus[8:][rep[8:]] = corpus[:-8][rep[8:]]
splits = {'train': corpus[:360_000], 'val': corpus[360_000:]}


def get_batch(split):
    data = splits[split]
    ix = torch.randint(len(data) - block_size - 1, (batch_size,))
    x = torch.stack([data[i:i + block_size] for i in ix])
    y = torch.stack([data[i + 1:i + 1 + block_size] for i in ix])
    return x.to(device, non_blocking=True), y.to(device, non_blocking=True)


model = GPT(config).to(device)
print(f"{sum(p.numel() for p in model.parameters())/1e6:.1f}M params")
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
sched = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda it: min(1.0, (it + 1) / 3) * 0.5 * (1 + math.cos(math.pi * it / max_iters)))

for it in range(max_iters):
    t0 = time.time()
    X, Y = get_batch('train')
    with torch.autocast('cuda', dtype=torch.bfloat16):
        lm, aux = model(X, Y)
    (lm + aux).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    sched.step()
    optimizer.zero_grad(set_to_none=True)
    print(f"iter {it}: loss {lm.item():.4f}, aux {aux.item():.4f}, norm {norm:.2f}, {1e3*(time.time()-t0):.0f}ms")

    if (it + 1) % eval_interval == 0:
        model.eval()
        with torch.no_grad(), torch.autocast('cuda', dtype=torch.bfloat16):
            val = torch.stack([model(*get_batch('val'))[0] for _ in range(eval_iters)]).mean()
        model.train()
        print(f"  val loss {val.item():.4f} ppl {val.exp().item():.1f}")

print("max_memory_allocated", torch.cuda.max_memory_allocated())
print("max_memory_reserved ", torch.cuda.max_memory_reserved())
