"""Person re-id with a ViT that drops tokens on the way:
   after block 2: EViT (top-k by cls attention, the rest fused into one token)
   after block 5: keep the smallest set of tokens holding 85% of the cls attention (different per image, padded)
Identity loss + batch-all triplet loss over the active triplets only."""
import torch, torch.nn as nn, torch.nn.functional as F

IMG = (256, 128); PATCH = 8
IDS_PER_BATCH, VIEWS = 16, 4
NUM_IDS, DIM, DEPTH, HEADS = 200, 512, 8, 8
KEEP_RATE, MASS = 0.7, 0.85
STEPS, MARGIN = 8, 0.3


class Attn(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, DIM * 3), nn.Linear(DIM, DIM)

    def forward(self, x, pad, want_cls):
        B, N, _ = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, HEADS, DIM // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        mask = None if pad is None else ~pad[:, None, None, :]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        cls_attn = None
        if want_cls:
            with torch.no_grad():
                a = (q[:, :, :1].float() @ k.float().transpose(-1, -2)) * (DIM // HEADS) ** -0.5
                if pad is not None:
                    a = a.masked_fill(pad[:, None, None, :], -torch.inf)
                cls_attn = a[:, :, 0, 1:].softmax(-1).mean(1)        # (B, N-1)
        return self.out(y.transpose(1, 2).reshape(B, N, DIM)), cls_attn


class Block(nn.Module):
    def __init__(self, prune=None):
        super().__init__()
        self.prune = prune
        self.n1, self.n2, self.attn = nn.LayerNorm(DIM), nn.LayerNorm(DIM), Attn()
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x, pad):
        a, cls_attn = self.attn(self.n1(x), pad, self.prune is not None)
        x = x + a
        if self.prune == "topk":
            x = self.evit(x, cls_attn)
        elif self.prune == "mass":
            x, pad = self.by_mass(x, cls_attn)
        return x + self.mlp(self.n2(x)), pad

    @staticmethod
    def evit(x, s):
        cls, tok = x[:, :1], x[:, 1:]
        k = int(KEEP_RATE * tok.size(1))
        order = s.argsort(dim=1, descending=True)
        pick = lambda i: tok.gather(1, i.unsqueeze(-1).expand(-1, -1, DIM))
        w = s.gather(1, order[:, k:]).unsqueeze(-1)
        fused = (pick(order[:, k:]) * w).sum(1, keepdim=True) / w.sum(1, keepdim=True).clamp(min=1e-6)
        return torch.cat([cls, pick(order[:, :k]), fused.to(x.dtype)], 1)

    @staticmethod
    def by_mass(x, s):
        sv, order = s.sort(dim=1, descending=True)
        before = sv.cumsum(1) - sv
        keep_sorted = before < MASS
        n_keep = keep_sorted.sum(1)
        longest = n_keep.max().item()
        b, j = torch.nonzero(keep_sorted, as_tuple=True)
        out = x.new_zeros(x.size(0), longest + 1, DIM)
        out[:, 0] = x[:, 0]
        out[b, j + 1] = x[b, order[b, j] + 1]
        pad = torch.arange(longest + 1, device=x.device)[None] > n_keep[:, None]
        return out, pad


class PrunedViT(nn.Module):
    def __init__(self):
        super().__init__()
        n = (IMG[0] // PATCH) * (IMG[1] // PATCH)
        self.patch = nn.Conv2d(3, DIM, PATCH, PATCH)
        self.cls = nn.Parameter(torch.zeros(1, 1, DIM))
        self.pos = nn.Parameter(torch.randn(1, n + 1, DIM) * 0.02)
        self.blocks = nn.ModuleList(Block({2: "topk", 5: "mass"}.get(i)) for i in range(DEPTH))
        self.norm = nn.LayerNorm(DIM)
        self.bnneck = nn.BatchNorm1d(DIM)
        self.head = nn.Linear(DIM, NUM_IDS, bias=False)

    def forward(self, img):
        t = self.patch(img).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(t), -1, -1).to(t.dtype), t], 1) + self.pos
        pad = None
        for blk in self.blocks:
            x, pad = blk(x, pad)
        f = self.norm(x[:, 0])
        return f, self.head(self.bnneck(f)), x.size(1)


def batch_all_triplets(f, y):
    f = F.normalize(f.float(), dim=1)
    d = torch.cdist(f, f)
    same = y[:, None] == y[None, :]
    eye = torch.eye(len(y), dtype=torch.bool, device=y.device)
    valid = (same & ~eye)[:, :, None] & ~same[:, None, :]
    a, p, n = torch.nonzero(valid, as_tuple=True)
    viol = d[a, p] - d[a, n] + MARGIN
    active = viol[viol > 1e-6]
    if active.numel() == 0:
        return viol.sum() * 0.0, 0, len(viol)
    return active.mean(), active.numel(), len(viol)


def draw(identity, ids):
    """Each identity is a fixed low-res pattern; views are shifted and lit differently."""
    y = ids.repeat_interleave(VIEWS)
    x = F.interpolate(identity[y], size=IMG, mode="nearest")
    x = torch.stack([xi.roll(int(torch.randint(-8, 9, ())), -1) for xi in x])
    x = x * (0.7 + 0.6 * torch.rand(len(y), 1, 1, 1, device=x.device)) + 0.3 * torch.randn_like(x)
    return x, y


if __name__ == "__main__":
    torch.manual_seed(2024)
    identity = torch.randn(NUM_IDS, 3, 16, 8, device="cuda")
    model = PrunedViT().cuda()
    opt = torch.optim.AdamW(model.parameters(), lr=2e-4, weight_decay=0.05)
    warm = torch.optim.lr_scheduler.LinearLR(opt, 0.1, 1.0, 2)
    cos = torch.optim.lr_scheduler.CosineAnnealingLR(opt, STEPS - 2)
    sched = torch.optim.lr_scheduler.SequentialLR(opt, [warm, cos], milestones=[2])
    for step in range(STEPS):
        x, y = draw(identity, torch.randperm(NUM_IDS, device="cuda")[:IDS_PER_BATCH])
        with torch.autocast("cuda", dtype=torch.bfloat16):
            f, logits, ntok = model(x)
            loss_id = F.cross_entropy(logits, y, label_smoothing=0.1)
        loss_tri, n_act, n_all = batch_all_triplets(f, y)
        loss = loss_id + loss_tri
        opt.zero_grad(set_to_none=True); loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step(); sched.step()
        print(f"{step:03d} loss {loss.item():.4f} id {loss_id.item():.4f} tri {loss_tri.item():.4f} ({n_act}/{n_all} active) tokens left {ntok}")

    model.eval()
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
        x, y = draw(identity, torch.arange(24, device="cuda"))
        f = F.normalize(model(x)[0].float(), dim=1)
    sim = (f @ f.t()).fill_diagonal_(-1)
    print(f"rank-1 {(y[sim.argmax(1)] == y).float().mean().item():.3f}")
    print("mem", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
