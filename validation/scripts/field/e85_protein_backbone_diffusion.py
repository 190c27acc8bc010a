"""C-alpha backbone diffusion with a small Evoformer/Pairformer-like denoiser.

Pair stack: triangle multiplication (out/in) + triangle attention (start/end), checkpointed per block.
Structure module: invariant point attention on frames built from the noisy trace.  All float32.
"""
import copy
import math
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

CROP, BATCH = 288, 2
N_STEPS = 24
N_BLOCKS, N_IPA = 4, 3
C_S, C_Z, HEADS = 256, 128, 4
SAMPLE_LEN, SAMPLE_STEPS = 320, 6
SIGMA_DATA = 10.0

class TriangleMultiplication(nn.Module):
    def __init__(self, c, outgoing):
        super().__init__()
        self.outgoing = outgoing
        self.norm_in, self.norm_out = nn.LayerNorm(c), nn.LayerNorm(c)
        self.ab, self.ab_gate = nn.Linear(c, 2 * c), nn.Linear(c, 2 * c)
        self.gate, self.out = nn.Linear(c, c), nn.Linear(c, c)

    def forward(self, z):
        z = self.norm_in(z)
        a, b = (self.ab(z) * torch.sigmoid(self.ab_gate(z))).chunk(2, dim=-1)
        eq = "bikc,bjkc->bijc" if self.outgoing else "bkic,bkjc->bijc"
        x = torch.einsum(eq, a, b)
        return torch.sigmoid(self.gate(z)) * self.out(self.norm_out(x))

class TriangleAttention(nn.Module):
    def __init__(self, c, heads, ending):
        super().__init__()
        self.h, self.d, self.ending = heads, c // heads, ending
        self.norm = nn.LayerNorm(c)
        self.qkv = nn.Linear(c, 3 * c, bias=False)
        self.bias = nn.Linear(c, heads, bias=False)
        self.gate, self.out = nn.Linear(c, c), nn.Linear(c, c)

    def forward(self, z):
        z = self.norm(z.transpose(1, 2) if self.ending else z)
        q, k, v = (t.unflatten(-1, (self.h, self.d)) for t in self.qkv(z).chunk(3, dim=-1))
        logits = torch.einsum("bijhd,bikhd->bihjk", q * self.d ** -0.5, k)
        logits = logits + self.bias(z).permute(0, 3, 1, 2).unsqueeze(1)
        o = torch.einsum("bihjk,bikhd->bijhd", logits.softmax(dim=-1), v).flatten(-2)
        o = self.out(torch.sigmoid(self.gate(z)) * o)
        return o.transpose(1, 2) if self.ending else o

class Transition(nn.Sequential):
    def __init__(self, c, n=4):
        super().__init__(nn.LayerNorm(c), nn.Linear(c, n * c), nn.ReLU(), nn.Linear(n * c, c))

class PairBlock(nn.Module):
    def __init__(self, p=0.15):
        super().__init__()
        self.mul_out, self.mul_in = TriangleMultiplication(C_Z, True), TriangleMultiplication(C_Z, False)
        self.att_start, self.att_end = TriangleAttention(C_Z, HEADS, False), TriangleAttention(C_Z, HEADS, True)
        self.trans, self.p = Transition(C_Z), p

    def row_drop(self, x, dim):
        return x * F.dropout(torch.ones_like(x.narrow(dim, 0, 1)), self.p, self.training)

    def forward(self, z):
        z = z + self.row_drop(self.mul_out(z), 1)
        z = z + self.row_drop(self.mul_in(z), 1)
        z = z + self.row_drop(self.att_start(z), 1)
        z = z + self.row_drop(self.att_end(z), 2)
        return z + self.trans(z)

class InvariantPointAttention(nn.Module):
    def __init__(self, heads=8, d=32, pts=4):
        super().__init__()
        self.h, self.d, self.p = heads, d, pts
        self.qkv = nn.Linear(C_S, 3 * heads * d)
        self.pts = nn.Linear(C_S, 3 * heads * pts * 3)
        self.bias = nn.Linear(C_Z, heads)
        self.w = nn.Parameter(torch.full((heads,), 0.54))
        self.out = nn.Linear(heads * (d + pts * 3 + C_Z), C_S)

    def forward(self, s, z, R, t):
        B, N, _ = s.shape
        q, k, v = self.qkv(s).view(B, N, 3, self.h, self.d).unbind(2)
        P = self.pts(s).view(B, N, 3 * self.h * self.p, 3)
        P = torch.einsum("bnxy,bnpy->bnpx", R, P) + t[:, :, None]
        qp, kp, vp = P.view(B, N, 3, self.h, self.p, 3).unbind(2)
        d2 = (qp[:, :, None] - kp[:, None]).pow(2).sum((-1, -2))                     # B i j h
        logits = torch.einsum("bihd,bjhd->bijh", q, k) * self.d ** -0.5 + self.bias(z)
        logits = (logits - 0.5 * F.softplus(self.w) * (2 / (9 * self.p)) ** 0.5 * d2) * 3 ** -0.5
        a = logits.softmax(dim=2)
        o = torch.einsum("bijh,bjhd->bihd", a, v).flatten(2)
        op = torch.einsum("bijh,bjhpx->bihpx", a, vp) - t[:, :, None, None]
        op = torch.einsum("bnyx,bnhpy->bnhpx", R, op)  # local frame
        oz = torch.einsum("bijh,bijc->bihc", a, z).flatten(2)
        return self.out(torch.cat([o, op.flatten(2), oz], -1))

