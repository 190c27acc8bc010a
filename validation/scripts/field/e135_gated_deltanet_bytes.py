# Gated DeltaNet byte-level LM, chunkwise-parallel training in plain torch,
# recurrent form for sampling.
import argparse

import torch
from torch import nn
from torch.nn import functional as F

p = argparse.ArgumentParser()
p.add_argument("--dim", type=int, default=768)
p.add_argument("--depth", type=int, default=12)
p.add_argument("--heads", type=int, default=6)
p.add_argument("--seq-len", type=int, default=2048)
p.add_argument("--batch-size", type=int, default=6)
p.add_argument("--chunk", type=int, default=64)
p.add_argument("--steps", type=int, default=5)
p.add_argument("--sample-len", type=int, default=48)
p.add_argument("--lr", type=float, default=6e-4)
args = p.parse_args()

torch.manual_seed(7)
torch.backends.cuda.matmul.allow_tf32 = True
device = "cuda" if torch.cuda.is_available() else "cpu"


def delta_chunked(q, k, v, g, beta, C):
    """q,k,v: B H L D (fp32); g: log decay B H L; beta: B H L"""
    B, H, L, D = q.shape
    N = L // C
    q, k, v = (t.reshape(B, H, N, C, -1) for t in (q, k, v))
    g = g.reshape(B, H, N, C).cumsum(-1)
    beta = beta.reshape(B, H, N, C, 1)
    kb, vb = k * beta, v * beta
    decay = (g.unsqueeze(-1) - g.unsqueeze(-2)).tril().exp().tril()
    eye = torch.eye(C, device=q.device)
    A = ((kb @ k.transpose(-1, -2)) * decay).tril(-1)
    T = torch.linalg.solve_triangular(eye + A, eye.expand_as(A), upper=False, unitriangular=True)
    u = T @ vb
    w = T @ (kb * g.exp().unsqueeze(-1))
    intra = ((q @ k.transpose(-1, -2)) * decay).tril()
    S = q.new_zeros(B, H, D, v.size(-1))
    outs = []
    for i in range(N):
        v_new = u[:, :, i] - w[:, :, i] @ S
        gi = g[:, :, i]
        outs.append((q[:, :, i] * gi.exp().unsqueeze(-1)) @ S + intra[:, :, i] @ v_new)
        last = gi[..., -1:]
        S = S * last.exp().unsqueeze(-1) + (k[:, :, i] * (last - gi).exp().unsqueeze(-1)).transpose(-1, -2) @ v_new
    return torch.stack(outs, 2).reshape(B, H, L, -1)


def delta_step(S, q, k, v, g, beta):
    S = S * g.exp()[..., None, None]
    err = (v - torch.einsum("bhd,bhde->bhe", k, S)) * beta[..., None]
    S = S + k.unsqueeze(-1) * err.unsqueeze(-2)
    return S, torch.einsum("bhd,bhde->bhe", q, S)


class DeltaMixer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.h, self.d = heads, dim // heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.conv = nn.Conv1d(3 * dim, 3 * dim, 4, groups=3 * dim, padding=3)
        self.ab = nn.Linear(dim, 2 * heads)
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.gate = nn.Linear(dim, dim, bias=False)
        self.norm = nn.RMSNorm(self.d)
        self.out = nn.Linear(dim, dim, bias=False)

    def project(self, x, z):
        B, L, _ = x.shape
        q, k, v = F.silu(z).float().view(B, L, 3, self.h, self.d).permute(2, 0, 3, 1, 4)
        a, b = self.ab(x).float().transpose(1, 2).chunk(2, 1)
        return F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, -self.A_log.exp()[:, None] * F.softplus(a), b.sigmoid()

    def forward(self, x):
        B, L, D = x.shape
        z = self.conv(self.qkv(x).transpose(1, 2))[..., :L].transpose(1, 2)
        q, k, v, g, beta = self.project(x, z)
        with torch.autocast(x.device.type, enabled=False):
            o = delta_chunked(q, k, v, g, beta, args.chunk)
        o = self.norm(o).transpose(1, 2).reshape(B, L, D)
        return self.out(o * F.silu(self.gate(x)))

    def step(self, x, state):
        S, buf = state
        buf = torch.cat([buf[:, 1:], self.qkv(x)], 1)
        z = (buf * self.conv.weight.squeeze(1).t()).sum(1, keepdim=True) + self.conv.bias
        q, k, v, g, beta = self.project(x, z)
        S, o = delta_step(S, q[:, :, 0], k[:, :, 0], v[:, :, 0], g[..., 0], beta[..., 0])
        o = self.norm(o).reshape(x.size(0), 1, -1)
        return self.out(o * F.silu(self.gate(x))), (S, buf)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        D = args.dim
        self.emb = nn.Embedding(256, D)
        self.n1 = nn.ModuleList(nn.RMSNorm(D) for _ in range(args.depth))
        self.n2 = nn.ModuleList(nn.RMSNorm(D) for _ in range(args.depth))
        self.mix = nn.ModuleList(DeltaMixer(D, args.heads) for _ in range(args.depth))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(approximate="tanh"), nn.Linear(4 * D, D)) for _ in range(args.depth))
        self.head = nn.Sequential(nn.RMSNorm(D), nn.Linear(D, 256))

    def forward(self, idx):
        x = self.emb(idx)
        for n1, n2, mix, mlp in zip(self.n1, self.n2, self.mix, self.mlp):
            x = x + mix(n1(x))
            x = x + mlp(n2(x))
        return self.head(x)

    @torch.no_grad()
    def sample(self, prompt, n):
        B, d = prompt.size(0), args.dim // args.heads
        st = [(torch.zeros(B, args.heads, d, d, device=device), torch.zeros(B, 4, 3 * args.dim, device=device)) for _ in self.mix]
        seq = prompt
        for t in range(prompt.size(1) + n - 1):
            x = self.emb(seq[:, t:t + 1])
            for i, (n1, n2, mix, mlp) in enumerate(zip(self.n1, self.n2, self.mix, self.mlp)):
                y, st[i] = mix.step(n1(x), st[i])
                x = x + y
                x = x + mlp(n2(x))
            if t >= prompt.size(1) - 1:
                nxt = torch.multinomial((self.head(x)[:, -1] / 0.9).softmax(-1), 1)
                seq = torch.cat([seq, nxt], 1)
        return seq


text = ("the quick brown fox jumps over the lazy dog; " * 6000).encode()
data = torch.tensor(list(text), dtype=torch.uint8, device=device)
net = Net().to(device)
opt = torch.optim.NAdam(net.parameters(), lr=args.lr, weight_decay=0.01, decoupled_weight_decay=True)
print("params: %.1fM" % (sum(q.numel() for q in net.parameters()) / 1e6))
offs = torch.arange(args.seq_len + 1, device=device)
for it in range(1, args.steps + 1):
    start = torch.randint(0, len(data) - args.seq_len - 1, (args.batch_size, 1), device=device)
    batch = data[start + offs].long()
    with torch.autocast(device, dtype=torch.bfloat16):
        logits = net(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    opt.step()
    print("it %d  bpb %.4f  alloc %.0f MB  peak %.0f MB" % (
        it, loss.item() / 0.6931, torch.cuda.memory_allocated() / 1e6, torch.cuda.max_memory_allocated() / 1e6))
net.eval()
out = net.sample(data[:16].long().repeat(4, 1), args.sample_len)
print(repr(bytes(out[0].tolist())))
