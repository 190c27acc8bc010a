"""HRNet-W32 semantic segmentation, LIP-like data: 473x473 crops, 20 classes, weighted CE, bf16 autocast.

Layout follows the public HRNet-Semantic-Segmentation code (with fewer modules in stage 3/4).
"""
import logging

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils import data

logging.basicConfig(level=logging.INFO)
logger = logging.getLogger("hrnet")

CROP, NUM_CLASSES, IGNORE = (473, 473), 20, 255
BATCH, ITERS = 10, 12
WIDTH = 32
BN_MOMENTUM = 0.1


def conv3x3(cin, cout, stride=1):
    return nn.Conv2d(cin, cout, 3, stride, 1, bias=False)


class BasicBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.conv1, self.bn1 = conv3x3(c, c), nn.BatchNorm2d(c, momentum=BN_MOMENTUM)
        self.conv2, self.bn2 = conv3x3(c, c), nn.BatchNorm2d(c, momentum=BN_MOMENTUM)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out = out + x
        return self.relu(out)


class Bottleneck(nn.Module):
    def __init__(self, cin, planes):
        super().__init__()
        cout = planes * 4
        self.body = nn.Sequential(
            nn.Conv2d(cin, planes, 1, bias=False), nn.BatchNorm2d(planes), nn.ReLU(inplace=True),
            conv3x3(planes, planes), nn.BatchNorm2d(planes), nn.ReLU(inplace=True),
            nn.Conv2d(planes, cout, 1, bias=False), nn.BatchNorm2d(cout))
        self.down = nn.Sequential(nn.Conv2d(cin, cout, 1, bias=False), nn.BatchNorm2d(cout)) if cin != cout else None

    def forward(self, x):
        identity = x if self.down is None else self.down(x)
        return F.relu(self.body(x) + identity, inplace=True)


class HRModule(nn.Module):
    def __init__(self, chans, blocks=4):
        super().__init__()
        n = len(chans)
        self.branches = nn.ModuleList(nn.Sequential(*[BasicBlock(c) for _ in range(blocks)]) for c in chans)
        self.fuse = nn.ModuleList()
        for i in range(n):
            row = nn.ModuleList()
            for j in range(n):
                if j > i:
                    row.append(nn.Sequential(nn.Conv2d(chans[j], chans[i], 1, bias=False), nn.BatchNorm2d(chans[i])))
                elif j == i:
                    row.append(nn.Identity())
                else:
                    convs = []
                    for _ in range(i - j - 1):
                        convs += [conv3x3(chans[j], chans[j], 2), nn.BatchNorm2d(chans[j]), nn.ReLU(inplace=True)]
                    row.append(nn.Sequential(*convs, conv3x3(chans[j], chans[i], 2), nn.BatchNorm2d(chans[i])))
            self.fuse.append(row)

    def forward(self, xs):
        xs = [b(x) for b, x in zip(self.branches, xs)]
        outs = []
        for i, row in enumerate(self.fuse):
            y = 0
            for j, layer in enumerate(row):
                z = layer(xs[j])
                if j > i:
                    z = F.interpolate(z, size=xs[i].shape[-2:], mode="bilinear", align_corners=True)
                y = y + z
            outs.append(F.relu(y))
        return outs


