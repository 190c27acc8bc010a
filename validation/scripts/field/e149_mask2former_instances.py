# Mask-transformer instance segmentation (Mask2Former-like: masked attention, point losses) on random ellipses
from types import SimpleNamespace
import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers import ResNetBackbone, ResNetConfig

args = SimpleNamespace(size=512, batch=8, iters=6, queries=100, dec_layers=6, dim=256, classes=20,
                       points=12544, lr=1e-4, seed=0)

class PixelDecoder(nn.Module):
    def __init__(self, channels, dim):
        super().__init__()
        self.lateral = nn.ModuleList(nn.Conv2d(c, dim, 1) for c in channels)
        self.smooth = nn.ModuleList(nn.Sequential(nn.Conv2d(dim, dim, 3, padding=1, bias=False),
                                                  nn.GroupNorm(32, dim), nn.ReLU()) for _ in channels)
        self.mask_feat = nn.Conv2d(dim, dim, 1)

    def forward(self, feats):
        y, pyramid = None, []
        for f, lat, sm in zip(feats[::-1], list(self.lateral)[::-1], list(self.smooth)[::-1]):
            z = lat(f)
            y = sm(z if y is None else z + F.interpolate(y, size=z.shape[-2:], mode="nearest"))
            pyramid.append(y)
        return pyramid[:3], self.mask_feat(y)          # strides 32, 16, 8 and mask features at stride 4

class DecoderLayer(nn.Module):
    def __init__(self, dim, heads=8):
        super().__init__()
        self.cross = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.self_attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.ffn = nn.Sequential(nn.Linear(dim, 2048), nn.ReLU(), nn.Linear(2048, dim))
        self.n1, self.n2, self.n3 = (nn.LayerNorm(dim) for _ in range(3))

    def forward(self, q, qpos, mem, mpos, mask):
        q = self.n1(q + self.cross(q + qpos, mem + mpos, mem, attn_mask=mask, need_weights=False)[0])
        q = self.n2(q + self.self_attn(q + qpos, q + qpos, q, need_weights=False)[0])
        return self.n3(q + self.ffn(q))

