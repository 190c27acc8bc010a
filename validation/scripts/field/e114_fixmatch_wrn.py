"""Semi-supervised training: FixMatch with a self-adaptive threshold (FreeMatch-like).
Only the unlabeled images whose pseudo-label is confident go through the student's strong branch."""
import copy
import math
import random

import torch
import torch.nn as nn
import torch.nn.functional as F

NUM_CLASSES, N_LAB, MU = 10, 64, 7
TOTAL_STEPS, LR, EMA_M = 8, 0.03, 0.99


def set_seed(s):
    random.seed(s)
    torch.manual_seed(s)
    torch.cuda.manual_seed_all(s)


class BasicBlock(nn.Module):
    def __init__(self, cin, cout, stride):
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(cin), nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.bn2, self.conv2 = nn.BatchNorm2d(cout), nn.Conv2d(cout, cout, 3, 1, 1, bias=False)
        self.short = nn.Conv2d(cin, cout, 1, stride, bias=False) if (cin != cout or stride != 1) else None

    def forward(self, x):
        o = F.leaky_relu(self.bn1(x), 0.1)
        s = x if self.short is None else self.short(o)
        o = self.conv1(o)
        return s + self.conv2(F.leaky_relu(self.bn2(o), 0.1))


class WideResNet(nn.Module):
    def __init__(self, depth=22, widen=4):
        super().__init__()
        n = (depth - 4) // 6
        ch = [16, 16 * widen, 32 * widen, 64 * widen]
        layers = [nn.Conv2d(3, ch[0], 3, 1, 1, bias=False)]
        for i in range(3):
            for j in range(n):
                layers.append(BasicBlock(ch[i] if j == 0 else ch[i + 1], ch[i + 1], 2 if (j == 0 and i > 0) else 1))
        self.body = nn.Sequential(*layers, nn.BatchNorm2d(ch[3]), nn.LeakyReLU(0.1))
        self.fc = nn.Linear(ch[3], NUM_CLASSES)

    def forward(self, x):
        return self.fc(self.body(x).mean((2, 3)))


class ToyCIFAR:
    """Class = low-frequency template + noise of varying strength (some samples are hard)."""

    def __init__(self, device):
        self.device = device
        self.templates = F.interpolate(torch.randn(NUM_CLASSES, 3, 4, 4, device=device), size=32, mode="bilinear")

    def draw(self, n):
        y = torch.randint(NUM_CLASSES, (n,), device=self.device)
        noise = torch.rand(n, 1, 1, 1, device=self.device) * 2.0
        return self.templates[y] + noise * torch.randn(n, 3, 32, 32, device=self.device), y


def weak(x):
    flip = torch.rand(x.size(0), device=x.device) < 0.5
    x = x.clone()
    x[flip] = x[flip].flip(-1)
    return torch.roll(x, (random.randint(-3, 3), random.randint(-3, 3)), (2, 3))


def strong(x):
    x = weak(x) * (0.6 + 0.8 * torch.rand(x.size(0), 1, 1, 1, device=x.device))
    cy, cx = random.randint(0, 20), random.randint(0, 20)
    x[:, :, cy:cy + 12, cx:cx + 12] = 0
    return x


@torch.no_grad()
def ema_update(ema, model):
    for e, p in zip(ema.state_dict().values(), model.state_dict().values()):
        if e.dtype.is_floating_point:
            e.mul_(EMA_M).add_(p, alpha=1 - EMA_M)
        else:
            e.copy_(p)


@torch.no_grad()
def evaluate(model, data, n=1024):
    model.eval()
    wrong_conf, hits = [], 0
    for _ in range(n // 256):
        x, y = data.draw(256)
        p, pred = model(x).softmax(-1).max(-1)
        hits += (pred == y).sum().item()
        wrong_conf.append(p[pred != y])
    model.train()
    wrong = torch.cat(wrong_conf)
    return hits / n, wrong.mean().item() if wrong.numel() else 0.0


def main():
    set_seed(5)
    device = torch.device("cuda", 0)
    data = ToyCIFAR(device)
    model = WideResNet().to(device)
    ema = copy.deepcopy(model).requires_grad_(False)
    decay = [p for p in model.parameters() if p.ndim > 1]
    no_decay = [p for p in model.parameters() if p.ndim <= 1]
    opt = torch.optim.SGD([{"params": decay, "weight_decay": 5e-4}, {"params": no_decay}],
                          lr=LR, momentum=0.9, nesterov=True)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda t: math.cos(7 * math.pi * t / (16 * TOTAL_STEPS)))
    tau = torch.tensor(1.0 / NUM_CLASSES, device=device)
    x_lab, y_lab = data.draw(N_LAB)

    for step in range(TOTAL_STEPS):
        xu, yu_true = data.draw(N_LAB * MU)
        with torch.no_grad():
            conf, pseudo = model(weak(xu)).softmax(-1).max(-1)
        tau = 0.8 * tau + 0.2 * conf.mean()
        mask = conf >= torch.clamp(tau, max=0.95)
        n_sel = int(mask.sum())

        logits = model(torch.cat([weak(x_lab), strong(xu[mask])]))
        logits_x, logits_s = logits.split([N_LAB, n_sel])
        loss_x = F.cross_entropy(logits_x, y_lab)
        if n_sel > 0:
            loss_u = F.cross_entropy(logits_s, pseudo[mask], reduction="sum") / (N_LAB * MU)
            purity = (pseudo[mask] == yu_true[mask]).float().mean().item()
        else:
            loss_u, purity = torch.zeros((), device=device), float("nan")
        loss = loss_x + loss_u

        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        opt.step()
        sched.step()
        ema_update(ema, model)
        print(f"step={step} loss={loss.item():.4f} Lx={loss_x.item():.4f} Lu={loss_u.item():.4f} "
              f"selected={n_sel}/{N_LAB * MU} purity={purity:.3f} tau={tau.item():.3f}")

    for name, m in (("student", model), ("ema", ema)):
        acc, wc = evaluate(m, data)
        print(f"{name}: acc={acc:.4f} mean confidence when wrong={wc:.3f}")
    print(f"max_memory_allocated={torch.cuda.max_memory_allocated()} max_memory_reserved={torch.cuda.max_memory_reserved()}")


if __name__ == "__main__":
    main()
