"""DDP options: --mode unused | static | view | plain, on a two-branch MLP-transformer."""
import argparse
import os
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

ap = argparse.ArgumentParser()
ap.add_argument("--mode", default="unused", choices=["unused", "static", "view", "plain"])
ap.add_argument("--bucket-mb", type=int, default=25)
args = ap.parse_args()


class TwoBranch(nn.Module):
    """Even steps use branch a, odd steps branch b (only in 'unused' mode)."""

    def __init__(self, d=1024, depth=4):
        super().__init__()
        def enc():
            return nn.TransformerEncoderLayer(d, 16, 4 * d, dropout=0.0, batch_first=True, norm_first=True)
        self.inp = nn.Linear(256, d)
        self.trunk = nn.ModuleList(enc() for _ in range(depth))
        self.a = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, 100))
        self.b = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, 100))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x, which):
        x = self.inp(x)
        for layer in self.trunk:
            x = checkpoint(layer, x, use_reentrant=False) if args.mode == "static" else layer(x)
        x = x.mean(1)
        if which == 0:
            return self.a(x)
        if which == 1:
            return self.b(x)
        return self.a(x) + self.b(x)


def main():
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    rank = dist.get_rank()
    torch.manual_seed(0)
    kw = {
        "unused": dict(find_unused_parameters=True),
        "static": dict(static_graph=True),
        "view": dict(gradient_as_bucket_view=True),
        "plain": dict(broadcast_buffers=False),
    }[args.mode]
    model = DDP(TwoBranch().cuda(local), device_ids=[local], bucket_cap_mb=args.bucket_mb, **kw)
    opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)

    x = torch.randn(512, 196, 256)
    y = torch.randint(0, 100, (512,))
    ds = TensorDataset(x, y)
    sampler = DistributedSampler(ds, shuffle=True, seed=1)
    loader = DataLoader(ds, batch_size=32, sampler=sampler, pin_memory=True, drop_last=True)
    sampler.set_epoch(0)
    for step, (xb, yb) in enumerate(loader):
        xb, yb = xb.cuda(local, non_blocking=True), yb.cuda(local, non_blocking=True)
        which = step % 2 if args.mode == "unused" else 2
        loss = F.cross_entropy(model(xb, which), yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if rank == 0:
            print(f"{args.mode} step {step} loss {loss.item():.4f} alloc {torch.cuda.memory_allocated()}")
    dist.barrier()
    print(f"rank {rank} max_memory_allocated {torch.cuda.max_memory_allocated()} "
          f"max_memory_reserved {torch.cuda.max_memory_reserved()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
