# tiny-ish llama style gpt w/ multi token prediction, optimizer fused into backward
import math
import time
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class GPTConfig:
    vocab_size: int = 32768
    block_size: int = 1024
    n_layer: int = 16
    n_head: int = 16
    n_kv_head: int = 4
    n_embd: int = 1536
    ffn_hidden: int = 4096
    n_future: int = 3          # how many tokens ahead we predict (1 = plain LM)
    rope_theta: float = 10000.0
    mtp_weight: float = 0.3


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        xf = x.float()
        xf = xf * torch.rsqrt(xf.pow(2).mean(-1, keepdim=True) + self.eps)
        return xf.type_as(x) * self.weight.type_as(x)


def rope_cache(head_dim, max_len, theta, device):
    inv = 1.0 / (theta ** (torch.arange(0, head_dim, 2, device=device).float() / head_dim))
    t = torch.arange(max_len, device=device).float()
    f = torch.outer(t, inv)
    return f.cos(), f.sin()


def apply_rope(x, cos, sin):
    # x: B H T D
    x1, x2 = x.float().chunk(2, dim=-1)
    out = torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1)
    return out.type_as(x)


class Attention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.nh, self.nkv = cfg.n_head, cfg.n_kv_head
        self.hd = cfg.n_embd // cfg.n_head
        self.wq = nn.Linear(cfg.n_embd, self.nh * self.hd, bias=False)
        self.wkv = nn.Linear(cfg.n_embd, 2 * self.nkv * self.hd, bias=False)
        self.wo = nn.Linear(self.nh * self.hd, cfg.n_embd, bias=False)
        self.q_norm = RMSNorm(self.hd)
        self.k_norm = RMSNorm(self.hd)

    def forward(self, x, cos, sin, cache=None):
        B, T, C = x.shape
        q = self.wq(x).view(B, T, self.nh, self.hd).transpose(1, 2)
        k, v = self.wkv(x).view(B, T, 2 * self.nkv, self.hd).transpose(1, 2).chunk(2, dim=1)
        q = apply_rope(self.q_norm(q), cos, sin)
        k = apply_rope(self.k_norm(k), cos, sin)
        if cache is not None:
            if "k" in cache:
                k = torch.cat([cache["k"], k], dim=2)
                v = torch.cat([cache["v"], v], dim=2)
            cache["k"], cache["v"] = k, v
        rep = self.nh // self.nkv
        k = k.repeat_interleave(rep, dim=1)
        v = v.repeat_interleave(rep, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=(T > 1))
        return self.wo(y.transpose(1, 2).reshape(B, T, C))


class SwiGLU(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.w1 = nn.Linear(cfg.n_embd, cfg.ffn_hidden, bias=False)
        self.w3 = nn.Linear(cfg.n_embd, cfg.ffn_hidden, bias=False)
        self.w2 = nn.Linear(cfg.ffn_hidden, cfg.n_embd, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.n1, self.n2 = RMSNorm(cfg.n_embd), RMSNorm(cfg.n_embd)
        self.attn, self.mlp = Attention(cfg), SwiGLU(cfg)

    def forward(self, x, cos, sin, cache=None):
        x = x + self.attn(self.n1(x), cos, sin, cache)
        return x + self.mlp(self.n2(x))


class MTPHead(nn.Module):
    """one transformer block per extra future offset; unembedding is shared"""

    def __init__(self, cfg):
        super().__init__()
        self.proj = nn.Linear(2 * cfg.n_embd, cfg.n_embd, bias=False)
        self.nh, self.ne = RMSNorm(cfg.n_embd), RMSNorm(cfg.n_embd)
        self.block = Block(cfg)

    def forward(self, h, e, cos, sin):
        h = self.proj(torch.cat([self.nh(h), self.ne(e)], dim=-1))
        return self.block(h, cos, sin)


class GPT(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.tok = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layer))
        self.norm = RMSNorm(cfg.n_embd)
        self.lm_head = nn.Linear(cfg.n_embd, cfg.vocab_size, bias=False)
        self.mtp = nn.ModuleList(MTPHead(cfg) for _ in range(cfg.n_future - 1))
        cos, sin = rope_cache(cfg.n_embd // cfg.n_head, cfg.block_size, cfg.rope_theta,
                              self.tok.weight.device)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.apply(self._init)
        for n, p in self.named_parameters():
            if n.endswith("wo.weight") or n.endswith("w2.weight"):
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * cfg.n_layer))

    def _init(self, m):
        if isinstance(m, (nn.Linear, nn.Embedding)):
            nn.init.normal_(m.weight, std=0.02)

    def forward(self, idx):
        """idx: B, T + n_future.  Returns dict of losses (one per offset)."""
        T = idx.size(1) - self.cfg.n_future
        cos, sin = self.cos[:T], self.sin[:T]
        h = self.tok(idx[:, :T])
        for blk in self.blocks:
            h = blk(h, cos, sin)
        losses = [self._ce(h, idx[:, 1:T + 1])]
        for k, head in enumerate(self.mtp, start=1):
            e = self.tok(idx[:, k:T + k])
            h = head(h, e, cos, sin)
            losses.append(self._ce(h, idx[:, k + 1:T + k + 1]))
        return losses

    def _ce(self, h, y):
        logits = self.lm_head(self.norm(h))
        return F.cross_entropy(logits.float().view(-1, logits.size(-1)), y.reshape(-1))

    @torch.no_grad()
    def generate(self, idx, n_new, temperature=0.8, top_k=50):
        caches = [{} for _ in self.blocks]
        cur, pos = idx, 0
        for _ in range(n_new):
            T = cur.size(1)
            cos, sin = self.cos[pos:pos + T], self.sin[pos:pos + T]
            h = self.tok(cur)
            for blk, c in zip(self.blocks, caches):
                h = blk(h, cos, sin, c)
            logits = self.lm_head(self.norm(h[:, -1])).float() / temperature
            v, _ = torch.topk(logits, top_k)
            logits[logits < v[:, [-1]]] = -float("inf")
            cur = torch.multinomial(F.softmax(logits, -1), 1)
            idx = torch.cat([idx, cur], dim=1)
            pos += T
        return idx


