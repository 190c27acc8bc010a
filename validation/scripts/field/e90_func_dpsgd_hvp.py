# Playground for torch.func: DP-SGD, curvature, ensembles; and nested checkpointing at the end.
import copy
import math

import torch
from torch import nn
from torch.func import functional_call, grad, grad_and_value, jvp, stack_module_state, vjp, vmap
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

dev = "cuda"
torch.manual_seed(7)
torch.set_float32_matmul_precision("high")

V, T, D, H, L = 8192, 128, 320, 5, 5
B_DP = 192


def report(what):
    torch.cuda.synchronize()
    a, r = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    print(f"[{what:>12}] max allocated {a} ({a / 2**30:.2f} GiB), max reserved {r} ({r / 2**30:.2f} GiB)")


class Attn(nn.Module):
    # written out by hand: the fused kernels have no forward-mode derivative
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.qkv = nn.Linear(d, 3 * d)
        self.out = nn.Linear(d, d)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        *lead, t, d = x.shape
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k, v = (z.reshape(*lead, t, self.h, d // self.h).transpose(-2, -3) for z in (q, k, v))
        s = q @ k.transpose(-1, -2) / math.sqrt(d // self.h)
        mask = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
        p = self.drop(s.masked_fill(mask, -1e9).softmax(-1))
        return self.out((p @ v).transpose(-2, -3).reshape(*lead, t, d))


class Layer(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn = Attn(d, h)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x):
        x = x + self.attn(self.n1(x))
        return x + self.mlp(self.n2(x))


class TinyLM(nn.Module):
    def __init__(self, d=D, h=H, n=L):
        super().__init__()
        self.tok = nn.Embedding(V, d)
        self.pos = nn.Parameter(torch.randn(T, d) * 0.02)
        self.layers = nn.Sequential(*[Layer(d, h) for _ in range(n)])
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, V, bias=False)

    def forward(self, ids):
        return self.head(self.norm(self.layers(self.tok(ids) + self.pos)))


# ---------------------------------------------------------------- 1. DP-SGD
model = TinyLM().to(dev)
params = {k: v.detach() for k, v in model.named_parameters()}
n_par = sum(p.numel() for p in params.values())
print(f"{n_par / 1e6:.1f}M parameters, per-sample gradients take {4 * n_par * B_DP / 2**30:.2f} GiB")


def sample_loss(p, ids):
    logits = functional_call(model, p, (ids[None, :-1],))
    return F.cross_entropy(logits.flatten(0, 1), ids[1:])


per_sample = vmap(grad_and_value(sample_loss), in_dims=(None, 0), randomness="different")
clip, sigma, lr = 1.0, 0.8, 0.1
momentum = {k: torch.zeros_like(v) for k, v in params.items()}
for it in range(4):
    ids = torch.randint(0, V, (B_DP, T + 1), device=dev)
    gs, losses = per_sample(params, ids)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in gs.values()]).norm(dim=0)
    factor = (clip / (norms + 1e-6)).clamp(max=1.0)
    for k in params:
        g = torch.einsum("b,b...->...", factor, gs[k])
        g += torch.randn_like(g) * sigma * clip
        momentum[k].mul_(0.9).add_(g / B_DP)
        params[k] = params[k] - lr * momentum[k]
    print(f"  dp step {it}: loss {losses.mean().item():.4f}, mean grad norm {norms.mean().item():.3f}")
report("dp-sgd")
del gs, g, momentum

# ---------------------------------------------------------------- 2. Hessian-vector products
torch.cuda.reset_peak_memory_stats()
model.eval()     # no dropout for curvature
ids = torch.randint(0, V, (48, T + 1), device=dev)


def batch_loss(p):
    logits = functional_call(model, p, (ids[:, :-1],))
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def hvp_fwd_over_rev(p, v):
    return jvp(grad(batch_loss), (p,), (v,))[1]


def hvp_rev_over_rev(p, v):
    _, pullback = vjp(grad(batch_loss), p)
    return pullback(v)[0]


def tnorm(tree):
    return math.sqrt(sum(t.pow(2).sum().item() for t in tree.values()))


v = {k: torch.randn_like(p) for k, p in params.items()}
for it in range(3):                      # power iteration
    nv = tnorm(v)
    v = {k: t / nv for k, t in v.items()}
    v = hvp_fwd_over_rev(params, v)
    print(f"  power iteration {it}: |Hv| = {tnorm(v):.4f}")
report("jvp(grad)")
torch.cuda.reset_peak_memory_stats()
print(f"  vjp(grad): |Hv| = {tnorm(hvp_rev_over_rev(params, v)):.4f}")
report("vjp(grad)")
del v, params

# ---------------------------------------------------------------- 3. ensemble of MLPs
torch.cuda.reset_peak_memory_stats()
E, F_IN, WIDTH, N = 12, 512, 2048, 4096
members = [nn.Sequential(nn.Linear(F_IN, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.SiLU(),
                         nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 16)).to(dev) for _ in range(E)]
stacked, buffers = stack_module_state(members)
skeleton = copy.deepcopy(members[0]).to("meta")
opt = torch.optim.Adam(stacked.values(), lr=1e-3)
forward = vmap(lambda p, b, x: functional_call(skeleton, (p, b), (x,)), in_dims=(0, 0, None))
for it in range(10):
    x, y = torch.randn(N, F_IN, device=dev), torch.randn(N, 16, device=dev)
    pred = forward(stacked, buffers, x)
    loss = (pred - y).square().mean(dim=(1, 2)).sum()
    opt.zero_grad()
    loss.backward()
    opt.step()
print(f"  ensemble: loss {loss.item() / E:.4f}, disagreement {pred.var(0).mean().item():.5f}")
report("ensemble")
del members, stacked, buffers, opt, pred, loss, forward

# ---------------------------------------------------------------- 4. nested checkpointing
torch.cuda.reset_peak_memory_stats()
deep = nn.ModuleList([nn.ModuleList([Layer(768, 12) for _ in range(4)]) for _ in range(6)]).to(dev)
opt = torch.optim.SGD(deep.parameters(), lr=1e-3, momentum=0.9)


def inner(group, x):
    for layer in group:
        x = checkpoint(layer, x, use_reentrant=False)
    return x


for it in range(3):
    h = torch.randn(32, 256, 768, device=dev, requires_grad=True)
    out = h
    for group in deep:
        out = checkpoint(inner, group, out, use_reentrant=False)
    out.pow(2).mean().backward()
    opt.step()
    opt.zero_grad()
report("nested ckpt")
