"""RAFT optical flow training (chairs stage crops 368x496), all-pairs correlation + ConvGRU, float32."""
import torch
import torch.nn as nn
import torch.nn.functional as F

CROP, BATCH = (368, 496), 5
ITERS, NUM_STEPS, GAMMA, MAX_FLOW = 12, 10, 0.8, 400
HDIM, CDIM, LEVELS, RADIUS = 128, 128, 4, 4
VAL_SIZE, VAL_ITERS = (432, 1024), 24


class ResidualBlock(nn.Module):
    def __init__(self, cin, cout, norm, stride=1):
        super().__init__()
        mk = (lambda: nn.InstanceNorm2d(cout)) if norm == "instance" else (lambda: nn.BatchNorm2d(cout))
        self.conv1 = nn.Conv2d(cin, cout, 3, stride, 1)
        self.conv2 = nn.Conv2d(cout, cout, 3, padding=1)
        self.norm1, self.norm2 = mk(), mk()
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Sequential(nn.Conv2d(cin, cout, 1, stride), mk()) if stride != 1 else None

    def forward(self, x):
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.relu(self.norm2(self.conv2(y)))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


class Encoder(nn.Module):
    def __init__(self, out, norm):
        super().__init__()
        norm0 = nn.InstanceNorm2d(64) if norm == "instance" else nn.BatchNorm2d(64)
        self.net = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3), norm0, nn.ReLU(inplace=True),
            ResidualBlock(64, 64, norm), ResidualBlock(64, 64, norm),
            ResidualBlock(64, 96, norm, 2), ResidualBlock(96, 96, norm),
            ResidualBlock(96, 128, norm, 2), ResidualBlock(128, 128, norm), nn.Conv2d(128, out, 1))

    def forward(self, x):
        return self.net(x)


class SepConvGRU(nn.Module):
    def __init__(self, hidden, inp):
        super().__init__()
        mk = lambda k, p: nn.Conv2d(hidden + inp, hidden, k, padding=p)
        self.convz1, self.convr1, self.convq1 = (mk((1, 5), (0, 2)) for _ in range(3))
        self.convz2, self.convr2, self.convq2 = (mk((5, 1), (2, 0)) for _ in range(3))

    def forward(self, h, x):
        for cz, cr, cq in ((self.convz1, self.convr1, self.convq1), (self.convz2, self.convr2, self.convq2)):
            hx = torch.cat([h, x], dim=1)
            z, r = torch.sigmoid(cz(hx)), torch.sigmoid(cr(hx))
            q = torch.tanh(cq(torch.cat([r * h, x], dim=1)))
            h = (1 - z) * h + z * q
        return h


class UpdateBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.convc1 = nn.Conv2d(LEVELS * (2 * RADIUS + 1) ** 2, 256, 1)
        self.convc2 = nn.Conv2d(256, 192, 3, padding=1)
        self.convf1, self.convf2 = nn.Conv2d(2, 128, 7, padding=3), nn.Conv2d(128, 64, 3, padding=1)
        self.conv = nn.Conv2d(192 + 64, 128 - 2, 3, padding=1)
        self.gru = SepConvGRU(HDIM, 128 + CDIM)
        head = lambda out, k: nn.Sequential(nn.Conv2d(HDIM, 256, 3, padding=1), nn.ReLU(inplace=True),
                                            nn.Conv2d(256, out, k, padding=k // 2))
        self.flow_head, self.mask = head(2, 3), head(64 * 9, 1)

    def forward(self, net, inp, corr, flow):
        cor = F.relu(self.convc2(F.relu(self.convc1(corr))))
        flo = F.relu(self.convf2(F.relu(self.convf1(flow))))
        net = self.gru(net, torch.cat([inp, F.relu(self.conv(torch.cat([cor, flo], 1))), flow], 1))
        return net, 0.25 * self.mask(net), self.flow_head(net)


def coords_grid(b, h, w, device):
    ys, xs = torch.meshgrid(torch.arange(h, device=device), torch.arange(w, device=device), indexing="ij")
    return torch.stack([xs, ys]).float()[None].repeat(b, 1, 1, 1)


def bilinear_sampler(img, coords):
    (h, w), (x, y) = img.shape[-2:], coords.split([1, 1], dim=-1)
    return F.grid_sample(img, torch.cat([2 * x / (w - 1) - 1, 2 * y / (h - 1) - 1], dim=-1), align_corners=True)


class CorrBlock:
    def __init__(self, f1, f2):
        b, d, h, w = f1.shape
        corr = torch.matmul(f1.view(b, d, h * w).transpose(1, 2), f2.view(b, d, h * w)) / d ** 0.5
        self.pyramid = [corr.reshape(b * h * w, 1, h, w)]
        for _ in range(LEVELS - 1):
            self.pyramid.append(F.avg_pool2d(self.pyramid[-1], 2, stride=2))

    def __call__(self, coords):
        coords = coords.permute(0, 2, 3, 1)
        b, h, w, _ = coords.shape
        d, out = torch.linspace(-RADIUS, RADIUS, 2 * RADIUS + 1, device=coords.device), []
        delta = torch.stack(torch.meshgrid(d, d, indexing="ij"), dim=-1)[None]
        for i, corr in enumerate(self.pyramid):
            c = coords.reshape(b * h * w, 1, 1, 2) / 2 ** i + delta
            out.append(bilinear_sampler(corr, c).view(b, h, w, -1))
        return torch.cat(out, dim=-1).permute(0, 3, 1, 2).contiguous()


class RAFT(nn.Module):
    def __init__(self):
        super().__init__()
        self.fnet, self.cnet = Encoder(256, "instance"), Encoder(HDIM + CDIM, "batch")
        self.update_block = UpdateBlock()

    def upsample_flow(self, flow, mask):
        n, _, h, w = flow.shape
        mask = mask.view(n, 1, 9, 8, 8, h, w).softmax(dim=2)
        up = F.unfold(8 * flow, [3, 3], padding=1).view(n, 2, 9, 1, 1, h, w)
        return torch.sum(mask * up, dim=2).permute(0, 1, 4, 2, 5, 3).reshape(n, 2, 8 * h, 8 * w)

    def forward(self, im1, im2, iters=ITERS, test_mode=False):
        im1, im2 = 2 * (im1 / 255.0) - 1.0, 2 * (im2 / 255.0) - 1.0
        f1, f2 = self.fnet(torch.cat([im1, im2])).chunk(2)
        corr_fn = CorrBlock(f1, f2)
        net, inp = self.cnet(im1).chunk(2, dim=1)
        net, inp = torch.tanh(net), torch.relu(inp)
        coords0 = coords_grid(im1.shape[0], *f1.shape[-2:], im1.device)
        coords1, preds = coords0.clone(), []
        for _ in range(iters):
            coords1 = coords1.detach()
            net, mask, delta = self.update_block(net, inp, corr_fn(coords1), coords1 - coords0)
            coords1 = coords1 + delta
            if not test_mode:
                preds.append(self.upsample_flow(coords1 - coords0, mask))
        return self.upsample_flow(coords1 - coords0, mask) if test_mode else preds


def sequence_loss(preds, gt, valid):
    valid, loss = (valid >= 0.5) & (gt.pow(2).sum(1).sqrt() < MAX_FLOW), 0.0
    for i, p in enumerate(preds):
        loss = loss + GAMMA ** (len(preds) - i - 1) * (valid[:, None] * (p - gt).abs()).mean()
    epe = (preds[-1] - gt).pow(2).sum(1).sqrt()
    return loss, (epe * valid).sum() / valid.sum().clamp(min=1)


def fetch(b, size):
    im1 = torch.randint(0, 256, (b, 3, *size)).float()
    im2 = torch.roll(im1, shifts=(3, -5), dims=(2, 3))
    flow = torch.tensor([-5.0, 3.0]).view(1, 2, 1, 1).expand(b, 2, *size) + 0.1 * torch.randn(b, 2, *size)
    return [t.cuda() for t in (im1, im2, flow, torch.ones(b, *size))]


if __name__ == "__main__":
    torch.manual_seed(1234)
    model = RAFT().to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4, weight_decay=1e-4, eps=1e-8)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-4, NUM_STEPS + 100, pct_start=0.05)
    model.train()
    for step in range(NUM_STEPS):
        image1, image2, flow, valid = fetch(BATCH, CROP)
        optimizer.zero_grad()
        loss, epe = sequence_loss(model(image1, image2), flow, valid)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        print(f"[{step + 1:4d}] loss {loss.item():.3f} epe {epe.item():.3f}")
    model.eval()
    with torch.no_grad():
        image1, image2, flow, _ = fetch(1, VAL_SIZE)
        out = model(image1, image2, iters=VAL_ITERS, test_mode=True)
    print("val epe", (out - flow).pow(2).sum(1).sqrt().mean().item())
    print("peak allocated", torch.cuda.max_memory_allocated(), "peak reserved", torch.cuda.max_memory_reserved())
