"""Fine-tune SAM ViT-B on box-prompted masks (prompt encoder frozen, last two ViT blocks + neck + decoder trained).

colleague utility, accelerate flavour:  python e169_sam_boxprompt_accelerate.py --steps 6
"""
import argparse
import os
import tempfile

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch.utils.data import DataLoader, Dataset
from transformers import SamConfig, SamModel, get_scheduler


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=6, help="optimizer steps")
    p.add_argument("--batch-size", type=int, default=3)
    p.add_argument("--accum", type=int, default=2)
    p.add_argument("--boxes", type=int, default=3, help="prompts per image")
    p.add_argument("--train-blocks", type=int, default=2)
    p.add_argument("--lr", type=float, default=5e-5)
    p.add_argument("--seed", type=int, default=42)
    return p.parse_args()


class Blobs(Dataset):
    """Ellipses on noise. Returns 1024px image, boxes in pixels and 256px masks."""

    def __init__(self, n, boxes, seed):
        self.n, self.boxes, self.seed = n, boxes, seed
        ys, xs = torch.meshgrid(torch.arange(256.0), torch.arange(256.0), indexing="ij")
        self.ys, self.xs = ys, xs

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.seed + i)
        img = 0.2 * torch.randn(3, 1024, 1024, generator=g)
        boxes, masks = [], []
        for _ in range(self.boxes):
            cx, cy = (40 + 176 * torch.rand(2, generator=g)).tolist()
            rx, ry = (10 + 28 * torch.rand(2, generator=g)).tolist()
            m = ((self.xs - cx) / rx) ** 2 + ((self.ys - cy) / ry) ** 2 <= 1
            colour = torch.rand(3, generator=g)
            up = m.repeat_interleave(4, 0).repeat_interleave(4, 1)
            img[:, up] += colour[:, None]
            boxes.append([4 * (cx - rx), 4 * (cy - ry), 4 * (cx + rx), 4 * (cy + ry)])
            masks.append(m.float())
        return {"pixel_values": img, "input_boxes": torch.tensor(boxes), "masks": torch.stack(masks)}


def seg_loss(logits, target):
    logits = logits.float()
    bce = F.binary_cross_entropy_with_logits(logits, target)
    p = logits.sigmoid().flatten(2)
    t = target.flatten(2)
    dice = 1 - (2 * (p * t).sum(-1) + 1) / (p.sum(-1) + t.sum(-1) + 1)
    return bce + dice.mean()


def main():
    a = parse()
    set_seed(a.seed)
    work = tempfile.mkdtemp(prefix="sam_ft_")
    acc = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=a.accum,
                      project_config=ProjectConfiguration(project_dir=work, automatic_checkpoint_naming=True, total_limit=1))

    model = SamModel(SamConfig())
    model.requires_grad_(False)
    model.mask_decoder.requires_grad_(True)
    model.vision_encoder.neck.requires_grad_(True)
    for blk in model.vision_encoder.layers[-a.train_blocks:]:
        blk.requires_grad_(True)
    trainable = [p for p in model.parameters() if p.requires_grad]
    acc.print(f"trainable {sum(p.numel() for p in trainable) / 1e6:.1f} M of {model.num_parameters() / 1e6:.1f} M")

    opt = torch.optim.AdamW(trainable, lr=a.lr, weight_decay=0.01)
    sched = get_scheduler("cosine", opt, num_warmup_steps=1, num_training_steps=a.steps)
    train = DataLoader(Blobs(a.steps * a.accum * a.batch_size, a.boxes, 0), batch_size=a.batch_size, shuffle=True, num_workers=4)
    val = DataLoader(Blobs(7, a.boxes, 10_000), batch_size=a.batch_size)
    model, opt, sched, train, val = acc.prepare(model, opt, sched, train, val)

    model.train()
    done, running = 0, 0.0
    for batch in train:
        with acc.accumulate(model):
            out = model(pixel_values=batch["pixel_values"], input_boxes=batch["input_boxes"], multimask_output=False)
            loss = seg_loss(out.pred_masks.squeeze(2), batch["masks"])
            acc.backward(loss)
            if acc.sync_gradients:
                acc.clip_grad_norm_(trainable, 1.0)
            opt.step()
            sched.step()
            opt.zero_grad()
        running += loss.item() / a.accum
        if acc.sync_gradients:
            done += 1
            acc.print(f"step {done}: loss {running:.4f}  peak {torch.cuda.max_memory_allocated() / 1e9:.2f} GB")
            running = 0.0
            if done == a.steps // 2:
                acc.save_state()
                acc.print("state saved:", sorted(os.listdir(os.path.join(work, "checkpoints", "checkpoint_0"))))
            if done >= a.steps:
                break

    model.eval()
    ious = []
    for batch in val:
        with torch.no_grad():
            out = model(pixel_values=batch["pixel_values"], input_boxes=batch["input_boxes"], multimask_output=False)
        pred = out.pred_masks.squeeze(2) > 0
        pred, gt = acc.gather_for_metrics((pred, batch["masks"].bool()))
        ious.append(((pred & gt).sum((-1, -2)) / (pred | gt).sum((-1, -2)).clamp(min=1)).mean(1))
    acc.print(f"mean IoU {torch.cat(ious).mean().item():.4f} on {len(torch.cat(ious))} images")
    acc.print(f"peak allocated {torch.cuda.max_memory_allocated() / 1e9:.2f} GB, "
              f"reserved {torch.cuda.max_memory_reserved() / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
