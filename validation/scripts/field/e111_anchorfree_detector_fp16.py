"""Tiny anchor-free detector: OHEM for the classes, GIoU on the positives, own NMS in eval. fp16 with GradScaler."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(42)
cfg = dict(img=512, batch=16, classes=6, max_obj=12, iters=8, lr=0.02, width=64,
           neg_ratio=3, score_thr=0.1, nms_thr=0.5, pre_nms=400, strides=(8, 16))


def synth(n):
    """Images of coloured rectangles on noise, with a varying number of objects."""
    S = cfg["img"]
    imgs = torch.rand(n, 3, S, S) * 0.3
    targets = []
    palette = torch.tensor([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0], [0, 1, 1], [1, 0, 1]]).float()
    for i in range(n):
        k = int(torch.randint(0, cfg["max_obj"] + 1, (1,)))      # may be an empty image
        wh = torch.randint(S // 16, S // 3, (k, 2))
        xy = (torch.rand(k, 2) * (S - wh)).long()
        lab = torch.randint(0, cfg["classes"], (k,))
        for (x, y), (w, h), c in zip(xy.tolist(), wh.tolist(), lab.tolist()):
            imgs[i, :, y:y + h, x:x + w] += palette[c][:, None, None] * 0.7
        boxes = torch.cat([xy, xy + wh], 1).float()
        targets.append({"boxes": boxes.to("cuda"), "labels": lab.to("cuda")})
    return imgs.to("cuda"), targets


def cbr(i, o, s=1):
    return nn.Sequential(nn.Conv2d(i, o, 3, s, 1, bias=False), nn.BatchNorm2d(o, momentum=0.5), nn.ReLU(inplace=True))


class Res(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.a, self.b = cbr(c, c), nn.Sequential(nn.Conv2d(c, c, 3, 1, 1, bias=False), nn.BatchNorm2d(c, momentum=0.5))

    def forward(self, x):
        return F.relu(x + self.b(self.a(x)))


class Detector(nn.Module):
    def __init__(self, w, nc):
        super().__init__()
        self.stem = nn.Sequential(cbr(3, w, 2), Res(w), cbr(w, 2 * w, 2), Res(2 * w))
        self.c3 = nn.Sequential(cbr(2 * w, 4 * w, 2), Res(4 * w), Res(4 * w))
        self.c4 = nn.Sequential(cbr(4 * w, 4 * w, 2), Res(4 * w), Res(4 * w))
        self.lat = nn.Conv2d(4 * w, 4 * w, 1)
        self.tower = nn.Sequential(cbr(4 * w, 4 * w), cbr(4 * w, 4 * w))
        self.cls = nn.Conv2d(4 * w, nc, 3, 1, 1)
        self.reg = nn.Conv2d(4 * w, 4, 3, 1, 1)
        nn.init.normal_(self.cls.weight, std=0.01)
        nn.init.constant_(self.cls.bias, -1.5)

    def forward(self, x):
        p3 = self.c3(self.stem(x))
        p4 = self.c4(p3)
        p3 = self.lat(p3) + F.interpolate(p4, scale_factor=2)
        cls, reg, pts = [], [], []
        for f, s in zip((p3, p4), cfg["strides"]):
            t = self.tower(f)
            cls.append(self.cls(t).flatten(2).transpose(1, 2))
            reg.append((self.reg(t).float().clamp(max=6).exp() * s).flatten(2).transpose(1, 2))
            ys, xs = torch.meshgrid(*(torch.arange(d, device=x.device) for d in t.shape[-2:]), indexing="ij")
            pts.append((torch.stack([xs, ys], -1).reshape(-1, 2) + 0.5) * s)
        pts = torch.cat(pts)
        reg = torch.cat(reg, 1)
        boxes = torch.cat([pts - reg[..., :2], pts + reg[..., 2:]], -1)
        return torch.cat(cls, 1).float(), boxes, pts


def pair_iou(a, b):
    lt, rb = torch.max(a[:, None, :2], b[None, :, :2]), torch.min(a[:, None, 2:], b[None, :, 2:])
    inter = (rb - lt).clamp(min=0).prod(-1)
    area = lambda z: (z[:, 2] - z[:, 0]) * (z[:, 3] - z[:, 1])
    return inter / (area(a)[:, None] + area(b)[None] - inter + 1e-6)


def giou_loss(a, b):
    lt, rb = torch.max(a[:, :2], b[:, :2]), torch.min(a[:, 2:], b[:, 2:])
    inter = (rb - lt).clamp(min=0).prod(-1)
    union = (a[:, 2:] - a[:, :2]).prod(-1) + (b[:, 2:] - b[:, :2]).prod(-1) - inter
    hull = (torch.max(a[:, 2:], b[:, 2:]) - torch.min(a[:, :2], b[:, :2])).prod(-1)
    return 1 - inter / (union + 1e-6) + (hull - union) / (hull + 1e-6)


def criterion(cls, boxes, pts, targets):
    cls_losses, box_losses, npos = [], [], 0
    for c, b, t in zip(cls, boxes, targets):
        tgt = torch.zeros_like(c)
        pos = torch.zeros(len(pts), dtype=torch.bool, device=c.device)
        if len(t["boxes"]):
            gt = t["boxes"]
            ctr, half = (gt[:, :2] + gt[:, 2:]) / 2, (gt[:, 2:] - gt[:, :2]) / 4    # central half of the box
            inside = ((pts[:, None] - ctr).abs() < half).all(-1)
            area = (gt[:, 2:] - gt[:, :2]).prod(-1)
            owner = torch.where(inside, area, torch.inf).argmin(1)
            pos = inside.any(1)
            tgt[pos, t["labels"][owner[pos]]] = 1.0
            box_losses.append(giou_loss(b[pos], gt[owner[pos]]))
        per_pt = F.binary_cross_entropy_with_logits(c, tgt, reduction="none").sum(1)
        n = int(pos.sum())
        k = min(int((~pos).sum()), max(cfg["neg_ratio"] * n, 64))
        hard = per_pt[~pos].topk(k).values                      # OHEM
        cls_losses.append(per_pt[pos].sum() + hard.sum())
        npos += n
    lb = torch.cat(box_losses).sum() if box_losses else boxes.sum() * 0
    return torch.stack(cls_losses).sum() / max(npos, 1), lb / max(npos, 1), npos


def nms(boxes, scores, thr):
    order, keep = scores.argsort(descending=True), []
    while order.numel() > 0:
        i = order[0]
        keep.append(i)
        if order.numel() == 1:
            break
        rest = order[1:]
        order = rest[pair_iou(boxes[i][None], boxes[rest])[0] <= thr]
    return torch.stack(keep) if keep else order


@torch.no_grad()
def evaluate(net, n=4):
    net.eval()
    imgs, targets = synth(n)
    with torch.autocast("cuda", torch.float16):
        cls, boxes, _ = net(imgs)
    for j in range(n):
        score, lab = cls[j].sigmoid().max(-1)
        cand = score > cfg["score_thr"]
        s, l, b = score[cand], lab[cand], boxes[j][cand].clamp(0, cfg["img"])
        if s.numel() > cfg["pre_nms"]:
            s, ix = s.topk(cfg["pre_nms"]); l, b = l[ix], b[ix]
        keep = nms(b + l[:, None] * 2 * cfg["img"], s, cfg["nms_thr"])
        hit = 0
        if keep.numel() and len(targets[j]["boxes"]):
            hit = int((pair_iou(targets[j]["boxes"], b[keep]).max(1).values > 0.5).sum())
        print(f"  img{j}: {int(cand.sum())} candidates -> {keep.numel()} dets, recalled {hit}/{len(targets[j]['boxes'])}")
    net.train()


net = Detector(cfg["width"], cfg["classes"]).cuda().to(memory_format=torch.channels_last)
opt = torch.optim.SGD(net.parameters(), lr=cfg["lr"], momentum=0.9, weight_decay=1e-4)
sched = torch.optim.lr_scheduler.MultiStepLR(opt, [6], 0.1)
scaler = torch.amp.GradScaler("cuda", init_scale=2.0 ** 12)
for it in range(cfg["iters"]):
    imgs, targets = synth(cfg["batch"])
    with torch.autocast("cuda", torch.float16):
        cls, boxes, pts = net(imgs.contiguous(memory_format=torch.channels_last))
    lc, lb, npos = criterion(cls, boxes, pts, targets)
    opt.zero_grad()
    scaler.scale(lc + 2 * lb).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(net.parameters(), 10.0)
    scaler.step(opt); scaler.update(); sched.step()
    print(f"[{it}] cls {lc.item():.3f} giou {lb.item():.3f} pos {npos} scale {scaler.get_scale():.0f}")
    if it % 4 == 3:
        evaluate(net)
print("alloc", torch.cuda.max_memory_allocated(), "reserved", torch.cuda.max_memory_reserved())
