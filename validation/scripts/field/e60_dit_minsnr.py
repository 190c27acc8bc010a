"""DiT-L/2-ish latent diffusion training: cosine schedule, v-free eps-prediction, min-SNR-gamma, CFG dropout, EMA."""

import argparse
import copy
import math
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


def modulate(x, shift, scale):
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class TimestepEmbedder(nn.Module):
    def __init__(self, hidden_size, freq_dim=256):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(freq_dim, hidden_size), nn.SiLU(), nn.Linear(hidden_size, hidden_size))
        self.freq_dim = freq_dim

    def forward(self, t):
        half = self.freq_dim // 2
        freqs = torch.exp(-math.log(10000) * torch.arange(half, device=t.device, dtype=torch.float32) / half)
        args = t[:, None].float() * freqs[None]
        return self.mlp(torch.cat([args.cos(), args.sin()], dim=-1))


class LabelEmbedder(nn.Module):
    def __init__(self, num_classes, hidden_size, dropout_prob):
        super().__init__()
        self.table = nn.Embedding(num_classes + 1, hidden_size)
        self.num_classes = num_classes
        self.dropout_prob = dropout_prob

    def forward(self, y, train):
        if train and self.dropout_prob > 0:
            drop = torch.rand(y.shape[0], device=y.device) < self.dropout_prob
            y = torch.where(drop, self.num_classes, y)
        return self.table(y)


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, dim * 3)
        self.q_norm = nn.RMSNorm(dim // heads)
        self.k_norm = nn.RMSNorm(dim // heads)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(B, N, C))


class DiTBlock(nn.Module):
    def __init__(self, dim, heads, mlp_ratio=4.0):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.attn = Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        hidden = int(dim * mlp_ratio)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(approximate="tanh"), nn.Linear(hidden, dim))
        self.ada = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))

    def forward(self, x, c):
        s1, sc1, g1, s2, sc2, g2 = self.ada(c).chunk(6, dim=1)
        x = x + g1.unsqueeze(1) * self.attn(modulate(self.norm1(x), s1, sc1))
        x = x + g2.unsqueeze(1) * self.mlp(modulate(self.norm2(x), s2, sc2))
        return x


class DiT(nn.Module):
    def __init__(self, size=32, patch=2, in_ch=4, dim=1024, depth=24, heads=16, num_classes=1000, class_drop=0.1):
        super().__init__()
        self.patch, self.in_ch, self.grid = patch, in_ch, size // patch
        self.x_embed = nn.Conv2d(in_ch, dim, patch, patch)
        self.t_embed = TimestepEmbedder(dim)
        self.y_embed = LabelEmbedder(num_classes, dim, class_drop)
        self.pos = nn.Parameter(torch.randn(1, self.grid**2, dim) * 0.02)
        self.blocks = nn.ModuleList([DiTBlock(dim, heads) for _ in range(depth)])
        self.final_norm = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.final_ada = nn.Sequential(nn.SiLU(), nn.Linear(dim, 2 * dim))
        self.final = nn.Linear(dim, patch * patch * in_ch)
        self.init_weights()

    def init_weights(self):
        for m in self.modules():
            if isinstance(m, nn.Linear):
                nn.init.xavier_uniform_(m.weight)
                nn.init.zeros_(m.bias)
        for blk in self.blocks:
            nn.init.zeros_(blk.ada[-1].weight)
        nn.init.zeros_(self.final_ada[-1].weight)
        nn.init.zeros_(self.final.weight)

    def unpatchify(self, x):
        p, g = self.patch, self.grid
        x = x.reshape(x.shape[0], g, g, p, p, self.in_ch)
        return torch.einsum("nhwpqc->nchpwq", x).reshape(x.shape[0], self.in_ch, g * p, g * p)

    def forward(self, x, t, y):
        x = self.x_embed(x).flatten(2).transpose(1, 2) + self.pos
        c = self.t_embed(t) + self.y_embed(y, self.training)
        for blk in self.blocks:
            x = blk(x, c)
        shift, scale = self.final_ada(c).chunk(2, dim=1)
        return self.unpatchify(self.final(modulate(self.final_norm(x), shift, scale)))

    def forward_cfg(self, x, t, y, scale):
        null = torch.full_like(y, self.y_embed.num_classes)
        out = self(torch.cat([x, x]), torch.cat([t, t]), torch.cat([y, null]))
        cond, uncond = out.float().chunk(2)
        return uncond + scale * (cond - uncond)


class Diffusion:
    def __init__(self, steps=1000, device="cuda"):
        s = 0.008
        t = torch.linspace(0, 1, steps + 1, device=device, dtype=torch.float64)
        f = torch.cos((t + s) / (1 + s) * math.pi / 2) ** 2
        betas = (1 - f[1:] / f[:-1]).clamp(max=0.999)
        self.abar = torch.cumprod(1 - betas, 0).float()
        self.steps = steps

    def q_sample(self, x0, t, noise):
        a = self.abar[t][:, None, None, None]
        return a.sqrt() * x0 + (1 - a).sqrt() * noise

    def min_snr_weight(self, t, gamma):
        snr = self.abar[t] / (1 - self.abar[t])
        return torch.minimum(snr, torch.full_like(snr, gamma)) / snr.clamp(min=1e-8)

    @torch.no_grad()
    def ddim(self, model, shape, y, cfg_scale, n_steps):
        x = torch.randn(shape, device=y.device)
        ts = torch.linspace(self.steps - 1, 0, n_steps, device=y.device).long()
        for i, t in enumerate(ts):
            tb = t.expand(shape[0])
            with torch.autocast("cuda", dtype=torch.bfloat16):
                eps = model.forward_cfg(x, tb, y, cfg_scale)
            a = self.abar[t]
            a_prev = self.abar[ts[i + 1]] if i + 1 < len(ts) else torch.ones((), device=y.device)
            x0 = ((x - (1 - a).sqrt() * eps) / a.sqrt().clamp(min=1e-4)).clamp(-4, 4)
            x = a_prev.sqrt() * x0 + (1 - a_prev).sqrt() * eps
        return x


