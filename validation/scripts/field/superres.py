"""EDSR x2/x4 with progressive patch sizes; L1 + gradient-difference loss, Charbonnier, PSNR eval."""
import argparse
import torch
from torch import nn
from torch.nn import functional as F

ap = argparse.ArgumentParser()
ap.add_argument("--scale", type=int, default=4, choices=[2, 4])
ap.add_argument("--feats", type=int, default=128)
ap.add_argument("--empty-cache", action="store_true")
a = ap.parse_args()


class RB(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.a, self.b = nn.Conv2d(n, n, 3, 1, 1), nn.Conv2d(n, n, 3, 1, 1)
        self.act = nn.PReLU(n)

    def forward(self, x):
        return torch.add(x, self.b(self.act(self.a(x))), alpha=0.1)


class EDSR(nn.Module):
    def __init__(self, n, scale):
        super().__init__()
        self.head = nn.Conv2d(3, n, 3, 1, 1)
        self.body = nn.Sequential(*[RB(n) for _ in range(16)])
        tail = []
        for _ in range(scale // 2):
            tail += [nn.Conv2d(n, 4 * n, 3, 1, 1), nn.PixelShuffle(2)]
        self.tail = nn.Sequential(*tail, nn.Conv2d(n, 3, 3, 1, 1))
        self.scale = scale

    def forward(self, x):
        h = self.head(x)
        base = F.interpolate(x, scale_factor=self.scale, mode="bicubic", align_corners=False)
        return base + self.tail(h + self.body(h))


def grads(x):
    return x[..., 1:, :] - x[..., :-1, :], x[..., 1:] - x[..., :-1]


model = EDSR(a.feats, a.scale).cuda()
opt = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.99))
for stage, (patch, bs) in enumerate([(64, 32), (128, 16), (192, 8), (256, 4)]):
    for _ in range(2):
        hr = torch.rand(bs, 3, patch, patch, device="cuda")
        lr = F.interpolate(hr, size=patch // a.scale, mode="area")
        sr = model(lr)
        loss = torch.sqrt((sr - hr) ** 2 + 1e-6).mean()
        for gs, gh in zip(grads(sr), grads(hr)):
            loss = loss + 0.1 * F.l1_loss(gs, gh)
        model.zero_grad()
        loss.backward()
        opt.step()
    if a.empty_cache:
        torch.cuda.empty_cache()
    with torch.no_grad():
        hr = torch.rand(1, 3, 512, 768, device="cuda")
        sr = model(F.avg_pool2d(hr, a.scale)).clamp(0, 1)
        psnr = -10 * torch.log10(F.mse_loss(sr, hr))
    print(f"stage {stage}: loss {loss.item():.4f}, psnr {psnr.item():.2f}, reserved {torch.cuda.memory_reserved() / 1e6:.0f} MB")
