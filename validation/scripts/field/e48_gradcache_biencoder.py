"""
Dense retrieval bi-encoder, big in-batch-negative batches through gradient caching
(two forward passes: no-grad embeddings -> loss on cached embeddings -> chunked re-forward).
"""
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import get_device_states, set_device_states
from transformers import BertConfig, BertModel

device = "cuda"
cfg = dict(
    batch_size=384,
    chunk_q=96,
    chunk_d=32,
    q_len=48,
    d_len=256,
    steps=6,
    lr=5e-5,
    wd=0.01,
    max_norm=1.0,
    eval_every=3,
    seed=3407,
)


class RandContext:
    """remember cpu + gpu rng so that dropout is identical in the second forward"""

    def __init__(self, *tensors):
        self.fwd_cpu_state = torch.get_rng_state()
        self.fwd_gpu_devices, self.fwd_gpu_states = get_device_states(*tensors)

    def __enter__(self):
        self._fork = torch.random.fork_rng(devices=self.fwd_gpu_devices, enabled=True)
        self._fork.__enter__()
        torch.set_rng_state(self.fwd_cpu_state)
        set_device_states(self.fwd_gpu_devices, self.fwd_gpu_states)

    def __exit__(self, exc_type, exc_val, exc_tb):
        self._fork.__exit__(exc_type, exc_val, exc_tb)
        self._fork = None


class Encoder(nn.Module):
    def __init__(self, dim=768):
        super().__init__()
        self.bert = BertModel(
            BertConfig(vocab_size=30522, hidden_size=1024, num_hidden_layers=18, num_attention_heads=16,
                       intermediate_size=4096, max_position_embeddings=512),
            add_pooling_layer=False,
        )
        self.proj = nn.Linear(1024, dim, bias=False)

    def forward(self, input_ids, attention_mask):
        h = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        m = attention_mask.unsqueeze(-1).to(h.dtype)
        pooled = (h * m).sum(1) / m.sum(1).clamp(min=1e-6)
        return F.normalize(self.proj(pooled).float(), dim=-1)


class InfoNCE(nn.Module):
    def __init__(self, init_temp=0.05):
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(float(np.log(1 / init_temp))))

    def forward(self, q, d):
        scale = self.log_scale.exp().clamp(max=100.0)
        logits = scale * q @ d.t()
        target = torch.arange(q.size(0), device=q.device)
        loss = 0.5 * (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target))
        acc = (logits.argmax(1) == target).float().mean()
        return loss, acc