def install_backward_optimizer(model, lr):
    """One AdamW per parameter; steps as soon as the grad is ready, then frees it."""
    opts = {}
    for name, p in model.named_parameters():
        wd = 0.1 if p.dim() >= 2 and "tok" not in name else 0.0
        opts[p] = torch.optim.AdamW([p], lr=lr, betas=(0.9, 0.95), weight_decay=wd, fused=True)

    def hook(p):
        # cheap per-tensor clip, global norm is not available here
        torch.nn.utils.clip_grad_norm_([p], 1.0)
        opts[p].step()
        opts[p].zero_grad(set_to_none=True)

    handles = [p.register_post_accumulate_grad_hook(hook) for p in opts]
    return opts, handles


def make_corpus(cfg, n_tokens, device):
    # second order-ish markov: next = (a*prev + b) mod V with noise
    g = torch.Generator(device=device).manual_seed(7)
    n_seq = n_tokens // 256
    x = torch.randint(0, cfg.vocab_size, (n_seq, 1), generator=g, device=device)
    cols = [x]
    for _ in range(255):
        nxt = (cols[-1] * 5 + 17) % 4096
        noise = torch.randint(0, cfg.vocab_size, nxt.shape, generator=g, device=device)
        keep = torch.rand(nxt.shape, generator=g, device=device) < 0.9
        cols.append(torch.where(keep, nxt, noise))
    return torch.cat(cols, 1).reshape(-1)


def get_batch(data, bs, length):
    ix = torch.randint(0, data.numel() - length - 1, (bs,)).tolist()
    return torch.stack([data[i:i + length] for i in ix])


def mem(tag):
    a = torch.cuda.max_memory_allocated() / 2**30
    r = torch.cuda.max_memory_reserved() / 2**30
    print(f"    [mem {tag}] allocated {a:.2f} GiB, reserved {r:.2f} GiB")


def main():
    torch.manual_seed(1337)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda")
    cfg = GPTConfig()
    with device:
        model = GPT(cfg)
    n_par = sum(p.numel() for p in model.parameters())
    print(f"{n_par/1e6:.1f}M parameters")
    mem("init")

    base_lr, epochs, steps_per_epoch, bs = 6e-4, 2, 4, 8
    total, warm = epochs * steps_per_epoch, 2
    opts, handles = install_backward_optimizer(model, base_lr)
    data = make_corpus(cfg, 400_000, device)
    train, val = data[:-40_000], data[-40_000:]
    L = cfg.block_size + cfg.n_future

    it, best = 0, float("inf")
    for ep in range(epochs):
        model.train()
        for _ in range(steps_per_epoch):
            t0 = time.time()
            if it < warm:
                lr = base_lr * (it + 1) / warm
            else:
                lr = base_lr * (0.1 + 0.45 * (1 + math.cos(math.pi * (it - warm) / (total - warm))))
            for o in opts.values():
                o.param_groups[0]["lr"] = lr
            xb = get_batch(train, bs, L)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                losses = model(xb)
                loss = losses[0] + cfg.mtp_weight * sum(losses[1:])
            if not torch.isfinite(loss):
                raise RuntimeError(f"loss went to {loss.item()} at iter {it}")
            loss.backward()
            parts = " ".join(f"{l.item():.4f}" for l in losses)
            print(f"iter {it} lr {lr:.2e} loss {loss.item():.4f} (per offset {parts}) {1e3*(time.time()-t0):.0f}ms")
            it += 1
            if it == 1:
                mem("after first step")
        model.eval()
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
            vl = torch.stack([model(get_batch(val, bs, L))[0] for _ in range(2)]).mean().item()
            out = model.generate(get_batch(val, 8, 128), 48)
        flag = ""
        if vl < best:
            best, flag = vl, " *"
        print(f"epoch {ep}: val {vl:.4f}{flag}; sample {out[0, -10:].tolist()}")
        mem(f"epoch {ep}")

    for h in handles:
        h.remove()
    left = sum(p.grad is not None for p in model.parameters())
    print("params with a grad still alive:", left)
    print("best val", round(best, 4))
    print("max_memory_allocated", torch.cuda.max_memory_allocated())
    print("max_memory_reserved", torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    main()
