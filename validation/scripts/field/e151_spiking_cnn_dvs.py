"""Spiking VGG with LIF neurons on synthetic event-camera frames, BPTT with an arctan surrogate."""
import math
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(2024)
device = torch.device("cuda")

T = 10
BATCH = 32
SIZE = 128
CLASSES = 11
STEPS = 6
PLAN = [64, "P", 128, "P", 256, 256, "P", 512, "P", 512, "P"]


class SurrogateATan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v, alpha):
        ctx.save_for_backward(v)
        ctx.alpha = alpha
        return (v >= 0).to(v.dtype)

    @staticmethod
    def backward(ctx, grad):
        (v,) = ctx.saved_tensors
        sg = ctx.alpha / 2 / (1 + (math.pi / 2 * ctx.alpha * v) ** 2)
        return grad * sg, None


class PLIF(nn.Module):
    """parametric LIF: one learnable time constant per layer; detached reset"""

    def __init__(self, tau=2.0, v_th=1.0):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(-math.log(tau - 1.0)))
        self.v_th = v_th

    def forward(self, x_seq):                      # T, B, ...
        v = torch.zeros_like(x_seq[0])
        decay = self.w.sigmoid()
        spikes = []
        for x in x_seq:
            v = v + (x - v) * decay
            s = SurrogateATan.apply(v - self.v_th, 2.0)
            v = v * (1.0 - s.detach())
            spikes.append(s)
        return torch.stack(spikes)


class SeqWrap(nn.Module):
    """fold time into the batch for a stateless layer"""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        t, b = x.shape[:2]
        y = self.layer(x.flatten(0, 1))
        return y.view(t, b, *y.shape[1:])


class SpikingVGG(nn.Module):
    def __init__(self):
        super().__init__()
        layers, cin, side = [], 2, SIZE
        for p in PLAN:
            if p == "P":
                layers.append(SeqWrap(nn.MaxPool2d(2)))
                side //= 2
            else:
                layers += [SeqWrap(nn.Sequential(nn.Conv2d(cin, p, 3, padding=1, bias=False), nn.BatchNorm2d(p))), PLIF()]
                cin = p
        self.features = nn.Sequential(*layers)
        self.fc1 = SeqWrap(nn.Sequential(nn.Linear(cin * side * side, 512), nn.BatchNorm1d(512)))
        self.lif = PLIF()
        self.fc2 = SeqWrap(nn.Sequential(nn.Linear(512, CLASSES * 10), nn.BatchNorm1d(CLASSES * 10)))
        self.out_lif = PLIF()

    def forward(self, x):
        x = x.transpose(0, 1)                      # B,T -> T,B
        x = self.features(x).flatten(2)
        x = F.dropout(x, 0.5, self.training)
        x = self.out_lif(self.fc2(self.lif(self.fc1(x))))
        votes = x.mean(0).view(-1, CLASSES, 10).mean(-1)   # firing rates, population voting
        return votes, x.mean()


def events(n, gen):
    """a bar moving in a class-dependent direction leaves ON/OFF events"""
    y = torch.randint(CLASSES, (n,), generator=gen)
    ang = 2 * math.pi * y.float() / CLASSES
    t = torch.arange(T).float()[None, :, None, None]
    g = torch.linspace(-1, 1, SIZE)
    proj = g[None, :] * ang.cos()[:, None, None] + g[:, None] * ang.sin()[:, None, None]
    pos = proj[:, None] - (2 * t / T - 1)
    on = ((pos > 0) & (pos < 0.1)).float()
    off = ((pos < 0) & (pos > -0.1)).float()
    frames = torch.stack([on, off], 2)
    frames += (torch.rand(frames.shape, generator=gen) < 0.01).float()
    return frames, y


gen = torch.Generator().manual_seed(0)
net = SpikingVGG().to(device)
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, STEPS)
scaler = torch.amp.GradScaler("cuda")

for step in range(STEPS):
    frames, label = events(BATCH, gen)
    frames, label = frames.to(device), label.to(device)
    target = F.one_hot(label, CLASSES).float()
    with torch.autocast("cuda", dtype=torch.float16):
        rate, activity = net(frames)
        loss = F.mse_loss(rate.float(), target)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    sched.step()
    acc = (rate.argmax(1) == label).float().mean()
    print(f"step {step}: loss={loss.item():.4f} acc={acc.item():.2f} out-rate={activity.item():.3f} "
          f"scale={scaler.get_scale():.0f} peak={torch.cuda.max_memory_allocated() / 1e9:.2f}GB")

torch.cuda.reset_peak_memory_stats()
net.eval()
with torch.no_grad():
    frames, label = events(BATCH * 2, gen)
    rate, _ = net(frames.to(device))
    acc = (rate.argmax(1).cpu() == label).float().mean()
print(f"test acc {acc:.3f}, eval peak {torch.cuda.max_memory_allocated() / 1e9:.2f}GB")
print("time constants:", [round(1 / m.w.sigmoid().item(), 3) for m in net.modules() if isinstance(m, PLIF)])
