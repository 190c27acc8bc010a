"""S4D-style long convolution through FFT with complex parameters, and a plain cumsum/chunked scan variant.  s4|scan"""
import sys, math
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import einsum


class S4D(nn.Module):
    def __init__(self, h, n=32):
        super().__init__()
        self.log_dt = nn.Parameter(torch.rand(h) * (math.log(.1) - math.log(.001)) + math.log(.001))
        self.C = nn.Parameter(torch.view_as_real(torch.randn(h, n, dtype=torch.cfloat)))
        self.log_A = nn.Parameter(torch.log(0.5 * torch.ones(h, n)))
        self.A_im = nn.Parameter(math.pi * torch.arange(n).repeat(h, 1).float())
        self.D = nn.Parameter(torch.randn(h))
        self.out = nn.Sequential(nn.Conv1d(h, 2 * h, 1), nn.GLU(dim=-2))

    def kernel(self, L):
        dt = self.log_dt.exp()
        C = torch.view_as_complex(self.C)
        A = -self.log_A.exp() + 1j * self.A_im
        dtA = A * dt[:, None]
        K = dtA[..., None] * torch.arange(L, device=A.device)
        C = C * (dtA.exp() - 1) / A
        return 2 * einsum("hn,hnl->hl", C, K.exp()).real

    def forward(self, u):
        L = u.size(-1)
        k = self.kernel(L)
        y = torch.fft.irfft(torch.fft.rfft(u, n=2 * L) * torch.fft.rfft(k, n=2 * L), n=2 * L)[..., :L]
        return self.out(F.gelu(y + u * self.D[:, None]))


class ScanSSM(nn.Module):
    """h_t = a_t h_{t-1} + b_t x_t computed in log space with cumsum, chunk by chunk"""
    def __init__(self, h, n=8, chunk=64):
        super().__init__()
        self.proj = nn.Linear(h, h + 2 * n)
        self.A = nn.Parameter(torch.log(torch.arange(1, n + 1).float()).repeat(h, 1))
        self.out = nn.Linear(h, h)
        self.n, self.h, self.chunk = n, h, chunk

    def forward(self, u):
        x = u.transpose(1, 2)
        dt, B, C = self.proj(x).split([self.h, self.n, self.n], -1)
        dt = F.softplus(dt - 4)
        state = x.new_zeros(x.size(0), self.h, self.n)
        ys = []
        for xs, ds, bs, cs in zip(*(t.split(self.chunk, 1) for t in (x, dt, B, C))):
            la = torch.cumsum(-ds[..., None] * self.A.exp(), 1)
            bx = (ds * xs)[..., None] * bs[:, :, None]
            hs = la.exp() * (state[:, None] + torch.cumsum(bx * torch.exp(-la), 1))
            state = hs[:, -1]
            ys.append(einsum("blhn,bln->blh", hs, cs))
        return self.out(torch.cat(ys, 1)).transpose(1, 2)


kind = sys.argv[1]
H, L, B = (512, 4096, 8) if kind == "s4" else (512, 512, 8)
layers = nn.ModuleList([S4D(H) if kind == "s4" else ScanSSM(H) for _ in range(4)])
norms = nn.ModuleList([nn.BatchNorm1d(H) for _ in range(4)])
inp, head = nn.Linear(1, H), nn.Linear(H, 10)
model = nn.ModuleDict(dict(inp=inp, layers=layers, norms=norms, head=head)).cuda()
special = [p for n, p in model.named_parameters() if any(s in n for s in ("log_dt", "log_A", "A_im", ".A"))]
ids = {id(p) for p in special}
opt = torch.optim.AdamW([{"params": [p for p in model.parameters() if id(p) not in ids], "weight_decay": 0.01},
                         {"params": special, "lr": 1e-3, "weight_decay": 0.0}], lr=4e-3, capturable=True)
for step in range(5):
    seq, y = torch.rand(B, L, 1, device="cuda"), torch.randint(10, (B,), device="cuda")
    h = inp(seq).transpose(-1, -2)
    for layer, norm in zip(layers, norms):
        h = h + F.dropout1d(layer(norm(h)), 0.1)
    loss = F.cross_entropy(head(h.mean(-1)), y)
    loss.backward()
    opt.step()
    opt.zero_grad()
    print(step, f"{loss.item():.3f}", torch.cuda.max_memory_allocated() >> 20)
