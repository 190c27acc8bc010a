"""MAE pretraining -> linear probe -> full fine-tune with layer-wise lr decay and EMA."""
import copy
import math
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers import ViTMAEConfig, ViTMAEForPreTraining

SEED = 17
DEVICE = torch.device("cuda")
IMG = 224
NUM_CLASSES = 200
PRETRAIN_BS, PROBE_BS, FT_BS = 256, 256, 96
PRETRAIN_STEPS, PROBE_STEPS, FT_STEPS = 8, 8, 8


def mem(tag):
    a = torch.cuda.max_memory_allocated() / 2**30
    r = torch.cuda.max_memory_reserved() / 2**30
    print(f"[mem] {tag:<18s} max_allocated={a:.3f} GiB  max_reserved={r:.3f} GiB", flush=True)


class SyntheticImages:
    """uint8 images on the GPU; each class has its own low-frequency pattern."""

    def __init__(self, n, num_classes, device):
        g = torch.Generator(device=device).manual_seed(SEED)
        self.protos = torch.randn(num_classes, 3, 7, 7, device=device, generator=g)
        self.labels = torch.randint(0, num_classes, (n,), device=device, generator=g)
        imgs = []
        for chunk in self.labels.split(128):
            base = F.interpolate(self.protos[chunk], size=(IMG, IMG), mode="bicubic", align_corners=False)
            noise = torch.randn(base.shape, device=device, generator=g)
            imgs.append(((base + 0.5 * noise) * 40 + 127).clamp_(0, 255).to(torch.uint8))
        self.images = torch.cat(imgs)

    def batches(self, bs, steps):
        n = len(self.labels)
        for _ in range(steps):
            idx = torch.randint(0, n, (bs,), device=self.images.device)
            x = self.images[idx].float().div_(127.5).sub_(1.0)
            if torch.rand(()) < 0.5:
                x = x.flip(-1)
            yield x, self.labels[idx]


class ModelEMA:
    def __init__(self, model, decay=0.99):
        self.module = copy.deepcopy(model).eval()
        self.module.requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for e, p in zip(self.module.parameters(), model.parameters()):
            e.lerp_(p.detach(), 1 - self.decay)
        for e, b in zip(self.module.buffers(), model.buffers()):
            e.copy_(b)


class MAEClassifier(nn.Module):
    def __init__(self, vit, hidden, num_classes, probe=False):
        super().__init__()
        self.vit = vit
        self.vit.config.mask_ratio = 0.0
        self.norm = nn.BatchNorm1d(hidden, affine=False, eps=1e-6) if probe else nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, num_classes)
        nn.init.trunc_normal_(self.head.weight, std=0.01)
        nn.init.zeros_(self.head.bias)
        self.probe = probe

    def features(self, x):
        tokens = self.vit(pixel_values=x).last_hidden_state
        return tokens[:, 0] if self.probe else tokens[:, 1:].mean(1)

    def forward(self, x):
        if self.probe:
            with torch.no_grad():
                f = self.features(x)
        else:
            f = self.features(x)
        return self.head(self.norm(f))


def cosine(step, total, base, warmup, floor=0.0):
    if step < warmup:
        return base * (step + 1) / warmup
    t = (step - warmup) / max(1, total - warmup)
    return floor + 0.5 * (base - floor) * (1 + math.cos(math.pi * t))


def layer_id(name, n_layers):
    if "embeddings" in name:
        return 0
    parts = name.split(".")
    for key in ("layer", "layers"):
        if key in parts:
            nxt = parts[parts.index(key) + 1]
            if nxt.isdigit():
                return int(nxt) + 1
    return n_layers + 1


def llrd_groups(model, n_layers, lr, wd, decay):
    groups = {}
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        lid = layer_id(name, n_layers)
        this_wd = 0.0 if p.ndim <= 1 else wd
        key = (lid, this_wd)
        if key not in groups:
            scale = decay ** (n_layers + 1 - lid)
            groups[key] = {"params": [], "lr": lr * scale, "lr_scale": scale, "weight_decay": this_wd}
        groups[key]["params"].append(p)
    return list(groups.values())


