"""torchrun --nproc-per-node 2 ddp_syncbn.py"""
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Noise(Dataset):
    def __len__(self):
        return 330

    def __getitem__(self, i):
        return torch.rand(3, 160, 160), i % 200


class Basic(nn.Module):
    def __init__(self, i, o, s):
        super().__init__()
        self.c1, self.b1 = nn.Conv2d(i, o, 3, s, 1, bias=False), nn.BatchNorm2d(o)
        self.c2, self.b2 = nn.Conv2d(o, o, 3, 1, 1, bias=False), nn.BatchNorm2d(o)
        self.relu = nn.ReLU(inplace=True)
        self.down = nn.Sequential(nn.Conv2d(i, o, 1, s, bias=False), nn.BatchNorm2d(o)) if s > 1 or i != o else None

    def forward(self, x):
        r = x if self.down is None else self.down(x)
        return self.relu(self.b2(self.c2(self.relu(self.b1(self.c1(x))))) + r)


def resnet34(n=200):
    layers, c = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)], 64
    for o, k, s in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for j in range(k):
            layers.append(Basic(c, o, s if j == 0 else 1))
            c = o
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, n))


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    model = resnet34().cuda()
    if "plain" not in sys.argv:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = DDP(model, device_ids=[local_rank], gradient_as_bucket_view=True)
    opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    ds = Noise()
    sampler = DistributedSampler(ds, shuffle=True)
    dl = DataLoader(ds, batch_size=48, sampler=sampler, num_workers=1, pin_memory=True)
    crit = nn.CrossEntropyLoss().cuda()
    for epoch in range(1):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(dl):
            x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
            loss = crit(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            reduced = loss.detach().clone()
            dist.all_reduce(reduced, op=dist.ReduceOp.AVG)
            if dist.get_rank() == 0:
                print(i, reduced.item())
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "/tmp/memest_ddp.pt")
        os.remove("/tmp/memest_ddp.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
