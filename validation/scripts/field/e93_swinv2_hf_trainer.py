# Train a Swin V2 small-ish classifier with the HF Trainer (label smoothing, bf16, eval each epoch)
import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import (
    Swinv2Config,
    Swinv2ForImageClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)

IMAGE_SIZE = 256
WINDOW = 8
EMBED_DIM = 96
DEPTHS = [2, 2, 18, 2]
HEADS = [3, 6, 12, 24]
NUM_LABELS = 257
TRAIN_BS = 48
EVAL_BS = 128
N_TRAIN = 48 * 7 + 20
N_EVAL = 300


class SyntheticCaltech(Dataset):
    """Images are stored as uint8, decoded + normalised on access like a usual transform."""

    def __init__(self, n, seed, train):
        rng = np.random.default_rng(seed)
        self.low = rng.integers(0, 256, size=(n, 16, 16, 3), dtype=np.uint8)
        self.labels = rng.integers(0, NUM_LABELS, size=n)
        self.train = train

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, idx):
        img = torch.from_numpy(self.low[idx]).permute(2, 0, 1)[None].float() / 255.0
        img = torch.nn.functional.interpolate(img, size=(IMAGE_SIZE, IMAGE_SIZE), mode="bilinear")[0]
        if self.train and idx % 2 == 0:
            img = img.flip(-1)
        return {"pixel_values": (img - 0.5) / 0.5, "labels": int(self.labels[idx])}


def collate_fn(examples):
    pixel_values = torch.stack([e["pixel_values"] for e in examples])
    labels = torch.tensor([e["labels"] for e in examples])
    return {"pixel_values": pixel_values, "labels": labels}


def compute_metrics(p):
    logits = p.predictions[0] if isinstance(p.predictions, tuple) else p.predictions
    top1 = (logits.argmax(-1) == p.label_ids).mean()
    top5 = (np.argsort(-logits, axis=-1)[:, :5] == p.label_ids[:, None]).any(-1).mean()
    return {"accuracy": float(top1), "top5": float(top5)}


def main():
    print("device:", torch.cuda.get_device_name("cuda"))
    set_seed(17)

    config = Swinv2Config(
        image_size=IMAGE_SIZE,
        patch_size=4,
        embed_dim=EMBED_DIM,
        depths=DEPTHS,
        num_heads=HEADS,
        window_size=WINDOW,
        drop_path_rate=0.3,
        num_labels=NUM_LABELS,
    )
    model = Swinv2ForImageClassification(config)
    print(f"params: {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M")

    train_ds = SyntheticCaltech(N_TRAIN, seed=0, train=True)
    eval_ds = SyntheticCaltech(N_EVAL, seed=1, train=False)

    args = TrainingArguments(
        output_dir="/tmp/swinv2_out",
        per_device_train_batch_size=TRAIN_BS,
        per_device_eval_batch_size=EVAL_BS,
        num_train_epochs=1,
        learning_rate=5e-4,
        weight_decay=0.05,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        label_smoothing_factor=0.1,
        bf16=True,
        max_grad_norm=5.0,
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=2,
        dataloader_num_workers=4,
        remove_unused_columns=False,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=train_ds,
        eval_dataset=eval_ds,
        data_collator=collate_fn,
        compute_metrics=compute_metrics,
    )
    trainer.train()
    metrics = trainer.evaluate()
    print(metrics)
    print(f"{torch.cuda.max_memory_allocated() = }")
    print(f"{torch.cuda.max_memory_reserved() = }")


if __name__ == "__main__":
    main()
