import copy
import torch
from torch import nn
from torch.nn import functional as F

# ---- config ----------------------------------------------------------------
BS = 128
IMG = 192
RAW = 224
WIDTH = 64
DEPTHS = (3, 4, 6, 3)
QUEUE = 65536
DIM = 128
STEPS = 7
TEMP = 0.2
MOM = 0.99
device = "cuda"

torch.manual_seed(0)
torch.backends.cudnn.benchmark = True


class Bottleneck(nn.Module):
    def __init__(self, cin, width, stride):
        super().__init__()
        cout = width * 4
        self.c1 = nn.Conv2d(cin, width, 1, bias=False)
        self.b1 = nn.BatchNorm2d(width)
        self.c2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.b2 = nn.BatchNorm2d(width)
        self.c3 = nn.Conv2d(width, cout, 1, bias=False)
        self.b3 = nn.BatchNorm2d(cout)
        self.act = nn.ReLU(inplace=True)
        self.down = None
        if stride != 1 or cin != cout:
            self.down = nn.Sequential(nn.Conv2d(cin, cout, 1, stride, bias=False), nn.BatchNorm2d(cout))

    def forward(self, x):
        y = self.act(self.b1(self.c1(x)))
        y = self.act(self.b2(self.c2(y)))
        y = self.b3(self.c3(y))
        y += x if self.down is None else self.down(x)
        return self.act(y)


def resnet(dim):
    layers = [nn.Conv2d(3, WIDTH, 7, 2, 3, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU(True), nn.MaxPool2d(3, 2, 1)]
    c = WIDTH
    for i, n in enumerate(DEPTHS):
        w = WIDTH * 2**i
        for j in range(n):
            layers.append(Bottleneck(c, w, 2 if (j == 0 and i > 0) else 1))
            c = w * 4
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, c), nn.ReLU(True), nn.Linear(c, dim)]
    return nn.Sequential(*layers)


class Prefetcher:
    """copies the next uint8 batch on a side stream while the current one trains"""

    def __init__(self, host_batches):
        self.it = iter(host_batches)
        self.stream = torch.cuda.Stream()
        self._load()

    def _load(self):
        try:
            host = next(self.it)
        except StopIteration:
            self.nxt = None
            return
        with torch.cuda.stream(self.stream):
            x = host.to(device, non_blocking=True)
            x = x.float().div_(255).sub_(0.5).div_(0.25)
            self.nxt = x.contiguous(memory_format=torch.channels_last)

    def __iter__(self):
        while self.nxt is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
            out = self.nxt
            out.record_stream(torch.cuda.current_stream())
            self._load()
            yield out


def augment(x):
    """random crop, flip per batch half, colour jitter, noise: all on device"""
    top, left = torch.randint(0, RAW - IMG + 1, (2,)).tolist()
    x = x[:, :, top:top + IMG, left:left + IMG]
    flip = torch.rand(len(x), 1, 1, 1, device=x.device) < 0.5
    x = torch.where(flip, x.flip(-1), x)
    gain = 1 + 0.4 * (torch.rand(len(x), 3, 1, 1, device=x.device) - 0.5)
    x = x * gain + 0.05 * torch.randn_like(x)
    return x.contiguous(memory_format=torch.channels_last)


query = resnet(DIM).to(device, memory_format=torch.channels_last)
key = copy.deepcopy(query)
for p in key.parameters():
    p.requires_grad = False
queue = F.normalize(torch.randn(DIM, QUEUE, device=device), dim=0)
ptr = 0

opt = torch.optim.SGD(query.parameters(), lr=0.06, momentum=0.9, weight_decay=1e-4)
scaler = torch.amp.GradScaler(device)


@torch.no_grad()
def update_key():
    torch._foreach_lerp_(list(key.parameters()), list(query.parameters()), 1 - MOM)


host = [torch.randint(0, 256, (BS, 3, RAW, RAW), dtype=torch.uint8).pin_memory() for _ in range(3)]
for step, imgs in enumerate(Prefetcher(host[i % 3] for i in range(STEPS))):
    v1, v2 = augment(imgs), augment(imgs)
    with torch.autocast(device, dtype=torch.float16):
        q = F.normalize(query(v1).float(), dim=1)
        with torch.no_grad():
            update_key()
            perm = torch.randperm(BS, device=device)
            k = key(v2[perm])
            k = F.normalize(k[torch.argsort(perm)].float(), dim=1)
        l_pos = (q * k).sum(1, keepdim=True)
        l_neg = q @ queue.clone().detach()
        logits = torch.cat([l_pos, l_neg], dim=1) / TEMP
        loss = F.cross_entropy(logits, torch.zeros(BS, dtype=torch.long, device=device))
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    queue[:, ptr:ptr + BS] = k.T
    ptr = (ptr + BS) % QUEUE
    print(f"[{step}] loss={loss.item():.4f} scale={scaler.get_scale():.0f}")

print("max_memory_allocated:", torch.cuda.max_memory_allocated())
print("max_memory_reserved:", torch.cuda.max_memory_reserved())
