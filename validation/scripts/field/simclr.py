"""SimCLR with GPU augmentation, LARS-ish SGD."""
import sys
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass
class Config:
    batch: int = 40
    size: int = 96
    width: int = 64
    proj: int = 128
    temperature: float = 0.2
    steps: int = 5
    amp: bool = "amp" in sys.argv


class Bottleneck(nn.Module):
    def __init__(self, cin, planes, stride=1):
        super().__init__()
        out = planes * 4
        self.body = nn.Sequential(
            nn.Conv2d(cin, planes, 1, bias=False), nn.BatchNorm2d(planes), nn.ReLU(inplace=True),
            nn.Conv2d(planes, planes, 3, stride, 1, bias=False), nn.BatchNorm2d(planes), nn.ReLU(inplace=True),
            nn.Conv2d(planes, out, 1, bias=False), nn.BatchNorm2d(out))
        self.short = nn.Identity() if cin == out and stride == 1 else nn.Sequential(
            nn.Conv2d(cin, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x):
        return F.relu_(self.body(x) + self.short(x))


class Encoder(nn.Module):
    def __init__(self, w, proj):
        super().__init__()
        stages = []
        cin = w
        self.stem = nn.Sequential(nn.Conv2d(3, w, 3, 1, 1, bias=False), nn.BatchNorm2d(w), nn.ReLU(True))
        for i, n in enumerate([2, 3, 3, 2]):
            for j in range(n):
                stages.append(Bottleneck(cin, w * 2**i, 2 if j == 0 and i > 0 else 1))
                cin = w * 2**i * 4
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Sequential(nn.Linear(cin, 2048), nn.BatchNorm1d(2048), nn.ReLU(True), nn.Linear(2048, proj))

    def forward(self, x):
        return self.head(self.pool(self.stages(self.stem(x))).flatten(1))


@torch.no_grad()
def augment(x):
    n = x.shape[0]
    scale = torch.empty(n, device=x.device).uniform_(0.4, 1.0)
    flip = torch.where(torch.rand(n, device=x.device) < 0.5, -1.0, 1.0)
    shift = (torch.rand(n, 2, device=x.device) * 2 - 1) * (1 - scale)[:, None]
    theta = torch.zeros(n, 2, 3, device=x.device)
    theta[:, 0, 0] = scale * flip
    theta[:, 1, 1] = scale
    theta[:, :, 2] = shift
    grid = F.affine_grid(theta, x.shape, align_corners=False)
    x = F.grid_sample(x, grid, mode="bilinear", padding_mode="reflection", align_corners=False)
    x = x * torch.empty(n, 1, 1, 1, device=x.device).uniform_(0.6, 1.4)
    mean = x.mean((2, 3), keepdim=True)
    x = (x - mean) * torch.empty(n, 1, 1, 1, device=x.device).uniform_(0.6, 1.4) + mean
    gray = x.mean(1, keepdim=True).expand_as(x)
    return torch.where(torch.rand(n, 1, 1, 1, device=x.device) < 0.2, gray, x).clamp_(0, 1)


def nt_xent(a, b, t):
    z = F.normalize(torch.cat([a, b]), dim=1)
    sim = z @ z.T / t
    sim.fill_diagonal_(float("-inf"))
    n = a.shape[0]
    target = torch.cat([torch.arange(n, 2 * n), torch.arange(n)]).to(sim.device)
    return F.cross_entropy(sim, target)


def main(cfg: Config):
    model = Encoder(cfg.width, cfg.proj).to("cuda")
    decay = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.SGD([{"params": decay, "weight_decay": 1e-4}, {"params": plain, "weight_decay": 0}],
                                lr=0.3, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, cfg.steps)
    images = torch.randint(0, 256, (cfg.batch * cfg.steps, 3, cfg.size, cfg.size), dtype=torch.uint8, device="cuda")
    perm = torch.randperm(len(images), device="cuda")
    for step in range(cfg.steps):
        batch = images[perm[step * cfg.batch:(step + 1) * cfg.batch]].float().div_(255)
        v1, v2 = augment(batch), augment(batch)
        with torch.autocast(device_type="cuda", dtype=torch.bfloat16, enabled=cfg.amp):
            za, zb = model(torch.cat([v1, v2])).chunk(2)
        loss = nt_xent(za.float(), zb.float(), cfg.temperature)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        print(step, f"{loss.item():.4f}", f"{torch.cuda.max_memory_reserved() / 2**30:.2f} GiB")


if __name__ == "__main__":
    main(Config())