class HRNet(nn.Module):
    def __init__(self, w=WIDTH, modules=(1, 3, 2), ncls=NUM_CLASSES):
        super().__init__()
        c = [w, w * 2, w * 4, w * 8]
        self.stem = nn.Sequential(conv3x3(3, 64, 2), nn.BatchNorm2d(64), nn.ReLU(True),
                                  conv3x3(64, 64, 2), nn.BatchNorm2d(64), nn.ReLU(True))
        self.layer1 = nn.Sequential(Bottleneck(64, 64), *[Bottleneck(256, 64) for _ in range(3)])
        cbr = lambda i, o, s: nn.Sequential(conv3x3(i, o, s), nn.BatchNorm2d(o), nn.ReLU(True))
        self.trans1 = nn.ModuleList([cbr(256, c[0], 1), cbr(256, c[1], 2)])
        self.trans2 = cbr(c[1], c[2], 2)
        self.trans3 = cbr(c[2], c[3], 2)
        self.stage2 = nn.ModuleList(HRModule(c[:2]) for _ in range(modules[0]))
        self.stage3 = nn.ModuleList(HRModule(c[:3]) for _ in range(modules[1]))
        self.stage4 = nn.ModuleList(HRModule(c) for _ in range(modules[2]))
        total = sum(c)
        self.last = nn.Sequential(nn.Conv2d(total, total, 1), nn.BatchNorm2d(total), nn.ReLU(True),
                                  nn.Conv2d(total, ncls, 1))

    def forward(self, x):
        x = self.layer1(self.stem(x))
        xs = [t(x) for t in self.trans1]
        for stage, trans in ((self.stage2, self.trans2), (self.stage3, self.trans3), (self.stage4, None)):
            for m in stage:
                xs = m(xs)
            xs = xs + [trans(xs[-1])] if trans is not None else xs
        h, w = xs[0].shape[-2:]
        ups = [xs[0]] + [F.interpolate(f, size=(h, w), mode="bilinear", align_corners=True) for f in xs[1:]]
        return self.last(torch.cat(ups, 1))


def weighted_ce(score, target, weight):
    score = F.interpolate(score, size=target.shape[-2:], mode="bilinear", align_corners=True)
    return F.cross_entropy(score, target, weight=weight, ignore_index=IGNORE), score


class FakeLIP(data.Dataset):
    def __len__(self):
        return BATCH * ITERS

    def __getitem__(self, i):
        rng = np.random.RandomState(i)
        img = rng.rand(3, *CROP).astype(np.float32)
        lab = np.kron(rng.randint(0, NUM_CLASSES, (11, 11)), np.ones((43, 43), dtype=np.int64))
        lab = lab[:CROP[0], :CROP[1]].copy()
        lab[:5] = IGNORE
        return torch.from_numpy(img), torch.from_numpy(lab)


def confusion(pred, lab):
    keep = lab != IGNORE
    k = torch.where(keep, lab * NUM_CLASSES + pred, NUM_CLASSES ** 2)
    return torch.bincount(k.flatten(), minlength=NUM_CLASSES ** 2 + 1)[:-1].view(NUM_CLASSES, NUM_CLASSES)


def main():
    torch.manual_seed(304)
    model = HRNet().to("cuda")
    logger.info("params %.2fM", sum(p.numel() for p in model.parameters()) / 1e6)
    opt = torch.optim.SGD(model.parameters(), lr=7e-3, momentum=0.9, weight_decay=5e-4)
    sched = torch.optim.lr_scheduler.PolynomialLR(opt, ITERS, power=0.9)
    loader = data.DataLoader(FakeLIP(), BATCH, num_workers=6, pin_memory=True, drop_last=True)
    weight = torch.ones(NUM_CLASSES, device="cuda")
    conf = torch.zeros(NUM_CLASSES, NUM_CLASSES, dtype=torch.long, device="cuda")
    for it, (img, lab) in enumerate(loader):
        img, lab = img.cuda(non_blocking=True), lab.cuda(non_blocking=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss, score = weighted_ce(model(img), lab, weight)
        model.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        conf += confusion(score.detach().argmax(1), lab)
        logger.info("iter %d lr %.5f loss %.4f", it, sched.get_last_lr()[0], loss.item())
    iou = conf.diag() / (conf.sum(0) + conf.sum(1) - conf.diag()).clamp(min=1)
    logger.info("train mIoU %.4f", iou.mean().item())
    print("peak allocated bytes:", torch.cuda.max_memory_allocated())
    print("peak reserved bytes:", torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    main()