def frames_from_trace(x):
    prev, nxt = torch.roll(x, 1, dims=1), torch.roll(x, -1, dims=1)
    e1, u = F.normalize(nxt - x, dim=-1, eps=1e-4), prev - x
    e2 = F.normalize(u - (u * e1).sum(-1, keepdim=True) * e1, dim=-1, eps=1e-4)
    return torch.stack([e1, e2, torch.cross(e1, e2, dim=-1)], dim=-1)

class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.aa, self.relpos, self.dist = nn.Embedding(21, C_S), nn.Embedding(65, C_Z), nn.Embedding(40, C_Z)
        self.t_mlp = nn.Sequential(nn.Linear(64, C_S), nn.SiLU(), nn.Linear(C_S, C_S))
        self.left, self.right = nn.Linear(C_S, C_Z), nn.Linear(C_S, C_Z)
        self.pair = nn.ModuleList([PairBlock() for _ in range(N_BLOCKS)])
        self.ipa = nn.ModuleList([InvariantPointAttention() for _ in range(N_IPA)])
        self.ipa_norm = nn.ModuleList([nn.LayerNorm(C_S) for _ in range(N_IPA)])
        self.update = nn.ModuleList([nn.Linear(C_S, 3) for _ in range(N_IPA)])

    def forward(self, x, sigma, seq):
        c_in = (sigma ** 2 + SIGMA_DATA ** 2).rsqrt()[:, None, None]
        emb = (sigma.log() / 4)[:, None] * torch.exp(torch.linspace(0, 5, 32, device=x.device))
        s = self.aa(seq) + self.t_mlp(torch.cat([emb.sin(), emb.cos()], -1))[:, None]
        n = torch.arange(x.shape[1], device=x.device)
        rel = (n[:, None] - n[None]).clamp(-32, 32) + 32
        bins = (torch.cdist(x, x) / 1.5).long().clamp(max=39)
        z = self.left(s)[:, :, None] + self.right(s)[:, None] + self.relpos(rel) + self.dist(bins)
        for blk in self.pair:
            z = checkpoint(blk, z, use_reentrant=False) if self.training else blk(z)
        R, t = frames_from_trace(x), x * c_in
        for ipa, norm, upd in zip(self.ipa, self.ipa_norm, self.update):
            s = norm(s + ipa(s, z, R, t))
            t = t + torch.einsum("bnxy,bny->bnx", R, upd(s))
        c_skip = (SIGMA_DATA ** 2 / (sigma ** 2 + SIGMA_DATA ** 2))[:, None, None]
        c_out = (sigma * SIGMA_DATA)[:, None, None] * c_in
        return c_skip * x + c_out * (t - x * c_in)

def fake_proteins(b, n, device):
    """persistent random walks with 3.8 A steps, centred"""
    d = torch.randn(b, n, 3, device=device)
    k = torch.exp(-torch.arange(8, device=device) / 3.0).view(1, 1, 8)
    d = F.conv1d(F.pad(d.transpose(1, 2).reshape(b * 3, 1, n), (7, 0)), k).view(b, 3, n).transpose(1, 2)
    x = (3.8 * F.normalize(d, dim=-1)).cumsum(1)
    x = x - x.mean(1, keepdim=True)
    return x * (SIGMA_DATA / x.std(dim=(1, 2), keepdim=True)), torch.randint(0, 20, (b, n), device=device)

def main():
    torch.manual_seed(11)
    device = "cuda"
    net = Denoiser().to(device)
    ema = copy.deepcopy(net).eval().requires_grad_(False)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=1e-2)
    net.train()
    for it in range(N_STEPS):
        x0, seq = fake_proteins(BATCH, CROP, device)
        sigma = SIGMA_DATA * torch.exp(-1.2 + 1.5 * torch.randn(BATCH, device=device))
        pred = net(x0 + sigma[:, None, None] * torch.randn_like(x0), sigma, seq)
        w = (sigma ** 2 + SIGMA_DATA ** 2) / (sigma * SIGMA_DATA) ** 2
        mse = (w * (pred - x0).pow(2).mean((1, 2))).mean()
        bond = (pred.diff(dim=1).norm(dim=-1) - x0.diff(dim=1).norm(dim=-1)).abs().mean()
        lddt = (torch.cdist(pred, pred) - torch.cdist(x0, x0)).abs().clamp(max=10).mean()
        loss = mse + 0.1 * bond + 0.1 * lddt
        opt.zero_grad()
        loss.backward()
        gn = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(ema.parameters()), list(net.parameters()), 0.05)
        if it % 6 == 0:
            print(f"{it:4d} loss {loss.item():.3f} grad {gn.item():.2f} peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
    # Euler EDM sampling with the averaged weights
    with torch.no_grad():
        sig = torch.cat([torch.logspace(math.log10(160), math.log10(0.05), SAMPLE_STEPS), torch.zeros(1)]).to(device)
        seq = torch.randint(0, 20, (1, SAMPLE_LEN), device=device)
        x = sig[0] * torch.randn(1, SAMPLE_LEN, 3, device=device)
        for a, b in zip(sig[:-1], sig[1:]):
            x = x + (b - a) * (x - ema(x, a[None], seq)) / a
        print("sample: mean CA-CA %.2f A" % x.diff(dim=1).norm(dim=-1).mean().item())
    print("torch.cuda.max_memory_allocated():", torch.cuda.max_memory_allocated())
    print("torch.cuda.max_memory_reserved():", torch.cuda.max_memory_reserved())

if __name__ == "__main__":
    main()
