"""Accelerated multi-coil MRI reconstruction with an unrolled variational network.
Soft data consistency as an autograd.Function, small U-Net regularisers in fp16.
"""
import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.amp import GradScaler, autocast, custom_bwd, custom_fwd


def fft2c(x):
    return torch.fft.fftshift(torch.fft.fft2(torch.fft.ifftshift(x, dim=(-2, -1)), norm="ortho"), dim=(-2, -1))


def ifft2c(x):
    return torch.fft.fftshift(torch.fft.ifft2(torch.fft.ifftshift(x, dim=(-2, -1)), norm="ortho"), dim=(-2, -1))


class SoftDC(torch.autograd.Function):
    """k <- k - lam * M (k - k0)"""

    @staticmethod
    @custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx, k, k0, mask, lam):
        diff = torch.where(mask, k - k0, torch.zeros_like(k))
        ctx.save_for_backward(diff, mask, lam)
        return k - lam * diff

    @staticmethod
    @custom_bwd(device_type="cuda")
    def backward(ctx, g):
        diff, mask, lam = ctx.saved_tensors
        grad_k = torch.where(mask, (1 - lam) * g, g)
        grad_lam = -(g.conj() * diff).real.sum().reshape(lam.shape)
        return grad_k, None, None, grad_lam


class Block(nn.Sequential):
    def __init__(self, cin, cout, drop):
        super().__init__(
            nn.Conv2d(cin, cout, 3, padding=1, bias=False), nn.InstanceNorm2d(cout),
            nn.LeakyReLU(0.2, inplace=True), nn.Dropout2d(drop),
            nn.Conv2d(cout, cout, 3, padding=1, bias=False), nn.InstanceNorm2d(cout),
            nn.LeakyReLU(0.2, inplace=True))


class UNet(nn.Module):
    def __init__(self, ch, depth=3, drop=0.05):
        super().__init__()
        self.down = nn.ModuleList([Block(2, ch, drop)])
        for i in range(depth):
            self.down.append(Block(ch * 2 ** i, ch * 2 ** (i + 1), drop))
        self.upsample, self.up = nn.ModuleList(), nn.ModuleList()
        for i in reversed(range(depth)):
            self.upsample.append(nn.ConvTranspose2d(ch * 2 ** (i + 1), ch * 2 ** i, 2, stride=2))
            self.up.append(Block(ch * 2 ** (i + 1), ch * 2 ** i, drop))
        self.out = nn.Conv2d(ch, 2, 1)

    def forward(self, x):
        skips = []
        for i, d in enumerate(self.down):
            x = d(x if i == 0 else F.avg_pool2d(x, 2))
            skips.append(x)
        skips.pop()
        for u, b in zip(self.upsample, self.up):
            x = b(torch.cat([u(x), skips.pop()], 1))
        return self.out(x)


class Cascade(nn.Module):
    def __init__(self, ch):
        super().__init__()
        self.net = UNet(ch)
        self.lam = nn.Parameter(torch.ones(1))

    def forward(self, k, k0, mask, sens):
        img = (ifft2c(k) * sens.conj()).sum(1)
        with autocast("cuda", dtype=torch.float16):
            r = self.net(torch.view_as_real(img).permute(0, 3, 1, 2))
        r = torch.view_as_complex(r.float().permute(0, 2, 3, 1).contiguous())
        return SoftDC.apply(k, k0, mask, self.lam) - fft2c(r.unsqueeze(1) * sens)


def phantom(b, coils, n, gen, dev):
    low = torch.randn(b, 2, 20, 20, generator=gen, device=dev)
    img = torch.complex(*F.interpolate(low, size=(n, n), mode="bicubic").unbind(1))
    s = torch.randn(b, coils * 2, 6, 6, generator=gen, device=dev)
    s = F.interpolate(s, size=(n, n), mode="bilinear").view(b, coils, 2, n, n)
    sens = torch.complex(s[:, :, 0], s[:, :, 1])
    sens = sens / sens.abs().pow(2).sum(1, keepdim=True).sqrt().clamp_min(1e-3)
    mask = torch.rand(b, 1, 1, n, generator=gen, device=dev) < 0.21
    mask[..., n // 2 - n // 25:n // 2 + n // 25] = True
    return img, sens, mask


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--cascades", type=int, default=8)
    ap.add_argument("--chans", type=int, default=32)
    ap.add_argument("--coils", type=int, default=12)
    ap.add_argument("--size", type=int, default=320)
    ap.add_argument("--batch", type=int, default=6)
    ap.add_argument("--steps", type=int, default=6)
    a = ap.parse_args()
    torch.manual_seed(2024)
    dev = torch.device("cuda")
    gen = torch.Generator(device=dev).manual_seed(7)
    net = nn.ModuleList([Cascade(a.chans) for _ in range(a.cascades)]).to(dev)
    trace = {}
    for i, c in enumerate(net):
        c.register_forward_hook(lambda m, x, out, i=i: trace.__setitem__(i, torch.cuda.memory_allocated() / 2**20))
    lams = [c.lam for c in net]
    rest = [p for n, p in net.named_parameters() if not n.endswith("lam")]
    opt = torch.optim.NAdam([{"params": rest, "weight_decay": 1e-4, "decoupled_weight_decay": True},
                             {"params": lams, "lr": 1e-2}], lr=3e-4)
    scaler = GradScaler("cuda", init_scale=2.0 ** 10)
    for it in range(a.steps):
        img, sens, mask = phantom(a.batch, a.coils, a.size, gen, dev)
        k0 = fft2c(img.unsqueeze(1) * sens) * mask
        k = k0.clone()
        for c in net:
            k = c(k, k0, mask, sens)
        rec = ifft2c(k).abs().pow(2).sum(1).add(1e-9).sqrt()
        loss = F.l1_loss(rec, img.abs())
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        gn = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        print(f"it {it} l1 {loss.item():.4f} |g| {gn.item():.3f} sampled {mask.float().mean().item():.3f} "
              f"after first/last cascade {trace[0]:.0f}/{trace[a.cascades - 1]:.0f} MiB")
    print(f"max allocated {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB, "
          f"max reserved {torch.cuda.max_memory_reserved() / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
