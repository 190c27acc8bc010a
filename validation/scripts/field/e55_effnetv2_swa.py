#!/usr/bin/env python
# EfficientNetV2-ish net from scratch, NHWC, bf16 AMP, mixup/cutmix, SWA + update_bn
import math, random, time
import numpy as np
import torch, torch.nn as nn, torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel, SWALR, update_bn

torch.backends.cudnn.benchmark = False
torch.backends.cudnn.deterministic = False

seed = 1
random.seed(seed); np.random.seed(seed); torch.manual_seed(seed)

dev = torch.device('cuda')
NC = 100
RES = 240
BS = 160
N_TRAIN, N_VAL = BS * 4, 320
EPOCHS, SWA_START = 3, 1


def make_divisible(v, d=8):
    n = max(d, int(v + d / 2) // d * d)
    return n + d if n < 0.9 * v else n


class DropPath(nn.Module):
    def __init__(self, p=0.):
        super().__init__()
        self.p = p

    def forward(self, x):
        if not self.training or self.p == 0.:
            return x
        keep = 1 - self.p
        mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep)
        return x * mask / keep


class ConvBNAct(nn.Sequential):
    def __init__(self, i, o, k=3, s=1, g=1, act=True):
        mods = [nn.Conv2d(i, o, k, s, k // 2, groups=g, bias=False), nn.BatchNorm2d(o, eps=1e-3, momentum=0.1)]
        if act:
            mods.append(nn.SiLU(inplace=True))
        super().__init__(*mods)


class SE(nn.Module):
    def __init__(self, ch, rd):
        super().__init__()
        self.reduce = nn.Conv2d(ch, rd, 1)
        self.expand = nn.Conv2d(rd, ch, 1)

    def forward(self, x):
        s = x.mean((2, 3), keepdim=True)
        s = self.expand(F.silu(self.reduce(s)))
        return x * s.sigmoid()


class MBConv(nn.Module):
    def __init__(self, i, o, k, s, e, dp, fused=False):
        super().__init__()
        mid = make_divisible(i * e)
        layers = []
        if fused:
            if e == 1:
                layers.append(ConvBNAct(i, o, k, s))
            else:
                layers += [ConvBNAct(i, mid, k, s), ConvBNAct(mid, o, 1, act=False)]
        else:
            if e != 1:
                layers.append(ConvBNAct(i, mid, 1))
            layers += [ConvBNAct(mid, mid, k, s, g=mid), SE(mid, max(1, i // 4)), ConvBNAct(mid, o, 1, act=False)]
        self.body = nn.Sequential(*layers)
        self.skip = s == 1 and i == o
        self.dp = DropPath(dp)

    def forward(self, x):
        y = self.body(x)
        return x + self.dp(y) if self.skip else y


class EffNetV2(nn.Module):
    #        fused  k  s  e  out  n
    CFG = [(True,  3, 1, 1, 24, 2),
           (True,  3, 2, 4, 48, 4),
           (True,  3, 2, 4, 64, 4),
           (False, 3, 2, 4, 128, 6),
           (False, 3, 1, 6, 160, 9),
           (False, 3, 2, 6, 256, 15)]

    def __init__(self, nc, drop=0.2, dp=0.2):
        super().__init__()
        self.stem = ConvBNAct(3, 24, 3, 2)
        total = sum(c[-1] for c in self.CFG)
        c_in, b, blocks = 24, 0, []
        for fused, k, s, e, out, n in self.CFG:
            for j in range(n):
                blocks.append(MBConv(c_in, out, k, s if j == 0 else 1, e, dp * b / total, fused))
                c_in, b = out, b + 1
        self.blocks = nn.Sequential(*blocks)
        self.head = ConvBNAct(c_in, 1280, 1)
        self.drop = nn.Dropout(drop, inplace=True)
        self.fc = nn.Linear(1280, nc)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                fan_out = m.kernel_size[0] * m.kernel_size[1] * m.out_channels // m.groups
                nn.init.normal_(m.weight, 0, math.sqrt(2.0 / fan_out))
                if m.bias is not None:
                    nn.init.zeros_(m.bias)

    def forward(self, x):
        x = self.head(self.blocks(self.stem(x)))
        return self.fc(self.drop(x.mean((2, 3))))


def one_hot_smooth(y, eps=0.1):
    off = eps / NC
    return torch.full((y.size(0), NC), off, device=y.device).scatter_(1, y[:, None], 1 - eps + off)


def mix(x, y):
    """randomly pick mixup / cutmix / nothing for the whole batch"""
    t = one_hot_smooth(y)
    r = random.random()
    perm = torch.randperm(x.size(0), device=x.device)
    if r < 0.4:
        lam = np.random.beta(0.2, 0.2)
        x = lam * x + (1 - lam) * x[perm]
    elif r < 0.8:
        lam = np.random.beta(1.0, 1.0)
        h, w = x.shape[-2:]
        rh, rw = int(h * math.sqrt(1 - lam)), int(w * math.sqrt(1 - lam))
        cy, cx = np.random.randint(h), np.random.randint(w)
        y1, y2 = max(cy - rh // 2, 0), min(cy + rh // 2, h)
        x1, x2 = max(cx - rw // 2, 0), min(cx + rw // 2, w)
        x = x.clone()
        x[:, :, y1:y2, x1:x2] = x[perm, :, y1:y2, x1:x2]
        lam = 1 - (y2 - y1) * (x2 - x1) / (h * w)
    else:
        return x, t
    return x, lam * t + (1 - lam) * t[perm]


# all the data sits on the gpu as uint8
_protos = torch.rand(NC, 3, 6, 6, device=dev)

def build(n):
    y = torch.randint(NC, (n,), device=dev)
    x = torch.empty(n, 3, RES, RES, dtype=torch.uint8, device=dev)
    for s in range(0, n, 64):
        im = F.interpolate(_protos[y[s:s + 64]], size=RES, mode='bilinear')
        x[s:s + 64] = (im * 200 + torch.rand_like(im) * 55).byte()
    return x, y


class GpuLoader:
    def __init__(self, x, y, bs, train):
        self.x, self.y, self.bs, self.train = x, y, bs, train

    def __len__(self):
        return math.ceil(len(self.y) / self.bs)

    def __iter__(self):
        order = torch.randperm(len(self.y), device=dev) if self.train else torch.arange(len(self.y), device=dev)
        for ids in order.split(self.bs):
            x = self.x[ids].to(memory_format=torch.channels_last).float().div_(255).sub_(0.45).div_(0.225)
            if self.train and random.random() < 0.5:
                x = x.flip(3)
            yield x, self.y[ids]


def validate(net, loader):
    net.eval()
    correct = loss = n = 0
    with torch.no_grad(), torch.autocast('cuda', torch.bfloat16):
        for x, y in loader:
            out = net(x)
            loss += F.cross_entropy(out.float(), y, reduction='sum').item()
            correct += (out.argmax(1) == y).sum().item()
            n += len(y)
    return loss / n, 100. * correct / n


def peak():
    return 'peak alloc {:.2f}G reserved {:.2f}G'.format(torch.cuda.max_memory_allocated() / 1e9,
                                                        torch.cuda.max_memory_reserved() / 1e9)


tr = GpuLoader(*build(N_TRAIN), BS, True)
va = GpuLoader(*build(N_VAL), BS, False)

net = EffNetV2(NC).to(dev, memory_format=torch.channels_last)
swa_net = AveragedModel(net)
print('params %.2fM' % (sum(p.numel() for p in net.parameters()) / 1e6))

decay = [p for p in net.parameters() if p.ndim > 1]
nodecay = [p for p in net.parameters() if p.ndim <= 1]
opt = torch.optim.SGD([{'params': decay, 'weight_decay': 2e-5}, {'params': nodecay, 'weight_decay': 0.}],
                      lr=0.05, momentum=0.9, nesterov=True)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=EPOCHS * len(tr))
swa_sched = SWALR(opt, swa_lr=0.02, anneal_epochs=1)

best = 0.
for ep in range(EPOCHS):
    net.train()
    t0, tot = time.time(), 0.
    for i, (x, y) in enumerate(tr):
        x, t = mix(x, y)
        opt.zero_grad()
        with torch.autocast('cuda', torch.bfloat16):
            out = net(x)
            loss = torch.sum(-t * F.log_softmax(out.float(), -1), -1).mean()
        loss.backward()
        opt.step()
        if ep < SWA_START:
            sched.step()
        tot += loss.item()
        if i % 2 == 1:
            print(f'ep {ep} it {i + 1}/{len(tr)} loss {tot / (i + 1):.4f} lr {opt.param_groups[0]["lr"]:.4f}')
    if ep >= SWA_START:
        swa_net.update_parameters(net)
        swa_sched.step()
    torch.cuda.synchronize()
    vl, acc = validate(net, va)
    if acc > best:
        best = acc
    print(f'== ep {ep} {time.time() - t0:.1f}s val loss {vl:.4f} acc {acc:.2f} best {best:.2f} | {peak()}')

# BN stats of the averaged weights (no autocast here: done once, fp32)
update_bn(tr, swa_net, device=dev)
vl, acc = validate(swa_net, va)
print(f'SWA (n_averaged={int(swa_net.n_averaged)}) val loss {vl:.4f} acc {acc:.2f}')
if acc >= best:
    print('SWA weights win')
print('END', peak())
