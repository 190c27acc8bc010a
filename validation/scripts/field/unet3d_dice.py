# brain tumour style 3D U-Net, fp16 + GradScaler, sliding window eval
import torch, torch.nn as nn, torch.nn.functional as F

def block(i, o):
    return nn.Sequential(nn.Conv3d(i, o, 3, padding=1), nn.InstanceNorm3d(o, affine=True), nn.LeakyReLU(0.01, inplace=True),
                         nn.Conv3d(o, o, 3, padding=1), nn.InstanceNorm3d(o, affine=True), nn.LeakyReLU(0.01, inplace=True))

class UNet3D(nn.Module):
    def __init__(self, cin=4, classes=4, f=32, depth=4):
        super().__init__()
        self.enc = nn.ModuleList(); self.dec = nn.ModuleList(); self.up = nn.ModuleList()
        c = cin
        for d in range(depth):
            self.enc.append(block(c, f << d)); c = f << d
        for d in reversed(range(depth - 1)):
            self.up.append(nn.ConvTranspose3d(f << (d + 1), f << d, 2, 2))
            self.dec.append(block(2 * (f << d), f << d))
        self.head = nn.Conv3d(f, classes, 1)
    def forward(self, x):
        skips = []
        for i, e in enumerate(self.enc):
            x = e(x)
            if i < len(self.enc) - 1:
                skips.append(x); x = F.max_pool3d(x, 2)
        for u, d in zip(self.up, self.dec):
            x = d(torch.cat((u(x), skips.pop()), 1))
        return self.head(x)

def dice_loss(logits, target, eps=1e-5):
    p = logits.float().softmax(1)
    t = F.one_hot(target, p.shape[1]).permute(0, 4, 1, 2, 3).float()
    dims = (0, 2, 3, 4)
    inter, union = (p * t).sum(dims), p.sum(dims) + t.sum(dims)
    return 1 - ((2 * inter + eps) / (union + eps))[1:].mean()

net = UNet3D().cuda()
opt = torch.optim.SGD(net.parameters(), 1e-2, momentum=0.99, nesterov=True, weight_decay=3e-5)
scaler = torch.amp.GradScaler("cuda", init_scale=1024.)
for it in range(5):
    img = torch.randn(2, 4, 96, 96, 96).cuda(non_blocking=True)
    seg = torch.randint(0, 4, (2, 96, 96, 96)).cuda(non_blocking=True)
    opt.zero_grad(set_to_none=True)
    with torch.autocast("cuda", torch.float16):
        out = net(img)
        loss = F.cross_entropy(out, seg) + dice_loss(out, seg)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(net.parameters(), 12)
    scaler.step(opt); scaler.update()
    print(it, loss.item(), scaler.get_scale())

net.eval()
vol = torch.randn(1, 4, 160, 160, 128)
acc = torch.zeros(1, 4, 160, 160, 128, device="cuda"); cnt = torch.zeros_like(acc[:, :1])
with torch.inference_mode(), torch.autocast("cuda", torch.float16):
    for a in (0, 64):
        for b in (0, 64):
            for c in (0, 32):
                patch = vol[..., a:a+96, b:b+96, c:c+96].cuda()
                acc[..., a:a+96, b:b+96, c:c+96] += net(patch).float()
                cnt[..., a:a+96, b:b+96, c:c+96] += 1
pred = (acc / cnt).argmax(1).to(torch.uint8).cpu()
print(pred.shape, torch.cuda.max_memory_allocated())