def pretrain(model, data):
    base_lr = 1.5e-4 * PRETRAIN_BS / 256
    decay = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    no_decay = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
    opt = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.05}, {"params": no_decay, "weight_decay": 0.0}],
        lr=base_lr, betas=(0.9, 0.95),
    )
    ema = ModelEMA(model, 0.98)
    model.train()
    running = 0.0
    for step, (x, _) in enumerate(data.batches(PRETRAIN_BS, PRETRAIN_STEPS)):
        for g in opt.param_groups:
            g["lr"] = cosine(step, PRETRAIN_STEPS, base_lr, 2)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(pixel_values=x).loss
        opt.zero_grad(set_to_none=True)
        loss.backward()
        gn = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        ema.update(model)
        running += loss.item()
        if (step + 1) % 2 == 0:
            print(f"pretrain {step + 1}/{PRETRAIN_STEPS} loss={running / 2:.4f} gnorm={gn:.3f}")
            running = 0.0
    mem("pretrain")
    return ema.module


@torch.no_grad()
def evaluate(model, data, bs=128, steps=3):
    model.eval()
    hit = tot = 0
    for x, y in data.batches(bs, steps):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(x)
        hit += (logits.argmax(-1) == y).sum().item()
        tot += y.numel()
    return 100.0 * hit / tot


def linear_probe(vit, hidden, data):
    model = MAEClassifier(vit, hidden, NUM_CLASSES, probe=True).to(DEVICE)
    model.vit.requires_grad_(False)
    opt = torch.optim.SGD(model.head.parameters(), lr=0.1, momentum=0.9)
    best = 0.0
    for step, (x, y) in enumerate(data.batches(PROBE_BS, PROBE_STEPS)):
        model.train()
        model.vit.eval()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if (step + 1) % 4 == 0:
            acc = evaluate(model, data)
            best = max(best, acc)
            print(f"probe {step + 1} loss={loss.item():.4f} acc={acc:.2f} best={best:.2f}")
    mem("linear probe")


def finetune(vit, hidden, n_layers, data):
    vit.requires_grad_(True)
    vit.embeddings.position_embeddings.requires_grad_(False)
    model = MAEClassifier(vit, hidden, NUM_CLASSES, probe=False).to(DEVICE)
    lr = 5e-4
    opt = torch.optim.AdamW(llrd_groups(model, n_layers, lr, 0.05, 0.75), lr=lr, betas=(0.9, 0.999))
    print(f"finetune: {len(opt.param_groups)} param groups, "
          f"lr range {min(g['lr'] for g in opt.param_groups):.2e} .. {max(g['lr'] for g in opt.param_groups):.2e}")
    ema = ModelEMA(model, 0.9)
    best, best_state = -1.0, None
    for step, (x, y) in enumerate(data.batches(FT_BS, FT_STEPS)):
        model.train()
        cur = cosine(step, FT_STEPS, lr, 2, 1e-6)
        for g in opt.param_groups:
            g["lr"] = cur * g["lr_scale"]
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(x)
            loss = F.cross_entropy(logits, y, label_smoothing=0.1)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        ema.update(model)
        if (step + 1) % 4 == 0:
            acc, acc_ema = evaluate(model, data), evaluate(ema.module, data)
            print(f"finetune {step + 1} loss={loss.item():.4f} acc={acc:.2f} ema={acc_ema:.2f}")
            if acc_ema > best:
                best = acc_ema
                best_state = {k: v.detach().cpu() for k, v in ema.module.state_dict().items()}
    mem("finetune")
    print(f"best ema acc {best:.2f}, {len(best_state)} tensors kept on host")


def main():
    torch.manual_seed(SEED)
    torch.backends.cuda.matmul.allow_tf32 = True
    t0 = time.time()
    data = SyntheticImages(2048, NUM_CLASSES, DEVICE)
    mem("data")

    cfg = ViTMAEConfig(
        hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072,
        decoder_hidden_size=512, decoder_num_hidden_layers=6, decoder_num_attention_heads=16,
        decoder_intermediate_size=2048, image_size=IMG, patch_size=16, mask_ratio=0.75, norm_pix_loss=True,
    )
    with torch.device(DEVICE):
        model = ViTMAEForPreTraining(cfg)
    print(f"MAE params: {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M")
    ema_model = pretrain(model, data)

    vit = ema_model.vit
    del model, ema_model
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    linear_probe(vit, cfg.hidden_size, data)
    torch.cuda.reset_peak_memory_stats()
    finetune(vit, cfg.hidden_size, cfg.num_hidden_layers, data)
    print(f"done in {time.time() - t0:.1f}s")
    mem("end")


if __name__ == "__main__":
    main()
