# Stereo disparity: concatenation cost volume + stacked 3D hourglasses (PSMNet style)
import os, tempfile
import torch, torch.nn as nn, torch.nn.functional as F

cfg = dict(maxdisp=192, height=256, width=512, batch=3, iters=5, lr=1e-3, seed=1,
           val_height=384, val_width=768)
torch.manual_seed(cfg["seed"])
torch.backends.cudnn.benchmark = False
device = torch.device("cuda")


def convbn(i, o, k, s, p, d):
    return nn.Sequential(nn.Conv2d(i, o, k, s, d if d > 1 else p, dilation=d, bias=False), nn.BatchNorm2d(o))


def convbn3d(i, o, k=3, s=1, p=1):
    return nn.Sequential(nn.Conv3d(i, o, k, s, p, bias=False), nn.BatchNorm3d(o))


class BasicBlock(nn.Module):
    def __init__(self, i, o, s, d):
        super().__init__()
        self.conv1 = nn.Sequential(convbn(i, o, 3, s, 1, d), nn.ReLU(inplace=True))
        self.conv2 = convbn(o, o, 3, 1, 1, d)
        self.down = convbn(i, o, 1, s, 0, 1) if s != 1 or i != o else None

    def forward(self, x):
        out = self.conv2(self.conv1(x))
        return out + (x if self.down is None else self.down(x))


class FeatureNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(convbn(3, 32, 3, 2, 1, 1), nn.ReLU(True), convbn(32, 32, 3, 1, 1, 1), nn.ReLU(True),
                                   convbn(32, 32, 3, 1, 1, 1), nn.ReLU(True))
        self.l1 = self._layer(32, 32, 3, 1, 1)
        self.l2 = self._layer(32, 64, 10, 2, 1)
        self.l3 = self._layer(64, 128, 3, 1, 1)
        self.l4 = self._layer(128, 128, 3, 1, 2)
        self.pools = nn.ModuleList(nn.Sequential(nn.AvgPool2d(k, k), convbn(128, 32, 1, 1, 0, 1), nn.ReLU(True))
                                   for k in (64, 32, 16, 8))
        self.last = nn.Sequential(convbn(320, 128, 3, 1, 1, 1), nn.ReLU(True), nn.Conv2d(128, 32, 1, bias=False))

    @staticmethod
    def _layer(i, o, n, s, d):
        return nn.Sequential(BasicBlock(i, o, s, d), *[BasicBlock(o, o, 1, d) for _ in range(n - 1)])

    def forward(self, x):
        raw = self.l2(self.l1(self.first(x)))
        skip = self.l4(self.l3(raw))
        branches = [F.interpolate(p(skip), skip.shape[2:], mode="bilinear", align_corners=False) for p in self.pools]
        return self.last(torch.cat([raw, skip] + branches, 1))


