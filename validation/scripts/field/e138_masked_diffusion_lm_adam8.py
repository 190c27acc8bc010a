"""LLaDA-like masked diffusion language model, trained with a hand-written block-wise 8-bit AdamW."""
import argparse
import torch
import torch.nn as nn
import torch.nn.functional as F


class Adam8(torch.optim.Optimizer):
    """Moments kept as one byte per element with one fp32 absmax per block."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, block=2048, min_size=4096):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self.block, self.min_size = block, min_size

    def _pack(self, x, signed):
        flat = F.pad(x.flatten(), (0, -x.numel() % self.block)).view(-1, self.block)
        if not signed:
            flat = flat.sqrt()
        scale = flat.abs().amax(1, keepdim=True).clamp_min(1e-20)
        q = (flat / scale * 127).round().to(torch.int8) if signed else (flat / scale * 255).round().to(torch.uint8)
        return q, scale

    def _unpack(self, q, scale, like, signed):
        x = q.float() * (scale / (127 if signed else 255))
        x = x.flatten()[: like.numel()].view_as(like)
        return x if signed else x.square()

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                st = self.state[p]
                small = p.numel() < self.min_size
                if not st:
                    st["t"] = 0
                    zero = torch.zeros_like(p)
                    if small:
                        st["m"], st["v"] = zero, zero.clone()
                    else:
                        st["m"], st["v"] = self._pack(zero, True), self._pack(zero, False)
                st["t"] += 1
                m = st["m"] if small else self._unpack(*st["m"], p, True)
                v = st["v"] if small else self._unpack(*st["v"], p, False)
                m.mul_(b1).add_(p.grad, alpha=1 - b1)
                v.mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                if not small:
                    st["m"], st["v"] = self._pack(m, True), self._pack(v, False)
                denom = (v / (1 - b2 ** st["t"])).sqrt_().add_(group["eps"])
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.addcdiv_(m, denom, value=-group["lr"] / (1 - b1 ** st["t"]))


class Layer(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))
        self.qn, self.kn = nn.LayerNorm(d // h, bias=False), nn.LayerNorm(d // h, bias=False)

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(B, T, 3, self.h, -1).transpose(1, 3).unbind(2)
        a = F.scaled_dot_product_attention(self.qn(q).to(v.dtype), self.kn(k).to(v.dtype), v)
        x = x + self.proj(a.transpose(1, 2).reshape(B, T, D))
        return x + self.mlp(self.ln2(x))


class Denoiser(nn.Module):
    def __init__(self, vocab, d, h, n, T):
        super().__init__()
        self.mask_id = vocab
        self.tok, self.pos = nn.Embedding(vocab + 1, d), nn.Embedding(T, d)
        self.layers = nn.ModuleList([Layer(d, h) for _ in range(n)])
        self.ln = nn.LayerNorm(d)
        self.out = nn.Linear(d, vocab, bias=False)

    def forward(self, x, keep=None):
        h = self.tok(x) + self.pos.weight[: x.size(1)]
        for l in self.layers:
            h = l(h)
        h = self.ln(h)
        return self.out(h if keep is None else h[keep])


def diffusion_loss(model, x):
    t = (torch.rand(x.size(0), 1, device=x.device) * 0.98 + 0.02)
    masked = torch.rand(x.shape, device=x.device) < t
    noisy = x.masked_fill(masked, model.mask_id)
    logits = model(noisy, masked)          # only masked positions get logits
    ce = F.cross_entropy(logits.float(), x[masked], reduction="none")
    return (ce / t.expand_as(x)[masked]).sum() / x.numel(), masked.float().mean()


@torch.no_grad()
def sample(model, batch, length, rounds, device):
    x = torch.full((batch, length), model.mask_id, device=device)
    for r in range(rounds):
        prob = model(x).float().softmax(-1)
        conf, tok = prob.max(-1)
        open_ = x == model.mask_id
        conf = conf.masked_fill(~open_, -1)
        k = length // rounds if r < rounds - 1 else int(open_.sum(1).max())
        idx = conf.topk(k, dim=1).indices
        x.scatter_(1, idx, tok.gather(1, idx))
    return x


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--vocab", type=int, default=65536)
    ap.add_argument("--dim", type=int, default=1280)
    ap.add_argument("--heads", type=int, default=20)
    ap.add_argument("--layers", type=int, default=20)
    ap.add_argument("--seq", type=int, default=1024)
    ap.add_argument("--batch", type=int, default=12)
    ap.add_argument("--steps", type=int, default=6)
    ap.add_argument("--lr", type=float, default=2e-4)
    a = ap.parse_args()
    torch.manual_seed(42)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Denoiser(a.vocab, a.dim, a.heads, a.layers, a.seq).to(device)
    n = sum(p.numel() for p in model.parameters())
    opt = Adam8(model.parameters(), lr=a.lr, weight_decay=0.1)
    print(f"{n/1e6:.0f}M params")
    for step in range(a.steps):
        x = torch.randint(0, a.vocab, (a.batch, a.seq)).to(device)
        with torch.autocast(device, dtype=torch.bfloat16):
            loss, frac = diffusion_loss(model, x)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        opt.step()
        model.zero_grad(set_to_none=True)
        print(f"{step}: loss {loss.item():.3f} masked {frac.item():.2f} "
              f"mem {torch.cuda.memory_allocated()/2**20:.0f}/{torch.cuda.max_memory_allocated()/2**20:.0f} MiB")
    model.eval()
    with torch.autocast(device, dtype=torch.bfloat16):
        s = sample(model, 4, 256, 8, device)
    print("sample", s[0, :10].tolist(), "left masked:", int((s == model.mask_id).sum()))


if __name__ == "__main__":
    main()
