"""Tiny GPT trained with a hand written SOAP (Shampoo eigenbasis + Adam)."""
import argparse
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class SOAP(torch.optim.Optimizer):
    def __init__(self, params, lr=3e-3, betas=(0.95, 0.95), eps=1e-8, weight_decay=0.01,
                 precondition_frequency=3, max_precond_dim=4096):
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay,
                        precondition_frequency=precondition_frequency,
                        max_precond_dim=max_precond_dim)
        super().__init__(params, defaults)

    def init_precond(self, grad, state, group):
        state["GG"], state["Q"] = [], None
        for d in grad.shape:
            if grad.dim() < 2 or d > group["max_precond_dim"]:
                state["GG"].append(None)
            else:
                state["GG"].append(torch.zeros(d, d, device=grad.device))

    def update_precond(self, grad, state, beta):
        for i, gg in enumerate(state["GG"]):
            if gg is None:
                continue
            outer = grad @ grad.T if i == 0 else grad.T @ grad
            gg.lerp_(outer, 1 - beta)

    def project(self, g, Q, back=False):
        for i, q in enumerate(Q):
            if q is None:
                continue
            if back:
                q = q.T
            g = q.T @ g if i == 0 else g @ q
        return g

    def first_basis(self, GG):
        Q = []
        for m in GG:
            if m is None:
                Q.append(None)
                continue
            eye = torch.eye(m.shape[0], device=m.device)
            try:
                _, q = torch.linalg.eigh(m + 1e-30 * eye)
            except RuntimeError:
                _, q = torch.linalg.eigh(m.double() + 1e-30 * eye)
                q = q.to(m.dtype)
            Q.append(torch.flip(q, [1]))
        return Q

    def refresh_basis(self, state):
        new_Q = []
        for m, q in zip(state["GG"], state["Q"]):
            if m is None:
                new_Q.append(None)
                continue
            est = torch.diag(q.T @ m @ q)
            idx = torch.argsort(est, descending=True)
            q = q[:, idx]
            power = m @ q
            q, _ = torch.linalg.qr(power)
            new_Q.append(q)
        state["Q"] = new_Q

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                g = p.grad
                st = self.state[p]
                if "step" not in st:
                    st["step"] = 0
                    st["exp_avg"] = torch.zeros_like(g)
                    st["exp_avg_sq"] = torch.zeros_like(g)
                    self.init_precond(g, st, group)
                    self.update_precond(g, st, b2)
                    st["Q"] = self.first_basis(st["GG"])
                    continue  # the first step is skipped
                gp = self.project(g, st["Q"])
                st["step"] += 1
                st["exp_avg"].mul_(b1).add_(g, alpha=1 - b1)
                st["exp_avg_sq"].mul_(b2).add_(gp.square(), alpha=1 - b2)
                denom = st["exp_avg_sq"].sqrt().add_(group["eps"])
                avg_p = self.project(st["exp_avg"], st["Q"])
                t = st["step"]
                lr = group["lr"] * math.sqrt(1 - b2 ** t) / (1 - b1 ** t)
                upd = self.project(avg_p / denom, st["Q"], back=True)
                p.add_(upd, alpha=-lr)
                if group["weight_decay"]:
                    p.add_(p, alpha=-group["lr"] * group["weight_decay"])
                self.update_precond(g, st, b2)
                if t % group["precondition_frequency"] == 0:
                    self.refresh_basis(st)


class Block(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.proj = nn.Linear(d, d, bias=False)
        self.fc = nn.Linear(d, 4 * d)
        self.out = nn.Linear(4 * d, d)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(self.ln1(x)).split(C, dim=2)
        q, k, v = (t.view(B, T, self.h, C // self.h).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.out(F.gelu(self.fc(self.ln2(x))))


class GPT(nn.Module):
    def __init__(self, vocab, d, n_layer, h, T):
        super().__init__()
        self.tok = nn.Embedding(vocab, d)
        self.pos = nn.Embedding(T, d)
        self.blocks = nn.ModuleList([Block(d, h) for _ in range(n_layer)])
        self.ln = nn.LayerNorm(d)
        self.head = nn.Linear(d, vocab, bias=False)

    def forward(self, idx, targets):
        x = self.tok(idx) + self.pos(torch.arange(idx.size(1), device=idx.device))
        for b in self.blocks:
            x = b(x)
        logits = self.head(self.ln(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--dim", type=int, default=512)
    ap.add_argument("--layers", type=int, default=4)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--seq", type=int, default=256)
    ap.add_argument("--vocab", type=int, default=8192)
    ap.add_argument("--steps", type=int, default=7)
    ap.add_argument("--freq", type=int, default=3)
    a = ap.parse_args()
    torch.manual_seed(1337)
    model = GPT(a.vocab, a.dim, a.layers, a.dim // 64, a.seq).cuda()
    opt = SOAP(model.parameters(), precondition_frequency=a.freq)
    data = torch.randint(0, a.vocab, (200_000,))
    for step in range(a.steps):
        ix = torch.randint(len(data) - a.seq - 1, (a.batch,))
        x = torch.stack([data[i:i + a.seq] for i in ix]).cuda()
        y = torch.stack([data[i + 1:i + 1 + a.seq] for i in ix]).cuda()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
