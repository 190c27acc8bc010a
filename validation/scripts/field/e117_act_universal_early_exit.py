# Universal transformer with adaptive computation time.
# Tokens halt one by one; sequences whose tokens have all halted leave the batch.
# A second classifier hangs off every ponder step and gives early exit at test time.
import os, torch
os.environ.setdefault("PYTHONHASHSEED", "0")
import torch.nn as nn
import torch.nn.functional as F
from contextlib import nullcontext

BS = int(os.environ.get("BS", 64))
T = int(os.environ.get("SEQ", 256))
D = int(os.environ.get("DIM", 512))
MAX_PONDER = 8
EPS = 0.01
TIME_PENALTY = 0.02
NCLS = 4
STEPS = 7
dev = "cuda"

torch.manual_seed(123)
torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cudnn.allow_tf32 = True


class SharedBlock(nn.Module):
    def __init__(s):
        super().__init__()
        s.norm_a, s.norm_f = nn.LayerNorm(D), nn.LayerNorm(D)
        s.q, s.kv, s.o = nn.Linear(D, D), nn.Linear(D, 2 * D), nn.Linear(D, D)
        s.ff = nn.Sequential(nn.Linear(D, 4 * D), nn.ReLU(), nn.Dropout(0.1), nn.Linear(4 * D, D))

    def forward(s, x, running):
        """x (b,t,d); only the tokens in `running` (b,t bool) are rewritten, all serve as keys."""
        b, t, _ = x.shape
        h = s.norm_a(x)
        q = s.q(h).view(b, t, -1, 64).transpose(1, 2)
        k, v = s.kv(h).view(b, t, 2, -1, 64).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, D)
        live = (x + s.o(a))[running]                 # (n_running, d)
        live = live + s.ff(s.norm_f(live))
        y = x.clone()
        y[running] = live
        return y


class ACT(nn.Module):
    def __init__(s, vocab=64):
        super().__init__()
        s.emb, s.pos = nn.Embedding(vocab, D), nn.Parameter(torch.randn(T, D) * 0.02)
        s.step_emb = nn.Parameter(torch.randn(MAX_PONDER, D) * 0.02)
        s.block = SharedBlock()
        s.halt = nn.Linear(D, 1)
        nn.init.constant_(s.halt.bias, 0.5)
        nn.init.normal_(s.halt.weight, std=0.08)
        s.cls, s.exit_cls = nn.Linear(D, NCLS), nn.Linear(D, NCLS)

    def forward(s, ids):
        x = s.emb(ids) + s.pos[: ids.size(1)]
        B, t, _ = x.shape
        rows = torch.arange(B, device=x.device)      # which original sample each batch row is
        acc = x.new_zeros(B, t)
        final, out_rows = [], []
        state = torch.zeros_like(x)
        ponder = x.new_zeros(B)
        exits, sizes = [], []
        for n in range(MAX_PONDER):
            running = acc < 1 - EPS
            sizes.append((x.size(0), int(running.sum())))
            p = torch.sigmoid(s.halt(x + s.step_emb[n])).squeeze(-1) * running
            last = (acc + p > 1 - EPS) & running if n < MAX_PONDER - 1 else running
            w = torch.where(last, 1 - acc, p)
            x = s.block(x + s.step_emb[n], running)
            state = state + w.unsqueeze(-1) * x
            acc = acc + w
            ponder = ponder.index_add(0, rows, (running.float() + torch.where(last, w, 0.)).mean(1))
            exits.append((rows, s.exit_cls(x.mean(1))))
            done = (acc >= 1 - EPS).all(1)
            if done.any():
                final.append(state[done]); out_rows.append(rows[done])
                x, state, acc, rows = x[~done], state[~done], acc[~done], rows[~done]
            if rows.numel() == 0:
                break
        order = torch.cat(out_rows).argsort()
        return s.cls(torch.cat(final)[order].mean(1)), ponder, exits, sizes

    @torch.no_grad()
    def early_exit(s, ids, conf):
        x = s.emb(ids) + s.pos[: ids.size(1)]
        rows = torch.arange(len(ids), device=ids.device)
        pred = torch.full((len(ids),), -1, device=ids.device)
        hist = []
        for n in range(MAX_PONDER):
            x = s.block(x + s.step_emb[n], torch.ones(x.shape[:2], dtype=torch.bool, device=x.device))
            c, y = s.exit_cls(x.mean(1)).softmax(-1).max(-1)
            leave = (c > conf) if n < MAX_PONDER - 1 else torch.ones_like(c, dtype=torch.bool)
            pred[rows[leave]] = y[leave]
            hist.append(int(leave.sum()))
            x, rows = x[~leave], rows[~leave]
            if x.size(0) == 0: break
        return pred, hist, c


def data(n):
    # class = which quarter of the vocabulary is over-represented, with a per-sample difficulty
    y = torch.randint(NCLS, (n,), device=dev)
    hard = torch.rand(n, 1, device=dev) * 0.8
    ids = torch.randint(64, (n, T), device=dev)
    biased = torch.randint(16, (n, T), device=dev) + 16 * y[:, None]
    return torch.where(torch.rand(n, T, device=dev) > hard, biased, ids), y


net = ACT().to(dev)
opt = torch.optim.AdamW(net.parameters(), lr=3e-4)
sch = torch.optim.lr_scheduler.PolynomialLR(opt, total_iters=STEPS, power=1.0)

for i in range(STEPS):
    ids, y = data(BS)
    with nullcontext():
        logits, ponder, exits, sizes = net(ids)
        task = F.cross_entropy(logits, y)
        aux = sum(F.cross_entropy(l, y[r]) for r, l in exits) / len(exits)
        loss = task + 0.3 * aux + TIME_PENALTY * ponder.mean()
    opt.zero_grad(); loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    opt.step(); sch.step()
    print(f"{i} loss={loss.item():.4f} task={task.item():.4f} ponder={ponder.mean().item():.3f} (batch,tokens)={sizes}")

net.eval()
ids, y = data(4 * BS)
for conf in (0.3, 0.4, 0.6, 0.9):
    pred, hist, _ = net.early_exit(ids, conf)
    print(f"early exit conf>{conf}: acc {(pred == y).float().mean().item():.3f}, left per step {hist}")
print(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
