# Mini-DETR from scratch. ResNet-50-style backbone w/ frozen-ish BN, nn.Transformer, set loss.
import random
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class Args:
    img: int = 512
    batch: int = 16
    accum: int = 1
    n_train: int = 160
    epochs: int = 1
    num_classes: int = 20
    queries: int = 100
    d_model: int = 256
    nheads: int = 8
    enc: int = 6
    dec: int = 6
    lr: float = 1e-4
    lr_backbone: float = 1e-5
    wd: float = 1e-4
    clip: float = 0.1
    eos_coef: float = 0.1
    print_freq: int = 2


args = Args()
dev = "cuda"


# ----------------------------------------------------------------------------- boxes
def cxcywh_to_xyxy(b):
    cx, cy, w, h = b.unbind(-1)
    return torch.stack([cx - 0.5 * w, cy - 0.5 * h, cx + 0.5 * w, cy + 0.5 * h], -1)


def box_area(b):
    return (b[:, 2] - b[:, 0]) * (b[:, 3] - b[:, 1])


def box_iou(a, b):
    area1, area2 = box_area(a), box_area(b)
    lt = torch.max(a[:, None, :2], b[None, :, :2])
    rb = torch.min(a[:, None, 2:], b[None, :, 2:])
    wh = (rb - lt).clamp(min=0)
    inter = wh[..., 0] * wh[..., 1]
    union = area1[:, None] + area2[None] - inter
    return inter / union.clamp(min=1e-7), union


def generalized_box_iou(a, b):
    iou, union = box_iou(a, b)
    lt = torch.min(a[:, None, :2], b[None, :, :2])
    rb = torch.max(a[:, None, 2:], b[None, :, 2:])
    wh = (rb - lt).clamp(min=0)
    hull = wh[..., 0] * wh[..., 1]
    return iou - (hull - union) / hull.clamp(min=1e-7)


