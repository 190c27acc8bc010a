# %% [markdown]
# # Segmentation baseline: frozen ViT + light conv decoder, fp16 AMP
# %%
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers import ViTConfig, ViTModel
import os

class CFG:
    img_size = 384
    patch = 16
    n_class = 21
    bs = int(os.environ.get('BS', 16))
    epochs = 2
    iters = 4
    lr = 1e-3
    seed = 2024
    unfreeze_last = 0
    taps = [2, 5, 8, 11]

import sys
for arg in sys.argv[1:]:
    k, v = arg.split('=')
    setattr(CFG, k, type(getattr(CFG, k))(v))

torch.manual_seed(CFG.seed); np.random.seed(CFG.seed)
device = torch.device('cuda')

# %%
class Up(nn.Module):
    def __init__(self, cin, cskip, cout):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(cin + cskip, cout, 3, padding=1, bias=False), nn.BatchNorm2d(cout), nn.ReLU(inplace=True),
            nn.Conv2d(cout, cout, 3, padding=1, bias=False), nn.BatchNorm2d(cout), nn.ReLU(inplace=True))
    def forward(self, x, skip):
        x = F.interpolate(x, scale_factor=2, mode='bilinear', align_corners=False)
        if skip is not None:
            skip = F.interpolate(skip, size=x.shape[-2:], mode='bilinear', align_corners=False)
            x = torch.cat([x, skip], 1)
        return self.conv(x)

class SegModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = ViTModel(ViTConfig(image_size=CFG.img_size, patch_size=CFG.patch), add_pooling_layer=False)
        for p in self.backbone.parameters():
            p.requires_grad = False
        if CFG.unfreeze_last:
            for n, p in self.backbone.named_parameters():
                if any(f'layer.{12 - i - 1}.' in n or f'layers.{12 - i - 1}.' in n for i in range(CFG.unfreeze_last)):
                    p.requires_grad = True
        self.lat = nn.ModuleList([nn.Conv2d(768, 128, 1) for _ in CFG.taps])
        self.up1, self.up2, self.up3 = Up(128, 128, 128), Up(128, 128, 96), Up(96, 128, 64)
        self.up4 = Up(64, 0, 32)
        self.head = nn.Conv2d(32, CFG.n_class, 1)

    def forward(self, x):
        ctx = torch.enable_grad() if CFG.unfreeze_last else torch.no_grad()
        with ctx:
            hs = self.backbone(x, output_hidden_states=True).hidden_states
        g = CFG.img_size // CFG.patch
        f = [l(hs[t + 1][:, 1:].transpose(1, 2).reshape(-1, 768, g, g)) for l, t in zip(self.lat, CFG.taps)]
        y = self.up1(f[3], f[2]); y = self.up2(y, f[1]); y = self.up3(y, f[0]); y = self.up4(y, None)
        return self.head(y)

def dice_loss(logits, target):
    p = logits.softmax(1)
    t = F.one_hot(target.clamp(min=0), CFG.n_class).permute(0, 3, 1, 2).float()
    inter = (p * t).sum((0, 2, 3))
    return 1 - (2 * inter / (p.sum((0, 2, 3)) + t.sum((0, 2, 3)) + 1e-6)).mean()

def fast_hist(a, b, n):
    k = (a >= 0) & (a < n)
    return np.bincount(n * a[k].astype(int) + b[k], minlength=n ** 2).reshape(n, n)

# %%
model = SegModel().to(device)
params = [p for p in model.parameters() if p.requires_grad]
print('trainable', sum(p.numel() for p in params) / 1e6, 'M')
optimizer = torch.optim.AdamW(params, lr=CFG.lr)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, CFG.epochs * CFG.iters)
scaler = torch.amp.GradScaler('cuda')

for epoch in range(CFG.epochs):
    model.train(); model.backbone.eval()
    for it in range(CFG.iters):
        images = torch.from_numpy(np.random.rand(CFG.bs, 3, CFG.img_size, CFG.img_size).astype(np.float32)).to(device)
        masks = torch.from_numpy(np.random.randint(0, CFG.n_class, (CFG.bs, CFG.img_size, CFG.img_size))).to(device)
        masks[:, :8] = -100
        with torch.autocast('cuda', dtype=torch.float16):
            logits = model(images)
            loss = F.cross_entropy(logits, masks) + dice_loss(logits.float(), masks)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        scaler.step(optimizer); scaler.update()
        optimizer.zero_grad(); scheduler.step()
        print(f'epoch {epoch} it {it} loss {loss.item():.4f} scale {scaler.get_scale()}')
    model.eval()
    hist = np.zeros((CFG.n_class, CFG.n_class))
    with torch.no_grad(), torch.autocast('cuda', dtype=torch.float16):
        pred = model(images).argmax(1)
    hist += fast_hist(masks.cpu().numpy().flatten(), pred.cpu().numpy().flatten(), CFG.n_class)
    iou = np.diag(hist) / (hist.sum(1) + hist.sum(0) - np.diag(hist) + 1e-9)
    print('mIoU', iou.mean())
