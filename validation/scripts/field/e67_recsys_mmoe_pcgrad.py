# Multi-task recommender: embedding bags -> MMoE -> 3 task towers, PCGrad on the shared part.
# afterwards: a vmapped ensemble of small calibration heads, and LBFGS temperature scaling.
import random
import time

import torch
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap
import torch.nn.functional as F

torch.manual_seed(2024)
random.seed(2024)
device = "cuda"

NUM_TABLES = 8
ROWS = [4_000_000, 2_000_000, 1_000_000, 1_000_000, 500_000, 100_000, 10_000, 1_000]
EMB = 64
DENSE = 32
BATCH = 16384
BAG = 20
TASKS = ["click", "like", "watch_time"]
EPOCH_STEPS = 20


class EmbeddingTables(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList()
        for n in ROWS:
            eb = nn.EmbeddingBag(n, EMB, mode="sum" if n > 100_000 else "mean", sparse=False,
                                 include_last_offset=True)
            nn.init.uniform_(eb.weight, -n ** -0.5, n ** -0.5)
            self.tables.append(eb)

    def forward(self, sparse):
        return torch.stack([t(idx, off) for t, (idx, off) in zip(self.tables, sparse)], dim=1)


class Interaction(nn.Module):
    def __init__(self):
        super().__init__()
        f = NUM_TABLES + 1
        i, j = torch.tril_indices(f, f, offset=-1)
        self.register_buffer("i", i)
        self.register_buffer("j", j)

    def forward(self, dense, emb):
        z = torch.cat([dense.unsqueeze(1), emb], 1)
        dots = torch.bmm(z, z.transpose(1, 2))[:, self.i, self.j]
        return torch.cat([z.flatten(1), dots], 1)


def mlp(*sizes, norm=False):
    layers = []
    for a, b in zip(sizes[:-1], sizes[1:]):
        layers.append(nn.Linear(a, b))
        if norm:
            layers.append(nn.LayerNorm(b))
        layers.append(nn.ReLU())
    return nn.Sequential(*layers)


class MMoE(nn.Module):
    def __init__(self, d_in, d_out, n_experts=8):
        super().__init__()
        self.experts = nn.ModuleList([mlp(d_in, 2048, 1024, d_out, norm=True) for _ in range(n_experts)])
        self.gates = nn.ModuleDict({t: nn.Linear(d_in, n_experts) for t in TASKS})

    def forward(self, x):
        e = torch.stack([ex(x) for ex in self.experts], 1)
        return {t: (F.softmax(g(x), -1).unsqueeze(-1) * e).sum(1) for t, g in self.gates.items()}


class RecModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = EmbeddingTables()
        self.bottom = mlp(DENSE, 512, 256, EMB)
        self.inter = Interaction()
        f = NUM_TABLES + 1
        self.moe = MMoE(f * EMB + f * (f - 1) // 2, 512)
        self.towers = nn.ModuleDict({t: nn.Sequential(mlp(512, 512, 128), nn.Linear(128, 1)) for t in TASKS})

    def forward(self, dense, sparse):
        x = self.inter(self.bottom(dense), self.emb(sparse))
        h = self.moe(x)
        return {t: self.towers[t](h[t]).squeeze(-1) for t in TASKS}


def make_batch(w):
    dense = torch.randn(BATCH, DENSE, device=device)
    sparse = []
    for n in ROWS:
        lengths = torch.randint(1, BAG + 1, (BATCH,), device=device)
        off = torch.zeros(BATCH + 1, dtype=torch.long, device=device)
        torch.cumsum(lengths, 0, out=off[1:])
        total = int(off[-1])
        # zipf-ish popularity
        idx = (n * torch.rand(total, device=device).pow_(3)).long().clamp_(max=n - 1)
        sparse.append((idx, off))
    u = dense @ w
    y = {
        "click": (u[:, 0] + 0.3 * torch.randn(BATCH, device=device) > 0).float(),
        "like": (u[:, 1] - 0.5 * u[:, 0] > 0.5).float(),
        "watch_time": F.softplus(u[:, 2] + 0.2 * u[:, 0]),
    }
    return dense, sparse, y


def task_losses(out, y):
    return {
        "click": F.binary_cross_entropy_with_logits(out["click"], y["click"]),
        "like": F.binary_cross_entropy_with_logits(out["like"], y["like"]),
        "watch_time": F.smooth_l1_loss(out["watch_time"], y["watch_time"]),
    }


def pcgrad(losses, shared):
    """projected gradients on the shared dense parameters"""
    names = list(losses)
    grads = []
    for k, t in enumerate(names):
        g = torch.autograd.grad(losses[t], shared, retain_graph=True, allow_unused=True)
        grads.append(torch.cat([(torch.zeros_like(p) if gi is None else gi).flatten() for p, gi in zip(shared, g)]))
    conflicts = 0
    merged = torch.zeros_like(grads[0])
    for i in range(len(grads)):
        gi = grads[i].clone()
        order = [j for j in range(len(grads)) if j != i]
        random.shuffle(order)
        for j in order:
            dot = torch.dot(gi, grads[j])
            if dot < 0:
                conflicts += 1
                gi -= dot / grads[j].norm().square().clamp_min(1e-12) * grads[j]
        merged += gi
    return merged, conflicts


def report(where):
    a, r = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    print(f"## {where}: max_memory_allocated={a / 1e9:.3f} GB max_memory_reserved={r / 1e9:.3f} GB")


def main():
    t0 = time.time()
    with torch.device(device):
        model = RecModel()
    w = torch.randn(DENSE, 3, device=device) / DENSE ** 0.5
    shared = [p for n, p in model.named_parameters() if n.startswith(("bottom", "moe.experts"))]
    emb_params = list(model.emb.parameters())
    own = [p for n, p in model.named_parameters() if n.startswith(("towers", "moe.gates"))]
    print(f"embeddings {sum(p.numel() for p in emb_params) / 1e6:.1f}M  shared {sum(p.numel() for p in shared) / 1e6:.1f}M  "
          f"task {sum(p.numel() for p in own) / 1e6:.2f}M")
    report("model on the device")

    opts = [
        torch.optim.Adagrad(emb_params, lr=0.02, initial_accumulator_value=0.1, foreach=False),
        torch.optim.AdamW([{"params": shared, "lr": 1e-3, "weight_decay": 1e-4},
                           {"params": own, "lr": 2e-3, "weight_decay": 0.0}], fused=True),
    ]
    report("optimizers built")

    weights = {"click": 1.0, "like": 1.0, "watch_time": 0.5}
    for step in range(EPOCH_STEPS):
        dense, sparse, y = make_batch(w)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=step >= 4):
            out = model(dense, sparse)
        losses = task_losses({k: v.float() for k, v in out.items()}, y)
        losses = {k: weights[k] * v for k, v in losses.items()}
        n_conf = 0
        if step % 2 == 0:
            merged, n_conf = pcgrad(losses, shared)
            # embeddings and task parts take the plain sum
            rest = emb_params + own
            for p, g in zip(rest, torch.autograd.grad(sum(losses.values()), rest)):
                p.grad = g
            ofs = 0
            for p in shared:
                p.grad = merged[ofs:ofs + p.numel()].view_as(p)
                ofs += p.numel()
        else:
            sum(losses.values()).backward()
        nn.utils.clip_grad_norm_(shared + own, 10.0, foreach=True)
        for o in opts:
            o.step()
        for o in opts:
            o.zero_grad(set_to_none=True)
        if step % 4 == 0 or step == EPOCH_STEPS - 1:
            print(f"step {step:3d} " + " ".join(f"{k} {v.item():.4f}" for k, v in losses.items()) + f" conflicts {n_conf}")
        if step in (0, 1, 4):
            report(f"step {step}")
    report("main training")

    # --- features for the calibration stage, graph-free
    model.eval()
    feats, labels, base = [], [], []
    with torch.no_grad():
        for _ in range(4):
            dense, sparse, y = make_batch(w)
            h = model.moe(model.inter(model.bottom(dense), model.emb(sparse)))
            feats.append(h["click"])
            base.append(model.towers["click"](h["click"]).squeeze(-1))
            labels.append(y["click"])
    feats, labels, base = torch.cat(feats), torch.cat(labels), torch.cat(base)

    # --- ensemble of heads trained together with vmap
    K = 16
    with torch.device(device):
        heads = [nn.Sequential(nn.Linear(512, 256), nn.Tanh(), nn.Linear(256, 1)) for _ in range(K)]
    params, buffers = stack_module_state(heads)
    params = {k: v.detach() for k, v in params.items()}
    skeleton = heads[0]
    mom = {k: torch.zeros_like(v) for k, v in params.items()}

    def head_loss(p, b, x, t):
        z = functional_call(skeleton, (p, b), (x,)).squeeze(-1)
        l = F.binary_cross_entropy_with_logits(z, t)
        return l, l.detach()

    vgrad = vmap(grad(head_loss, has_aux=True), in_dims=(0, 0, 0, 0))
    for it in range(15):
        pick = torch.randint(0, feats.size(0), (K, 8192), device=device)
        g, l = vgrad(params, buffers, feats[pick], labels[pick])
        for k in params:
            mom[k].mul_(0.9).add_(g[k])
            params[k] = params[k] - 0.05 * mom[k]
        if it % 7 == 0:
            print(f"ensemble {it:2d} mean {l.mean().item():.4f} min {l.min().item():.4f} max {l.max().item():.4f}")
    with torch.no_grad():
        probs = vmap(lambda p, b: functional_call(skeleton, (p, b), (feats,)).squeeze(-1).sigmoid())(params, buffers)
        print(f"ensemble acc {((probs.mean(0) > 0.5) == (labels > 0.5)).float().mean().item():.4f} "
              f"disagreement {probs.std(0).mean().item():.4f}")
    report("ensemble")

    # --- temperature + bias with LBFGS
    temp = torch.ones(1, device=device, requires_grad=True)
    bias = torch.zeros(1, device=device, requires_grad=True)
    lbfgs = torch.optim.LBFGS([temp, bias], lr=0.5, max_iter=20, history_size=10, line_search_fn="strong_wolfe")

    def closure():
        lbfgs.zero_grad()
        l = F.binary_cross_entropy_with_logits(base / temp + bias, labels)
        l.backward()
        return l

    for r in range(3):
        l = lbfgs.step(closure)
        print(f"lbfgs round {r} loss {l.item():.5f} temperature {temp.item():.3f} bias {bias.item():.3f}")

    print(f"total {time.time() - t0:.1f}s")
    report("end")
    print(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())


main()
