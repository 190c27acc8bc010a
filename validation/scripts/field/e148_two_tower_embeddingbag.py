"""Two-tower retrieval: EmbeddingBag(sparse=True) histories, in-batch softmax with logQ correction.

Sparse tables are trained by Adagrad, the towers by AdamW.
"""
from dataclasses import dataclass, field
import math
import os
import tempfile

import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


@dataclass
class Config:
    n_items: int = 2_000_000
    n_users: int = 3_000_000
    n_tags: int = 200_000
    item_dim: int = 128
    user_dim: int = 64
    tag_dim: int = 32
    tower: list = field(default_factory=lambda: [1024, 512, 128])
    max_hist: int = 100
    batch: int = 8192
    steps: int = 6
    lr_sparse: float = 0.05
    lr_dense: float = 1e-3
    temperature: float = 0.07
    seed: int = 7
    eval_items: int = 400_000
    eval_chunk: int = 65_536


class Clicks(Dataset):
    """history of clicked items (variable length), next clicked item, tags of that item"""

    def __init__(self, cfg, size):
        self.cfg, self.size = cfg, size

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.cfg.seed * 1_000_003 + i)
        n = int(torch.randint(5, self.cfg.max_hist + 1, (1,), generator=g))
        r = torch.rand(n + 1, generator=g)
        items = (torch.exp(r * math.log(self.cfg.n_items)) - 1).long().clamp_(max=self.cfg.n_items - 1)
        user = int(torch.randint(self.cfg.n_users, (1,), generator=g))
        k = int(items[-1]) % 6 + 1
        tags = (items[-1] * 31 + torch.arange(k) * 7919) % self.cfg.n_tags
        return user, items[:-1], items[-1], tags


def collate(rows):
    users, hist, target, tags = zip(*rows)
    hlen = torch.tensor([len(h) for h in hist])
    tlen = torch.tensor([len(t) for t in tags])
    age = torch.cat([torch.arange(n, 0, -1) for n in hlen.tolist()]).float()
    return {
        "user": torch.tensor(users),
        "hist": torch.cat(hist),
        "hist_off": torch.cat([torch.zeros(1, dtype=torch.long), hlen.cumsum(0)[:-1]]),
        "hist_w": 0.97 ** age,
        "target": torch.stack(target),
        "tags": torch.cat(tags),
        "tags_off": torch.cat([torch.zeros(1, dtype=torch.long), tlen.cumsum(0)[:-1]]),
    }


def mlp(d_in, widths):
    layers = []
    for w in widths[:-1]:
        layers += [nn.Linear(d_in, w), nn.BatchNorm1d(w), nn.GELU()]
        d_in = w
    return nn.Sequential(*layers, nn.Linear(d_in, widths[-1]))


class TwoTower(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.hist_bag = nn.EmbeddingBag(cfg.n_items, cfg.item_dim, mode="sum", sparse=True)
        self.user_emb = nn.Embedding(cfg.n_users, cfg.user_dim, sparse=True)
        self.item_emb = nn.Embedding(cfg.n_items, cfg.item_dim, sparse=True)
        self.tag_bag = nn.EmbeddingBag(cfg.n_tags, cfg.tag_dim, mode="mean", sparse=True)
        for e in (self.hist_bag, self.user_emb, self.item_emb, self.tag_bag):
            nn.init.normal_(e.weight, std=0.02)
        self.user_tower = mlp(cfg.item_dim + cfg.user_dim, cfg.tower)
        self.item_tower = mlp(cfg.item_dim + cfg.tag_dim, cfg.tower)

    def user(self, b):
        h = self.hist_bag(b["hist"], b["hist_off"], per_sample_weights=b["hist_w"])
        return F.normalize(self.user_tower(torch.cat([h, self.user_emb(b["user"])], 1)), dim=1)

    def item(self, ids, tags, off):
        return F.normalize(self.item_tower(torch.cat([self.item_emb(ids), self.tag_bag(tags, off)], 1)), dim=1)


def main(cfg=Config()):
    torch.manual_seed(cfg.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loader = DataLoader(Clicks(cfg, cfg.batch * (cfg.steps + 1)), batch_size=cfg.batch,
                        collate_fn=collate, num_workers=4, pin_memory=True)
    with torch.device(device):
        model = TwoTower(cfg)
    tables = [m.weight for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    table_ids = {id(p) for p in tables}
    dense = [p for p in model.parameters() if id(p) not in table_ids]
    opt_s = torch.optim.Adagrad(tables, lr=cfg.lr_sparse, initial_accumulator_value=1e-6)
    opt_d = torch.optim.AdamW(dense, lr=cfg.lr_dense, weight_decay=1e-4)
    print(f"after optimizers: {torch.cuda.memory_allocated() / 2**30:.2f} GiB")

    batch = None
    for step, batch in enumerate(loader):
        batch = {k: v.to(device, non_blocking=True) for k, v in batch.items()}
        if step == cfg.steps:          # the last batch is kept for the evaluation
            break
        u = model.user(batch)
        v = model.item(batch["target"], batch["tags"], batch["tags_off"])
        logits = u @ v.t() / cfg.temperature
        logq = -torch.log(batch["target"].float() + 1) - math.log(math.log(cfg.n_items))
        logits = logits - logq
        dup = batch["target"][:, None] == batch["target"][None, :]
        dup.fill_diagonal_(False)
        logits = logits.masked_fill(dup, -1e4)
        loss = F.cross_entropy(logits, torch.arange(len(u), device=device))
        opt_s.zero_grad()
        opt_d.zero_grad()
        loss.backward()
        gn = nn.utils.clip_grad_norm_(dense, 1.0)
        opt_s.step()
        opt_d.step()
        print(f"[{step}] loss {loss.item():.3f} gnorm {gn.item():.3f} hist ids {batch['hist'].numel()} "
              f"peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")

    model.eval()
    with torch.inference_mode():
        q = model.user(batch)[:1024]
        best = torch.full((len(q), 100), -2.0, device=device)
        best_id = torch.zeros(len(q), 100, dtype=torch.long, device=device)
        for lo in range(0, cfg.eval_items, cfg.eval_chunk):
            ids = torch.arange(lo, min(lo + cfg.eval_chunk, cfg.eval_items), device=device)
            emb = model.item(ids, ids * 31 % cfg.n_tags, torch.arange(len(ids), device=device))
            s = torch.cat([best, q @ emb.t()], 1)
            i = torch.cat([best_id, ids.expand(len(q), -1)], 1)
            best, pos = s.topk(100, dim=1)
            best_id = i.gather(1, pos)
        hit = (best_id == batch["target"][:1024, None]).any(1).float().mean()
    print(f"recall@100 {hit.item():.4f}")
    with tempfile.TemporaryDirectory() as d:
        torch.save({"towers": {k: v for k, v in model.state_dict().items() if "tower" in k},
                    "opt": opt_d.state_dict()}, os.path.join(d, "towers.pt"))
    print(f"final peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB, "
          f"reserved {torch.cuda.max_memory_reserved() / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
