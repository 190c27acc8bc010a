"""R(2+1)D on clips. 1) find the largest batch that fits into our share of the card, 2) train with SAM at
half of it, 3) average weights (SWA), recompute the batch-norm statistics and evaluate."""
import argparse
import gc
import torch
import torch.nn as nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn


def conv2plus1d(cin, cout, stride=1):
    mid = (cin * cout * 27) // (cin * 9 + 3 * cout)
    return nn.Sequential(
        nn.Conv3d(cin, mid, (1, 3, 3), (1, stride, stride), (0, 1, 1), bias=False),
        nn.BatchNorm3d(mid), nn.ReLU(inplace=True),
        nn.Conv3d(mid, cout, (3, 1, 1), (stride, 1, 1), (1, 0, 0), bias=False))


class Residual(nn.Module):
    def __init__(self, cin, cout, stride):
        super().__init__()
        self.conv1 = nn.Sequential(conv2plus1d(cin, cout, stride), nn.BatchNorm3d(cout), nn.ReLU(inplace=True))
        self.conv2 = nn.Sequential(conv2plus1d(cout, cout), nn.BatchNorm3d(cout))
        self.short = nn.Identity() if cin == cout and stride == 1 else nn.Sequential(
            nn.Conv3d(cin, cout, 1, stride, bias=False), nn.BatchNorm3d(cout))

    def forward(self, x):
        return torch.relu(self.conv2(self.conv1(x)) + self.short(x))


def r2plus1d(width, classes=60):
    chans = [width, width, width * 2, width * 4, width * 8]
    layers = [nn.Conv3d(3, 45, (1, 7, 7), (1, 2, 2), (0, 3, 3), bias=False), nn.BatchNorm3d(45), nn.ReLU(True),
              nn.Conv3d(45, width, (3, 1, 1), 1, (1, 0, 0), bias=False), nn.BatchNorm3d(width), nn.ReLU(True)]
    for i in range(4):
        layers += [Residual(chans[i], chans[i + 1], 1 if i == 0 else 2), Residual(chans[i + 1], chans[i + 1], 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Dropout(0.3), nn.Linear(chans[-1], classes))


class SAM:
    def __init__(self, optimizer, rho=0.05):
        self.opt, self.rho = optimizer, rho

    def params(self):
        return [p for g in self.opt.param_groups for p in g["params"] if p.grad is not None]

    @torch.no_grad()
    def ascend(self):
        ps = self.params()
        norm = torch.norm(torch.stack([p.grad.norm() for p in ps]))
        self.eps = [p.grad * (self.rho / (norm + 1e-12)) for p in ps]
        torch._foreach_add_(ps, self.eps)
        self.opt.zero_grad()

    @torch.no_grad()
    def descend(self):
        torch._foreach_sub_(self.params(), self.eps)
        self.eps = None
        self.opt.step()
        self.opt.zero_grad()


def set_bn_tracking(model, on):
    for m in model.modules():
        if isinstance(m, nn.BatchNorm3d):
            m.momentum = 0.1 if on else 0.0


def fwd_loss(model, x, y):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return nn.functional.cross_entropy(model(x), y, label_smoothing=0.1)


def clips(n, a):
    g = torch.randint(0, 60, (n,), device="cuda")
    x = torch.randn(n, 3, a.frames, a.size, a.size, device="cuda")
    x += (g.view(-1, 1, 1, 1, 1) - 30) / 30
    return x, g


def find_batch(model, a):
    bs, good = a.start, None
    while bs <= 512:
        try:
            x, y = clips(bs, a)
            fwd_loss(model, x, y).backward()
            good = bs
            print(f"  batch {bs} ok, peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
        except torch.cuda.OutOfMemoryError:
            print(f"  batch {bs} out of memory")
            break
        finally:
            x = y = None
            model.zero_grad(set_to_none=True)
            gc.collect()
            torch.cuda.empty_cache()
        bs *= 2
    return good


def stats(name):
    print(f"{name}: max_memory_allocated {torch.cuda.max_memory_allocated()} max_memory_reserved {torch.cuda.max_memory_reserved()}")
    torch.cuda.reset_peak_memory_stats()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--frames", type=int, default=16)
    ap.add_argument("--size", type=int, default=112)
    ap.add_argument("--width", type=int, default=64)
    ap.add_argument("--start", type=int, default=4)
    ap.add_argument("--steps", type=int, default=6)
    ap.add_argument("--share", type=float, default=0.25)
    a = ap.parse_args()
    torch.manual_seed(17)
    torch.cuda.set_per_process_memory_fraction(a.share)
    model = r2plus1d(a.width).cuda()

    bs = max(1, find_batch(model, a) // 2)
    print("using batch", bs)
    stats("search")

    sam = SAM(torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4, nesterov=True))
    swa, swa_sched = None, SWALR(sam.opt, swa_lr=0.005, anneal_epochs=2)
    for step in range(a.steps):
        x, y = clips(bs, a)
        loss = fwd_loss(model, x, y)
        loss.backward()
        sam.ascend()
        set_bn_tracking(model, False)
        fwd_loss(model, x, y).backward()
        set_bn_tracking(model, True)
        sam.descend()
        if step >= a.steps // 2:
            if swa is None:
                swa = AveragedModel(model)
            swa.update_parameters(model)
            swa_sched.step()
        print(f"step {step} loss {loss.item():.4f}")
    stats("train")

    torch.cuda.empty_cache()
    update_bn((clips(bs, a)[0] for _ in range(3)), swa)
    swa.eval()
    with torch.inference_mode():
        x, y = clips(2 * bs, a)
        print("swa val loss", fwd_loss(swa, x, y).item())
    stats("swa/eval")


if __name__ == "__main__":
    main()