@torch.no_grad()
def update_ema(ema, model, decay):
    torch._foreach_lerp_(list(ema.parameters()), list(model.parameters()), 1 - decay)
    for be, b in zip(ema.buffers(), model.buffers()):
        be.copy_(b)


def latent_batches(n, size, num_classes, device):
    """Class dependent gaussian-ish latents: a per-class low-res template upsampled, plus noise."""
    g = torch.Generator(device=device).manual_seed(0)
    templates = torch.randn(num_classes, 4, 4, 4, device=device, generator=g)
    while True:
        y = torch.randint(0, num_classes, (n,), device=device)
        x = F.interpolate(templates[y], size=(size, size), mode="bicubic")
        yield (x + 0.3 * torch.randn_like(x)).clamp(-4, 4), y


def gib(x):
    return f"{x / 1024 ** 3:.3f} GiB"


def main(args):
    device = torch.device("cuda", 0)
    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True

    with device:
        model = DiT(size=args.latent_size, depth=args.depth, dim=args.dim, heads=args.heads, num_classes=args.num_classes)
    ema = copy.deepcopy(model).eval().requires_grad_(False)
    diffusion = Diffusion(device=device)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0, betas=(0.9, 0.95), fused=True)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / args.warmup))
    print(f"DiT parameters: {sum(p.numel() for p in model.parameters()):,}")
    print("after init:", gib(torch.cuda.max_memory_allocated()), gib(torch.cuda.max_memory_reserved()))

    data = latent_batches(args.batch_size, args.latent_size, args.num_classes, device)
    fixed_y = torch.randint(0, args.num_classes, (args.n_samples,), device=device)
    running, log_t = 0.0, time.time()
    model.train()
    for step in range(1, args.steps + 1):
        x0, y = next(data)
        t = torch.randint(0, diffusion.steps, (x0.shape[0],), device=device)
        noise = torch.randn_like(x0)
        xt = diffusion.q_sample(x0, t, noise)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            pred = model(xt, t, y)
        mse = F.mse_loss(pred.float(), noise, reduction="none").mean(dim=(1, 2, 3))
        loss = (mse * diffusion.min_snr_weight(t, args.snr_gamma)).mean()

        opt.zero_grad(set_to_none=True)
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        update_ema(ema, model, min(args.ema_decay, (1 + step) / (10 + step)))

        running += loss.item()
        if step % args.log_every == 0:
            torch.cuda.synchronize()
            dt = (time.time() - log_t) / args.log_every
            print(f"(step={step:04d}) loss: {running / args.log_every:.4f}, mse: {mse.mean().item():.4f}, "
                  f"gnorm: {grad_norm.item():.3f}, s/step: {dt:.2f}, "
                  f"peak alloc: {gib(torch.cuda.max_memory_allocated())}, peak reserved: {gib(torch.cuda.max_memory_reserved())}")
            running, log_t = 0.0, time.time()

        if step % args.sample_every == 0:
            shape = (args.n_samples, 4, args.latent_size, args.latent_size)
            z = diffusion.ddim(ema, shape, fixed_y, args.cfg_scale, args.sample_steps)
            print(f"(step={step:04d}) samples: mean {z.mean().item():.3f} std {z.std().item():.3f}; "
                  f"allocated now {gib(torch.cuda.memory_allocated())}")
            log_t = time.time()

    print("done.")
    print(f"max_memory_allocated = {torch.cuda.max_memory_allocated()} ({gib(torch.cuda.max_memory_allocated())})")
    print(f"max_memory_reserved  = {torch.cuda.max_memory_reserved()} ({gib(torch.cuda.max_memory_reserved())})")


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--dim", type=int, default=1024)
    p.add_argument("--depth", type=int, default=24)
    p.add_argument("--heads", type=int, default=16)
    p.add_argument("--latent-size", type=int, default=32)
    p.add_argument("--num-classes", type=int, default=1000)
    p.add_argument("--batch-size", type=int, default=64)
    p.add_argument("--steps", type=int, default=12)
    p.add_argument("--lr", type=float, default=1e-4)
    p.add_argument("--warmup", type=int, default=5)
    p.add_argument("--snr-gamma", type=float, default=5.0)
    p.add_argument("--ema-decay", type=float, default=0.9999)
    p.add_argument("--cfg-scale", type=float, default=4.0)
    p.add_argument("--n-samples", type=int, default=32)
    p.add_argument("--sample-steps", type=int, default=20)
    p.add_argument("--sample-every", type=int, default=6)
    p.add_argument("--log-every", type=int, default=2)
    p.add_argument("--seed", type=int, default=0)
    main(p.parse_args())
