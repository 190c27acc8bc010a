"""ConvNeXt-Base style classifier written by hand. AMP fp16, channels_last, SGD + EMA."""
import argparse
import copy

import torch
from torch import nn
import torch.nn.functional as F


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x):
        x = x.permute(0, 2, 3, 1)
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class DropPath(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x):
        if not self.training or self.p == 0.0:
            return x
        keep = 1 - self.p
        noise = torch.empty((x.shape[0],) + (1,) * (x.ndim - 1), dtype=x.dtype, device=x.device)
        noise.bernoulli_(keep).div_(keep)
        return x * noise


class Block(nn.Module):
    def __init__(self, dim, drop_path, ls_init=1e-6):
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pwconv1 = nn.Linear(dim, 4 * dim)
        self.act = nn.GELU()
        self.pwconv2 = nn.Linear(4 * dim, dim)
        self.gamma = nn.Parameter(ls_init * torch.ones(dim))
        self.drop_path = DropPath(drop_path)

    def forward(self, x):
        shortcut = x
        x = self.dwconv(x)
        x = x.permute(0, 2, 3, 1)
        x = self.norm(x)
        x = self.pwconv2(self.act(self.pwconv1(x)))
        x = self.gamma * x
        x = x.permute(0, 3, 1, 2)
        return shortcut + self.drop_path(x)


class ConvNeXt(nn.Module):
    def __init__(self, num_classes, depths, dims, drop_path_rate):
        super().__init__()
        self.downsample = nn.ModuleList()
        self.downsample.append(nn.Sequential(nn.Conv2d(3, dims[0], 4, 4), LayerNorm2d(dims[0], eps=1e-6)))
        for i in range(3):
            self.downsample.append(
                nn.Sequential(LayerNorm2d(dims[i], eps=1e-6), nn.Conv2d(dims[i], dims[i + 1], 2, 2)))
        rates = torch.linspace(0, drop_path_rate, sum(depths)).tolist()
        self.stages = nn.ModuleList()
        k = 0
        for d, dim in zip(depths, dims):
            self.stages.append(nn.Sequential(*[Block(dim, rates[k + j]) for j in range(d)]))
            k += d
        self.norm = nn.LayerNorm(dims[-1], eps=1e-6)
        self.head = nn.Linear(dims[-1], num_classes)
        self.apply(self._init)

    @staticmethod
    def _init(m):
        if isinstance(m, (nn.Conv2d, nn.Linear)):
            nn.init.trunc_normal_(m.weight, std=0.02)
            nn.init.zeros_(m.bias)

    def forward(self, x):
        for down, stage in zip(self.downsample, self.stages):
            x = stage(down(x))
        return self.head(self.norm(x.mean([-2, -1])))


class ModelEMA:
    def __init__(self, model, decay):
        self.module = copy.deepcopy(model).eval()
        for p in self.module.parameters():
            p.requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        msd = model.state_dict()
        for k, v in self.module.state_dict().items():
            if v.dtype.is_floating_point:
                v.mul_(self.decay).add_(msd[k].detach(), alpha=1 - self.decay)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch-size", type=int, default=128)
    ap.add_argument("--image-size", type=int, default=224)
    ap.add_argument("--steps", type=int, default=6)
    ap.add_argument("--lr", type=float, default=0.05)
    ap.add_argument("--seed", type=int, default=42)
    args = ap.parse_args()

    torch.manual_seed(args.seed)
    device = "cuda"
    model = ConvNeXt(1000, (3, 3, 27, 3), (128, 256, 512, 1024), 0.2)
    model = model.to(device, memory_format=torch.channels_last)
    ema = ModelEMA(model, 0.9998)

    decay, no_decay = [], []
    for n, p in model.named_parameters():
        (no_decay if p.ndim == 1 else decay).append(p)
    opt = torch.optim.SGD(
        [{"params": decay, "weight_decay": 5e-5}, {"params": no_decay, "weight_decay": 0.0}],
        lr=args.lr, momentum=0.9, nesterov=True)
    scaler = torch.amp.GradScaler("cuda")
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    g = torch.Generator().manual_seed(args.seed)
    for step in range(args.steps):
        images = torch.randint(0, 256, (args.batch_size, 3, args.image_size, args.image_size),
                               dtype=torch.uint8, generator=g)
        target = torch.randint(0, 1000, (args.batch_size,), generator=g)
        images = images.to(device, non_blocking=True).float().div_(255).sub_(0.45).div_(0.225)
        images = images.contiguous(memory_format=torch.channels_last)
        target = target.to(device, non_blocking=True)

        with torch.autocast("cuda", dtype=torch.float16):
            logits = model(images)
            loss = criterion(logits, target)
        opt.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        scaler.step(opt)
        scaler.update()
        ema.update(model)
        print(f"[{step}] loss={loss.item():.4f} scale={scaler.get_scale():.0f} "
              f"max_alloc={torch.cuda.max_memory_allocated()} max_reserved={torch.cuda.max_memory_reserved()}")

    # EMA validation on one batch
    with torch.inference_mode(), torch.autocast("cuda", dtype=torch.float16):
        acc = (ema.module(images).argmax(1) == target).float().mean()
    print("ema acc", acc.item())
    print("max_memory_allocated", torch.cuda.max_memory_allocated())
    print("max_memory_reserved", torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    main()
