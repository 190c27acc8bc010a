"""SwinUNETR-like 3D segmentation (BTCV-style, 14 classes) as a LightningModule, 16-mixed, sliding-window validation."""
import itertools

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

ROI = (96, 96, 96)
VAL_SHAPE = (160, 160, 128)
N_CLASSES = 14
FEATURE_SIZE = 48
BATCH_SIZE = 2

def random_ct(n, shape):
    return [{"image": torch.rand(1, *shape), "label": torch.randint(0, N_CLASSES, shape)} for _ in range(n)]

def window_partition(x, ws):
    b, d, h, w, c = x.shape
    x = x.view(b, d // ws, ws, h // ws, ws, w // ws, ws, c).permute(0, 1, 3, 5, 2, 4, 6, 7)
    return x.reshape(-1, ws ** 3, c)

def window_reverse(x, ws, b, d, h, w):
    x = x.view(b, d // ws, h // ws, w // ws, ws, ws, ws, -1)
    return x.permute(0, 1, 4, 2, 5, 3, 6, 7).reshape(b, d, h, w, -1)

def shift_mask(d, h, w, ws, ss, device):
    img = torch.zeros(1, d, h, w, 1, device=device)
    slices = (slice(-ws), slice(-ws, -ss), slice(-ss, None))
    for cnt, (a, b, c) in enumerate(itertools.product(slices, slices, slices)):
        img[:, a, b, c] = cnt
    m = window_partition(img, ws).squeeze(-1)
    diff = m.unsqueeze(1) - m.unsqueeze(2)
    return diff.masked_fill(diff != 0, -100.0)

class WindowAttention(nn.Module):
    def __init__(self, dim, heads, ws):
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(dim, dim * 3), nn.Linear(dim, dim)
        self.table = nn.Parameter(torch.zeros((2 * ws - 1) ** 3, heads))
        nn.init.trunc_normal_(self.table, std=0.02)
        coords = torch.stack(torch.meshgrid(*[torch.arange(ws)] * 3, indexing="ij")).flatten(1)
        rel = (coords[:, :, None] - coords[:, None, :]).permute(1, 2, 0) + ws - 1
        rel = rel[..., 0] * (2 * ws - 1) ** 2 + rel[..., 1] * (2 * ws - 1) + rel[..., 2]
        self.register_buffer("index", rel.flatten(), persistent=False)

    def forward(self, x, mask=None):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        attn = attn + self.table[self.index].view(n, n, -1).permute(2, 0, 1).unsqueeze(0)
        if mask is not None:
            nw = mask.shape[0]
            attn = (attn.view(b // nw, nw, self.heads, n, n) + mask[None, :, None]).view(b, self.heads, n, n)
        attn = attn.softmax(-1).to(v.dtype)
        return self.proj((attn @ v).transpose(1, 2).reshape(b, n, c))

class SwinBlock(nn.Module):
    def __init__(self, dim, heads, shift, ws=7):
        super().__init__()
        self.ws, self.shift = ws, ws // 2 if shift else 0
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = WindowAttention(dim, heads, ws)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        b, d, h, w, c = x.shape
        y = self.norm1(x)
        pd, ph, pw = [(-s) % self.ws for s in (d, h, w)]
        y = F.pad(y, (0, 0, 0, pw, 0, ph, 0, pd))
        D, H, W = y.shape[1:4]
        s = self.shift
        mask = shift_mask(D, H, W, self.ws, s, x.device) if s else None
        y = torch.roll(y, (-s, -s, -s), dims=(1, 2, 3)) if s else y
        y = window_reverse(self.attn(window_partition(y, self.ws), mask), self.ws, b, D, H, W)
        y = torch.roll(y, (s, s, s), dims=(1, 2, 3)) if s else y
        x = x + y[:, :d, :h, :w]
        return x + self.mlp(self.norm2(x))

class PatchMerging(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.reduction = nn.LayerNorm(8 * dim), nn.Linear(8 * dim, 2 * dim, bias=False)

    def forward(self, x):
        x = torch.cat([x[:, i::2, j::2, k::2] for i, j, k in itertools.product((0, 1), repeat=3)], -1)
        return self.reduction(self.norm(x))

class ResBlock(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv3d(cin, cout, 3, 1, 1, bias=False), nn.Conv3d(cout, cout, 3, 1, 1, bias=False)
        self.n1, self.n2 = nn.InstanceNorm3d(cout), nn.InstanceNorm3d(cout)
        self.skip = nn.Sequential(nn.Conv3d(cin, cout, 1, bias=False), nn.InstanceNorm3d(cout)) if cin != cout else nn.Identity()

    def forward(self, x):
        y = F.leaky_relu(self.n1(self.conv1(x)), 0.01)
        return F.leaky_relu(self.n2(self.conv2(y)) + self.skip(x), 0.01)

class UpBlock(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.up, self.res = nn.ConvTranspose3d(cin, cout, 2, 2, bias=False), ResBlock(2 * cout, cout)

    def forward(self, x, skip):
        return self.res(torch.cat([self.up(x), skip], 1))

class SwinUNETR(nn.Module):
    def __init__(self, f=FEATURE_SIZE, depths=(2, 2, 2, 2), heads=(3, 6, 12, 24)):
        super().__init__()
        self.embed = nn.Conv3d(1, f, 2, 2)
        self.stages = nn.ModuleList(nn.Sequential(*[SwinBlock(f * 2 ** i, heads[i], j % 2 == 1) for j in range(depths[i])])
                                    for i in range(4))
        self.merges = nn.ModuleList(PatchMerging(f * 2 ** i) for i in range(4))
        self.enc = nn.ModuleList([ResBlock(1, f), ResBlock(f, f), ResBlock(2 * f, 2 * f), ResBlock(4 * f, 4 * f)])
        self.bottleneck = ResBlock(16 * f, 16 * f)
        self.dec = nn.ModuleList([UpBlock(16 * f, 8 * f), UpBlock(8 * f, 4 * f), UpBlock(4 * f, 2 * f), UpBlock(2 * f, f), UpBlock(f, f)])
        self.out = nn.Conv3d(f, N_CLASSES, 1)

    def forward(self, x):
        h, hs = self.embed(x).permute(0, 2, 3, 4, 1), []
        for i in range(4):
            hs.append(F.layer_norm(h, h.shape[-1:]).permute(0, 4, 1, 2, 3))
            h = self.merges[i](self.stages[i](h))
        y = self.bottleneck(h.permute(0, 4, 1, 2, 3))
        skips = [hs[3], self.enc[3](hs[2]), self.enc[2](hs[1]), self.enc[1](hs[0]), self.enc[0](x)]
        for dec, s in zip(self.dec, skips):
            y = dec(y, s)
        return self.out(y)

def dice_ce(logits, label):
    p = logits.float().softmax(1)
    t = F.one_hot(label, N_CLASSES).permute(0, 4, 1, 2, 3).float()
    dice = 1 - (2 * (p * t).sum((2, 3, 4)) + 1e-5) / (p.sum((2, 3, 4)) + t.sum((2, 3, 4)) + 1e-5)
    return dice.mean() + F.cross_entropy(logits, label)

class Segmenter(L.LightningModule):
    def __init__(self, lr=1e-4):
        super().__init__()
        self.save_hyperparameters()
        self.net = SwinUNETR()

    def training_step(self, batch, batch_idx):
        loss = dice_ce(self.net(batch["image"]), batch["label"])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def sliding_window(self, vol, sw_batch=4):
        starts = [sorted({min(s, n - r) for s in range(0, n - r // 2, r // 2)}) for n, r in zip(vol.shape[2:], ROI)]
        pos = list(itertools.product(*starts))
        out, cnt = vol.new_zeros(1, N_CLASSES, *vol.shape[2:]), vol.new_zeros(1, 1, *vol.shape[2:])
        for i in range(0, len(pos), sw_batch):
            sl = [(..., *[slice(a, a + r) for a, r in zip(p, ROI)]) for p in pos[i:i + sw_batch]]
            pred = self.net(torch.cat([vol[s] for s in sl]))
            for s, p in zip(sl, pred):
                out[s] += p
                cnt[s] += 1
        return out / cnt

    def validation_step(self, batch, batch_idx):
        logits = self.sliding_window(batch["image"])
        pred, gt = (F.one_hot(t, N_CLASSES).flatten(0, 3) for t in (logits.argmax(1), batch["label"]))
        dice = 2 * (pred * gt).sum(0) / (pred.sum(0) + gt.sum(0)).clamp(min=1)
        self.log_dict({"val_loss": dice_ce(logits, batch["label"]), "val_dice": dice[1:].mean()}, prog_bar=True, batch_size=1)

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=1e-5)
        return {"optimizer": opt, "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=2)}

if __name__ == "__main__":
    L.seed_everything(0)
    train_dl = DataLoader(random_ct(14, ROI), batch_size=BATCH_SIZE, shuffle=True, num_workers=2, pin_memory=True)
    val_dl = DataLoader(random_ct(1, VAL_SHAPE), batch_size=1, num_workers=1)
    trainer = L.Trainer(accelerator="cuda", devices=1, precision="16-mixed", max_epochs=2, gradient_clip_val=1.0,
                        gradient_clip_algorithm="norm", logger=False, enable_checkpointing=False, log_every_n_steps=5)
    trainer.fit(Segmenter(), train_dl, val_dl)
    print("max_memory_allocated", torch.cuda.max_memory_allocated())
    print("max_memory_reserved", torch.cuda.max_memory_reserved())
