# minimal DDPM on 64x64 images, with attention at 16x16 and EMA weights
import copy, math, torch
from torch import nn
import torch.nn.functional as F

torch.manual_seed(42)
device = 'cuda'

IMG = 64
BATCH = 64
T = 1000
CH = 128
MULT = (1, 2, 2, 4)
ATTN_RES = (16, 8)


def timestep_embedding(t, dim):
    half = dim // 2
    freqs = torch.exp(-math.log(10000) * torch.arange(half, device=t.device) / half)
    args = t[:, None].float() * freqs[None]
    return torch.cat([args.cos(), args.sin()], dim=-1)


class Swish(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(x)


class ResBlock(nn.Module):
    def __init__(self, cin, cout, tdim, dropout=0.1):
        super().__init__()
        self.block1 = nn.Sequential(nn.GroupNorm(32, cin), Swish(), nn.Conv2d(cin, cout, 3, padding=1))
        self.temb = nn.Sequential(Swish(), nn.Linear(tdim, cout))
        self.block2 = nn.Sequential(nn.GroupNorm(32, cout), Swish(), nn.Dropout(dropout),
                                    nn.Conv2d(cout, cout, 3, padding=1))
        self.skip = nn.Conv2d(cin, cout, 1) if cin != cout else nn.Identity()
        nn.init.zeros_(self.block2[-1].weight)

    def forward(self, x, temb):
        h = self.block1(x)
        h = h + self.temb(temb)[:, :, None, None]
        return self.block2(h) + self.skip(x)


class AttnBlock(nn.Module):
    """old-school single head attention written with bmm, as in the original DDPM code"""
    def __init__(self, c):
        super().__init__()
        self.norm = nn.GroupNorm(32, c)
        self.q = nn.Conv2d(c, c, 1)
        self.k = nn.Conv2d(c, c, 1)
        self.v = nn.Conv2d(c, c, 1)
        self.proj = nn.Conv2d(c, c, 1)

    def forward(self, x):
        B, C, H, W = x.shape
        h = self.norm(x)
        q = self.q(h).permute(0, 2, 3, 1).view(B, H * W, C)
        k = self.k(h).view(B, C, H * W)
        v = self.v(h).permute(0, 2, 3, 1).view(B, H * W, C)
        w = torch.bmm(q, k) * (C ** -0.5)
        w = F.softmax(w, dim=-1)
        h = torch.bmm(w, v).view(B, H, W, C).permute(0, 3, 1, 2)
        return x + self.proj(h)


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        tdim = CH * 4
        self.time_mlp = nn.Sequential(nn.Linear(CH, tdim), Swish(), nn.Linear(tdim, tdim))
        self.head = nn.Conv2d(3, CH, 3, padding=1)
        self.downs = nn.ModuleList()
        chs = [CH]
        cur, res = CH, IMG
        for i, m in enumerate(MULT):
            out = CH * m
            for _ in range(2):
                self.downs.append(nn.ModuleList([ResBlock(cur, out, tdim),
                                                 AttnBlock(out) if res in ATTN_RES else nn.Identity()]))
                cur = out
                chs.append(cur)
            if i != len(MULT) - 1:
                self.downs.append(nn.Conv2d(cur, cur, 3, stride=2, padding=1))
                res //= 2
                chs.append(cur)
        self.mid1 = ResBlock(cur, cur, tdim)
        self.mid_attn = AttnBlock(cur)
        self.mid2 = ResBlock(cur, cur, tdim)
        self.ups = nn.ModuleList()
        for i, m in reversed(list(enumerate(MULT))):
            out = CH * m
            for _ in range(3):
                self.ups.append(nn.ModuleList([ResBlock(chs.pop() + cur, out, tdim),
                                               AttnBlock(out) if res in ATTN_RES else nn.Identity()]))
                cur = out
            if i != 0:
                self.ups.append(nn.Conv2d(cur, cur, 3, padding=1))
                res *= 2
        self.tail = nn.Sequential(nn.GroupNorm(32, cur), Swish(), nn.Conv2d(cur, 3, 3, padding=1))

    def forward(self, x, t):
        temb = self.time_mlp(timestep_embedding(t, CH))
        h = self.head(x)
        hs = [h]
        for layer in self.downs:
            if isinstance(layer, nn.ModuleList):
                h = layer[1](layer[0](h, temb))
            else:
                h = layer(h)
            hs.append(h)
        h = self.mid2(self.mid_attn(self.mid1(h, temb)), temb)
        for layer in self.ups:
            if isinstance(layer, nn.ModuleList):
                h = layer[1](layer[0](torch.cat([h, hs.pop()], dim=1), temb))
            else:
                h = layer(F.interpolate(h, scale_factor=2, mode='nearest'))
        assert not hs
        return self.tail(h)


@torch.no_grad()
def ema_update(ema, model, decay):
    for e, p in zip(ema.parameters(), model.parameters()):
        e.mul_(decay).add_(p, alpha=1 - decay)


net = UNet().to(device)
ema = copy.deepcopy(net).eval().requires_grad_(False)
optim = torch.optim.Adam(net.parameters(), lr=2e-4)

betas = torch.linspace(1e-4, 0.02, T, device=device)
alphas_bar = torch.cumprod(1 - betas, 0)
print(f'params: {sum(p.numel() for p in net.parameters())/1e6:.1f}M')

for step in range(6):
    x0 = torch.rand(BATCH, 3, IMG, IMG, device=device) * 2 - 1
    t = torch.randint(0, T, (BATCH,), device=device)
    noise = torch.randn_like(x0)
    ab = alphas_bar[t].view(-1, 1, 1, 1)
    xt = ab.sqrt() * x0 + (1 - ab).sqrt() * noise
    loss = F.mse_loss(net(xt, t), noise)
    optim.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optim.step()
    ema_update(ema, net, 0.9999)
    print(step, loss.item(), torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())

# a couple of sampling steps with the EMA copy
with torch.no_grad():
    x = torch.randn(16, 3, IMG, IMG, device=device)
    for i in reversed(range(T - 5, T)):
        tt = torch.full((16,), i, device=device, dtype=torch.long)
        eps = ema(x, tt)
        x = (x - betas[i] / (1 - alphas_bar[i]).sqrt() * eps) / (1 - betas[i]).sqrt()
        x = x + betas[i].sqrt() * torch.randn_like(x)
print('sampled', x.std().item(), torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
