import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

# ---- joint keypoint detector + descriptor, supervised by a known shift between two views ----
H, W = 240, 320
PAIRS = 8
STEPS = 8
DET_THR = 0.35
NMS_R = 4
MARGIN = 0.5
rng = np.random.default_rng(3)
torch.manual_seed(3)
DEV = 'cuda'


class VGGPoint(nn.Module):
    def __init__(self, dim=128):
        super().__init__()
        def double(i, o):
            return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o, momentum=0.5), nn.ReLU(True),
                                 nn.Conv2d(o, o, 3, padding=1), nn.BatchNorm2d(o, momentum=0.5), nn.ReLU(True))
        self.b1, self.b2, self.b3, self.b4 = double(1, 64), double(64, 64), double(64, 128), double(128, 128)
        self.pool = nn.MaxPool2d(2)
        self.det = nn.Sequential(nn.Conv2d(128, 256, 3, padding=1), nn.ReLU(True), nn.Conv2d(256, 64, 1))
        self.desc = nn.Sequential(nn.Conv2d(128, 256, 3, padding=1), nn.ReLU(True), nn.Conv2d(256, dim, 1))
        nn.init.constant_(self.det[-1].bias, -3.0)

    def forward(self, x):
        x = self.pool(self.b1(x))
        x = self.pool(self.b2(x))
        x = self.pool(self.b3(x))
        x = self.b4(x)
        heat = F.pixel_shuffle(self.det(x), 8).squeeze(1)        # full-resolution logits
        return heat, F.normalize(self.desc(x), dim=1)


def make_pairs():
    """Grey rectangles; their corners are the keypoints. View 2 is view 1 shifted."""
    a = np.full((PAIRS, H, W), 0.5, np.float32)
    ka = []
    for i in range(PAIRS):
        pts = []
        for _ in range(rng.integers(15, 40)):
            h, w = rng.integers(8, 40, 2)
            y, x = rng.integers(2, H - h - 2), rng.integers(2, W - w - 2)
            a[i, y:y + h, x:x + w] = rng.random()
            pts += [(x, y), (x + w - 1, y), (x, y + h - 1), (x + w - 1, y + h - 1)]
        ka.append(torch.tensor(pts, device=DEV))
    shift = rng.integers(-24, 25, (PAIRS, 2))
    b = np.stack([np.roll(im, (s[1], s[0]), (0, 1)) for im, s in zip(a, shift)])
    a = a + rng.normal(0, 0.03, a.shape).astype(np.float32)
    b = b + rng.normal(0, 0.03, b.shape).astype(np.float32)
    kb, ok = [], []
    for k, s in zip(ka, torch.from_numpy(shift).to(DEV)):
        q = k + s
        ok.append((q[:, 0] >= 0) & (q[:, 0] < W) & (q[:, 1] >= 0) & (q[:, 1] < H))
        kb.append(q)
    t = lambda z: torch.from_numpy(z).unsqueeze(1).to(DEV)
    return t(a), t(b), ka, kb, ok, torch.from_numpy(shift).to(DEV)


def sample(desc, xy):
    g = xy.float() / torch.tensor([W - 1, H - 1], device=xy.device) * 2 - 1
    d = F.grid_sample(desc[None], g.view(1, 1, -1, 2), align_corners=True)[0, :, 0].t()
    return F.normalize(d, dim=1)


def detect(heat):
    """Score threshold + local-maximum suppression, so the number of points depends on the image."""
    s = heat.sigmoid()
    peak = F.max_pool2d(s[None, None], 2 * NMS_R + 1, 1, NMS_R)[0, 0] == s
    ys, xs = torch.where(peak & (s > DET_THR))
    if len(ys) > 1000:
        best = s[ys, xs].topk(1000).indices
        ys, xs = ys[best], xs[best]
    return torch.stack([xs, ys], 1)


def mutual_nn(d1, d2):
    if len(d1) == 0 or len(d2) == 0:
        return torch.empty(0, 2, dtype=torch.long, device=d1.device)
    sim = d1 @ d2.t()
    n12, n21 = sim.argmax(1), sim.argmax(0)
    i = torch.arange(len(d1), device=d1.device)
    m = (n21[n12] == i) & (sim[i, n12] > 0.5)
    return torch.stack([i[m], n12[m]], 1)


def det_loss(heat, kpts):
    tgt = torch.zeros_like(heat)
    for i, k in enumerate(kpts):
        tgt[i, k[:, 1], k[:, 0]] = 1
    loss = F.binary_cross_entropy_with_logits(heat, tgt, reduction='none')
    pos, neg = loss[tgt > 0], loss[tgt == 0]
    hard = neg[neg > neg.mean()]               # background pixels worse than average
    return pos.mean() + (hard.mean() if hard.numel() else neg.mean())


def desc_loss(da, db, ka, kb, ok):
    terms, nhard = [], 0
    for i in range(PAIRS):
        pa, pb = ka[i][ok[i]], kb[i][ok[i]]
        if len(pa) < 2:
            continue
        fa, fb = sample(da[i], pa), sample(db[i], pb)
        dist = (2 - 2 * fa @ fb.t()).clamp(min=1e-6).sqrt()
        near = torch.cdist(pb.float(), pb.float()) < 8     # not a negative if it is almost the same spot
        neg = dist.masked_fill(near, 10.0)
        hardest = torch.minimum(neg.min(1).values, neg.min(0).values)
        viol = dist.diagonal() - hardest + MARGIN
        act = viol[viol > 0]
        nhard += act.numel()
        if act.numel():
            terms.append(act.mean())
    return (torch.stack(terms).mean() if terms else da.sum() * 0), nhard


net = VGGPoint().to(DEV)
optim = torch.optim.AdamW(net.parameters(), lr=3e-3)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(optim, STEPS)

for step in range(STEPS):
    net.train()
    ia, ib, ka, kb, ok, _ = make_pairs()
    heat, desc = net(torch.cat([ia, ib]))
    kvis = [k[o] for k, o in zip(kb, ok)]
    ld = det_loss(heat, ka + kvis)
    lm, nh = desc_loss(desc[:PAIRS], desc[PAIRS:], ka, kb, ok)
    loss = ld + lm
    optim.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 5.0)
    optim.step()
    sched.step()
    print(f'step {step} loss {loss.item():.4f} det {ld.item():.4f} desc {lm.item():.4f} active {nh}')

net.eval()
with torch.no_grad():
    ia, ib, _, _, _, shift = make_pairs()
    ha, da = net(ia)
    hb, db = net(ib)
    for i in range(PAIRS):
        p, q = detect(ha[i]), detect(hb[i])
        m = mutual_nn(sample(da[i], p), sample(db[i], q)) if len(p) and len(q) else p[:0]
        good = 0
        if len(m):
            good = ((q[m[:, 1]] - p[m[:, 0]] - shift[i]).float().norm(dim=1) < 3).sum().item()
        print(f'pair {i}: {len(p)} / {len(q)} keypoints, {len(m)} mutual, {good} inliers')
print('max allocated', torch.cuda.max_memory_allocated(), 'max reserved', torch.cuda.max_memory_reserved())
