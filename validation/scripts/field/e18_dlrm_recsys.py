"""DLRM-ish click model.

Big dense-gradient tables (sparse=False), one pooled EmbeddingBag for the watch history,
pairwise dot interaction, Adagrad on the tables, Adam on the towers, BCE with logits.
"""
import os
import tempfile

import torch
from torch import nn

SEED = 2024
TABLE_SIZES = [4_000_000, 1_500_000, 600_000, 200_000, 50_000, 10_000, 1_000, 300, 24, 7]
HISTORY_VOCAB = 1_000_000
EMB = 64
DENSE = 13
BATCH = 16384
HIST_MAX = 50


def mlp(sizes, last_relu=True):
    mods = []
    for i, (a, b) in enumerate(zip(sizes, sizes[1:])):
        mods.append(nn.Linear(a, b))
        if last_relu or i < len(sizes) - 2:
            mods.append(nn.ReLU())
    return nn.Sequential(*mods)


class DLRM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n, EMB) for n in TABLE_SIZES)
        self.history = nn.EmbeddingBag(HISTORY_VOCAB, EMB, mode="mean")
        self.bottom = mlp([DENSE, 512, 256, EMB])
        n_feat = len(TABLE_SIZES) + 2
        li, lj = torch.tril_indices(n_feat, n_feat, offset=-1)
        self.register_buffer("li", li)
        self.register_buffer("lj", lj)
        self.top = mlp([EMB + len(li), 1024, 1024, 512, 256, 1], last_relu=False)

    def forward(self, dense, cats, hist, offsets):
        d = self.bottom(dense)
        feats = [d, self.history(hist, offsets)]
        feats += [tab(cats[:, i]) for i, tab in enumerate(self.tables)]
        T = torch.stack(feats, dim=1)
        Z = torch.bmm(T, T.transpose(1, 2))
        flat = Z[:, self.li, self.lj]
        return self.top(torch.cat([d, flat], dim=1)).squeeze(1)


def make_batch(gen):
    dense = torch.rand(BATCH, DENSE, generator=gen).log1p()
    cats = torch.stack([(torch.rand(BATCH, generator=gen) ** 3 * n).long() for n in TABLE_SIZES], dim=1)
    lens = torch.randint(1, HIST_MAX, (BATCH,), generator=gen)
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lens.cumsum(0)[:-1]])
    hist = torch.randint(0, HISTORY_VOCAB, (int(lens.sum()),), generator=gen)
    label = (torch.rand(BATCH, generator=gen) < 0.03).float()
    return dense, cats, hist, offsets, label


def main():
    torch.manual_seed(SEED)
    device = torch.device("cuda")
    gen = torch.Generator().manual_seed(SEED)
    with device:
        model = DLRM()
    emb_params = [*model.tables.parameters(), *model.history.parameters()]
    mlp_params = [*model.bottom.parameters(), *model.top.parameters()]
    emb_opt = torch.optim.Adagrad(emb_params, lr=0.02)
    mlp_opt = torch.optim.Adam(mlp_params, lr=1e-3)
    bce = nn.BCEWithLogitsLoss()

    for step in range(6):
        batch = [b.to(device) for b in make_batch(gen)]
        *inputs, label = batch
        logit = model(*inputs)
        loss = bce(logit, label)
        emb_opt.zero_grad()
        mlp_opt.zero_grad()
        loss.backward()
        emb_opt.step()
        mlp_opt.step()
        print(f"{step=} loss={loss.item():.4f} {torch.cuda.max_memory_allocated()=} {torch.cuda.max_memory_reserved()=}")

    # only the towers are checkpointed here, tables are exported by another job
    with tempfile.TemporaryDirectory() as tmp:
        path = os.path.join(tmp, "towers.pt")
        torch.save({"bottom": model.bottom.state_dict(), "top": model.top.state_dict(),
                    "opt": mlp_opt.state_dict()}, path)
        ck = torch.load(path, map_location=device)
        model.bottom.load_state_dict(ck["bottom"])
        model.top.load_state_dict(ck["top"])
        mlp_opt.load_state_dict(ck["opt"])
    batch = [b.to(device) for b in make_batch(gen)]
    loss = bce(model(*batch[:-1]), batch[-1])
    loss.backward()          # grads from the last step are still there
    mlp_opt.step()
    print("after resume", loss.item(), torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    main()
