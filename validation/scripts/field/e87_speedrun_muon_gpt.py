import math
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

torch.empty(1, device="cuda", requires_grad=True).backward()  # prevents a bug on some systems
torch.backends.cuda.matmul.allow_tf32 = True

# Muon optimizer
def zeropower_via_newtonschulz5(G: Tensor, steps: int) -> Tensor:
    """Quintic Newton-Schulz iteration, batched over leading dims, in bf16."""
    a, b, c = (3.4445, -4.7750, 2.0315)
    X = G.bfloat16()
    if G.size(-2) > G.size(-1):
        X = X.mT
    X = X / (X.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        A = X @ X.mT
        B = b * A + c * A @ A
        X = a * X + B @ X
    if G.size(-2) > G.size(-1):
        X = X.mT
    return X

class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, weight_decay=0.01, momentum=0.95, ns_steps=5):
        params = list(params)
        defaults = dict(lr=lr, weight_decay=weight_decay, momentum=momentum, ns_steps=ns_steps)
        groups = [dict(params=[p for p in params if p.shape == s]) for s in sorted({p.shape for p in params})]
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            params = group["params"]
            updates = []
            for p in params:
                state = self.state[p]
                if len(state) == 0:
                    state["momentum_buffer"] = torch.zeros_like(p, dtype=torch.float32)
                buf = state["momentum_buffer"]
                g = p.grad.float()
                buf.lerp_(g, 1 - group["momentum"])
                updates.append(g.lerp_(buf, group["momentum"]))  # nesterov
            O = zeropower_via_newtonschulz5(torch.stack(updates), group["ns_steps"])
            scale = max(1, params[0].size(-2) / params[0].size(-1)) ** 0.5
            for p, u in zip(params, O.unbind(0)):
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(u, alpha=-group["lr"] * scale)

# Model
def norm(x: Tensor):
    return F.rms_norm(x, (x.size(-1),))

