"""iBOT-style pretraining: multi-crop self-distillation (CLS) + masked patch distillation, ViT-S/16, EMA teacher."""
import math
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.parametrizations import weight_norm

BATCH, STEPS = 48, 36
GLOBAL, LOCAL, N_LOCAL = 224, 96, 6
PATCH, DIM, DEPTH, HEADS = 16, 384, 12, 6
OUT_DIM, MASK_RATIO = 8192, 0.3
DROP_PATH = 0.1

class DropPath(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x):
        if self.p == 0.0 or not self.training:
            return x
        keep = 1 - self.p
        mask = x.new_empty((x.shape[0], 1, 1)).bernoulli_(keep)
        return x * mask / keep

class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(B, N, C))

class Block(nn.Module):
    def __init__(self, dim, heads, dp):
        super().__init__()
        norm = partial(nn.LayerNorm, eps=1e-6)
        self.norm1, self.attn = norm(dim), Attention(dim, heads)
        self.norm2 = norm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.drop_path = DropPath(dp)

    def forward(self, x):
        x = x + self.drop_path(self.attn(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))

class ViT(nn.Module):
    def __init__(self, drop_path=0.0):
        super().__init__()
        n = (GLOBAL // PATCH) ** 2
        self.patch_embed = nn.Conv2d(3, DIM, PATCH, PATCH)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, DIM))
        self.mask_token = nn.Parameter(torch.zeros(1, 1, DIM))
        self.pos_embed = nn.Parameter(torch.zeros(1, n + 1, DIM))
        dpr = torch.linspace(0, drop_path, DEPTH).tolist()
        self.blocks = nn.ModuleList(Block(DIM, HEADS, d) for d in dpr)
        self.norm = nn.LayerNorm(DIM, eps=1e-6)
        self.head = DINOHead(DIM, OUT_DIM)   # shared between cls and patch tokens
        for t in (self.cls_token, self.mask_token, self.pos_embed):
            nn.init.trunc_normal_(t, std=0.02)

    def interpolate_pos(self, h, w):
        side = GLOBAL // PATCH
        if (h, w) == (side, side):
            return self.pos_embed
        patch_pos = self.pos_embed[:, 1:].reshape(1, side, side, DIM).permute(0, 3, 1, 2)
        patch_pos = F.interpolate(patch_pos, size=(h, w), mode="bicubic", align_corners=False)
        return torch.cat([self.pos_embed[:, :1], patch_pos.flatten(2).transpose(1, 2)], 1)

    def forward(self, x, mask=None):
        x = self.patch_embed(x)
        h, w = x.shape[-2:]
        x = x.flatten(2).transpose(1, 2)
        if mask is not None:
            x = torch.where(mask.unsqueeze(-1), self.mask_token.to(x.dtype), x)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], 1) + self.interpolate_pos(h, w)
        for blk in self.blocks:
            x = blk(x)
        return self.norm(x)

class DINOHead(nn.Module):
    def __init__(self, in_dim, out_dim, hidden=2048, bottleneck=256):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(in_dim, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(),
                                 nn.Linear(hidden, bottleneck))
        self.last_layer = weight_norm(nn.Linear(bottleneck, out_dim, bias=False))
        self.last_layer.parametrizations.weight.original0.data.fill_(1)
        self.last_layer.parametrizations.weight.original0.requires_grad = False

    def forward(self, x):
        return self.last_layer(F.normalize(self.mlp(x), dim=-1))

