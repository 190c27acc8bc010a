"""Three steps of four layers of eight experts, each token to two of them, routed by hand.

experts.py where|onehot|split|mask|scatter|nms

How many tokens an expert gets, the router says: `where`, `onehot` and `mask` look for them, `split`
and `scatter` count and sort them. `nms` keeps what scores above a threshold instead.
"""

import sys

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, NUM_EXPERTS, NUM_PICKED = 512, 8, 2


def _expert():
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


class Experts(nn.Module):
    """A layer whose router picks two experts for each token."""

    def __init__(self, how):
        super().__init__()
        self.how = getattr(self, f"_{how}")
        self.gate = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.experts = nn.ModuleList(_expert() for _ in range(NUM_EXPERTS))

    def forward(self, x):
        """A result of the shape of `x`: batch, tokens, width."""
        rows = x.reshape(-1, WIDTH)
        weights, chosen = torch.topk(self.gate(rows).softmax(-1), NUM_PICKED)
        out = torch.zeros_like(rows)
        return self.how(rows, weights, chosen, out).view(x.shape)

    def _where(self, x, weights, chosen, out):
        for i, run in enumerate(self.experts):
            token, place = torch.where(chosen == i)
            out[token] += weights[token, place, None] * run(x[token])
        return out

    def _onehot(self, x, weights, chosen, out):
        mask = F.one_hot(chosen, NUM_EXPERTS).permute(2, 1, 0)
        for hit in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            i = hit[0]
            place, token = torch.where(mask[i])
            y = self.experts[i](x[token]) * weights[token, place, None]
            out.index_add_(0, token, y.to(out.dtype))
        return out

    def _split(self, x, weights, chosen, out):
        order = chosen.view(-1).argsort()
        counts = torch.bincount(chosen.view(-1), minlength=NUM_EXPERTS).cpu().numpy()
        rows = x[order // NUM_PICKED]
        parts, start = [], 0
        for i, count in enumerate(counts):
            if count == 0:
                continue
            parts.append(self.experts[i](rows[start : start + count]))
            start += count
        y = torch.cat(parts)
        back = torch.empty_like(y)
        back[order] = y
        return (back.view(*chosen.shape, -1) * weights.unsqueeze(-1)).sum(1)

    def _mask(self, x, weights, chosen, out):
        for i, run in enumerate(self.experts):
            is_here = (chosen == i).any(-1)
            if is_here.any():
                out[is_here] = out[is_here] + run(x[is_here])
        return out

    def _scatter(self, x, weights, chosen, out):
        counts = chosen.new_zeros((chosen.shape[0], NUM_EXPERTS))
        counts.scatter_(1, chosen, 1)
        total = counts.sum(0)
        parts = x[chosen.view(-1).argsort() // NUM_PICKED].split(total.tolist())
        y = torch.cat([run(part) for run, part in zip(self.experts, parts, strict=True)])
        return y.view(-1, NUM_PICKED, WIDTH).sum(1)

    def _nms(self, x, weights, chosen, out):
        keep = weights[:, 0] > 0.2
        out = self.experts[0](x)
        out = out + 0 * self.experts[1](x[keep]).sum()
        kinds, inverse = torch.unique(chosen, return_inverse=True)
        runs = torch.unique_consecutive((weights[:, 0] * 100).long())
        print(kinds.shape, inverse.shape, runs.shape)
        return out


torch.manual_seed(0)
model = nn.Sequential(*[Experts(sys.argv[1]) for _ in range(4)]).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    x = torch.randn(8, 512, WIDTH, device="cuda")
    loss = model(x).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
