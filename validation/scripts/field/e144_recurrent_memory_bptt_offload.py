"""Recurrent Memory Transformer: the document is read segment by segment, memory tokens carry state.
Full BPTT over segments; the saved activations of the earlier segments are parked in pinned host memory."""
import contextlib
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True

V, D, H, LAYERS = 32768, 1024, 16, 8
SEG, N_SEG, MEM = 768, 4, 32
BATCH, ITERS = 8, 5
OFFLOAD_SEGMENTS = 2          # how many of the first segments get offloaded


class HostOffload(contextlib.AbstractContextManager):
    def __init__(self, min_bytes=8 << 20):
        self.min_bytes, self.moved = min_bytes, 0
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, t):
        if not t.is_cuda or isinstance(t, nn.Parameter) or t.numel() * t.element_size() < self.min_bytes:
            return t
        host = torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
        host.copy_(t, non_blocking=True)
        self.moved += host.numel() * host.element_size()
        return (t.device, host)

    def unpack(self, saved):
        if isinstance(saved, tuple):
            return saved[1].to(saved[0], non_blocking=True)
        return saved

    def __enter__(self):
        self.hooks.__enter__()
        return self

    def __exit__(self, *exc):
        self.hooks.__exit__(*exc)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(D, D, bias=False)
        self.kv = nn.Linear(D, 2 * D // 4, bias=False)
        self.o = nn.Linear(D, D, bias=False)

    def forward(self, x, mask):
        b, t, _ = x.shape
        q = self.q(x).view(b, t, H, -1).transpose(1, 2)
        k, v = self.kv(x).view(b, t, 2, H // 4, -1).permute(2, 0, 3, 1, 4)
        k, v = k.repeat_interleave(4, 1), v.repeat_interleave(4, 1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o(y.transpose(1, 2).flatten(2))


class RMT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(V, D)
        self.pos = nn.Parameter(torch.randn(SEG, D) * 0.02)
        self.mem0 = nn.Parameter(torch.randn(MEM, D) * 0.02)
        self.att = nn.ModuleList(Attention() for _ in range(LAYERS))
        self.ff = nn.ModuleList(nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D), nn.Dropout(0.1))
                                for _ in range(LAYERS))
        self.ln = nn.ModuleList(nn.LayerNorm(D) for _ in range(2 * LAYERS + 1))
        self.mem_gate = nn.Linear(2 * D, D)
        L = MEM + SEG + MEM
        mask = torch.ones(L, L, dtype=torch.bool).tril()
        mask[:MEM, :MEM] = True           # read memory is bidirectional
        mask[-MEM:, :] = True             # write memory sees the whole segment
        self.register_buffer("mask", mask)
        nn.init.normal_(self.tok.weight, std=0.02)

    def segment(self, ids, mem):
        x = torch.cat([mem, self.tok(ids) + self.pos, mem], 1)
        for i in range(LAYERS):
            x = x + self.att[i](self.ln[2 * i](x), self.mask)
            x = x + self.ff[i](self.ln[2 * i + 1](x))
        x = self.ln[-1](x)
        write = x[:, -MEM:]
        gate = torch.sigmoid(self.mem_gate(torch.cat([mem, write], -1)))
        return x[:, MEM:-MEM], gate * mem + (1 - gate) * write

    def forward(self, ids, labels, offload=0):
        mem = self.mem0.expand(ids.size(0), -1, -1)
        losses, moved = [], 0
        for s in range(N_SEG):
            sl = slice(s * SEG, (s + 1) * SEG)
            with (HostOffload() if s < offload else contextlib.nullcontext()) as ctx:
                h, mem = self.segment(ids[:, sl], mem)
                logits = F.linear(h, self.tok.weight)
                losses.append(F.cross_entropy(logits.flatten(0, 1), labels[:, sl].flatten()))
            moved += getattr(ctx, "moved", 0)
        return torch.stack(losses), moved


def copy_task(n):
    """Random text whose last segment repeats pieces of the first one."""
    doc = torch.randint(10, V, (n, N_SEG * SEG + 1), device="cuda")
    doc[:, -SEG // 2:] = doc[:, : SEG // 2]
    return doc[:, :-1], doc[:, 1:]


net = RMT().cuda()
opt = torch.optim.RAdam(net.parameters(), lr=2e-4, weight_decay=0.05, decoupled_weight_decay=True)
for it in range(ITERS):
    ids, labels = copy_task(BATCH)
    torch.cuda.reset_peak_memory_stats()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        losses, moved = net(ids, labels, OFFLOAD_SEGMENTS)
    fwd = torch.cuda.memory_allocated()
    losses.mean().backward()
    nn.utils.clip_grad_value_(net.parameters(), 0.5)
    opt.step()
    opt.zero_grad()
    print(f"iter {it} losses {[round(l, 3) for l in losses.tolist()]} offloaded {moved / 2**30:.2f} GiB "
          f"after fwd {fwd / 2**30:.2f} GiB peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")

net.eval()
with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
    ids, labels = copy_task(BATCH)
    losses, _ = net(ids, labels)
print("eval per segment", losses.float().cpu().numpy().round(3))
