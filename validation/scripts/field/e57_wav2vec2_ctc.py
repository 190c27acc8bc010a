"""
Fine-tune a (randomly initialised) wav2vec2 encoder with CTC.

 - variable length utterances, bucketed a little by length
 - SpecAugment through the HF config (mask_time_prob / mask_feature_prob)
 - fp16 autocast + GradScaler, gradient accumulation
 - conv feature encoder frozen for the first UNFREEZE_AT updates
"""
import math
import random
import time
from dataclasses import dataclass
from typing import Dict, List

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC, get_linear_schedule_with_warmup

SEED = 1337
SAMPLE_RATE = 16_000
VOCAB = ["<pad>", "<unk>", "|"] + list("abcdefghijklmnopqrstuvwxyz'")
BATCH_SIZE = 8
GRAD_ACCUM = 2
MAX_UPDATES = 8
UNFREEZE_AT = 4
EVAL_EVERY = 4
LR = 1e-4
DEVICE = torch.device("cuda")


class ToySpeech(Dataset):
    """Sum of a few chirps per 'character', plus noise.  4 to 14 seconds."""

    def __init__(self, n, min_s=4.0, max_s=14.0, seed=0):
        rng = np.random.default_rng(seed)
        self.durations = rng.uniform(min_s, max_s, size=n)
        self.seeds = rng.integers(0, 2**31, size=n)

    def __len__(self):
        return len(self.durations)

    def __getitem__(self, idx):
        rng = np.random.default_rng(self.seeds[idx])
        n_samples = int(self.durations[idx] * SAMPLE_RATE)
        n_chars = max(8, int(self.durations[idx] * 9))
        chars = rng.integers(2, len(VOCAB), size=n_chars)
        wav = 0.02 * rng.standard_normal(n_samples, dtype=np.float32)
        seg = n_samples // n_chars
        t = np.arange(seg, dtype=np.float32) / SAMPLE_RATE
        for i, c in enumerate(chars):
            wav[i * seg:(i + 1) * seg] += 0.3 * np.sin(2 * np.pi * (120 + 60 * c) * t)
        return {"input_values": wav, "labels": chars}


class LengthBucketSampler(Sampler):
    def __init__(self, durations, batch_size, shuffle=True):
        self.durations, self.batch_size, self.shuffle = durations, batch_size, shuffle

    def __iter__(self):
        order = np.argsort(self.durations + np.random.uniform(-1.5, 1.5, len(self.durations)))
        batches = [order[i:i + self.batch_size].tolist() for i in range(0, len(order), self.batch_size)]
        if self.shuffle:
            random.shuffle(batches)
        return iter(batches)

    def __len__(self):
        return math.ceil(len(self.durations) / self.batch_size)


@dataclass
class CTCCollator:
    pad_to_multiple_of: int = 320

    def __call__(self, feats: List[Dict]) -> Dict[str, torch.Tensor]:
        longest = max(len(f["input_values"]) for f in feats)
        longest = math.ceil(longest / self.pad_to_multiple_of) * self.pad_to_multiple_of
        x = torch.zeros(len(feats), longest)
        mask = torch.zeros(len(feats), longest, dtype=torch.long)
        labels = torch.full((len(feats), max(len(f["labels"]) for f in feats)), -100, dtype=torch.long)
        for i, f in enumerate(feats):
            w = torch.from_numpy(f["input_values"])
            w = (w - w.mean()) / torch.sqrt(w.var() + 1e-7)
            x[i, :len(w)] = w
            mask[i, :len(w)] = 1
            labels[i, :len(f["labels"])] = torch.from_numpy(f["labels"])
        return {"input_values": x, "attention_mask": mask, "labels": labels}


def mem(tag):
    print(f"[mem] {tag}: allocated peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB, "
          f"reserved peak {torch.cuda.max_memory_reserved() / 2**30:.2f} GiB", flush=True)


