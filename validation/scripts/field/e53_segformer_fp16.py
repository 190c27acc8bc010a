import time
import numpy as np
import torch
from torch import nn
import torch.nn.functional as F
from torch.amp import autocast, GradScaler
from transformers import SegformerConfig, SegformerForSemanticSegmentation

# ---- config -------------------------------------------------------------
N_CLASSES   = 19
IGNORE      = 255
CROP        = 512
BATCH       = 12
MAX_ITERS   = 12
EVAL_EVERY  = 6
LOG_EVERY   = 3
BASE_LR     = 6e-5
HEAD_MULT   = 10.0
WARMUP      = 3
POWER       = 1.0
device = torch.device("cuda:0")
torch.manual_seed(3407)
rng = np.random.default_rng(3407)


def report(msg):
    print("%-24s alloc peak %8.1f MiB | reserved peak %8.1f MiB" % (
        msg, torch.cuda.max_memory_allocated(device) / 2**20, torch.cuda.max_memory_reserved(device) / 2**20))


# ---- data ---------------------------------------------------------------
class VoronoiScenes(torch.utils.data.IterableDataset):
    """Piecewise-constant label maps: small grid of random class ids, nearest-upsampled,
    with a strip of ignore pixels along the bottom, as with ego-vehicle masks."""

    def __init__(self, length, seed):
        self.length, self.seed = length, seed

    def __len__(self):
        return self.length

    def __iter__(self):
        r = np.random.default_rng(self.seed)
        for _ in range(self.length):
            cell = int(r.choice([16, 32, 64]))
            grid = r.integers(0, N_CLASSES, (CROP // cell, CROP // cell), dtype=np.int64)
            lab = np.kron(grid, np.ones((cell, cell), dtype=np.int64))
            if r.random() < 0.5:
                lab[-int(r.integers(8, 64)):, :] = IGNORE
            yield torch.from_numpy(lab.astype(np.uint8))


class_colors = torch.randn(256, 3, device=device)


def render(labels):
    """labels (B,H,W) uint8 on gpu -> images (B,3,H,W)"""
    img = class_colors[labels.long()].permute(0, 3, 1, 2).contiguous()
    return img + 0.4 * torch.randn_like(img)


train_loader = torch.utils.data.DataLoader(VoronoiScenes(BATCH * MAX_ITERS, 1), batch_size=BATCH, pin_memory=True)
val_loader = torch.utils.data.DataLoader(VoronoiScenes(24, 2), batch_size=8, pin_memory=True)

# ---- model: mit-b2-ish ---------------------------------------------------
cfg = SegformerConfig(
    num_channels=3,
    depths=[3, 4, 6, 3],
    hidden_sizes=[64, 128, 320, 512],
    num_attention_heads=[1, 2, 5, 8],
    sr_ratios=[8, 4, 2, 1],
    mlp_ratios=[4, 4, 4, 4],
    decoder_hidden_size=768,
    drop_path_rate=0.1,
    classifier_dropout_prob=0.1,
    num_labels=N_CLASSES,
    semantic_loss_ignore_index=IGNORE,
)
model = SegformerForSemanticSegmentation(cfg).to(device)
n_par = sum(p.numel() for p in model.parameters())
print(f"segformer: {n_par/1e6:.2f} M params")


# ---- losses --------------------------------------------------------------
class DiceLoss(nn.Module):
    def __init__(self, n_classes, ignore_index, smooth=1.0):
        super().__init__()
        self.n, self.ignore, self.smooth = n_classes, ignore_index, smooth

    def forward(self, logits, target):
        probs = logits.float().softmax(1)
        valid = target != self.ignore
        t = torch.where(valid, target, torch.zeros_like(target))
        onehot = F.one_hot(t, self.n).permute(0, 3, 1, 2).float()
        mask = valid.unsqueeze(1).float()
        probs, onehot = probs * mask, onehot * mask
        inter = (probs * onehot).sum((0, 2, 3))
        denom = probs.sum((0, 2, 3)) + onehot.sum((0, 2, 3))
        dice = (2 * inter + self.smooth) / (denom + self.smooth)
        return 1 - dice.mean()


ce_loss = nn.CrossEntropyLoss(ignore_index=IGNORE)
dice_loss = DiceLoss(N_CLASSES, IGNORE)

# ---- optim ---------------------------------------------------------------
enc_decay, enc_nodecay, head = [], [], []
for name, p in model.named_parameters():
    if name.startswith("decode_head"):
        head.append(p)
    elif p.ndim == 1 or "norm" in name:
        enc_nodecay.append(p)
    else:
        enc_decay.append(p)
optimizer = torch.optim.AdamW([
    dict(params=enc_decay, lr=BASE_LR, weight_decay=0.01),
    dict(params=enc_nodecay, lr=BASE_LR, weight_decay=0.0),
    dict(params=head, lr=BASE_LR * HEAD_MULT, weight_decay=0.01),
])


def poly(it):
    if it < WARMUP:
        return max(1e-6, (it + 1) / WARMUP)
    return (1 - (it - WARMUP) / (MAX_ITERS - WARMUP)) ** POWER


scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, poly)
scaler = GradScaler("cuda", init_scale=2.0 ** 14)


# ---- eval ----------------------------------------------------------------
def fast_hist(pred, label, n):
    k = (label >= 0) & (label < n)
    return torch.bincount(n * label[k].long() + pred[k], minlength=n * n).reshape(n, n)


@torch.inference_mode()
def validate():
    model.eval()
    hist = torch.zeros(N_CLASSES, N_CLASSES, dtype=torch.int64, device=device)
    losses = []
    for labels in val_loader:
        labels = labels.to(device, non_blocking=True)
        x = render(labels)
        with autocast("cuda", dtype=torch.float16):
            lo = model(pixel_values=x).logits
        up = F.interpolate(lo.float(), size=labels.shape[-2:], mode="bilinear", align_corners=False)
        losses.append(ce_loss(up, labels.long()).item())
        hist += fast_hist(up.argmax(1), labels, N_CLASSES)
    iou = hist.diag() / (hist.sum(0) + hist.sum(1) - hist.diag()).clamp(min=1)
    acc = hist.diag().sum() / hist.sum()
    model.train()
    return iou.mean().item(), acc.item(), sum(losses) / len(losses)


# ---- loop ----------------------------------------------------------------
best_miou = 0.0
best_weights = None
report("before training")
model.train()
tic = time.perf_counter()
for it, labels in enumerate(train_loader, start=1):
    labels = labels.to(device, non_blocking=True)
    images = render(labels)
    target = labels.long()

    optimizer.zero_grad(set_to_none=True)
    with autocast("cuda", dtype=torch.float16):
        logits = model(pixel_values=images).logits
        logits = F.interpolate(logits, size=target.shape[-2:], mode="bilinear", align_corners=False)
        l_ce = ce_loss(logits, target)
        l_dice = dice_loss(logits, target)
        loss = l_ce + 0.5 * l_dice
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    gnorm = nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    old_scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    if scaler.get_scale() >= old_scale:
        scheduler.step()
    else:
        print(f"iter {it}: overflow, scale {old_scale:g} -> {scaler.get_scale():g}")

    if it % LOG_EVERY == 0:
        dt = (time.perf_counter() - tic) / LOG_EVERY
        print(f"iter {it:3d}/{MAX_ITERS} loss {loss.item():.4f} (ce {l_ce.item():.4f} dice {l_dice.item():.4f}) "
              f"lr {scheduler.get_last_lr()[0]:.2e} gnorm {gnorm.item():.2f} {dt*1000:.0f} ms/it")
        tic = time.perf_counter()

    if it % EVAL_EVERY == 0:
        report(f"after {it} iters")
        miou, acc, vloss = validate()
        flag = ""
        if miou > best_miou:
            best_miou = miou
            best_weights = {k: v.clone() for k, v in model.state_dict().items()}
            flag = " *"
        print(f"val: mIoU {miou*100:.2f} pixAcc {acc*100:.2f} loss {vloss:.4f}{flag}")
        tic = time.perf_counter()

if best_weights is not None:
    model.load_state_dict(best_weights)
    miou, acc, _ = validate()
    print(f"final (best weights) mIoU {miou*100:.2f} pixAcc {acc*100:.2f}")
report("end")
