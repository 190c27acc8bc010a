#!/usr/bin/env python
"""Supervised fine-tuning of a Qwen2-VL style model with accelerate (bf16), vision tower frozen."""
import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration, get_scheduler

PAD, VISION_START, VISION_END, IMAGE, VIDEO = 31990, 31991, 31992, 31993, 31994


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--per_device_train_batch_size", type=int, default=4)
    p.add_argument("--gradient_accumulation_steps", type=int, default=2)
    p.add_argument("--max_train_steps", type=int, default=4)
    p.add_argument("--learning_rate", type=float, default=1e-5)
    p.add_argument("--weight_decay", type=float, default=0.01)
    p.add_argument("--seed", type=int, default=11)
    p.add_argument("--train_vision", action="store_true")
    return p.parse_args()


def build_config():
    return Qwen2VLConfig(
        text_config=dict(
            vocab_size=32000, hidden_size=1536, intermediate_size=6144, num_hidden_layers=18,
            num_attention_heads=12, num_key_value_heads=2, max_position_embeddings=4096,
            rope_parameters={"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [16, 24, 24]},
            bos_token_id=1, eos_token_id=2, pad_token_id=PAD,
        ),
        vision_config=dict(depth=16, embed_dim=1024, num_heads=16, mlp_ratio=4, hidden_size=1536,
                           patch_size=14, spatial_merge_size=2, temporal_patch_size=2),
        image_token_id=IMAGE, video_token_id=VIDEO,
        vision_start_token_id=VISION_START, vision_end_token_id=VISION_END,
    )


class VQADataset(Dataset):
    """One image per sample, resolution varies (as with dynamic resolution of Qwen2-VL)."""

    grids = [(1, 32, 32), (1, 24, 40), (1, 36, 28), (1, 32, 24)]

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        t, h, w = self.grids[i % len(self.grids)]
        pixel_values = torch.randn(t * h * w, 3 * 2 * 14 * 14, generator=g)
        n_img = t * h * w // 4
        prompt = torch.randint(3, 31000, (24,), generator=g)
        n_answer = 64 + 16 * (i % 5)
        answer = torch.randint(3, 31000, (n_answer,), generator=g)
        ids = torch.cat([torch.tensor([VISION_START]), torch.full((n_img,), IMAGE),
                         torch.tensor([VISION_END]), prompt, answer])
        labels = ids.clone()
        labels[:-n_answer] = -100
        return dict(input_ids=ids, labels=labels, pixel_values=pixel_values,
                    grid=torch.tensor([t, h, w]))


def collate(batch):
    longest = max(len(b["input_ids"]) for b in batch)
    ids = torch.full((len(batch), longest), PAD)
    labels = torch.full((len(batch), longest), -100)
    for i, b in enumerate(batch):
        n = len(b["input_ids"])
        ids[i, :n] = b["input_ids"]
        labels[i, :n] = b["labels"]
    return dict(
        input_ids=ids,
        labels=labels,
        attention_mask=(ids != PAD).long(),
        mm_token_type_ids=(ids == IMAGE).int(),
        pixel_values=torch.cat([b["pixel_values"] for b in batch]),
        image_grid_thw=torch.stack([b["grid"] for b in batch]),
    )


def main():
    args = parse_args()
    accelerator = Accelerator(mixed_precision="bf16",
                              gradient_accumulation_steps=args.gradient_accumulation_steps)
    set_seed(args.seed)

    with accelerator.device:
        model = Qwen2VLForConditionalGeneration(build_config())
    model.config.use_cache = False
    model.config.text_config.use_cache = False
    if not args.train_vision:
        model.model.visual.requires_grad_(False)
    accelerator.print("params: %.2fM" % (sum(p.numel() for p in model.parameters()) / 1e6))

    no_decay = ("bias", "norm")
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for n, p in named if not any(k in n for k in no_decay)], "weight_decay": args.weight_decay},
        {"params": [p for n, p in named if any(k in n for k in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate)
    n = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.max_train_steps
    loader = DataLoader(VQADataset(n), batch_size=args.per_device_train_batch_size, shuffle=True,
                        collate_fn=collate, generator=torch.Generator().manual_seed(args.seed))
    lr_scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=1, num_training_steps=args.max_train_steps)
    model, optimizer, loader, lr_scheduler = accelerator.prepare(model, optimizer, loader, lr_scheduler)

    model.train()
    completed = 0
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            completed += 1
            accelerator.print(f"step {completed} loss {loss.item():.4f} seq {batch['input_ids'].shape[1]} "
                              f"max_alloc {torch.cuda.max_memory_allocated()} "
                              f"max_reserved {torch.cuda.max_memory_reserved()}")
    accelerator.end_training()
    print("max_memory_allocated", torch.cuda.max_memory_allocated())
    print("max_memory_reserved", torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    main()
