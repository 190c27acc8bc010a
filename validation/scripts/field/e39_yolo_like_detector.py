"""YOLOv5/8-like anchor-free detector: CSP backbone, PAN neck, three heads, CIoU + BCE, fixed 20 boxes/image."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

SEED, NC, MAX_BOXES = 17, 80, 20
STRIDES = (8, 16, 32)


class Conv(nn.Module):
    def __init__(self, c1, c2, k=1, s=1):
        super().__init__()
        self.conv = nn.Conv2d(c1, c2, k, s, k // 2, bias=False)
        self.bn = nn.BatchNorm2d(c2, eps=1e-3, momentum=0.03)
        self.act = nn.SiLU(inplace=True)

    def forward(self, x):
        return self.act(self.bn(self.conv(x)))


class Bottleneck(nn.Module):
    def __init__(self, c, add=True):
        super().__init__()
        self.cv1, self.cv2, self.add = Conv(c, c, 3), Conv(c, c, 3), add

    def forward(self, x):
        y = self.cv2(self.cv1(x))
        return x + y if self.add else y


class C2f(nn.Module):
    def __init__(self, c1, c2, n=1, add=False):
        super().__init__()
        self.c = c2 // 2
        self.cv1 = Conv(c1, 2 * self.c)
        self.cv2 = Conv((2 + n) * self.c, c2)
        self.m = nn.ModuleList(Bottleneck(self.c, add) for _ in range(n))

    def forward(self, x):
        y = list(self.cv1(x).chunk(2, 1))
        y.extend(m(y[-1]) for m in self.m)
        return self.cv2(torch.cat(y, 1))


class SPPF(nn.Module):
    def __init__(self, c, k=5):
        super().__init__()
        self.cv1, self.cv2 = Conv(c, c // 2), Conv(c * 2, c)
        self.pool = nn.MaxPool2d(k, 1, k // 2)

    def forward(self, x):
        x = self.cv1(x)
        y1 = self.pool(x)
        y2 = self.pool(y1)
        return self.cv2(torch.cat([x, y1, y2, self.pool(y2)], 1))


class Detector(nn.Module):
    def __init__(self, w=(48, 96, 192, 384, 576), d=(2, 4, 4, 2)):
        super().__init__()
        self.stem = Conv(3, w[0], 3, 2)
        self.s2 = nn.Sequential(Conv(w[0], w[1], 3, 2), C2f(w[1], w[1], d[0], True))
        self.s3 = nn.Sequential(Conv(w[1], w[2], 3, 2), C2f(w[2], w[2], d[1], True))
        self.s4 = nn.Sequential(Conv(w[2], w[3], 3, 2), C2f(w[3], w[3], d[2], True))
        self.s5 = nn.Sequential(Conv(w[3], w[4], 3, 2), C2f(w[4], w[4], d[3], True), SPPF(w[4]))
        self.up = nn.Upsample(scale_factor=2, mode="nearest")
        self.n4 = C2f(w[4] + w[3], w[3], 2)
        self.n3 = C2f(w[3] + w[2], w[2], 2)
        self.d3, self.p4 = Conv(w[2], w[2], 3, 2), C2f(w[2] + w[3], w[3], 2)
        self.d4, self.p5 = Conv(w[3], w[3], 3, 2), C2f(w[3] + w[4], w[4], 2)
        self.box = nn.ModuleList(nn.Sequential(Conv(c, 64, 3), Conv(64, 64, 3), nn.Conv2d(64, 4, 1)) for c in w[2:])
        self.obj = nn.ModuleList(nn.Sequential(Conv(c, 64, 3), nn.Conv2d(64, 1, 1)) for c in w[2:])
        self.cls = nn.ModuleList(nn.Sequential(Conv(c, w[2], 3), Conv(w[2], w[2], 3), nn.Conv2d(w[2], NC, 1))
                                 for c in w[2:])
        for o in self.obj:
            nn.init.constant_(o[-1].bias, -4.6)

    def forward(self, x):
        x2 = self.s2(self.stem(x))
        x3 = self.s3(x2)
        x4 = self.s4(x3)
        x5 = self.s5(x4)
        y4 = self.n4(torch.cat([self.up(x5), x4], 1))
        o3 = self.n3(torch.cat([self.up(y4), x3], 1))
        o4 = self.p4(torch.cat([self.d3(o3), y4], 1))
        o5 = self.p5(torch.cat([self.d4(o4), x5], 1))
        return [(b(f), o(f), c(f)) for f, b, o, c in zip((o3, o4, o5), self.box, self.obj, self.cls)]


def ciou(a, b, eps=1e-7):
    """a, b: (..., 4) in xyxy"""
    inter = (torch.min(a[..., 2:], b[..., 2:]) - torch.max(a[..., :2], b[..., :2])).clamp(0).prod(-1)
    wa, ha = (a[..., 2:] - a[..., :2]).clamp(min=eps).unbind(-1)
    wb, hb = (b[..., 2:] - b[..., :2]).clamp(min=eps).unbind(-1)
    iou = inter / (wa * ha + wb * hb - inter + eps)
    enclose = (torch.max(a[..., 2:], b[..., 2:]) - torch.min(a[..., :2], b[..., :2]))
    c2 = enclose.pow(2).sum(-1) + eps
    rho2 = ((a[..., :2] + a[..., 2:] - b[..., :2] - b[..., 2:]) ** 2).sum(-1) / 4
    v = (4 / math.pi ** 2) * (torch.atan(wb / hb) - torch.atan(wa / ha)) ** 2
    with torch.no_grad():
        alpha = v / (v - iou + 1 + eps)
    return iou - (rho2 / c2 + v * alpha)


class DetectionLoss:
    def __init__(self, topk=10, box=7.5, obj=1.0, cls=0.5):
        self.topk, self.w = topk, (box, obj, cls)

    def __call__(self, outputs, gt_boxes, gt_labels):
        boxes, objs, clss, centers, strides = [], [], [], [], []
        for (b, o, c), s in zip(outputs, STRIDES):
            n, _, h, w = b.shape
            ys, xs = torch.meshgrid(torch.arange(h, device=b.device), torch.arange(w, device=b.device), indexing="ij")
            ctr = (torch.stack([xs, ys], -1).view(-1, 2) + 0.5) * s
            dist = F.softplus(b.float().flatten(2).transpose(1, 2)) * s
            boxes.append(torch.cat([ctr - dist[..., :2], ctr + dist[..., 2:]], -1))
            objs.append(o.float().flatten(1))
            clss.append(c.float().flatten(2).transpose(1, 2))
            centers.append(ctr)
        boxes, objs, clss, ctr = torch.cat(boxes, 1), torch.cat(objs, 1), torch.cat(clss, 1), torch.cat(centers)

        # assignment: for each gt the topk predictions with the best (iou * cls score), centre inside the gt
        with torch.no_grad():
            iou = ciou(boxes[:, None], gt_boxes[:, :, None]).clamp(0)                   # B, M, A
            score = clss.sigmoid().gather(2, gt_labels[:, None].expand(-1, clss.size(1), -1)).transpose(1, 2)
            d = torch.cat([ctr - gt_boxes[:, :, None, :2], gt_boxes[:, :, None, 2:] - ctr], -1)
            inside = d.amin(-1) > 0
            metric = score.sqrt() * iou.pow(6) * inside + 1e-9 * inside
            top = metric.topk(self.topk, dim=-1).indices                                # B, M, K
            target_obj = torch.zeros_like(objs)
            flat = top.flatten(1)
            target_obj.scatter_reduce_(1, flat, iou.gather(2, top).flatten(1), reduce="amax")

        pred = boxes.gather(1, flat[..., None].expand(-1, -1, 4)).view(*top.shape, 4)
        loss_box = (1 - ciou(pred, gt_boxes[:, :, None])).mean()
        loss_obj = F.binary_cross_entropy_with_logits(objs, target_obj, reduction="sum") / flat.numel()
        pred_cls = clss.gather(1, flat[..., None].expand(-1, -1, NC))
        onehot = F.one_hot(gt_labels, NC).float()[:, :, None].expand(-1, -1, self.topk, -1).flatten(1, 2)
        loss_cls = F.binary_cross_entropy_with_logits(pred_cls, onehot, reduction="sum") / flat.numel()
        return self.w[0] * loss_box + self.w[1] * loss_obj + self.w[2] * loss_cls


class Trainer:
    def __init__(self, batch=32, steps=7):
        torch.manual_seed(SEED)
        self.device = torch.device("cuda")
        self.batch, self.steps = batch, steps
        self.model = Detector().to(self.device)
        print("params %.1fM" % (sum(p.numel() for p in self.model.parameters()) / 1e6))
        g = [[], [], []]
        for m in self.model.modules():
            if isinstance(getattr(m, "bias", None), nn.Parameter):
                g[2].append(m.bias)
            if isinstance(m, nn.BatchNorm2d):
                g[1].append(m.weight)
            elif isinstance(getattr(m, "weight", None), nn.Parameter):
                g[0].append(m.weight)
        self.opt = torch.optim.SGD(g[2], lr=0.01, momentum=0.937, nesterov=True)
        self.opt.add_param_group({"params": g[0], "weight_decay": 5e-4})
        self.opt.add_param_group({"params": g[1], "weight_decay": 0.0})
        self.scaler = torch.amp.GradScaler("cuda")
        self.loss = DetectionLoss()

    def make_batch(self, size):
        imgs = torch.randint(0, 256, (self.batch, 3, 640, 640), dtype=torch.uint8).to(self.device)
        imgs = imgs.float() / 255
        if size != 640:
            imgs = F.interpolate(imgs, size=(size, size), mode="bilinear", align_corners=False)
        centre = torch.rand(self.batch, MAX_BOXES, 2, device=self.device) * 0.7 + 0.15
        wh = torch.rand(self.batch, MAX_BOXES, 2, device=self.device) * 0.2 + 0.08
        gt = torch.cat([centre - wh / 2, centre + wh / 2], -1) * size
        labels = torch.randint(0, NC, (self.batch, MAX_BOXES), device=self.device)
        return imgs, gt, labels

    def fit(self):
        self.model.train()
        sizes = [640, 512, 640, 768, 576, 640, 768][: self.steps]   # multi-scale training
        for i, size in enumerate(sizes):
            imgs, gt, labels = self.make_batch(size)
            with torch.autocast("cuda", dtype=torch.float16):
                outputs = self.model(imgs)
            loss = self.loss(outputs, gt, labels)
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.opt)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 10.0)
            self.scaler.step(self.opt)
            self.scaler.update()
            self.opt.zero_grad()
            print(f"iter {i} size {size} loss {loss.item():.3f} alloc {torch.cuda.max_memory_allocated()} "
                  f"reserved {torch.cuda.max_memory_reserved()}")


if __name__ == "__main__":
    Trainer().fit()
    print("max_memory_allocated", torch.cuda.max_memory_allocated())
    print("max_memory_reserved", torch.cuda.max_memory_reserved())
