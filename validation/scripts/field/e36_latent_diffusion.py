"""Latent diffusion training: frozen VAE encoder + CLIP text encoder, conditional UNet with cross attention."""
import argparse
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers import CLIPTextConfig, CLIPTextModel


def norm(c):
    return nn.GroupNorm(32, c, eps=1e-6)


# ----------------------------------------------------------------------------- VAE encoder
class VAERes(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.n1, self.c1 = norm(cin), nn.Conv2d(cin, cout, 3, padding=1)
        self.n2, self.c2 = norm(cout), nn.Conv2d(cout, cout, 3, padding=1)
        self.skip = nn.Conv2d(cin, cout, 1) if cin != cout else nn.Identity()

    def forward(self, x):
        h = self.c1(F.silu(self.n1(x)))
        h = self.c2(F.silu(self.n2(h)))
        return self.skip(x) + h


class VAEAttn(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.n = norm(c)
        self.qkv = nn.Conv2d(c, 3 * c, 1)
        self.out = nn.Conv2d(c, c, 1)

    def forward(self, x):
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.n(x)).reshape(b, 3, 1, c, h * w).transpose(-1, -2).unbind(1)
        o = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(o.transpose(-1, -2).reshape(b, c, h, w))


class VAEEncoder(nn.Module):
    def __init__(self, ch=128, mult=(1, 2, 4, 4), z=4):
        super().__init__()
        self.conv_in = nn.Conv2d(3, ch, 3, padding=1)
        layers, c = [], ch
        for i, m in enumerate(mult):
            layers += [VAERes(c, ch * m), VAERes(ch * m, ch * m)]
            c = ch * m
            if i < len(mult) - 1:
                layers.append(nn.Conv2d(c, c, 3, stride=2, padding=1))
        layers += [VAERes(c, c), VAEAttn(c), VAERes(c, c), norm(c), nn.SiLU(), nn.Conv2d(c, 2 * z, 3, padding=1)]
        self.body = nn.Sequential(*layers)

    def forward(self, x):
        mean, logvar = self.body(self.conv_in(x)).chunk(2, 1)
        std = torch.exp(0.5 * logvar.clamp(-30, 20))
        return (mean + std * torch.randn_like(mean)) * 0.18215


# ----------------------------------------------------------------------------- UNet
class ResBlock(nn.Module):
    def __init__(self, cin, cout, temb):
        super().__init__()
        self.in_layers = nn.Sequential(norm(cin), nn.SiLU(), nn.Conv2d(cin, cout, 3, padding=1))
        self.emb = nn.Linear(temb, cout)
        self.out_norm = norm(cout)
        self.out_conv = nn.Conv2d(cout, cout, 3, padding=1)
        self.skip = nn.Conv2d(cin, cout, 1) if cin != cout else nn.Identity()

    def forward(self, x, t):
        h = self.in_layers(x) + self.emb(F.silu(t))[:, :, None, None]
        return self.skip(x) + self.out_conv(F.silu(self.out_norm(h)))


class Attention(nn.Module):
    def __init__(self, dim, ctx=None, head_dim=64):
        super().__init__()
        self.h = dim // head_dim
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(ctx or dim, dim, bias=False)
        self.v = nn.Linear(ctx or dim, dim, bias=False)
        self.o = nn.Linear(dim, dim)

    def forward(self, x, ctx=None):
        ctx = x if ctx is None else ctx
        b, n, d = x.shape
        q = self.q(x).view(b, n, self.h, -1).transpose(1, 2)
        k = self.k(ctx).view(b, ctx.shape[1], self.h, -1).transpose(1, 2)
        v = self.v(ctx).view(b, ctx.shape[1], self.h, -1).transpose(1, 2)
        o = F.scaled_dot_product_attention(q, k, v)
        return self.o(o.transpose(1, 2).reshape(b, n, d))


class GEGLU(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.proj = nn.Linear(d, d * 8)
        self.out = nn.Linear(d * 4, d)

    def forward(self, x):
        a, g = self.proj(x).chunk(2, -1)
        return self.out(a * F.gelu(g))


class SpatialTransformer(nn.Module):
    def __init__(self, c, ctx):
        super().__init__()
        self.norm = norm(c)
        self.proj_in, self.proj_out = nn.Linear(c, c), nn.Linear(c, c)
        self.n1, self.n2, self.n3 = nn.LayerNorm(c), nn.LayerNorm(c), nn.LayerNorm(c)
        self.self_attn, self.cross_attn, self.ff = Attention(c), Attention(c, ctx), GEGLU(c)

    def forward(self, x, ctx):
        b, c, h, w = x.shape
        y = self.proj_in(self.norm(x).flatten(2).transpose(1, 2))
        y = y + self.self_attn(self.n1(y))
        y = y + self.cross_attn(self.n2(y), ctx)
        y = y + self.ff(self.n3(y))
        return x + self.proj_out(y).transpose(1, 2).reshape(b, c, h, w)


class Stage(nn.Module):
    def __init__(self, cin, cout, temb, ctx, attn):
        super().__init__()
        self.res = ResBlock(cin, cout, temb)
        self.attn = SpatialTransformer(cout, ctx) if attn else None
        self.use_ckpt = False

    def _forward(self, x, t, ctx):
        x = self.res(x, t)
        return self.attn(x, ctx) if self.attn is not None else x

    def forward(self, x, t, ctx):
        if self.use_ckpt and self.training:
            return checkpoint(self._forward, x, t, ctx, use_reentrant=False)
        return self._forward(x, t, ctx)


class UNet(nn.Module):
    def __init__(self, ch=320, mult=(1, 2, 4, 4), attn=(True, True, True, False), ctx=768, n_res=2):
        super().__init__()
        temb = ch * 4
        self.ch = ch
        self.time = nn.Sequential(nn.Linear(ch, temb), nn.SiLU(), nn.Linear(temb, temb))
        self.conv_in = nn.Conv2d(4, ch, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        skips, c = [ch], ch
        for i, m in enumerate(mult):
            for _ in range(n_res):
                self.down.append(Stage(c, ch * m, temb, ctx, attn[i]))
                c = ch * m
                skips.append(c)
            if i < len(mult) - 1:
                self.down.append(nn.Conv2d(c, c, 3, stride=2, padding=1))
                skips.append(c)
        self.mid1 = Stage(c, c, temb, ctx, True)
        self.mid2 = Stage(c, c, temb, ctx, False)
        for i, m in reversed(list(enumerate(mult))):
            for j in range(n_res + 1):
                self.up.append(Stage(c + skips.pop(), ch * m, temb, ctx, attn[i]))
                c = ch * m
            if i > 0:
                self.up.append(nn.Sequential(nn.Upsample(scale_factor=2, mode="nearest"),
                                             nn.Conv2d(c, c, 3, padding=1)))
        self.out = nn.Sequential(norm(c), nn.SiLU(), nn.Conv2d(c, 4, 3, padding=1))

    def enable_gradient_checkpointing(self):
        for m in self.modules():
            if isinstance(m, Stage):
                m.use_ckpt = True

    def forward(self, x, t, ctx):
        half = self.ch // 2
        freqs = torch.exp(-math.log(10000) * torch.arange(half, device=x.device) / half)
        args = t[:, None].float() * freqs[None]
        temb = self.time(torch.cat([args.cos(), args.sin()], -1))
        h = self.conv_in(x)
        hs = [h]
        for layer in self.down:
            h = layer(h, temb, ctx) if isinstance(layer, Stage) else layer(h)
            hs.append(h)
        h = self.mid2(self.mid1(h, temb, ctx), temb, ctx)
        for layer in self.up:
            if isinstance(layer, Stage):
                h = layer(torch.cat([h, hs.pop()], 1), temb, ctx)
            else:
                h = layer(h)
        return self.out(h)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--resolution", type=int, default=512)
    ap.add_argument("--train_batch_size", type=int, default=8)
    ap.add_argument("--max_train_steps", type=int, default=5)
    ap.add_argument("--learning_rate", type=float, default=1e-4)
    ap.add_argument("--no_gradient_checkpointing", action="store_true")
    ap.add_argument("--seed", type=int, default=0)
    args = ap.parse_args()

    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    device = torch.device("cuda")
    with device:
        vae = VAEEncoder()
        text_encoder = CLIPTextModel(CLIPTextConfig(vocab_size=49408, hidden_size=768, intermediate_size=3072,
                                                    num_hidden_layers=12, num_attention_heads=12))
        unet = UNet()
    weight_dtype = torch.bfloat16
    vae.requires_grad_(False).eval().to(dtype=weight_dtype)
    text_encoder.requires_grad_(False).eval().to(dtype=weight_dtype)
    unet.train()
    if not args.no_gradient_checkpointing:
        unet.enable_gradient_checkpointing()
    print(f"unet params {sum(p.numel() for p in unet.parameters()) / 1e6:.1f}M")

    optimizer = torch.optim.AdamW(unet.parameters(), lr=args.learning_rate, weight_decay=1e-2)
    betas = torch.linspace(0.00085 ** 0.5, 0.012 ** 0.5, 1000, device=device) ** 2
    alphas_cumprod = torch.cumprod(1 - betas, 0)

    for step in range(args.max_train_steps):
        pixels = torch.rand(args.train_batch_size, 3, args.resolution, args.resolution) * 2 - 1
        input_ids = torch.randint(0, 49405, (args.train_batch_size, 77))
        pixels = pixels.to(device, dtype=weight_dtype)
        input_ids = input_ids.to(device)

        with torch.no_grad():
            latents = vae(pixels).float()
            context = text_encoder(input_ids)[0]

        noise = torch.randn_like(latents)
        t = torch.randint(0, 1000, (latents.shape[0],), device=device)
        a = alphas_cumprod[t][:, None, None, None]
        noisy = a.sqrt() * latents + (1 - a).sqrt() * noise

        with torch.autocast("cuda", dtype=torch.bfloat16):
            pred = unet(noisy, t, context)
        loss = F.mse_loss(pred.float(), noise, reduction="mean")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(f"step {step} loss {loss.item():.4f} alloc {torch.cuda.max_memory_allocated()} "
              f"reserved {torch.cuda.max_memory_reserved()}")

    print("max_memory_allocated", torch.cuda.max_memory_allocated())
    print("max_memory_reserved", torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    main()