class IBOTLoss(nn.Module):
    def __init__(self, s_temp=0.1, t_temp=0.04, momentum=0.9):
        super().__init__()
        self.s_temp, self.t_temp, self.m = s_temp, t_temp, momentum
        self.register_buffer("center", torch.zeros(1, OUT_DIM))
        self.register_buffer("center_patch", torch.zeros(1, OUT_DIM))

    def forward(self, s_cls, t_cls, s_patch, t_patch):
        t = F.softmax((t_cls.float() - self.center) / self.t_temp, dim=-1).chunk(2)
        s = (s_cls.float() / self.s_temp).chunk(2 + N_LOCAL)
        pairs = [(q, sv) for i, q in enumerate(t) for j, sv in enumerate(s) if i != j]
        cls_loss = sum(torch.sum(-q * F.log_softmax(sv, dim=-1), dim=-1).mean() for q, sv in pairs)
        tp = F.softmax((t_patch.float() - self.center_patch) / self.t_temp, dim=-1)
        patch_loss = torch.sum(-tp * F.log_softmax(s_patch.float() / self.s_temp, dim=-1), dim=-1).mean()
        self.update(t_cls, t_patch)
        return cls_loss / len(pairs), patch_loss

    @torch.no_grad()
    def update(self, t_cls, t_patch):
        self.center.mul_(self.m).add_(t_cls.float().mean(0, keepdim=True), alpha=1 - self.m)
        self.center_patch.mul_(self.m).add_(t_patch.float().mean(0, keepdim=True), alpha=1 - self.m)

def cosine(base, final, step, total):
    return final + 0.5 * (base - final) * (1 + math.cos(math.pi * step / total))

def param_groups(model):
    reg, noreg = [], []
    for n, p in model.named_parameters():
        if p.requires_grad:
            (noreg if n.endswith(".bias") or p.ndim == 1 else reg).append(p)
    return [{"params": reg}, {"params": noreg, "weight_decay": 0.0}]

def take(tokens, idx):
    return tokens.gather(1, idx.unsqueeze(-1).expand(-1, -1, tokens.shape[-1])).flatten(0, 1)

def main():
    torch.manual_seed(42)
    student, teacher = ViT(DROP_PATH).cuda(), ViT().cuda()
    teacher.load_state_dict(student.state_dict())
    for p in teacher.parameters():
        p.requires_grad = False
    criterion = IBOTLoss().to("cuda")
    optimizer = torch.optim.AdamW(param_groups(student), lr=5e-4, weight_decay=0.04)
    n_patch = (GLOBAL // PATCH) ** 2
    n_mask = int(MASK_RATIO * n_patch)
    for step in range(STEPS):
        lr = 5e-4 * min(1, (step + 1) / 10) if step < 10 else cosine(5e-4, 1e-6, step, STEPS)
        optimizer.param_groups[0]["weight_decay"] = cosine(0.04, 0.4, step, STEPS)
        for g in optimizer.param_groups:
            g["lr"] = lr
        crops = [torch.randn(BATCH, 3, GLOBAL, GLOBAL, device="cuda") for _ in range(2)]
        crops += [torch.randn(BATCH, 3, LOCAL, LOCAL, device="cuda") for _ in range(N_LOCAL)]
        glob, loc = torch.cat(crops[:2]), torch.cat(crops[2:])
        idx = torch.rand(2 * BATCH, n_patch, device="cuda").argsort(1)[:, :n_mask]
        mask = torch.zeros(2 * BATCH, n_patch, dtype=torch.bool, device="cuda").scatter_(1, idx, True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            with torch.no_grad():
                t_tok = teacher(glob)
                t_cls, t_patch = teacher.head(t_tok[:, 0]), teacher.head(take(t_tok[:, 1:], idx))
            s_tok, s_loc = student(glob, mask), student(loc)
            s_cls = student.head(torch.cat([s_tok[:, 0], s_loc[:, 0]]))
            s_patch = student.head(take(s_tok[:, 1:], idx))
            l_cls, l_patch = criterion(s_cls, t_cls, s_patch, t_patch)
            loss = l_cls + l_patch
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(student.parameters(), 3.0)
        optimizer.step()
        with torch.no_grad():
            m = cosine(0.996, 1.0, step, STEPS)
            for ps, pt in zip(student.parameters(), teacher.parameters()):
                pt.data.mul_(m).add_((1 - m) * ps.detach().data)
        if step % 6 == 0:
            print(f"[{step}/{STEPS}] cls {l_cls.item():.4f} patch {l_patch.item():.4f} lr {lr:.2e} "
                  f"max mem: {torch.cuda.max_memory_allocated() / 1024**2:.0f}")
    print("max_memory_allocated", torch.cuda.max_memory_allocated())
    print("max_memory_reserved", torch.cuda.max_memory_reserved())

if __name__ == "__main__":
    main()
