"""Masked autoencoder on images of strongly varying sizes (linear patches, interpolated positions, no convs)."""
import random
import torch
import torch.nn as nn
import torch.nn.functional as F

random.seed(6)
torch.manual_seed(6)
dev = torch.device("cuda")
P, D, DD = 16, 768, 512


def patchify(x):
    b, c, h, w = x.shape
    x = x.reshape(b, c, h // P, P, w // P, P).permute(0, 2, 4, 1, 3, 5)
    return x.reshape(b, (h // P) * (w // P), c * P * P)


def encoder(d, heads, depth):
    layer = nn.TransformerEncoderLayer(d, heads, 4 * d, 0.0, "gelu", batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, depth, norm=nn.LayerNorm(d), enable_nested_tensor=False)


class MAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3 * P * P, D)
        self.pos = nn.Parameter(torch.randn(1, D, 14, 14) * 0.02)
        self.dpos = nn.Parameter(torch.randn(1, DD, 14, 14) * 0.02)
        self.enc, self.dec = encoder(D, 12, 8), encoder(DD, 8, 4)
        self.bridge = nn.Linear(D, DD)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, DD))
        self.out = nn.Linear(DD, 3 * P * P)

    @staticmethod
    def resize(pos, h, w):
        return F.interpolate(pos, size=(h, w), mode="bicubic", align_corners=False).flatten(2).transpose(1, 2)

    def forward(self, img, ratio=0.6):
        b, _, hh, ww = img.shape
        h, w = hh // P, ww // P
        target = patchify(img)
        x = self.embed(target) + self.resize(self.pos, h, w)
        n = h * w
        keep = int(n * (1 - ratio))
        order = torch.rand(b, n, device=img.device).argsort(1)
        restore = order.argsort(1)
        vis = torch.gather(x, 1, order[:, :keep, None].expand(-1, -1, D))
        z = self.bridge(self.enc(vis))
        full = torch.cat([z, self.mask_token.expand(b, n - keep, -1)], 1)
        full = torch.gather(full, 1, restore[:, :, None].expand(-1, -1, DD))
        pred = self.out(self.dec(full + self.resize(self.dpos, h, w)))
        mask = torch.ones(b, n, device=img.device)
        mask[:, :keep] = 0
        mask = torch.gather(mask, 1, restore)
        err = (pred - target).pow(2).mean(-1)
        return (err * mask).sum() / mask.sum()


model = MAE().to(dev)
opt = torch.optim.AdamW(model.parameters(), lr=1.5e-4, betas=(0.9, 0.95))
sizes = [(96, 96), (640, 384), (128, 512), (224, 224), (768, 640), (160, 96), (448, 448), (1024, 512),
         (320, 192), (512, 768), (64, 64), (384, 896)]
for step, (h, w) in enumerate(sizes):
    bs = random.choice([4, 8, 12])
    img = torch.rand(bs, 3, h, w).to(dev)
    img = (img - img.mean((2, 3), keepdim=True)) / img.std((2, 3), keepdim=True)
    loss = model(img)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"step {step} {bs}x{h}x{w} loss {loss.item():.4f} allocated {torch.cuda.max_memory_allocated()} "
          f"reserved {torch.cuda.memory_reserved()}")

print("max_memory_allocated", torch.cuda.max_memory_allocated())
print("max_memory_reserved", torch.cuda.max_memory_reserved())
