"""SPLADE-style learned sparse retriever, fp16 autocast + GradScaler.

Triplets (query, positive, negative) with margins from a (synthetic) cross-encoder,
in-batch cross entropy, FLOPS regularisation, sparsity evaluation with an inverted index.
"""
from dataclasses import dataclass, field

import torch
from torch import nn
import torch.nn.functional as F
from transformers import DistilBertConfig, DistilBertForMaskedLM


@dataclass
class Options:
    vocab_size: int = 30522
    layers: int = 6
    dim: int = 768
    heads: int = 12
    batch: int = 40
    q_len: int = 32
    d_len: int = 160
    steps: int = 8
    lr: float = 3e-5
    lambda_q: float = 0.3
    lambda_d: float = 0.1
    n_index: int = 256
    seed: int = 143
    device: str = field(default_factory=lambda: "cuda" if torch.cuda.is_available() else "cpu")


class Splade(nn.Module):
    def __init__(self, o: Options):
        super().__init__()
        self.mlm = DistilBertForMaskedLM(DistilBertConfig(
            vocab_size=o.vocab_size, n_layers=o.layers, dim=o.dim, n_heads=o.heads, hidden_dim=4 * o.dim))
        nn.init.constant_(self.mlm.vocab_projector.bias, -1.5)   # start sparse

    def forward(self, ids, mask):
        logits = self.mlm(input_ids=ids, attention_mask=mask).logits
        weights = torch.log1p(torch.relu(logits)) * mask.unsqueeze(-1)
        return weights.max(dim=1).values.float()


def random_text(n, max_len, o):
    lengths = torch.randint(max_len // 3, max_len + 1, (n,))
    ids = torch.randint(1000, o.vocab_size, (n, max_len))
    mask = (torch.arange(max_len)[None] < lengths[:, None]).long()
    width = int(lengths.max())
    return (ids * mask)[:, :width], mask[:, :width]


def flops(reps):
    return reps.abs().mean(0).pow(2).sum()


def triplets(o):
    for step in range(o.steps):
        yield random_text(o.batch, o.q_len, o), random_text(o.batch, o.d_len, o), random_text(o.batch, o.d_len, o), \
            torch.randn(o.batch) * 2 + 3


@torch.no_grad()
def evaluate(model, o):
    model.eval()
    docs = []
    for _ in range(o.n_index // 64):
        ids, mask = random_text(64, o.d_len, o)
        with torch.autocast(o.device, dtype=torch.float16):
            rep = model(ids.to(o.device), mask.to(o.device))
        top = rep.topk(256, dim=1)                      # static pruning
        docs.append(torch.zeros_like(rep).scatter_(1, top.indices, top.values).to_sparse().cpu())
    index = torch.cat(docs).coalesce()
    ids, mask = random_text(16, o.q_len, o)
    with torch.autocast(o.device, dtype=torch.float16):
        q = model(ids.to(o.device), mask.to(o.device)).cpu()
    scores = torch.sparse.mm(index, q.t())
    model.train()
    return index._nnz() / index.size(0), scores.max().item()


def train(o: Options):
    torch.manual_seed(o.seed)
    model = Splade(o).to(o.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=o.lr, weight_decay=0.01)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=3)
    scaler = torch.amp.GradScaler(o.device, init_scale=2.0 ** 9, growth_interval=4)

    for step, batch in enumerate(triplets(o)):
        (q, qm), (p, pm), (n, nm), margin = [
            tuple(t.to(o.device, non_blocking=True) for t in x) if isinstance(x, tuple) else x.to(o.device) for x in batch]
        with torch.autocast(o.device, dtype=torch.float16):
            rq, rp, rn = model(q, qm), model(p, pm), model(n, nm)
        pos, neg = (rq * rp).sum(1), (rq * rn).sum(1)
        margin_mse = F.mse_loss(pos - neg, margin)
        in_batch = F.cross_entropy(torch.cat([rq @ rp.t(), neg[:, None]], 1), torch.arange(o.batch, device=o.device))
        ramp = min(1.0, (step / o.steps) ** 2)
        reg = ramp * (o.lambda_q * flops(rq) + o.lambda_d * flops(torch.cat([rp, rn])))
        loss = margin_mse + 0.1 * in_batch + reg

        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= before:
            warm.step()
        active = (rq > 0).float().sum(1).mean().item(), (rp > 0).float().sum(1).mean().item()
        print(f"{step:2d} loss {loss.item():9.3f} ce {in_batch.item():.3f} |g| {norm.item():.2f} scale {scaler.get_scale():.0f} "
              f"active q/d {active[0]:.0f}/{active[1]:.0f} mem {torch.cuda.max_memory_allocated() / 2**30:.2f}G")
        if step == o.steps // 2:
            nnz, best = evaluate(model, o)
            print(f"   index: {nnz:.1f} terms per document, best score {best:.2f}")
    nnz, best = evaluate(model, o)
    print(f"final index: {nnz:.1f} terms per document, best score {best:.2f}")
    print("peak reserved MB", torch.cuda.max_memory_reserved() // 2**20)


if __name__ == "__main__":
    train(Options())