def greedy_decode(logits):
    out = []
    for seq in logits.argmax(-1).tolist():
        prev, s = None, []
        for k in seq:
            if k != prev and k != 0:
                s.append(VOCAB[k])
            prev = k
        out.append("".join(s))
    return out


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    total, n = 0.0, 0
    sample = None
    for batch in loader:
        batch = {k: v.to(DEVICE, non_blocking=True) for k, v in batch.items()}
        with torch.autocast("cuda", dtype=torch.float16):
            out = model(**batch)
        total += out.loss.item() * batch["input_values"].size(0)
        n += batch["input_values"].size(0)
        if sample is None:
            sample = greedy_decode(out.logits[:1].float())[0]
    model.train()
    return total / n, sample


def build_model():
    cfg = Wav2Vec2Config(
        vocab_size=len(VOCAB),
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        feat_extract_norm="layer",
        do_stable_layer_norm=True,
        conv_bias=True,
        apply_spec_augment=True,
        mask_time_prob=0.05,
        mask_time_length=10,
        mask_feature_prob=0.04,
        mask_feature_length=32,
        layerdrop=0.05,
        ctc_loss_reduction="mean",
        ctc_zero_infinity=True,
        pad_token_id=0,
    )
    with torch.device(DEVICE):
        model = Wav2Vec2ForCTC(cfg)
    return model.to(DEVICE)


def main():
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    torch.backends.cuda.matmul.allow_tf32 = True

    train_ds = ToySpeech(BATCH_SIZE * GRAD_ACCUM * MAX_UPDATES, seed=1)
    valid_ds = ToySpeech(24, seed=2)
    collate = CTCCollator()
    train_dl = DataLoader(train_ds, batch_sampler=LengthBucketSampler(train_ds.durations, BATCH_SIZE),
                          collate_fn=collate, num_workers=2, pin_memory=True)
    valid_dl = DataLoader(valid_ds, batch_size=12, collate_fn=collate)

    model = build_model()
    model.freeze_feature_encoder()
    n_all = sum(p.numel() for p in model.parameters())
    n_train = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(f"{n_all / 1e6:.1f}M parameters, {n_train / 1e6:.1f}M trainable while the feature encoder is frozen")
    mem("model on gpu")

    decay, no_decay = [], []
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        (no_decay if p.ndim == 1 or "layer_norm" in name else decay).append(p)
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.01}, {"params": no_decay, "weight_decay": 0.0}],
        lr=LR, betas=(0.9, 0.98), eps=1e-8)
    scheduler = get_linear_schedule_with_warmup(optimizer, 2, MAX_UPDATES)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**14)

    model.train()
    update, running, t0 = 0, 0.0, time.time()
    for i, batch in enumerate(train_dl):
        batch = {k: v.to(DEVICE, non_blocking=True) for k, v in batch.items()}
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(**batch).loss / GRAD_ACCUM
        scaler.scale(loss).backward()
        running += loss.item()

        if (i + 1) % GRAD_ACCUM:
            continue

        scaler.unscale_(optimizer)
        gnorm = torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        update += 1
        print(f"update {update:3d} | loss {running:.4f} | gnorm {float(gnorm):.2f} | scale {scaler.get_scale():.0f} | "
              f"len {batch['input_values'].shape[1] / SAMPLE_RATE:.1f}s | {time.time() - t0:.1f}s", flush=True)
        running = 0.0

        if update == UNFREEZE_AT:
            fe = model.wav2vec2.feature_extractor
            for p in fe.parameters():
                p.requires_grad = True
            fe._requires_grad = True
            optimizer.add_param_group({"params": list(fe.parameters()), "lr": LR * 0.1, "weight_decay": 0.0})
            # LambdaLR keeps one lambda and one base lr per group
            scheduler.base_lrs.append(LR * 0.1)
            scheduler.lr_lambdas.append(scheduler.lr_lambdas[0])
            print("feature encoder unfrozen")
            mem("before unfreezing took effect")
        if update % EVAL_EVERY == 0:
            vloss, hyp = evaluate(model, valid_dl)
            print(f"  valid loss {vloss:.4f} | hyp: {hyp[:40]!r}")
            mem(f"after eval at {update}")
        if update >= MAX_UPDATES:
            break

    mem("end of training")
    print("max_memory_allocated", torch.cuda.max_memory_allocated())
    print("max_memory_reserved", torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    main()