class Mask2FormerLite(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.backbone = ResNetBackbone(ResNetConfig(out_features=["stage1", "stage2", "stage3", "stage4"]))
        self.pixel = PixelDecoder(self.backbone.channels, a.dim)
        self.query, self.qpos = nn.Embedding(a.queries, a.dim), nn.Embedding(a.queries, a.dim)
        self.level = nn.Embedding(3, a.dim)
        self.pos = nn.ParameterList(nn.Parameter(torch.randn(1, (a.size // s) ** 2, a.dim) * 0.02) for s in (32, 16, 8))
        self.layers = nn.ModuleList(DecoderLayer(a.dim) for _ in range(a.dec_layers))
        self.norm = nn.LayerNorm(a.dim)
        self.cls = nn.Linear(a.dim, a.classes + 1)
        self.mask_mlp = nn.Sequential(nn.Linear(a.dim, a.dim), nn.ReLU(), nn.Linear(a.dim, a.dim), nn.ReLU(),
                                      nn.Linear(a.dim, a.dim))

    def heads(self, q, mf, size):
        q = self.norm(q)
        masks = torch.einsum("bqc,bchw->bqhw", self.mask_mlp(q), mf)
        small = F.interpolate(masks.detach(), size=size, mode="bilinear", align_corners=False)
        block = (small.sigmoid().flatten(2) < 0.5)
        block = block & ~block.all(-1, keepdim=True)    # an empty mask attends everywhere
        return self.cls(q), masks, block.repeat_interleave(8, dim=0)

    def forward(self, x):
        pyr, mf = self.pixel(self.backbone(x).feature_maps)
        b = x.shape[0]
        q, qpos = self.query.weight.expand(b, -1, -1), self.qpos.weight.expand(b, -1, -1)
        c, m, block = self.heads(q, mf, pyr[0].shape[-2:])
        outs = [(c, m)]
        for i, layer in enumerate(self.layers):
            lv = i % 3
            mem = pyr[lv].flatten(2).transpose(1, 2) + self.level.weight[lv]
            q = layer(q, qpos, mem, self.pos[lv], block)
            c, m, block = self.heads(q, mf, pyr[(i + 1) % 3].shape[-2:])
            outs.append((c, m))
        return outs

def sample(masks, pts):                                  # masks N,H,W  pts N,P,2 in [0,1]
    return F.grid_sample(masks[:, None].float(), 2 * pts[:, :, None] - 1, align_corners=False)[:, 0, :, 0]

def dice(logit, t):
    p = logit.sigmoid()
    return 1 - (2 * (p * t).sum(-1) + 1) / (p.sum(-1) + t.sum(-1) + 1)

@torch.no_grad()
def match(cls, masks, labels, gt, npts):
    """greedy assignment on the host: cheapest (query, object) pair first"""
    pts = torch.rand(1, npts, 2, device=gt.device)
    pm, pg = sample(masks, pts.expand(len(masks), -1, -1)), sample(gt, pts.expand(len(gt), -1, -1))
    pos = F.softplus(-pm) @ pg.t() + F.softplus(pm) @ (1 - pg).t()
    sm = pm.sigmoid()
    dc = 1 - (2 * sm @ pg.t() + 1) / (sm.sum(1)[:, None] + pg.sum(1)[None] + 1)
    cost = (-2 * cls.float().softmax(-1)[:, labels] + 5 * pos / npts + 5 * dc).cpu()
    src, dst = [], []
    for _ in range(len(labels)):
        k = int(cost.argmin())
        i, j = divmod(k, cost.shape[1])
        src, dst = src + [i], dst + [j]
        cost[i], cost[:, j] = float("inf"), float("inf")
    return torch.tensor(src, device=gt.device), torch.tensor(dst, device=gt.device)

def criterion(outs, targets, a):
    weight = torch.tensor([1.0] * a.classes + [0.1], device=outs[0][0].device)
    n_obj = sum(len(l) for l, _ in targets)
    total = 0.0
    for cls, masks in outs:                              # deep supervision of each layer
        tgt = torch.full(cls.shape[:2], a.classes, device=cls.device)
        src_m, gt_m = [], []
        for b, (labels, gt) in enumerate(targets):
            s, d = match(cls[b], masks[b], labels, gt, a.points)
            tgt[b, s] = labels[d]
            src_m.append(masks[b, s])
            gt_m.append(gt[d])
        src_m, gt_m = torch.cat(src_m), torch.cat(gt_m)
        with torch.no_grad():                            # importance sampling of uncertain points
            cand = torch.rand(n_obj, 3 * a.points, 2, device=gt_m.device)
            unc = -sample(src_m, cand).abs()
            k = int(0.75 * a.points)
            idx = unc.topk(k, dim=1).indices
            pts = torch.cat([cand.gather(1, idx[..., None].expand(-1, -1, 2)),
                             torch.rand(n_obj, a.points - k, 2, device=gt_m.device)], 1)
            t = sample(gt_m, pts)
        p = sample(src_m, pts)
        total = total + 2 * F.cross_entropy(cls.float().transpose(1, 2), tgt, weight) \
            + 5 * F.binary_cross_entropy_with_logits(p, t, reduction="none").mean(1).sum() / n_obj \
            + 5 * dice(p, t).sum() / n_obj
    return total

def make_batch(a, gen, device):
    imgs, targets = torch.rand(a.batch, 3, a.size, a.size, generator=gen) * 0.3, []
    yy, xx = torch.meshgrid(torch.arange(a.size), torch.arange(a.size), indexing="ij")
    for b in range(a.batch):
        n = int(torch.randint(4, 16, (1,), generator=gen))
        labels, gt = torch.randint(a.classes, (n,), generator=gen), torch.zeros(n, a.size, a.size)
        for j in range(n):
            cy, cx = (torch.rand(2, generator=gen) * a.size).tolist()
            ry, rx = (torch.rand(2, generator=gen) * a.size / 6 + a.size / 32).tolist()
            gt[j] = (((yy - cy) / ry) ** 2 + ((xx - cx) / rx) ** 2 < 1).float()
            imgs[b] += gt[j] * torch.rand(3, 1, 1, generator=gen) * 0.5
        targets.append((labels.to(device), gt.to(device)))
    return imgs.to(device), targets

def main(a):
    torch.manual_seed(a.seed)
    gen, device = torch.Generator().manual_seed(a.seed), torch.device("cuda")
    model = Mask2FormerLite(a).to(device)
    bb = list(model.backbone.parameters())
    rest = [p for n, p in model.named_parameters() if not n.startswith("backbone")]
    opt = torch.optim.AdamW([{"params": bb, "lr": a.lr * 0.1}, {"params": rest}], lr=a.lr, weight_decay=0.05)
    for it in range(a.iters):
        imgs, targets = make_batch(a, gen, device)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            outs = model(imgs)
        loss = criterion(outs, targets, a)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        opt.step()
        print(f"iter {it} loss {loss.item():.3f} mem {torch.cuda.max_memory_allocated() / 1024 ** 2:.0f}MB")

if __name__ == "__main__":
    main(args)
