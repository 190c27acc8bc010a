"""Text-conditional latent diffusion: hand-written SD-style UNet, v-prediction, EMA, grad accumulation, DDIM sampling."""
import math

import torch
from torch import nn
import torch.nn.functional as F


class Cfg:
    latent, head_dim, T = 64, 64, 1000
    ch, mult, n_res = 192, (1, 2, 4, 4), 2
    ctx_len, ctx_dim = 77, 768
    micro_bs, accum, steps = 8, 3, 5
    lr, cfg_drop = 1e-4, 0.1
    sample_n, sample_steps = 4, 10


def timestep_embedding(t, dim):
    freqs = torch.exp(-math.log(10000) * torch.arange(dim // 2, device=t.device) / (dim // 2))
    a = t[:, None].float() * freqs[None]
    return torch.cat([a.cos(), a.sin()], dim=-1)


class ResBlock(nn.Module):
    def __init__(self, cin, cout, emb):
        super().__init__()
        self.in_layers = nn.Sequential(nn.GroupNorm(32, cin), nn.SiLU(), nn.Conv2d(cin, cout, 3, padding=1))
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(emb, cout))
        self.out_layers = nn.Sequential(nn.GroupNorm(32, cout), nn.SiLU(), nn.Conv2d(cout, cout, 3, padding=1))
        self.skip = nn.Conv2d(cin, cout, 1) if cin != cout else nn.Identity()

    def forward(self, x, emb):
        h = self.in_layers(x) + self.emb_layers(emb)[:, :, None, None]
        return self.skip(x) + self.out_layers(h)


class CrossAttention(nn.Module):
    def __init__(self, dim, ctx=None, head_dim=64):
        super().__init__()
        self.h = dim // head_dim
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_kv = nn.Linear(ctx or dim, dim * 2, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x, ctx=None):
        b, n, d = x.shape
        ctx = x if ctx is None else ctx
        q = self.to_q(x).view(b, n, self.h, -1).transpose(1, 2)
        k, v = self.to_kv(ctx).view(b, ctx.shape[1], 2, self.h, -1).permute(2, 0, 3, 1, 4)
        o = F.scaled_dot_product_attention(q, k, v)
        return self.to_out(o.transpose(1, 2).reshape(b, n, d))


class SpatialTransformer(nn.Module):
    def __init__(self, ch, ctx, head_dim):
        super().__init__()
        self.norm = nn.GroupNorm(32, ch, eps=1e-6)
        self.proj_in, self.proj_out = nn.Conv2d(ch, ch, 1), nn.Conv2d(ch, ch, 1)
        self.n1, self.n2, self.n3 = nn.LayerNorm(ch), nn.LayerNorm(ch), nn.LayerNorm(ch)
        self.attn1 = CrossAttention(ch, head_dim=head_dim)
        self.attn2 = CrossAttention(ch, ctx, head_dim)
        self.ff_in, self.ff_out = nn.Linear(ch, ch * 8), nn.Linear(ch * 4, ch)

    def forward(self, x, ctx):
        b, c, h, w = x.shape
        y = self.proj_in(self.norm(x)).flatten(2).transpose(1, 2)
        y = y + self.attn1(self.n1(y))
        y = y + self.attn2(self.n2(y), ctx)
        a, gate = self.ff_in(self.n3(y)).chunk(2, dim=-1)  # GEGLU
        y = y + self.ff_out(a * F.gelu(gate))
        return x + self.proj_out(y.transpose(1, 2).reshape(b, c, h, w))


class UNet(nn.Module):
    def __init__(self, c: Cfg):
        super().__init__()
        emb = c.ch * 4
        self.c = c
        self.time = nn.Sequential(nn.Linear(c.ch, emb), nn.SiLU(), nn.Linear(emb, emb))
        self.conv_in = nn.Conv2d(4, c.ch, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        chans, cur = [c.ch], c.ch
        for i, m in enumerate(c.mult):
            for _ in range(c.n_res):
                attn = SpatialTransformer(c.ch * m, c.ctx_dim, c.head_dim) if i < len(c.mult) - 1 else nn.Identity()
                self.down.append(nn.ModuleList([ResBlock(cur, c.ch * m, emb), attn]))
                cur = c.ch * m
                chans.append(cur)
            if i < len(c.mult) - 1:
                self.down.append(nn.Conv2d(cur, cur, 3, 2, 1))
                chans.append(cur)
        self.mid = nn.ModuleList([ResBlock(cur, cur, emb), SpatialTransformer(cur, c.ctx_dim, c.head_dim), ResBlock(cur, cur, emb)])
        for i, m in reversed(list(enumerate(c.mult))):
            for j in range(c.n_res + 1):
                attn = SpatialTransformer(c.ch * m, c.ctx_dim, c.head_dim) if i < len(c.mult) - 1 else nn.Identity()
                up = nn.Conv2d(c.ch * m, c.ch * m, 3, padding=1) if i > 0 and j == c.n_res else nn.Identity()
                self.up.append(nn.ModuleList([ResBlock(cur + chans.pop(), c.ch * m, emb), attn, up]))
                cur = c.ch * m
        self.out = nn.Sequential(nn.GroupNorm(32, cur), nn.SiLU(), nn.Conv2d(cur, 4, 3, padding=1))

    @staticmethod
    def block(res, attn, x, emb, ctx):
        x = res(x, emb)
        return attn(x, ctx) if isinstance(attn, SpatialTransformer) else x

    def forward(self, x, t, ctx):
        emb = self.time(timestep_embedding(t, self.c.ch))
        x = self.conv_in(x)
        hs = [x]
        for blk in self.down:
            x = blk(x) if isinstance(blk, nn.Conv2d) else self.block(blk[0], blk[1], x, emb, ctx)
            hs.append(x)
        x = self.mid[2](self.mid[1](self.mid[0](x, emb), ctx), emb)
        for res, attn, up in self.up:
            x = self.block(res, attn, torch.cat([x, hs.pop()], 1), emb, ctx)
            if isinstance(up, nn.Conv2d):
                x = up(F.interpolate(x, scale_factor=2, mode="nearest"))
        return self.out(x)


@torch.no_grad()
def ddim_sample(net, c, ctx, null_ctx, acp, scale=5.0):
    x = torch.randn(c.sample_n, 4, c.latent, c.latent, device="cuda")
    ts = torch.linspace(c.T - 1, 0, c.sample_steps + 1).long().tolist()
    for t, s in zip(ts[:-1], ts[1:]):
        tt = torch.full((2 * c.sample_n,), t, device="cuda")
        v = net(torch.cat([x, x]), tt, torch.cat([null_ctx, ctx])).float()
        vu, vc = v.chunk(2)
        v = vu + scale * (vc - vu)
        a, sg = acp[t].sqrt(), (1 - acp[t]).sqrt()
        x = acp[s].sqrt() * (a * x - sg * v) + (1 - acp[s]).sqrt() * (sg * x + a * v)
    return x


def main():
    c = Cfg()
    torch.manual_seed(42)
    net = UNet(c).to("cuda")
    ema = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9999))
    opt = torch.optim.AdamW(net.parameters(), lr=c.lr, betas=(0.9, 0.999), weight_decay=1e-2)
    betas = torch.linspace(0.00085 ** 0.5, 0.012 ** 0.5, c.T, device="cuda") ** 2
    acp = (1 - betas).cumprod(0)
    null_ctx = torch.zeros(1, c.ctx_len, c.ctx_dim, device="cuda")
    for step in range(c.steps):
        for _ in range(c.accum):
            z = torch.randn(c.micro_bs, 4, c.latent, c.latent).cuda() * 0.18215 * 5
            ctx = torch.randn(c.micro_bs, c.ctx_len, c.ctx_dim).cuda()
            ctx = torch.where(torch.rand(c.micro_bs, 1, 1, device="cuda") < c.cfg_drop, null_ctx, ctx)
            t = torch.randint(0, c.T, (c.micro_bs,), device="cuda")
            noise = torch.randn_like(z)
            a, s = acp[t].sqrt().view(-1, 1, 1, 1), (1 - acp[t]).sqrt().view(-1, 1, 1, 1)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                pred = net(a * z + s * noise, t, ctx)
            loss = F.mse_loss(pred.float(), a * noise - s * z) / c.accum
            loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        ema.update_parameters(net)
        print(f"[{step}] loss={loss.item() * c.accum:.4f}")
    ema.eval()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        ctx = torch.randn(c.sample_n, c.ctx_len, c.ctx_dim, device="cuda")
        x = ddim_sample(ema, c, ctx, null_ctx.expand_as(ctx), acp)
    print("sample", tuple(x.shape), "std", x.std().item())
    print(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    main()