class Hourglass(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c1 = nn.Sequential(convbn3d(c, 2 * c, s=2), nn.ReLU(True))
        self.c2 = convbn3d(2 * c, 2 * c)
        self.c3 = nn.Sequential(convbn3d(2 * c, 2 * c, s=2), nn.ReLU(True))
        self.c4 = nn.Sequential(convbn3d(2 * c, 2 * c), nn.ReLU(True))
        self.c5 = nn.Sequential(nn.ConvTranspose3d(2 * c, 2 * c, 3, 2, 1, 1, bias=False), nn.BatchNorm3d(2 * c))
        self.c6 = nn.Sequential(nn.ConvTranspose3d(2 * c, c, 3, 2, 1, 1, bias=False), nn.BatchNorm3d(c))

    def forward(self, x, presqu, postsqu):
        out = self.c1(x)
        pre = self.c2(out)
        pre = F.relu(pre if postsqu is None else pre + postsqu, inplace=True)
        out = self.c4(self.c3(pre))
        post = F.relu(self.c5(out) + (pre if presqu is None else presqu), inplace=True)
        return self.c6(post), pre, post


class PSMNet(nn.Module):
    def __init__(self, maxdisp):
        super().__init__()
        self.maxdisp = maxdisp
        self.features = FeatureNet()
        self.dres0 = nn.Sequential(convbn3d(64, 32), nn.ReLU(True), convbn3d(32, 32), nn.ReLU(True))
        self.dres1 = nn.Sequential(convbn3d(32, 32), nn.ReLU(True), convbn3d(32, 32))
        self.hg = nn.ModuleList(Hourglass(32) for _ in range(3))
        self.classif = nn.ModuleList(nn.Sequential(convbn3d(32, 32), nn.ReLU(True), nn.Conv3d(32, 1, 3, 1, 1, bias=False))
                                     for _ in range(3))

    def regress(self, cost, size):
        cost = F.interpolate(cost, [self.maxdisp, *size], mode="trilinear", align_corners=False).squeeze(1)
        prob = F.softmax(cost, dim=1)
        disp = torch.arange(self.maxdisp, device=cost.device, dtype=cost.dtype).view(1, -1, 1, 1)
        return (prob * disp).sum(1)

    def forward(self, left, right):
        fl, fr = self.features(left), self.features(right)
        b, c, h, w = fl.shape
        D = self.maxdisp // 4
        cost = fl.new_zeros(b, 2 * c, D, h, w)
        for i in range(D):
            if i > 0:
                cost[:, :c, i, :, i:] = fl[:, :, :, i:]
                cost[:, c:, i, :, i:] = fr[:, :, :, :-i]
            else:
                cost[:, :c, i], cost[:, c:, i] = fl, fr
        cost0 = self.dres0(cost)
        cost0 = self.dres1(cost0) + cost0
        out1, pre1, post1 = self.hg[0](cost0, None, None)
        out1 = out1 + cost0
        out2, _, post2 = self.hg[1](out1, pre1, post1)
        out2 = out2 + cost0
        out3, _, _ = self.hg[2](out2, pre1, post2)
        out3 = out3 + cost0
        cost1 = self.classif[0](out1)
        cost2 = self.classif[1](out2) + cost1
        cost3 = self.classif[2](out3) + cost2
        size = left.shape[2:]
        if self.training:
            return self.regress(cost1, size), self.regress(cost2, size), self.regress(cost3, size)
        return self.regress(cost3, size)


def stereo_pair(b, h, w):
    """random texture at the right camera, left image by sampling it at x - disparity"""
    right = F.interpolate(torch.rand(b, 3, h // 2, w // 2), size=(h, w), mode="bicubic", align_corners=False)
    disp = F.interpolate(torch.rand(b, 1, 6, 8) * 0.8 * cfg["maxdisp"], size=(h, w), mode="bilinear", align_corners=False)
    xs = torch.arange(w).float().view(1, 1, 1, w) - disp
    ys = torch.arange(h).float().view(1, 1, h, 1).expand_as(xs)
    grid = torch.stack([2 * xs / (w - 1) - 1, 2 * ys / (h - 1) - 1], -1).squeeze(1)
    return F.grid_sample(right, grid, align_corners=True), right, disp.squeeze(1)


model = PSMNet(cfg["maxdisp"]).to(device)
print("Number of model parameters:", sum(p.numel() for p in model.parameters()))
optimizer = torch.optim.Adam(model.parameters(), lr=cfg["lr"], betas=(0.9, 0.999))

model.train()
for it in range(cfg["iters"]):
    left, right, disp = (t.to(device) for t in stereo_pair(cfg["batch"], cfg["height"], cfg["width"]))
    mask = (disp < cfg["maxdisp"]).detach()
    optimizer.zero_grad()
    o1, o2, o3 = model(left, right)
    loss = 0.5 * F.smooth_l1_loss(o1[mask], disp[mask]) + 0.7 * F.smooth_l1_loss(o2[mask], disp[mask]) \
        + F.smooth_l1_loss(o3[mask], disp[mask])
    loss.backward()
    optimizer.step()
    print("Iter %d training loss = %.3f, allocated %.0f MB, peak %.0f MB" % (
        it, loss.item(), torch.cuda.memory_allocated() / 1e6, torch.cuda.max_memory_allocated() / 1e6))

with tempfile.TemporaryDirectory() as d:
    f = os.path.join(d, "checkpoint_0.tar")
    torch.save({"state_dict": model.state_dict(), "optimizer": optimizer.state_dict(), "iter": cfg["iters"]}, f)
    model.load_state_dict(torch.load(f, map_location="cpu")["state_dict"])

model.eval()
torch.cuda.empty_cache()
with torch.no_grad():
    left, right, disp = stereo_pair(1, cfg["val_height"], cfg["val_width"])
    pred = model(left.to(device), right.to(device)).cpu()
epe = (pred - disp).abs()
print("EPE %.3f px, >3px %.3f" % (epe.mean().item(), (epe > 3).float().mean().item()))
print("reserved %.2f GB" % (torch.cuda.memory_reserved() / 1e9))
