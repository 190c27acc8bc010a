"""Anchor-free detector (FCOS-ish) with losses on a data dependent number of positives, hand written NMS at eval."""
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
DEV = "cuda"


class C(nn.Sequential):
    def __init__(self, i, o, k=3, s=1):
        super().__init__(nn.Conv2d(i, o, k, s, k // 2, bias=False), nn.BatchNorm2d(o), nn.SiLU(inplace=True))


class CSP(nn.Module):
    def __init__(self, c, n):
        super().__init__()
        self.a, self.b, self.o = C(c, c // 2, 1), C(c, c // 2, 1), C(c, c, 1)
        self.m = nn.Sequential(*[nn.Sequential(C(c // 2, c // 2, 1), C(c // 2, c // 2)) for _ in range(n)])

    def forward(self, x):
        return self.o(torch.cat([self.m(self.a(x)), self.b(x)], 1))


class Net(nn.Module):
    def __init__(self, w=64, nc=20):
        super().__init__()
        self.s1 = nn.Sequential(C(3, w // 2, 6 - 1, 2), C(w // 2, w, 3, 2), CSP(w, 1))
        self.s2 = nn.Sequential(C(w, 2 * w, 3, 2), CSP(2 * w, 2))
        self.s3 = nn.Sequential(C(2 * w, 4 * w, 3, 2), CSP(4 * w, 3))
        self.s4 = nn.Sequential(C(4 * w, 8 * w, 3, 2), CSP(8 * w, 1))
        self.lat = nn.ModuleList(nn.Conv2d(c * w, 2 * w, 1) for c in (2, 4, 8))
        self.cls, self.reg = nn.Conv2d(2 * w, nc, 3, padding=1), nn.Conv2d(2 * w, 4, 3, padding=1)

    def forward(self, x):
        a = self.s2(self.s1(x)); b = self.s3(a); c = self.s4(b)
        p5 = self.lat[2](c)
        p4 = self.lat[1](b) + F.interpolate(p5, size=b.shape[-2:])
        p3 = self.lat[0](a) + F.interpolate(p4, size=a.shape[-2:])
        cls = torch.cat([self.cls(p).flatten(2) for p in (p3, p4, p5)], 2).transpose(1, 2)
        reg = torch.cat([self.reg(p).flatten(2) for p in (p3, p4, p5)], 2).transpose(1, 2)
        pts = []
        for p, s in ((p3, 8), (p4, 16), (p5, 32)):
            yy, xx = torch.meshgrid(torch.arange(p.shape[2], device=x.device), torch.arange(p.shape[3], device=x.device), indexing="ij")
            pts.append((torch.stack([xx, yy], -1).view(-1, 2) + 0.5) * s)
        return cls, F.softplus(reg) * 16, torch.cat(pts)


def decode(pts, d):
    return torch.cat([pts - d[..., :2], pts + d[..., 2:]], -1)


def giou(a, b):
    lt, rb = torch.maximum(a[:, :2], b[:, :2]), torch.minimum(a[:, 2:], b[:, 2:])
    inter = (rb - lt).clamp(min=0).prod(1)
    area = lambda z: (z[:, 2:] - z[:, :2]).clamp(min=0).prod(1)
    un = area(a) + area(b) - inter
    hull = (torch.maximum(a[:, 2:], b[:, 2:]) - torch.minimum(a[:, :2], b[:, :2])).prod(1)
    return inter / (un + 1e-7) - (hull - un) / (hull + 1e-7)


def nms(boxes, scores, thr=0.6):
    order = scores.argsort(descending=True)
    boxes = boxes[order]
    lt = torch.max(boxes[:, None, :2], boxes[None, :, :2])
    rb = torch.min(boxes[:, None, 2:], boxes[None, :, 2:])
    inter = (rb - lt).clamp(min=0).prod(-1)
    area = (boxes[:, 2:] - boxes[:, :2]).prod(-1)
    iou = inter / (area[:, None] + area[None] - inter)
    keep = ~((iou.triu(1) > thr).any(0))
    return order[keep]


net = Net().to(DEV)
opt = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.937, nesterov=True)
for it in range(5):
    size = [512, 576, 640, 448, 512][it]
    img = torch.rand(12, 3, size, size, device=DEV)
    # eight boxes an image with known sizes: the same number of positives whatever the seed? no: depends on positions
    ctr = torch.rand(12, 8, 2) * (size - 200) + 100
    wh = torch.rand(12, 8, 2) * 150 + 40
    gt = torch.cat([ctr - wh / 2, ctr + wh / 2], -1).to(DEV)
    lab = torch.randint(0, 20, (12, 8)).to(DEV)
    cls, reg, pts = net(img)
    inside = ((pts[None, :, None] > gt[:, None, :, :2]) & (pts[None, :, None] < gt[:, None, :, 2:])).all(-1)
    pos, which = inside.max(2)
    target = torch.zeros_like(cls)
    bi, pi = torch.nonzero(pos, as_tuple=True)
    gi = which[bi, pi]
    target[bi, pi, lab[bi, gi]] = 1.0
    p = cls.sigmoid()
    focal = F.binary_cross_entropy_with_logits(cls, target, reduction="none") * (target - p).abs().pow(2)
    boxes = decode(pts.expand(12, -1, -1), reg)
    lbox = (1 - giou(boxes[bi, pi], gt[bi, gi])).mean() if bi.numel() else reg.sum() * 0
    loss = focal.sum() / max(1, bi.numel()) + lbox
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(it, size, bi.numel(), loss.item())

if "eval" not in sys.argv:
    sys.exit(0)
net.eval()
with torch.no_grad():
    cls, reg, pts = net(torch.rand(4, 3, 640, 640, device=DEV))
    for b in range(4):
        sc, c = cls[b].sigmoid().max(-1)
        sc, ix = sc.topk(1000)
        m = sc > 0.05
        bx = decode(pts[ix], reg[b, ix])[m]
        k = nms(bx, sc[m])
        print(b, len(k), torch.unique(c[ix][m][k]).numel())
