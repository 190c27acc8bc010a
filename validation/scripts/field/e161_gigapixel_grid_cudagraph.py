# Fit a big image with multi-resolution feature planes + a small MLP.
#   stage 1: uniform sampling, the whole iteration in one CUDA graph
#   stage 2: importance sampling from an error map (inverse CDF), eager
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(1234)
torch.backends.cuda.matmul.allow_tf32 = True
dev = "cuda"

IMG = 4096
LEVELS, FEATS = 10, 4
R_MIN, R_MAX = 16, 2048
BATCH = 1 << 20
TILE = 512          # error-map cells per side
GRAPH_STEPS, EAGER_STEPS = 5, 3


def mib(x):
    return f"{x / 2**20:.0f} MiB"


def make_image():
    y, x = torch.meshgrid(torch.linspace(-1, 1, IMG, device=dev),
                          torch.linspace(-1, 1, IMG, device=dev), indexing="ij")
    chans = []
    for f in (3.0, 11.0, 37.0):
        chans.append(0.5 + 0.5 * torch.sin(f * (x * x + y) * math.pi) * torch.cos(f * 0.7 * (y * y - x)))
    return torch.stack(chans).unsqueeze(0)


class Planes(nn.Module):
    def __init__(self):
        super().__init__()
        growth = math.exp((math.log(R_MAX) - math.log(R_MIN)) / (LEVELS - 1))
        self.planes = nn.ParameterList(
            [nn.Parameter(torch.empty(1, FEATS, r, r).uniform_(-1e-2, 1e-2))
             for r in (round(R_MIN * growth ** i) for i in range(LEVELS))])
        self.mlp = nn.Sequential(nn.Linear(LEVELS * FEATS, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(),
                                 nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 3), nn.Sigmoid())

    def forward(self, xy):
        g = xy.view(1, 1, -1, 2)
        f = [F.grid_sample(p, g, align_corners=True, padding_mode="border")[0, :, 0] for p in self.planes]
        return self.mlp(torch.cat(f, 0).t())


def lookup(img, xy):
    return F.grid_sample(img, xy.view(1, 1, -1, 2), align_corners=True, padding_mode="border")[0, :, 0].t()


img = make_image()
print("image built:", mib(torch.cuda.memory_allocated()), "peak", mib(torch.cuda.max_memory_allocated()))
model = Planes().to(dev)
opt = torch.optim.Adam([
    {"params": model.planes.parameters(), "lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-15},
    {"params": model.mlp.parameters(), "lr": 2e-3, "weight_decay": 1e-6},
], capturable=True)


def iteration():
    xy = torch.rand(BATCH, 2, device=dev) * 2 - 1
    loss = F.huber_loss(model(xy), lookup(img, xy), delta=0.1)
    loss.backward()
    opt.step()
    return loss


# warm up on a side stream, as the docs ask
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(2):
        opt.zero_grad(set_to_none=True)
        warm = iteration()
torch.cuda.current_stream().wait_stream(side)
print(f"warm-up loss {warm.item():.5f}", "peak", mib(torch.cuda.max_memory_allocated()))
del warm

graph = torch.cuda.CUDAGraph()
opt.zero_grad(set_to_none=True)
with torch.cuda.graph(graph):
    static_loss = iteration()
print("captured: allocated", mib(torch.cuda.memory_allocated()), "reserved", mib(torch.cuda.memory_reserved()))

for i in range(GRAPH_STEPS):
    graph.replay()
    print(f"graph step {i}: {static_loss.item():.5f}")

# drop the graph and its private pool before going eager
opt.zero_grad(set_to_none=True)
del static_loss
graph.reset()
del graph
torch.cuda.empty_cache()
print("graph freed: reserved", mib(torch.cuda.memory_reserved()))


@torch.no_grad()
def error_map():
    c = (torch.arange(TILE, device=dev) + 0.5) / TILE * 2 - 1
    yy, xx = torch.meshgrid(c, c, indexing="ij")
    xy = torch.stack([xx, yy], -1).view(-1, 2)
    err = torch.cat([(model(p) - lookup(img, p)).abs().sum(1) for p in xy.split(1 << 17)])
    return err + 0.1 * err.mean()


torch.cuda.reset_peak_memory_stats()
for i in range(EAGER_STEPS):
    pdf = error_map()
    pdf = pdf / pdf.sum()
    cell = torch.searchsorted(pdf.cumsum(0), torch.rand(BATCH, device=dev)).clamp_(max=TILE * TILE - 1)
    corner = torch.stack([cell % TILE, cell // TILE], -1).float()
    xy = (corner + torch.rand_like(corner)) / TILE * 2 - 1
    weight = (1.0 / (pdf[cell] * TILE * TILE)).clamp_(max=5.0)
    # samples that land on the same side of an easy cell are thinned out
    keep = torch.rand_like(weight) < (2.0 / weight)
    xy, weight = xy[keep], weight[keep]
    per = F.huber_loss(model(xy), lookup(img, xy), delta=0.1, reduction="none").mean(1)
    loss = (per * weight).mean()
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
    print(f"eager step {i}: {loss.item():.5f} kept {keep.sum().item()} peak {mib(torch.cuda.max_memory_allocated())}")

with torch.no_grad():
    sq = 0.0
    for row in torch.linspace(-1, 1, 64, device=dev):
        xs = torch.linspace(-1, 1, IMG, device=dev)
        xy = torch.stack([xs, row.expand_as(xs)], -1)
        sq += (model(xy) - lookup(img, xy)).pow(2).mean().item() / 64
print(f"psnr on 64 rows {-10 * math.log10(sq):.2f} dB; reserved at end {mib(torch.cuda.memory_reserved())}")
