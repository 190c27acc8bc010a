#!/usr/bin/env python3
"""Data parallel without DDP: broadcast weights, flatten all gradients, one all_reduce; gather of embeddings for a global contrastive loss."""
import os
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors


class AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(out, x.contiguous())
        return torch.cat(out)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous()
        dist.all_reduce(g)
        n = g.size(0) // dist.get_world_size()
        r = dist.get_rank()
        return g[r * n:(r + 1) * n]


def tower(i, d=2048, n=8):
    layers = [nn.Linear(i, d)]
    for _ in range(n):
        layers += [nn.GELU(), nn.LayerNorm(d), nn.Linear(d, d)]
    return nn.Sequential(*layers, nn.LayerNorm(d), nn.Linear(d, 512))


def run():
    dist.init_process_group("nccl")
    r, w = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", r)))
    a, b = tower(1024).cuda(), tower(4096).cuda()
    params = [*a.parameters(), *b.parameters()]
    for p in params:
        dist.broadcast(p.data, src=0)
    opt = torch.optim.Adam(params, lr=1e-4)
    for it in range(5):
        bs = 4096
        za = F.normalize(a(torch.randn(bs, 1024, device="cuda")), dim=-1)
        zb = F.normalize(b(torch.randn(bs, 4096, device="cuda")), dim=-1)
        ga, gb = AllGather.apply(za), AllGather.apply(zb)
        tgt = torch.arange(bs, device="cuda") + r * bs
        loss = (F.cross_entropy(za @ gb.T / 0.07, tgt) + F.cross_entropy(zb @ ga.T / 0.07, tgt)) / 2
        opt.zero_grad()
        loss.backward()
        grads = [p.grad for p in params]
        flat = _flatten_dense_tensors(grads)
        flat.div_(w)
        work = dist.all_reduce(flat, async_op=True)
        work.wait()
        for g, s in zip(grads, _unflatten_dense_tensors(flat, grads)):
            g.copy_(s)
        del flat
        opt.step()
        objs = [None] * w
        dist.all_gather_object(objs, {"rank": r, "loss": loss.item()})
        if r == 0:
            print(it, objs)
    dist.destroy_process_group()


if __name__ == "__main__":
    run()
