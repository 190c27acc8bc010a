# Kernel-prediction network for burst denoising.
# The job shares the card with an inference server, so it limits itself to a slice of it and
# halves the batch until one fits.  After a warm-up the convs are pruned, then SWA.
import gc
import math
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.swa_utils import SWALR, AveragedModel

FRAMES, K, SIZE = 6, 5, 192
START_BATCH = 128
FRACTION = 0.2
GB = 1024 ** 3


def conv(i, o, wn=True):
    c = nn.Conv2d(i, o, 3, padding=1)
    return weight_norm(c) if wn else c


class KPN(nn.Module):
    def __init__(self, w=48):
        super().__init__()
        self.e1 = nn.Sequential(conv(FRAMES + 1, w), nn.PReLU(w), conv(w, w, False), nn.PReLU(w))
        self.e2 = nn.Sequential(conv(w, 2 * w), nn.PReLU(2 * w), conv(2 * w, 2 * w, False), nn.PReLU(2 * w))
        self.e3 = nn.Sequential(conv(2 * w, 4 * w), nn.PReLU(4 * w), conv(4 * w, 4 * w, False), nn.PReLU(4 * w))
        self.d2 = nn.Sequential(conv(6 * w, 2 * w), nn.PReLU(2 * w))
        self.d1 = nn.Sequential(conv(3 * w, w), nn.PReLU(w))
        self.kernels = nn.Conv2d(w, FRAMES * K * K, 1)

    def forward(self, burst, sigma):
        b, n, h, w = burst.shape
        x = torch.cat([burst, sigma.view(b, 1, 1, 1).expand(b, 1, h, w)], 1)
        x = x.contiguous(memory_format=torch.channels_last)
        a = self.e1(x)
        c = self.e2(F.max_pool2d(a, 2))
        d = self.e3(F.max_pool2d(c, 2))
        d = F.interpolate(d, scale_factor=2, mode="bilinear", align_corners=False)
        c = self.d2(torch.cat([d, c], 1))
        c = F.interpolate(c, scale_factor=2, mode="bilinear", align_corners=False)
        a = self.d1(torch.cat([c, a], 1))
        ker = self.kernels(a).float().flatten(2).softmax(1)          # b, n*k*k, hw
        patches = F.unfold(burst, K, padding=K // 2)                 # b, n*k*k, hw
        out = (ker * patches).view(b, n, K * K, h * w).sum(2)
        return out.sum(1).view(b, h, w), out.view(b, n, h, w) * n


def make_burst(b):
    clean = F.interpolate(torch.rand(b, 1, 24, 24, device="cuda"), size=(SIZE, SIZE), mode="bicubic")
    clean = clean.clamp_(0, 1)
    shift = (torch.rand(b * FRAMES, 2, device="cuda") - 0.5) * 4 / SIZE
    theta = torch.eye(2, 3, device="cuda").repeat(b * FRAMES, 1, 1)
    theta[:, :, 2] = shift
    grid = F.affine_grid(theta, (b * FRAMES, 1, SIZE, SIZE), align_corners=False)
    frames = F.grid_sample(clean.repeat_interleave(FRAMES, 0), grid, padding_mode="border", align_corners=False)
    frames = frames.view(b, FRAMES, SIZE, SIZE)
    sigma = torch.empty(b, device="cuda").uniform_(0.02, 0.15)
    frames = frames + torch.randn_like(frames) * sigma.view(b, 1, 1, 1)
    return clean[:, 0], frames, sigma


def train_step(net, opt, b, anneal):
    clean, burst, sigma = make_burst(b)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out, per_frame = net(burst, sigma)
    loss = F.l1_loss(out, clean) + anneal * F.l1_loss(per_frame, clean[:, None].expand_as(per_frame))
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
    return loss.item()


torch.manual_seed(31)
torch.cuda.set_per_process_memory_fraction(FRACTION)
net = KPN().cuda().to(memory_format=torch.channels_last)
opt = torch.optim.RAdam(net.parameters(), lr=4e-4, foreach=True)

# ---- find a batch that fits
batch = START_BATCH
while True:
    try:
        torch.cuda.reset_peak_memory_stats()
        l = train_step(net, opt, batch, 1.0)
        print(f"batch {batch} fits: loss {l:.4f} peak {torch.cuda.max_memory_allocated() / GB:.2f} GB")
        break
    except torch.cuda.OutOfMemoryError:
        print(f"batch {batch}: out of memory (peak {torch.cuda.max_memory_allocated() / GB:.2f} GB)")
        failed = True
    if failed:
        opt.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()
        batch //= 2
        if batch < 1:
            raise SystemExit("no batch fits")

# ---- warm-up
for it in range(2):
    l = train_step(net, opt, batch, 0.9 ** it)
    print(f"warm {it} loss {l:.4f} alloc {torch.cuda.memory_allocated() / GB:.3f}")

# ---- pruned fine-tuning: plain convs only, the weight-normed ones are parametrized
net = net.to(memory_format=torch.contiguous_format)      # prune flattens weights with view()
targets = [(m, "weight") for m in net.modules()
           if isinstance(m, nn.Conv2d) and "weight" in dict(m.named_parameters(recurse=False))]
prune.global_unstructured(targets, pruning_method=prune.L1Unstructured, amount=0.5)
opt = torch.optim.RAdam(net.parameters(), lr=2e-4, foreach=True)
for it in range(2):
    l = train_step(net, opt, batch, 0.5)
    kept = sum(m.weight_mask.sum().item() for m, _ in targets) / sum(m.weight_mask.numel() for m, _ in targets)
    print(f"pruned {it} loss {l:.4f} kept {kept:.2f} alloc {torch.cuda.memory_allocated() / GB:.3f}")
for m, name in targets:
    prune.remove(m, name)
net = net.to(memory_format=torch.channels_last)

# ---- SWA
opt = torch.optim.RAdam(net.parameters(), lr=2e-4, foreach=True)
swa, sched = AveragedModel(net), SWALR(opt, swa_lr=1e-4, anneal_epochs=2)
for it in range(3):
    l = train_step(net, opt, batch, 0.2)
    swa.update_parameters(net)
    sched.step()
    print(f"swa {it} loss {l:.4f} lr {sched.get_last_lr()[0]:.1e}")

swa.eval()
with torch.inference_mode():
    clean, burst, sigma = make_burst(8)
    mse = F.mse_loss(swa(burst, sigma)[0], clean).item()
print(f"psnr {-10 * math.log10(mse):.2f} dB")
stats = torch.cuda.memory_stats()
for k in ("allocated_bytes.all.peak", "reserved_bytes.all.peak", "num_alloc_retries", "num_ooms"):
    print(k, stats.get(k, 0))
