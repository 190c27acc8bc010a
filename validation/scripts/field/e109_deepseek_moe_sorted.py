#!/usr/bin/env python
"""DeepSeek-style fine-grained MoE (shared + routed experts), sorted dispatch, pure bf16 weights."""
import argparse
from typing import List, Optional, Tuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


def parse_args() -> argparse.Namespace:
    p = argparse.ArgumentParser()
    for name, default in (("--hidden", 1024), ("--layers", 6), ("--experts", 32), ("--topk", 4),
                          ("--moe-inter", 512), ("--vocab", 12000), ("--seq", 1024),
                          ("--micro-batch", 8), ("--accum", 2), ("--steps", 6)):
        p.add_argument(name, type=int, default=default)
    p.add_argument("--no-ckpt", action="store_true")
    p.add_argument("--bias-update-speed", type=float, default=1e-2)
    return p.parse_args()


class MLP(nn.Module):
    def __init__(self, hidden: int, inter: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inter, bias=False)
        self.up_proj = nn.Linear(hidden, inter, bias=False)
        self.down_proj = nn.Linear(inter, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MoEGate(nn.Module):
    """Sigmoid scores; a non-learned bias steers the selection only (aux-loss-free balancing)."""

    def __init__(self, hidden: int, n_experts: int, topk: int) -> None:
        super().__init__()
        self.topk = topk
        self.weight = nn.Parameter(torch.randn(n_experts, hidden) * hidden ** -0.5)
        self.register_buffer("e_bias", torch.zeros(n_experts))

    def forward(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        scores = F.linear(x.float(), self.weight.float()).sigmoid()
        idx = (scores + self.e_bias.float()).topk(self.topk, dim=-1, sorted=False).indices
        w = scores.gather(1, idx)
        return idx, w / (w.sum(-1, keepdim=True) + 1e-20)


class DeepseekMoE(nn.Module):
    def __init__(self, a: argparse.Namespace) -> None:
        super().__init__()
        self.n = a.experts
        self.gate = MoEGate(a.hidden, a.experts, a.topk)
        self.experts = nn.ModuleList(MLP(a.hidden, a.moe_inter) for _ in range(a.experts))
        self.shared = MLP(a.hidden, 2 * a.moe_inter)
        self.last_counts: Optional[Tensor] = None

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape
        flat = x.reshape(-1, shape[-1])
        idx, w = self.gate(flat)
        y = self.dispatch(flat, idx, w).view(shape)
        return y + self.shared(x)

    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weight: Tensor) -> Tensor:
        counts = torch.bincount(topk_ids.view(-1), minlength=self.n)
        self.last_counts = counts.detach()
        order = topk_ids.view(-1).argsort()
        sorted_tokens = x[order // topk_ids.shape[1]]
        tokens_per_expert: List[int] = counts.cpu().tolist()

        outputs, start = [], 0
        for i, num in enumerate(tokens_per_expert):
            end = start + num
            if num == 0:
                continue
            outputs.append(self.experts[i](sorted_tokens[start:end]))
            start = end
        outs = torch.cat(outputs, dim=0) if outputs else sorted_tokens.new_empty(0)

        new_x = torch.empty_like(outs)
        new_x[order] = outs
        return (new_x.view(*topk_ids.shape, -1).to(topk_weight.dtype)
                .mul_(topk_weight.unsqueeze(-1)).sum(dim=1).to(x.dtype))


class Layer(nn.Module):
    def __init__(self, a: argparse.Namespace) -> None:
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(a.hidden), nn.RMSNorm(a.hidden)
        self.qkv = nn.Linear(a.hidden, 3 * a.hidden, bias=False)
        self.o = nn.Linear(a.hidden, a.hidden, bias=False)
        self.heads = a.hidden // 64
        self.mlp = DeepseekMoE(a)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, 64).permute(2, 0, 3, 1, 4)
        att = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(att.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.n2(x))


class Model(nn.Module):
    def __init__(self, a: argparse.Namespace) -> None:
        super().__init__()
        self.use_ckpt = not a.no_ckpt
        self.embed = nn.Embedding(a.vocab, a.hidden)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.layers = nn.ModuleList(Layer(a) for _ in range(a.layers))
        self.norm = nn.RMSNorm(a.hidden)
        self.head = nn.Linear(a.hidden, a.vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        for i, layer in enumerate(self.layers):
            if self.use_ckpt and self.training and i % 2 == 1:   # every other layer
                h = checkpoint(layer, h, use_reentrant=False)
            else:
                h = layer(h)
        return self.head(self.norm(h))


def batch(a: argparse.Namespace, gen: torch.Generator) -> Tensor:
    base = torch.randint(0, a.vocab // 8, (a.micro_batch, a.seq + 1), generator=gen)
    drift = torch.arange(a.seq + 1) % 8
    return (base + drift * (a.vocab // 8)).cuda()


def main() -> None:
    a = parse_args()
    torch.manual_seed(0)
    gen = torch.Generator().manual_seed(1)
    model = Model(a).to(device="cuda", dtype=torch.bfloat16)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), foreach=True)
    sched = torch.optim.lr_scheduler.LinearLR(opt, start_factor=0.2, total_iters=3)
    for step in range(a.steps):
        total = 0.0
        for _ in range(a.accum):
            ids = batch(a, gen)
            logits = model(ids[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten()) / a.accum
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step(); sched.step(); opt.zero_grad()
        with torch.no_grad():
            worst = 0.0
            for layer in model.layers:
                c = layer.mlp.last_counts.float()
                layer.mlp.gate.e_bias += a.bias_update_speed * torch.sign(c.mean() - c).to(layer.mlp.gate.e_bias.dtype)
                worst = max(worst, (c.max() / c.mean()).item())
        print(f"step {step:2d} | loss {total:.4f} | max-violation {worst:.2f} | lr {sched.get_last_lr()[0]:.2e}")
    print(f"peak allocated {torch.cuda.max_memory_allocated()} peak reserved {torch.cuda.max_memory_reserved()}")


if __name__ == "__main__":
    main()
