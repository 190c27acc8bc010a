# Masked LM with three kinds of routed FFN stacked in one encoder:
#   'switch'  top-1 with fixed capacity (cumsum positions, overflow tokens dropped)
#   'choice'  experts choose tokens
#   'blocks'  dropless, each expert's tokens padded up to a multiple of BLOCK
import random
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

SEED = 7
random.seed(SEED); np.random.seed(SEED); torch.manual_seed(SEED)
torch.set_float32_matmul_precision("high")
dev = torch.device("cuda")

V, D, HID, E, HEADS = 20000, 512, 1024, 16, 8
B, L = 32, 256
KINDS = ["switch", "choice", "blocks", "switch", "choice", "blocks"]
BLOCK = 128
STEPS = 8
MASK_ID = 1


class ExpertBank(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(E, D, HID) * D ** -0.5)
        self.b1 = nn.Parameter(torch.zeros(E, 1, HID))
        self.w2 = nn.Parameter(torch.randn(E, HID, D) * HID ** -0.5)

    def forward(self, xe, which=None):            # xe: (E or nblocks, tokens, D)
        w1, b1, w2 = self.w1, self.b1, self.w2
        if which is not None:
            w1, b1, w2 = w1[which], b1[which], w2[which]
        return torch.bmm(F.gelu(torch.bmm(xe, w1) + b1), w2)


class RoutedFFN(nn.Module):
    def __init__(self, kind, cap_factor=1.25):
        super().__init__()
        self.kind, self.cap_factor = kind, cap_factor
        self.router = nn.Linear(D, E, bias=False)
        self.bank = ExpertBank()
        self.stats = {}

    def forward(self, x, valid):
        flat = x[valid]                              # padding never reaches the experts
        p = self.router(flat).softmax(-1)
        y, aux = getattr(self, self.kind)(flat, p)
        out = torch.zeros_like(x)
        out[valid] = y
        return out, aux

    def switch(self, x, p):
        n = x.size(0)
        cap = int(self.cap_factor * n / E)
        g, e = p.max(-1)
        oh = F.one_hot(e, E)
        pos = (oh.cumsum(0) * oh).sum(-1) - 1         # place in the expert's queue
        kept = torch.nonzero(pos < cap).squeeze(1)
        buf = x.new_zeros(E, cap, D)
        buf[e[kept], pos[kept]] = x[kept]
        y = self.bank(buf)
        out = torch.zeros_like(x).index_copy(0, kept, y[e[kept], pos[kept]] * g[kept, None])
        self.stats["dropped"] = n - kept.numel()
        return out, E * (oh.float().mean(0) * p.mean(0)).sum()

    def choice(self, x, p):
        n = x.size(0)
        cap = max(1, 2 * n // E)
        g, idx = p.t().topk(cap, dim=-1)              # (E, cap)
        y = self.bank(x[idx]) * g.unsqueeze(-1)
        out = torch.zeros_like(x).index_add(0, idx.reshape(-1), y.reshape(-1, D))
        self.stats["unchosen"] = n - torch.unique(idx).numel()
        return out, p.new_zeros(())

    def blocks(self, x, p):
        g, e = p.max(-1)
        order = torch.argsort(e, stable=True)
        counts = torch.bincount(e, minlength=E)
        nblk = (counts + BLOCK - 1) // BLOCK
        padded = nblk * BLOCK
        src_start = counts.cumsum(0) - counts
        dst_start = padded.cumsum(0) - padded
        es = e[order]
        dst = dst_start[es] + torch.arange(x.size(0), device=x.device) - src_start[es]
        total = int(padded.sum())
        buf = x.new_zeros(total, D).index_copy(0, dst, x[order])
        block_expert = torch.repeat_interleave(torch.arange(E, device=x.device), nblk)
        y = self.bank(buf.view(-1, BLOCK, D), block_expert).view(total, D)
        out = torch.zeros_like(x).index_copy(0, order, y[dst] * g[order, None])
        self.stats["padding"] = total - x.size(0)
        return out, E * (F.one_hot(e, E).float().mean(0) * p.mean(0)).sum()


class EncoderLayer(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.att = nn.MultiheadAttention(D, HEADS, batch_first=True)
        self.ffn = RoutedFFN(kind)
        self.ln1, self.ln2 = nn.LayerNorm(D), nn.LayerNorm(D)

    def forward(self, x, valid):
        h = self.ln1(x)
        x = x + self.att(h, h, h, key_padding_mask=~valid, need_weights=False)[0]
        y, aux = self.ffn(self.ln2(x), valid)
        return x + y, aux


class MLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(V, D, padding_idx=0), nn.Embedding(L, D)
        self.layers = nn.ModuleList([EncoderLayer(k) for k in KINDS])
        self.ln, self.out = nn.LayerNorm(D), nn.Linear(D, V)

    def forward(self, ids, labels):
        valid = ids != 0
        x, aux = self.tok(ids) + self.pos.weight[: ids.size(1)], 0
        for l in self.layers:
            x, a = l(x, valid)
            aux = aux + a
        sel = labels != -100
        logits = self.out(self.ln(x[sel]))            # only masked positions hit the vocabulary
        return F.cross_entropy(logits, labels[sel]), aux / len(self.layers), logits, labels[sel]


def make_batch():
    lens = np.random.randint(L // 3, L + 1, size=B)
    ids = np.zeros((B, L), dtype=np.int64)
    for i, n in enumerate(lens):
        start = np.random.randint(2, V // 2)
        ids[i, :n] = start + (np.arange(n) * np.random.randint(1, 4)) % (V // 4)
    ids = torch.from_numpy(ids).to(dev)
    m = (torch.rand(ids.shape, device=dev) < 0.15) & (ids != 0)
    labels = ids.masked_fill(~m, -100)
    return ids.masked_fill(m, MASK_ID), labels


net = MLM().to(dev)
opt = torch.optim.Adam(net.parameters(), lr=5e-4)
sched = torch.optim.lr_scheduler.OneCycleLR(opt, 5e-4, total_steps=STEPS)
for step in range(STEPS):
    ids, labels = make_batch()
    loss, aux, _, _ = net(ids, labels)
    opt.zero_grad()
    (loss + 0.01 * aux).backward()
    gn = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    opt.step(); sched.step()
    print("step", step, "loss %.4f" % loss.item(), "gnorm %.2f" % gn.item(), [l.ffn.stats for l in net.layers[:3]])

net.eval()
with torch.inference_mode():
    l, _, lg, tgt = net(*make_batch())
    print("eval loss %.4f acc %.4f over %d masked" % (l.item(), (lg.argmax(-1) == tgt).float().mean().item(), tgt.numel()))
print(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
