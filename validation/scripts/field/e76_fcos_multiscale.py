import copy, math, random

import torch
from torch import nn
from torch.nn import functional as F

torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cudnn.allow_tf32 = True

class cfg:
    num_classes = 80
    strides = (8, 16, 32, 64, 128)
    ranges = ((-1, 64), (64, 128), (128, 256), (256, 512), (512, 1e8))
    scales = (512, 640, 768)
    scale_every = 5
    batch_size = 8
    max_boxes = 24
    iters = 45
    lr = 0.01
    clip = 10.0
    ema = 0.9998
    device = "cuda"

class Block(nn.Module):
    def __init__(self, c_in, c_mid, stride):
        super().__init__()
        c_out = 4 * c_mid
        self.c1, self.b1 = nn.Conv2d(c_in, c_mid, 1, bias=False), nn.BatchNorm2d(c_mid)
        self.c2, self.b2 = nn.Conv2d(c_mid, c_mid, 3, stride, 1, bias=False), nn.BatchNorm2d(c_mid)
        self.c3, self.b3 = nn.Conv2d(c_mid, c_out, 1, bias=False), nn.BatchNorm2d(c_out)
        self.skip = nn.Identity() if c_in == c_out and stride == 1 else nn.Sequential(
            nn.Conv2d(c_in, c_out, 1, stride, bias=False), nn.BatchNorm2d(c_out))

    def forward(self, x):
        y = F.relu(self.b1(self.c1(x)))
        y = F.relu(self.b2(self.c2(y)))
        return F.relu(self.b3(self.c3(y)) + self.skip(x))

class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
                                  nn.MaxPool2d(3, 2, 1))
        c, self.stages = 64, nn.ModuleList()
        for mid, n, s in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            self.stages.append(nn.Sequential(Block(c, mid, s), *[Block(mid * 4, mid, 1) for _ in range(n - 1)]))
            c = mid * 4

    def forward(self, x):
        x, outs = self.stem(x), []
        for st in self.stages:
            x = st(x)
            outs.append(x)
        return outs[1:]

class FPN(nn.Module):
    def __init__(self, channels=(512, 1024, 2048), out=256):
        super().__init__()
        self.lat = nn.ModuleList(nn.Conv2d(c, out, 1) for c in channels)
        self.out = nn.ModuleList(nn.Conv2d(out, out, 3, padding=1) for _ in channels)
        self.p6, self.p7 = nn.Conv2d(out, out, 3, 2, 1), nn.Conv2d(out, out, 3, 2, 1)

    def forward(self, feats):
        lats = [l(f) for l, f in zip(self.lat, feats)]
        for i in (1, 0):
            lats[i] = lats[i] + F.interpolate(lats[i + 1], size=lats[i].shape[-2:], mode="nearest")
        ps = [o(l) for o, l in zip(self.out, lats)]
        p6 = self.p6(ps[-1])
        return ps + [p6, self.p7(F.relu(p6))]

class Head(nn.Module):
    def __init__(self, c=256, n_conv=4):
        super().__init__()
        tower = lambda: nn.Sequential(*[m for _ in range(n_conv) for m in
                                        (nn.Conv2d(c, c, 3, padding=1), nn.GroupNorm(32, c), nn.ReLU())])
        self.cls_tower, self.box_tower = tower(), tower()
        self.cls, self.box, self.ctr = (nn.Conv2d(c, k, 3, padding=1) for k in (cfg.num_classes, 4, 1))
        self.scale = nn.Parameter(torch.ones(len(cfg.strides)))
        for m in (m for m in self.modules() if isinstance(m, nn.Conv2d)):
            nn.init.normal_(m.weight, std=0.01)
            nn.init.zeros_(m.bias)
        nn.init.constant_(self.cls.bias, -math.log((1 - 0.01) / 0.01))

    def forward(self, feats):
        cls, box, ctr = [], [], []
        for i, f in enumerate(feats):
            tc, tb = self.cls_tower(f), self.box_tower(f)
            cls.append(self.cls(tc).flatten(2).transpose(1, 2))
            box.append((F.relu(self.box(tb) * self.scale[i]) * cfg.strides[i]).flatten(2).transpose(1, 2))
            ctr.append(self.ctr(tb).flatten(2).transpose(1, 2))
        preds = torch.cat(cls, 1), torch.cat(box, 1), torch.cat(ctr, 1).squeeze(-1)
        return preds, [f.shape[-2:] for f in feats]

class FCOS(nn.Sequential):
    def __init__(self):
        super().__init__(Backbone(), FPN(), Head())

