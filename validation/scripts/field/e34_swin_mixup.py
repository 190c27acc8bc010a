"""Swin-B from a transformers config; mixup, label smoothing, clipping, cosine schedule, bf16 autocast."""
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from transformers import SwinConfig, SwinForImageClassification, get_cosine_schedule_with_warmup


@dataclass
class Config:
    batch_size: int = 96
    eval_batch_size: int = 192
    image_size: int = 224
    num_classes: int = 1000
    steps: int = 6
    lr: float = 1e-3
    weight_decay: float = 0.05
    smoothing: float = 0.1
    mixup_alpha: float = 0.8
    clip: float = 5.0
    seed: int = 2024


class SyntheticImages:
    def __init__(self, cfg: Config, device):
        self.cfg = cfg
        self.device = device
        self.gen = torch.Generator(device=device).manual_seed(cfg.seed)

    def batch(self, n):
        x = torch.randn(n, 3, self.cfg.image_size, self.cfg.image_size, device=self.device, generator=self.gen)
        y = torch.randint(0, self.cfg.num_classes, (n,), device=self.device, generator=self.gen)
        return x, y


class Mixup:
    def __init__(self, cfg: Config):
        self.rng = np.random.default_rng(cfg.seed)
        self.alpha = cfg.mixup_alpha
        self.smoothing = cfg.smoothing
        self.classes = cfg.num_classes

    def one_hot(self, y):
        off = self.smoothing / self.classes
        on = 1.0 - self.smoothing + off
        return torch.full((y.size(0), self.classes), off, device=y.device).scatter_(1, y[:, None], on)

    def __call__(self, x, y):
        lam = float(self.rng.beta(self.alpha, self.alpha))
        x = x.mul(lam).add_(x.flip(0).mul_(1 - lam))
        target = lam * self.one_hot(y) + (1 - lam) * self.one_hot(y.flip(0))
        return x, target


class Trainer:
    def __init__(self, cfg: Config):
        self.cfg = cfg
        torch.manual_seed(cfg.seed)
        self.device = torch.device("cuda")
        torch.backends.cudnn.benchmark = True
        hf = SwinConfig(image_size=cfg.image_size, patch_size=4, embed_dim=128, depths=[2, 2, 18, 2],
                        num_heads=[4, 8, 16, 32], window_size=7, drop_path_rate=0.3,
                        num_labels=cfg.num_classes)
        self.model = SwinForImageClassification(hf).to(self.device)
        self.data = SyntheticImages(cfg, self.device)
        self.mixup = Mixup(cfg)
        skip = ("relative_position_bias_table", "absolute_pos_embed")
        decay = [p for n, p in self.model.named_parameters() if p.ndim > 1 and not any(s in n for s in skip)]
        rest = [p for n, p in self.model.named_parameters() if not (p.ndim > 1 and not any(s in n for s in skip))]
        self.opt = torch.optim.AdamW([{"params": decay, "weight_decay": cfg.weight_decay},
                                      {"params": rest, "weight_decay": 0.0}], lr=cfg.lr)
        self.sched = get_cosine_schedule_with_warmup(self.opt, 1, cfg.steps)

    def train_step(self):
        self.model.train()
        x, y = self.data.batch(self.cfg.batch_size)
        x, target = self.mixup(x, y)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = self.model(pixel_values=x).logits
        loss = torch.sum(-target * F.log_softmax(logits.float(), dim=-1), dim=-1).mean()
        self.opt.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.clip)
        self.opt.step()
        self.sched.step()
        return loss.item(), norm.item()

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        x, y = self.data.batch(self.cfg.eval_batch_size)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = self.model(pixel_values=x).logits
        top5 = logits.topk(5, dim=1).indices
        return (top5 == y[:, None]).any(1).float().mean().item()

    def fit(self):
        for step in range(self.cfg.steps):
            loss, norm = self.train_step()
            print(f"step {step} loss {loss:.4f} gnorm {norm:.3f} lr {self.sched.get_last_lr()[0]:.2e} "
                  f"alloc {torch.cuda.max_memory_allocated()} reserved {torch.cuda.max_memory_reserved()}")
        print("top5", self.evaluate())


if __name__ == "__main__":
    Trainer(Config()).fit()
    print("max_memory_allocated", torch.cuda.max_memory_allocated())
    print("max_memory_reserved", torch.cuda.max_memory_reserved())