# ----------------------------------------------------------------------------- model
class Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, cin, planes, stride=1):
        super().__init__()
        cout = planes * self.expansion
        self.conv1 = nn.Conv2d(cin, planes, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3 = nn.Conv2d(planes, cout, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(cout)
        self.relu = nn.ReLU(inplace=True)
        self.down = None
        if stride != 1 or cin != cout:
            self.down = nn.Sequential(nn.Conv2d(cin, cout, 1, stride, bias=False), nn.BatchNorm2d(cout))

    def forward(self, x):
        idt = x if self.down is None else self.down(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        x = self.bn3(self.conv3(x))
        return self.relu(x + idt)


class ResNet(nn.Module):
    def __init__(self, layers=(3, 4, 6, 3)):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        )
        cin = 64
        stages = []
        for i, n in enumerate(layers):
            planes = 64 * 2 ** i
            blocks = []
            for j in range(n):
                blocks.append(Bottleneck(cin, planes, 2 if (j == 0 and i > 0) else 1))
                cin = planes * 4
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.ModuleList(stages)
        self.out_ch = cin

    def forward(self, x):
        x = self.stem(x)
        for s in self.stages:
            x = s(x)
        return x


class PositionEmbeddingLearned(nn.Module):
    def __init__(self, d, size=50):
        super().__init__()
        self.row = nn.Embedding(size, d // 2)
        self.col = nn.Embedding(size, d // 2)
        nn.init.uniform_(self.row.weight)
        nn.init.uniform_(self.col.weight)

    def forward(self, h, w, device):
        i, j = torch.arange(w, device=device), torch.arange(h, device=device)
        x, y = self.col(i), self.row(j)
        return torch.cat([x[None].expand(h, -1, -1), y[:, None].expand(-1, w, -1)], -1).flatten(0, 1)


class MLP(nn.Module):
    def __init__(self, din, dh, dout, n):
        super().__init__()
        dims = [din] + [dh] * (n - 1) + [dout]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(dims[:-1], dims[1:]))

    def forward(self, x):
        for k, l in enumerate(self.layers):
            x = l(x) if k == len(self.layers) - 1 else F.relu(l(x))
        return x


class DETR(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.backbone = ResNet()
        self.proj = nn.Conv2d(self.backbone.out_ch, a.d_model, 1)
        self.pos = PositionEmbeddingLearned(a.d_model)
        self.transformer = nn.Transformer(
            a.d_model, a.nheads, a.enc, a.dec, dim_feedforward=2048, dropout=0.1, batch_first=True
        )
        self.query = nn.Embedding(a.queries, a.d_model)
        self.cls = nn.Linear(a.d_model, a.num_classes + 1)
        self.box = MLP(a.d_model, a.d_model, 4, 3)

    def forward(self, x):
        f = self.proj(self.backbone(x))
        b, c, h, w = f.shape
        src = f.flatten(2).transpose(1, 2) + self.pos(h, w, f.device)
        memory = self.transformer.encoder(src)
        hs = self.query.weight.unsqueeze(0).expand(b, -1, -1)
        aux = []
        for layer in self.transformer.decoder.layers:
            hs = layer(hs, memory)
            o = self.transformer.decoder.norm(hs)
            aux.append({"logits": self.cls(o), "boxes": self.box(o).sigmoid()})
        return aux


# ----------------------------------------------------------------------------- matching
def hungarian(cost):
    """Kuhn-Munkres (e-maxx potentials version) for n_rows <= n_cols."""
    n, m = cost.shape
    INF = 1e18
    u = np.zeros(n + 1)
    v = np.zeros(m + 1)
    p = np.zeros(m + 1, dtype=np.int64)
    way = np.zeros(m + 1, dtype=np.int64)
    for i in range(1, n + 1):
        p[0] = i
        j0 = 0
        minv = np.full(m + 1, INF)
        used = np.zeros(m + 1, dtype=bool)
        while True:
            used[j0] = True
            i0 = p[j0]
            free = ~used
            free[0] = False
            cur = np.full(m + 1, INF)
            cur[1:] = cost[i0 - 1] - u[i0] - v[1:]
            better = free & (cur < minv)
            minv[better] = cur[better]
            way[better] = j0
            j1 = int(np.argmin(np.where(free, minv, INF)))
            delta = minv[j1]
            u[p[used]] += delta
            v[used] -= delta
            minv[free] -= delta
            j0 = j1
            if p[j0] == 0:
                break
        while j0:
            j1 = way[j0]
            p[j0] = p[j1]
            j0 = j1
    cols = np.zeros(n, dtype=np.int64)
    for j in range(1, m + 1):
        if p[j]:
            cols[p[j] - 1] = j - 1
    return np.arange(n), cols


@torch.no_grad()
def match(out, targets):
    b, q = out["logits"].shape[:2]
    prob = out["logits"].flatten(0, 1).softmax(-1)
    boxes = out["boxes"].flatten(0, 1)
    tgt_ids = torch.cat([t["labels"] for t in targets])
    tgt_box = torch.cat([t["boxes"] for t in targets])
    c_class = -prob[:, tgt_ids]
    c_l1 = torch.cdist(boxes, tgt_box, p=1)
    c_giou = -generalized_box_iou(cxcywh_to_xyxy(boxes), cxcywh_to_xyxy(tgt_box))
    C = (5 * c_l1 + c_class + 2 * c_giou).view(b, q, -1).cpu()
    sizes = [len(t["labels"]) for t in targets]
    res = []
    for i, c in enumerate(C.split(sizes, -1)):
        tgt_idx, q_idx = hungarian(c[i].numpy().T.astype(np.float64))
        res.append((torch.as_tensor(q_idx), torch.as_tensor(tgt_idx)))
    return res


class SetCriterion(nn.Module):
    def __init__(self, num_classes, eos_coef):
        super().__init__()
        self.num_classes = num_classes
        w = torch.ones(num_classes + 1)
        w[-1] = eos_coef
        self.register_buffer("empty_weight", w)
        self.weights = {"ce": 1.0, "l1": 5.0, "giou": 2.0}

    def single(self, out, targets, num_boxes):
        ind = match(out, targets)
        batch_idx = torch.cat([torch.full_like(s, i) for i, (s, _) in enumerate(ind)]).to(out["logits"].device)
        src_idx = torch.cat([s for s, _ in ind]).to(out["logits"].device)
        tgt_cls = torch.full(out["logits"].shape[:2], self.num_classes, dtype=torch.int64, device=out["logits"].device)
        tgt_cls[batch_idx, src_idx] = torch.cat([t["labels"][j] for t, (_, j) in zip(targets, ind)])
        ce = F.cross_entropy(out["logits"].transpose(1, 2), tgt_cls, self.empty_weight)
        sb = out["boxes"][batch_idx, src_idx]
        tb = torch.cat([t["boxes"][j] for t, (_, j) in zip(targets, ind)])
        l1 = F.l1_loss(sb, tb, reduction="none").sum() / num_boxes
        giou = (1 - torch.diag(generalized_box_iou(cxcywh_to_xyxy(sb), cxcywh_to_xyxy(tb)))).sum() / num_boxes
        return {"ce": ce, "l1": l1, "giou": giou}

    def forward(self, outs, targets):
        num_boxes = max(sum(len(t["labels"]) for t in targets), 1)
        total, last = 0.0, None
        for o in outs:
            last = self.single(o, targets, num_boxes)
            total = total + sum(self.weights[k] * v for k, v in last.items())
        return total, last


# ----------------------------------------------------------------------------- data
class BoxesDataset(torch.utils.data.Dataset):
    """coloured rectangles on a grey canvas; colour <-> class"""

    def __init__(self, n, a, seed=0):
        self.n, self.a, self.seed = n, a, seed
        self.palette = np.random.default_rng(123).integers(0, 255, (a.num_classes, 3), dtype=np.uint8)

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        rng = np.random.default_rng(self.seed * 100003 + i)
        s = self.a.img
        im = np.full((s, s, 3), 114, dtype=np.uint8)
        k = int(rng.integers(1, 13))
        labels = rng.integers(0, self.a.num_classes, k)
        wh = rng.uniform(0.05, 0.4, (k, 2))
        c = rng.uniform(0, 1, (k, 2)) * (1 - wh) + wh / 2
        for l, (cx, cy), (w, h) in zip(labels, c, wh):
            x0, y0 = int((cx - w / 2) * s), int((cy - h / 2) * s)
            x1, y1 = int((cx + w / 2) * s), int((cy + h / 2) * s)
            im[y0:y1, x0:x1] = self.palette[l]
        boxes = np.concatenate([c, wh], 1).astype(np.float32)
        return torch.from_numpy(im), {"labels": torch.from_numpy(labels), "boxes": torch.from_numpy(boxes)}


def collate(batch):
    ims, tg = zip(*batch)
    return torch.stack(ims), list(tg)


def to_gpu(ims, targets):
    x = ims.to(dev, non_blocking=True).permute(0, 3, 1, 2).float().div(255)
    mean = torch.tensor([0.485, 0.456, 0.406], device=dev).view(1, 3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225], device=dev).view(1, 3, 1, 1)
    return (x - mean) / std, [{k: v.to(dev) for k, v in t.items()} for t in targets]


@torch.no_grad()
def evaluate(model, criterion, loader):
    model.eval()
    tot, n, recalls = 0.0, 0, []
    for ims, targets in loader:
        x, targets = to_gpu(ims, targets)
        outs = model(x)
        loss, _ = criterion(outs, targets)
        tot += loss.item()
        n += 1
        for i, t in enumerate(targets):
            iou, _ = box_iou(cxcywh_to_xyxy(outs[-1]["boxes"][i]), cxcywh_to_xyxy(t["boxes"]))
            recalls.append((iou.max(0).values > 0.5).float().mean().item())
    return tot / n, float(np.mean(recalls))


def main():
    torch.manual_seed(42)
    np.random.seed(42)
    random.seed(42)

    model = DETR(args).to(dev)
    criterion = SetCriterion(args.num_classes, args.eos_coef).to(dev)
    print("number of params:", sum(p.numel() for p in model.parameters() if p.requires_grad))

    param_dicts = [
        {"params": [p for n, p in model.named_parameters() if "backbone" not in n]},
        {"params": [p for n, p in model.named_parameters() if "backbone" in n], "lr": args.lr_backbone},
    ]
    optimizer = torch.optim.AdamW(param_dicts, lr=args.lr, weight_decay=args.wd)
    lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 8)

    train = torch.utils.data.DataLoader(
        BoxesDataset(args.n_train, args), batch_size=args.batch, shuffle=True, collate_fn=collate, drop_last=True
    )
    val = torch.utils.data.DataLoader(BoxesDataset(32, args, seed=1), batch_size=args.batch, collate_fn=collate)

    best = float("inf")
    for epoch in range(args.epochs):
        model.train()
        t0 = time.time()
        for it, (ims, targets) in enumerate(train):
            x, targets = to_gpu(ims, targets)
            outs = model(x)
            loss, parts = criterion(outs, targets)
            if not torch.isfinite(loss):
                raise RuntimeError(f"loss is {loss.item()}")
            optimizer.zero_grad()
            loss.backward()
            gn = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
            lr_scheduler.step()
            if it % args.print_freq == 0:
                s = "  ".join(f"{k}: {v.item():.4f}" for k, v in parts.items())
                print(
                    f"Epoch: [{epoch}] [{it}/{len(train)}] loss: {loss.item():.4f}  {s}  gn: {gn.item():.2f} "
                    f"max mem: {torch.cuda.max_memory_allocated() / 1048576:.0f} MB"
                )
        print(f"epoch {epoch}: {time.time() - t0:.1f}s")
        vl, rec = evaluate(model, criterion, val)
        print(f"val loss {vl:.4f}  recall@0.5 {rec:.4f}")
        if vl < best:
            best = vl
            print("new best", best)

    print("max_memory_allocated (MB):", torch.cuda.max_memory_allocated() / 1048576)
    print("max_memory_reserved  (MB):", torch.cuda.max_memory_reserved() / 1048576)


if __name__ == "__main__":
    main()