@torch.no_grad()
def assign(shapes, boxes, labels):
    pts, lo, hi = [], [], []
    for (h, w), s, (a, b) in zip(shapes, cfg.strides, cfg.ranges):
        y, x = torch.meshgrid(torch.arange(h, device=boxes.device), torch.arange(w, device=boxes.device), indexing="ij")
        p = torch.stack([x, y], -1).reshape(-1, 2) * s + s // 2
        pts.append(p.float())
        lo.append(torch.full_like(pts[-1][:, 0], a))
        hi.append(torch.full_like(pts[-1][:, 0], b))
    pts, lo, hi = torch.cat(pts), torch.cat(lo), torch.cat(hi)
    xy = pts[None, :, None]                                                      # 1,N,1,2
    ltrb = torch.cat([xy - boxes[:, None, :, :2], boxes[:, None, :, 2:] - xy], -1)  # B,N,M,4
    m = ltrb.amax(-1)
    ok = (ltrb.amin(-1) > 0) & (m >= lo[None, :, None]) & (m <= hi[None, :, None])
    area = ((boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1]))[:, None].expand_as(m)
    best_area, best = area.masked_fill(~ok, 1e9).min(-1)
    pos = best_area < 1e9
    reg = ltrb.gather(2, best[..., None, None].expand(-1, -1, 1, 4)).squeeze(2)
    lab = labels.gather(1, best)
    onehot = F.one_hot(lab, cfg.num_classes).float() * pos[..., None]
    reg = torch.where(pos[..., None], reg, torch.ones_like(reg))
    lr, tb = reg[..., 0::2], reg[..., 1::2]
    ctr = torch.sqrt((lr.amin(-1) / lr.amax(-1)) * (tb.amin(-1) / tb.amax(-1)))
    return onehot, reg, ctr, pos.float()

def focal(logits, target, alpha=0.25, gamma=2.0):
    p = logits.sigmoid()
    ce = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    p_t = p * target + (1 - p) * (1 - target)
    return ((alpha * target + (1 - alpha) * (1 - target)) * ce * (1 - p_t) ** gamma).sum()

def giou(pred, tgt):
    inter = (torch.min(pred[..., :2], tgt[..., :2]) + torch.min(pred[..., 2:], tgt[..., 2:])).prod(-1)
    hull = (torch.max(pred[..., :2], tgt[..., :2]) + torch.max(pred[..., 2:], tgt[..., 2:])).prod(-1)
    union = (pred[..., :2] + pred[..., 2:]).prod(-1) + (tgt[..., :2] + tgt[..., 2:]).prod(-1) - inter
    return 1 - inter / union.clamp(min=1e-6) + (hull - union) / hull.clamp(min=1e-6)

def losses(model, imgs, boxes, labels):
    (cls, box, ctr), shapes = model(imgs)
    t_cls, t_box, t_ctr, pos = assign(shapes, boxes, labels)
    n = pos.sum().clamp(min=1)
    l_ctr = F.binary_cross_entropy_with_logits(ctr, t_ctr, weight=pos, reduction="sum") / n
    w = t_ctr * pos
    return focal(cls, t_cls) / n, (giou(box, t_box) * w).sum() / w.sum().clamp(min=1e-6), l_ctr

def fake_batch(size):
    imgs = torch.rand(cfg.batch_size, 3, size, size)
    c = torch.rand(cfg.batch_size, cfg.max_boxes, 2) * size
    wh = (torch.rand(cfg.batch_size, cfg.max_boxes, 2) ** 2 * 0.6 + 0.04) * size
    boxes = torch.cat([c - wh / 2, c + wh / 2], -1).clamp(0, size)
    return [t.to(cfg.device) for t in (imgs, boxes, torch.randint(0, cfg.num_classes, (cfg.batch_size, cfg.max_boxes)))]

torch.manual_seed(0)
random.seed(0)
model = FCOS().to(cfg.device)
ema = copy.deepcopy(model).eval().requires_grad_(False)
opt = torch.optim.SGD(model.parameters(), lr=cfg.lr, momentum=0.9, weight_decay=1e-4, nesterov=True)
size = cfg.scales[-1]
for it in range(cfg.iters):
    if it and it % cfg.scale_every == 0:
        size = random.choice(cfg.scales)
    for g in opt.param_groups:
        g["lr"] = cfg.lr * min(1.0, (it + 1) / 20)
    lc, lb, lt = losses(model, *fake_batch(size))
    loss = lc + lb + lt
    opt.zero_grad()
    loss.backward()
    gn = nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
    opt.step()
    with torch.no_grad():
        d = cfg.ema * (1 - math.exp(-(it + 1) / 2000))
        msd = model.state_dict()
        for k, v in ema.state_dict().items():
            if v.dtype.is_floating_point:
                v.mul_(d).add_(msd[k], alpha=1 - d)
    if it % 5 == 0:
        print(f"{it:3d} size {size} cls {lc.item():.3f} box {lb.item():.3f} ctr {lt.item():.3f} gnorm {gn.item():.2f} "
              f"mem {torch.cuda.max_memory_reserved() / 1e9:.2f}G")

with torch.no_grad():
    val = [sum(losses(ema, *fake_batch(640))).item() for _ in range(3)]
print("ema val loss", sum(val) / len(val))
print(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
