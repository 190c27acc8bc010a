"""Mamba-like language model in pure torch.

* the selective scan is an autograd.Function (log-depth doubling scan, reverse scan in backward)
* odd blocks: big saved activations are parked in pinned host memory (saved_tensors_hooks)
* even blocks: reentrant checkpointing
* Adam moments live on the host between the steps
"""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

VOCAB = 16384
DIM = 768
EXPAND = 2
STATE = 16
BLOCKS = 8
BATCH = 4
SEQ = 512
STEPS = 5
OFFLOAD_MIN = 1 << 20  # elements
device = torch.device("cuda")


def _scan(a, b):
    """h_t = a_t * h_{t-1} + b_t along dim 1"""
    a, h = a.clone(), b.clone()
    k, n = 1, a.size(1)
    while k < n:
        h[:, k:] = h[:, k:] + a[:, k:] * h[:, :-k]
        a[:, k:] = a[:, k:] * a[:, :-k]
        k *= 2
    return h


class SelectiveScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        h = _scan(a, b)
        ctx.save_for_backward(a, h)
        return h

    @staticmethod
    def backward(ctx, gh):
        a, h = ctx.saved_tensors
        # g_t = gh_t + a_{t+1} g_{t+1}
        a_next = torch.cat([a[:, 1:], torch.zeros_like(a[:, :1])], dim=1)
        g = _scan(a_next.flip(1), gh.flip(1)).flip(1)
        h_prev = torch.cat([torch.zeros_like(h[:, :1]), h[:, :-1]], dim=1)
        return g * h_prev, g


class MambaBlock(nn.Module):
    def __init__(self, d):
        super().__init__()
        e = d * EXPAND
        self.rank = d // 16
        self.norm = nn.LayerNorm(d)
        self.inp = nn.Linear(d, 2 * e, bias=False)
        self.conv = nn.Conv1d(e, e, 4, groups=e, padding=3)
        self.xproj = nn.Linear(e, self.rank + 2 * STATE, bias=False)
        self.dt = nn.Linear(self.rank, e)
        self.logA = nn.Parameter(torch.log(torch.arange(1, STATE + 1).float()).repeat(e, 1))
        self.D = nn.Parameter(torch.ones(e))
        self.out = nn.Linear(e, d, bias=False)
        nn.init.constant_(self.dt.bias, -3.0)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        u, z = self.inp(self.norm(x)).chunk(2, dim=-1)
        u = F.silu(self.conv(u.transpose(1, 2))[..., :x.size(1)].transpose(1, 2))
        dt, B, C = self.xproj(u).split([self.rank, STATE, STATE], dim=-1)
        dt = F.softplus(self.dt(dt)).float()
        a = torch.exp(dt.unsqueeze(-1) * -torch.exp(self.logA))
        b = (dt * u.float()).unsqueeze(-1) * B.float().unsqueeze(2)
        h = SelectiveScan.apply(a, b)
        y = torch.einsum("btds,bts->btd", h, C.float()) + self.D * u
        return x + self.drop(self.out((y * F.silu(z)).to(x.dtype)))


def pack(t):
    if t.is_leaf and t.requires_grad or t.numel() < OFFLOAD_MIN or isinstance(t, nn.Parameter):
        return t
    host = torch.empty(t.shape, dtype=t.dtype, device="cpu", pin_memory=True)
    host.copy_(t, non_blocking=True)
    return (t.device, host)


def unpack(obj):
    if isinstance(obj, torch.Tensor):
        return obj
    dev, host = obj
    return host.to(dev, non_blocking=True)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList([MambaBlock(DIM) for _ in range(BLOCKS)])
        self.norm = nn.LayerNorm(DIM)

    def forward(self, ids):
        x = self.emb(ids)
        for i, blk in enumerate(self.blocks):
            if i % 4 == 0:
                x = checkpoint(blk, x, use_reentrant=True, preserve_rng_state=True)
            elif i % 4 == 1:
                with saved_tensors_hooks(pack, unpack):
                    x = blk(x)
            else:
                x = blk(x)
        return F.linear(self.norm(x), self.emb.weight)


def move_state(opt, where):
    for st in opt.state.values():
        for k, v in st.items():
            if torch.is_tensor(v) and v.numel() > 1:
                st[k] = v.to(where, non_blocking=True)
    torch.cuda.synchronize()


def main():
    torch.manual_seed(5)
    model = Model().to(device)
    nn.init.normal_(model.emb.weight, std=0.02)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=False)
    print("params", sum(p.numel() for p in model.parameters()) / 1e6, "M")
    for step in range(STEPS):
        ids = torch.randint(0, VOCAB, (BATCH, SEQ + 1), device=device)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        before = torch.cuda.memory_allocated()
        move_state(opt, device)
        opt.step()
        opt.zero_grad(set_to_none=True)
        move_state(opt, "cpu")
        print(f"step {step} loss {loss.item():.4f} before-opt {before} after {torch.cuda.memory_allocated()}")
    print("max_memory_allocated", torch.cuda.max_memory_allocated())
    print("max_memory_reserved", torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    main()