class Rotary(nn.Module):
    def __init__(self, dim: int, max_seq_len: int):
        super().__init__()
        # half-truncate RoPE
        angular_freq = (1 / 1024) ** torch.linspace(0, 1, steps=dim // 4, dtype=torch.float32)
        angular_freq = torch.cat([angular_freq, angular_freq.new_zeros(dim // 4)])
        theta = torch.einsum("i,j->ij", torch.arange(max_seq_len, dtype=torch.float32), angular_freq)
        self.cos = nn.Buffer(theta.cos(), persistent=False)
        self.sin = nn.Buffer(theta.sin(), persistent=False)

    def forward(self, x: Tensor):
        cos, sin = self.cos[None, :x.size(-3), None, :], self.sin[None, :x.size(-3), None, :]
        x1, x2 = x.to(dtype=torch.float32).chunk(2, dim=-1)
        return torch.cat((x1 * cos + x2 * sin, x1 * (-sin) + x2 * cos), 3).type_as(x)

class Block(nn.Module):
    def __init__(self, dim: int, num_heads: int, max_seq_len: int):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        std = 0.5 * dim ** -0.5
        bound = (3 ** 0.5) * std
        self.qkv_w = nn.Parameter(torch.empty(3 * dim, dim, dtype=torch.bfloat16).uniform_(-bound, bound))
        self.o_w = nn.Parameter(torch.zeros(dim, dim, dtype=torch.bfloat16))
        self.fc_w = nn.Parameter(torch.empty(4 * dim, dim, dtype=torch.bfloat16).uniform_(-bound, bound))
        self.proj_w = nn.Parameter(torch.zeros(dim, 4 * dim, dtype=torch.bfloat16))
        self.v_lambdas = nn.Parameter(torch.tensor([0.5, 0.5]))
        self.x_lambdas = nn.Parameter(torch.tensor([1.0, 0.0]))
        self.rotary = Rotary(self.head_dim, max_seq_len)

    def attn(self, x: Tensor, ve: Tensor | None):
        B, T = x.size(0), x.size(1)
        q, k, v = F.linear(x, self.qkv_w).view(B, T, 3 * self.num_heads, self.head_dim).chunk(3, dim=-2)
        q, k = self.rotary(norm(q)), self.rotary(norm(k))
        lam = self.v_lambdas.type_as(v)
        v = lam[0] * v + lam[1] * ve.view_as(v) if ve is not None else lam[0] * v
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
                                           is_causal=True, scale=0.12)
        return F.linear(y.transpose(1, 2).reshape(B, T, -1), self.o_w)

    def forward(self, x, ve, x0):
        lam = self.x_lambdas.type_as(x)
        x = lam[0] * x + lam[1] * x0
        x = x + self.attn(norm(x), ve)
        return x + F.linear(F.relu(F.linear(norm(x), self.fc_w)).square(), self.proj_w)

class GPT(nn.Module):
    def __init__(self, vocab_size, num_layers, num_heads, dim, max_seq_len):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, dim)                                         # fp32
        self.value_embeds = nn.ModuleList([nn.Embedding(vocab_size, dim) for _ in range(3)])  # fp32
        self.blocks = nn.ModuleList([Block(dim, num_heads, max_seq_len) for _ in range(num_layers)])
        self.lm_head_w = nn.Parameter(torch.zeros(vocab_size, dim, dtype=torch.bfloat16))
        self.skip_weights = nn.Parameter(torch.ones(num_layers // 2))

    def forward(self, idx: Tensor, target: Tensor):
        L = len(self.blocks)
        ve = [e(idx).bfloat16() for e in self.value_embeds]
        ve = ve + [None] * (L - 6) + ve   # 012 ... 012
        x = x0 = norm(self.embed(idx).bfloat16())
        skips = []
        for i, block in enumerate(self.blocks):
            if i >= L // 2:
                x = x + self.skip_weights[i - L // 2].type_as(x) * skips.pop()
            x = block(x, ve[i], x0)
            if i < L // 2:
                skips.append(x)
        logits = F.linear(norm(x), self.lm_head_w).float()
        logits = 30 * torch.sigmoid(logits / (7.5 * x.size(-1) ** 0.5 / 27.7))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), target.view(-1))

@dataclass
class Hyperparameters:
    vocab_size: int = 50304
    num_layers: int = 12
    num_heads: int = 6
    model_dim: int = 768
    micro_batch: int = 6
    grad_accum: int = 3
    seq_schedule: tuple = ((1024, 4), (2048, 4), (4096, 4))   # (sequence length, number of steps)
    cooldown_frac: float = 0.4

args = Hyperparameters()
torch.manual_seed(1337)
max_len = max(s for s, _ in args.seq_schedule)
with torch.device("cuda"):
    model = GPT(args.vocab_size, args.num_layers, args.num_heads, args.model_dim, max_len)

hidden = [p for n, p in model.blocks.named_parameters() if p.ndim >= 2]
embeds = [model.embed.weight, *model.value_embeds.parameters()]
scalars = [p for p in model.parameters() if p.ndim < 2]
opt1 = torch.optim.AdamW([dict(params=[model.lm_head_w], lr=0.004), dict(params=embeds, lr=0.2),
                          dict(params=scalars, lr=0.02)], betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0, fused=True)
opt2 = Muon(hidden, lr=0.03, momentum=0.95)
optimizers = [opt1, opt2]
for g in opt1.param_groups + opt2.param_groups:
    g["initial_lr"] = g["lr"]

total = sum(n for _, n in args.seq_schedule)
tokens = torch.randint(args.vocab_size, (4_000_000,), dtype=torch.int32)
step, pos = 0, 0
t0 = time.perf_counter()
for seq_len, n_steps in args.seq_schedule:
    for _ in range(n_steps):
        for _ in range(args.grad_accum):
            need = args.micro_batch * seq_len
            buf = tokens[pos:pos + need + 1].pin_memory().to("cuda", torch.int64, non_blocking=True)
            pos = (pos + need) % (len(tokens) - args.micro_batch * max_len - 1)
            loss = model(buf[:-1].view(-1, seq_len), buf[1:].view(-1, seq_len)) / args.grad_accum
            loss.backward()
        frac = max(0.1, min(1.0, (1 - step / total) / args.cooldown_frac))
        for opt in optimizers:
            for g in opt.param_groups:
                g["lr"] = g["initial_lr"] * frac
            opt.step()
        model.zero_grad(set_to_none=True)
        step += 1
        print(f"step:{step}/{total} seq:{seq_len} loss:{loss.item() * args.grad_accum:.4f} "
              f"ppl:{math.exp(min(20, loss.item() * args.grad_accum)):.0f} t:{1000 * (time.perf_counter() - t0):.0f}ms "
              f"alloc:{torch.cuda.max_memory_allocated()} reserved:{torch.cuda.max_memory_reserved()}")

print(f"peak memory allocated: {torch.cuda.max_memory_allocated() // 1024 // 1024} MiB "
      f"reserved: {torch.cuda.max_memory_reserved() // 1024 // 1024} MiB")
