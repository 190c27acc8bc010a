"""Speech-to-text toy: silence is trimmed on the GPU, the remaining frames are packed into rows with block-diagonal
attention, CTC loss, greedy decoding with unique_consecutive. Loop through accelerate (bf16)."""
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from accelerate import Accelerator
from accelerate.utils import set_seed

N_MELS, VOCAB, BLANK = 80, 40, 0
UTTS, MAX_FRAMES, ROW = 64, 1200, 1024
DIM, LAYERS, HEADS, STEPS = 384, 8, 6, 8


def synth_batch(n, device, proto):
    """Each character is a spectral prototype held for 6-14 frames; leading/trailing/inner silence at random."""
    feats = 0.05 * torch.randn(n, MAX_FRAMES, N_MELS, device=device)
    texts = []
    for i in range(n):
        t, chars = int(torch.randint(0, 100, ())), []
        n_chars = int(torch.randint(8, 60, ()))
        while len(chars) < n_chars:
            c, dur = int(torch.randint(1, VOCAB, ())), int(torch.randint(6, 15, ()))
            gap = int(torch.randint(0, 12, ()))
            if t + dur + gap >= MAX_FRAMES:
                break
            feats[i, t:t + dur] += proto[c]
            chars.append(c)
            t += dur + gap
        texts.append(torch.tensor(chars, device=device))
    return feats, texts


def trim(feats, thr=0.15):
    """Energy based VAD; returns voiced frames and their number for each utterance (both live on the device)."""
    voiced = feats.pow(2).mean(-1) > thr
    voiced = F.max_pool1d(voiced.float().unsqueeze(1), 5, 1, 2).squeeze(1) > 0
    lens = voiced.sum(1)
    return feats[voiced], lens


def pack(flat, lens, row):
    """First-fit-decreasing packing of utterances into rows of `row` frames."""
    chunks = flat.split(lens.tolist())
    order = lens.argsort(descending=True).tolist()
    rows, room = [], []
    for u in order:
        n = chunks[u].size(0)
        for r, free in enumerate(room):
            if n <= free:
                rows[r].append(u); room[r] -= n
                break
        else:
            rows.append([u]); room.append(row - n)
    width = row - min(room)
    x = flat.new_zeros(len(rows), width, flat.size(1))
    seg = torch.full((len(rows), width), -1, dtype=torch.long, device=flat.device)
    for r, us in enumerate(rows):
        o = 0
        for u in us:
            n = chunks[u].size(0)
            x[r, o:o + n] = chunks[u]; seg[r, o:o + n] = u
            o += n
    return x, seg


class ConvAttnBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2, self.ln3 = (nn.LayerNorm(DIM) for _ in range(3))
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.dw = nn.Conv1d(DIM, DIM, 9, padding=4, groups=DIM)
        self.pw = nn.Linear(DIM, DIM)
        self.ff = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.SiLU(), nn.Dropout(0.1), nn.Linear(4 * DIM, DIM))

    def forward(self, x, mask, valid):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, DIM))
        h = self.ln2(x) * valid
        x = x + self.pw(F.silu(self.dw(h.transpose(1, 2)).transpose(1, 2)))
        return x + self.ff(self.ln3(x))


class PackedEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(N_MELS, DIM)
        self.blocks = nn.ModuleList(ConvAttnBlock() for _ in range(LAYERS))
        self.out = nn.Linear(DIM, VOCAB)

    def forward(self, x, seg):
        mask = seg[:, :, None] == seg[:, None, :]           # padding attends to padding only
        valid = (seg >= 0).unsqueeze(-1)
        h = self.inp(x)
        for blk in self.blocks:
            h = blk(h, mask.unsqueeze(1), valid)
        return self.out(h)


def unpack(logits, seg, lens):
    # (rows, width, V) -> (T_max, utterances, V), utterances in their own order
    m = seg >= 0
    flat, owner = logits[m], seg[m]
    flat = flat[owner.argsort(stable=True)]
    return pad_sequence(flat.split(lens.tolist()))


def greedy(logp, lens):
    hyps = []
    for u in range(logp.size(1)):
        best = logp[: lens[u], u].argmax(-1)
        best = torch.unique_consecutive(best)
        hyps.append(best[best != BLANK])
    return hyps


def edit_distance(a, b):
    prev = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        cur = [i]
        for j, y in enumerate(b, 1):
            cur.append(min(prev[j] + 1, cur[-1] + 1, prev[j - 1] + (x != y)))
        prev = cur
    return prev[-1]


def main():
    accelerator = Accelerator(mixed_precision="bf16"); set_seed(21)
    proto = torch.randn(VOCAB, N_MELS, device=accelerator.device) * 1.2
    model = PackedEncoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=STEPS, pct_start=0.3)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    for step in range(STEPS):
        feats, texts = synth_batch(UTTS, accelerator.device, proto)
        flat, lens = trim(feats)
        x, seg = pack(flat, lens, ROW)
        logp = unpack(model(x, seg), seg, lens).float().log_softmax(-1)
        tlens = torch.tensor([len(t) for t in texts], device=logp.device)
        loss = F.ctc_loss(logp, torch.cat(texts), lens, tlens, blank=BLANK, zero_infinity=True)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(); scheduler.step(); optimizer.zero_grad()
        accelerator.print(f"step {step} loss {loss.item():.4f} frames {flat.size(0)} rows {tuple(x.shape[:2])} "
                          f"fill {flat.size(0) / seg.numel():.2f}")
    model.eval()
    with torch.no_grad():
        feats, texts = synth_batch(UTTS // 2, accelerator.device, proto)
        flat, lens = trim(feats)
        x, seg = pack(flat, lens, ROW)
        hyps = greedy(unpack(model(x, seg), seg, lens).float(), lens)
    err = sum(edit_distance(h.tolist(), t.tolist()) for h, t in zip(hyps, texts))
    accelerator.print(f"CER {err / sum(len(t) for t in texts):.3f}, emitted {sum(len(h) for h in hyps)} characters")
    accelerator.print("max allocated", torch.cuda.max_memory_allocated(), "max reserved", torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    main()