def make_pairs(n, rng):
    """query tokens are a noisy subset of the document's tokens"""
    d = rng.integers(1000, 30000, size=(n, cfg["d_len"]))
    d_lens = rng.integers(cfg["d_len"] // 3, cfg["d_len"] + 1, size=n)
    q = np.zeros((n, cfg["q_len"]), dtype=np.int64)
    q_lens = rng.integers(8, cfg["q_len"] + 1, size=n)
    for i in range(n):
        d[i, d_lens[i]:] = 0
        q[i, :q_lens[i]] = rng.choice(d[i, :d_lens[i]], q_lens[i])
    out = []
    for arr, lens in ((q, q_lens), (d, d_lens)):
        arr = arr[:, :lens.max()]
        ids = torch.from_numpy(np.ascontiguousarray(arr)).to(device, non_blocking=True)
        out.append({"input_ids": ids, "attention_mask": (ids != 0).long()})
    return out


def split(batch, size):
    keys = list(batch)
    parts = zip(*(batch[k].split(size) for k in keys))
    chunks = []
    for p in parts:
        c = dict(zip(keys, p))
        longest = int(c["attention_mask"].sum(1).max())   # trim padding per chunk
        chunks.append({k: v[:, :longest] for k, v in c.items()})
    return chunks


class GradCacheStep:
    def __init__(self, model, loss_fn, scaler):
        self.model, self.loss_fn, self.scaler = model, loss_fn, scaler

    def autocast(self):
        return torch.autocast("cuda", dtype=torch.float16)

    @torch.no_grad()
    def first_pass(self, chunks):
        reps, states = [], []
        for c in chunks:
            states.append(RandContext(*c.values()))
            with self.autocast():
                reps.append(self.model(**c))
        return torch.cat(reps), states

    def cache_grads(self, q, d):
        q = q.detach().requires_grad_()
        d = d.detach().requires_grad_()
        loss, acc = self.loss_fn(q, d)
        self.scaler.scale(loss).backward()
        return loss.detach(), acc, q.grad, d.grad

    def second_pass(self, chunks, states, grads, sizes):
        for c, st, g in zip(chunks, states, grads.split(sizes)):
            with st:
                with self.autocast():
                    r = self.model(**c)
                surrogate = torch.dot(r.flatten(), g.flatten())
            surrogate.backward()

    def __call__(self, q_batch, d_batch):
        qc, dc = split(q_batch, cfg["chunk_q"]), split(d_batch, cfg["chunk_d"])
        q, qs = self.first_pass(qc)
        d, ds = self.first_pass(dc)
        loss, acc, gq, gd = self.cache_grads(q, d)
        self.second_pass(qc, qs, gq, cfg["chunk_q"])
        self.second_pass(dc, ds, gd, cfg["chunk_d"])
        return loss, acc


@torch.inference_mode()
def recall_at(model, rng, n=512, ks=(1, 10)):
    model.eval()
    q, d = make_pairs(n, rng)
    with torch.autocast("cuda", dtype=torch.float16):
        Q = torch.cat([model(**c) for c in split(q, 128)])
        D = torch.cat([model(**c) for c in split(d, 128)])
    rank = (Q @ D.t()).topk(max(ks), dim=1).indices
    gold = torch.arange(n, device=device).unsqueeze(1)
    model.train()
    return {f"R@{k}": (rank[:, :k] == gold).any(1).float().mean().item() for k in ks}


def show_mem(where):
    print(f"{where:>12}: peak alloc {torch.cuda.max_memory_allocated() / 2**30:6.2f} GiB | "
          f"peak reserved {torch.cuda.max_memory_reserved() / 2**30:6.2f} GiB")


if __name__ == "__main__":
    torch.manual_seed(cfg["seed"])
    rng = np.random.default_rng(cfg["seed"])
    with torch.device(device):
        model = Encoder()
        loss_fn = InfoNCE()
    model.train()
    params = list(model.parameters()) + list(loss_fn.parameters())
    opt = torch.optim.AdamW(params, lr=cfg["lr"], weight_decay=cfg["wd"])
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 2))
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0 ** 14)
    gc_step = GradCacheStep(model, loss_fn, scaler)
    print(f"{sum(p.numel() for p in params) / 1e6:.1f}M params")
    show_mem("init")

    best, skipped = -1.0, 0
    for step in range(1, cfg["steps"] + 1):
        q_batch, d_batch = make_pairs(cfg["batch_size"], rng)
        opt.zero_grad(set_to_none=True)
        loss, acc = gc_step(q_batch, d_batch)
        scaler.unscale_(opt)
        gnorm = nn.utils.clip_grad_norm_(params, cfg["max_norm"])
        before = scaler.get_scale()
        scaler.step(opt)
        scaler.update()
        if scaler.get_scale() < before:
            skipped += 1
            print(f"step {step}: overflow, scale {before:.0f} -> {scaler.get_scale():.0f}")
        else:
            sched.step()
        print(f"step {step} loss {loss.item():.4f} acc {acc.item():.3f} gnorm {gnorm.item():.3f} "
              f"temp {1 / loss_fn.log_scale.exp().item():.4f}")
        if step in (1, 2):
            show_mem(f"step {step}")
        if step % cfg["eval_every"] == 0:
            r = recall_at(model, rng)
            mark = ""
            if r["R@10"] > best:
                best, mark = r["R@10"], "  <- best"
            print("   eval", {k: round(v, 4) for k, v in r.items()}, mark)
            show_mem("eval")
    print("skipped steps:", skipped)
    print("max_memory_allocated:", torch.cuda.max_memory_allocated())
    print("max_memory_reserved:", torch.cuda.max_memory_reserved())
