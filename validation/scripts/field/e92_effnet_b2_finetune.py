"""EfficientNet fine-tuning on an ImageNet-100 style subset.
Compound scaled (B0..B3), channels_last + fp16 AMP, RMSprop as in the paper, EMA of weights."""
import copy
import math
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

VARIANT, BATCH_SIZE = "b2", 96
TRAIN_IMAGES, VAL_IMAGES = 620, 200
LR = 0.008
SCALING = {  # width, depth, resolution, dropout
    "b0": (1.0, 1.0, 224, 0.2),
    "b1": (1.0, 1.1, 240, 0.2),
    "b2": (1.1, 1.2, 260, 0.3),
    "b3": (1.2, 1.4, 300, 0.3),
}
# expand, channels, repeats, stride, kernel
STAGES = [
    (1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3),
    (6, 112, 3, 1, 5), (6, 192, 4, 2, 5), (6, 320, 1, 1, 3),
]


def round_filters(c, width, divisor=8):
    c *= width
    new = max(divisor, int(c + divisor / 2) // divisor * divisor)
    if new < 0.9 * c:
        new += divisor
    return int(new)


class ConvBNAct(nn.Sequential):
    def __init__(self, cin, cout, k=3, s=1, groups=1, act=True):
        super().__init__(nn.Conv2d(cin, cout, k, s, k // 2, groups=groups, bias=False),
                         nn.BatchNorm2d(cout, eps=1e-3, momentum=0.01),
                         nn.SiLU(inplace=True) if act else nn.Identity())


class SqueezeExcite(nn.Module):
    def __init__(self, ch, reduced):
        super().__init__()
        self.fc1 = nn.Conv2d(ch, reduced, 1)
        self.fc2 = nn.Conv2d(reduced, ch, 1)

    def forward(self, x):
        s = x.mean((2, 3), keepdim=True)
        s = self.fc2(F.silu(self.fc1(s)))
        return x * torch.sigmoid(s)


class MBConv(nn.Module):
    def __init__(self, cin, cout, expand, k, stride, drop_path):
        super().__init__()
        mid = cin * expand
        self.expand = ConvBNAct(cin, mid, 1) if expand != 1 else nn.Identity()
        self.dw = ConvBNAct(mid, mid, k, stride, groups=mid)
        self.se = SqueezeExcite(mid, max(1, cin // 4))
        self.project = ConvBNAct(mid, cout, 1, act=False)
        self.residual = stride == 1 and cin == cout
        self.drop_path = drop_path

    def forward(self, x):
        out = self.project(self.se(self.dw(self.expand(x))))
        if self.residual:
            if self.training and self.drop_path > 0:
                keep = 1 - self.drop_path
                mask = torch.rand(x.shape[0], 1, 1, 1, device=x.device, dtype=out.dtype) < keep
                out = out / keep * mask
            out = out + x
        return out


class EfficientNet(nn.Module):
    def __init__(self, variant="b2", num_classes=100, drop_path=0.2):
        super().__init__()
        width, depth, self.resolution, dropout = SCALING[variant]
        c = round_filters(32, width)
        self.stem = ConvBNAct(3, c, 3, 2)
        total = sum(math.ceil(r * depth) for _, _, r, _, _ in STAGES)
        blocks, idx = [], 0
        for e, ch, r, s, k in STAGES:
            ch = round_filters(ch, width)
            for i in range(math.ceil(r * depth)):
                blocks.append(MBConv(c, ch, e, k, s if i == 0 else 1, drop_path * idx / total))
                c, idx = ch, idx + 1
        self.blocks = nn.Sequential(*blocks)
        self.head = ConvBNAct(c, round_filters(1280, width), 1)
        self.classifier = nn.Sequential(nn.Dropout(dropout), nn.Linear(round_filters(1280, width), num_classes))

    def forward(self, x):
        x = self.head(self.blocks(self.stem(x)))
        return self.classifier(x.mean((2, 3)))


class ModelEma:
    def __init__(self, model, decay=0.9998):
        self.module = copy.deepcopy(model).eval()
        self.decay = decay
        for p in self.module.parameters():
            p.requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for e, m in zip(self.module.state_dict().values(), model.state_dict().values()):
            if e.dtype.is_floating_point:
                e.mul_(self.decay).add_(m, alpha=1 - self.decay)
            else:
                e.copy_(m)


class FakeImageNet100(Dataset):
    def __init__(self, n, size):
        self.n, self.size = n, size

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        img = torch.randint(0, 256, (3, self.size, self.size), generator=g, dtype=torch.uint8)
        return (img.float() / 255 - 0.45) / 0.225, i % 100


def main():
    torch.manual_seed(0)
    device = torch.device("cuda")
    model = EfficientNet(VARIANT).to(device, memory_format=torch.channels_last)
    size = model.resolution
    ema = ModelEma(model)
    decay = [p for p in model.parameters() if p.ndim > 1]
    no_decay = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.RMSprop(
        [{"params": decay, "weight_decay": 1e-5}, {"params": no_decay, "weight_decay": 0.0}],
        lr=LR, alpha=0.9, momentum=0.9, eps=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    train = DataLoader(FakeImageNet100(TRAIN_IMAGES, size), BATCH_SIZE, shuffle=True,
                       num_workers=4, pin_memory=True, drop_last=True)
    val = DataLoader(FakeImageNet100(VAL_IMAGES, size), BATCH_SIZE, num_workers=2, pin_memory=True)

    model.train()
    t0 = time.time()
    for step, (x, y) in enumerate(train):
        x = x.to(device, non_blocking=True, memory_format=torch.channels_last)
        y = y.to(device, non_blocking=True)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(x), y)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        ema.update(model)
        print(f"step {step} loss {loss.item():.4f} {time.time() - t0:.1f}s")

    correct = 0
    with torch.inference_mode(), torch.autocast("cuda", dtype=torch.float16):
        for x, y in val:
            x = x.to(device, non_blocking=True, memory_format=torch.channels_last)
            correct += (ema.module(x).argmax(1) == y.to(device)).sum().item()
    print(f"ema top1 {100 * correct / VAL_IMAGES:.2f}")
    print("max allocated", torch.cuda.max_memory_allocated())
    print("max reserved", torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    main()
