"""HF Trainer: BERT classifier or GPT-2, gradient accumulation, eval during training, label smoothing."""
import sys
import tempfile
import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import (
    BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed, default_data_collator,
)

optim = sys.argv[1] if len(sys.argv) > 1 else "adafactor"
set_seed(0)


class ToyText(Dataset):
    def __init__(self, n, length, seed):
        rng = np.random.default_rng(seed)
        self.x = rng.integers(5, 30000, size=(n, length))
        self.y = rng.integers(0, 10, size=n)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        ids = torch.from_numpy(self.x[i]).long()
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": int(self.y[i])}


def compute_metrics(p):
    preds = p.predictions.argmax(-1)
    return {"accuracy": float((preds == p.label_ids).mean())}


config = BertConfig(
    vocab_size=30522, hidden_size=768, num_hidden_layers=12, num_attention_heads=12,
    intermediate_size=3072, num_labels=10,
)
model = BertForSequenceClassification(config)

with tempfile.TemporaryDirectory() as out:
    args = TrainingArguments(
        output_dir=out,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=64,
        gradient_accumulation_steps=2,
        max_steps=8,
        learning_rate=5e-5,
        warmup_steps=2,
        weight_decay=0.01,
        lr_scheduler_type="cosine",
        optim=optim,
        bf16=True,
        label_smoothing_factor=0.1,
        eval_strategy="steps",
        eval_steps=4,
        logging_steps=2,
        save_strategy="no",
        max_grad_norm=1.0,
        dataloader_num_workers=0,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=model, args=args,
        train_dataset=ToyText(256, 256, 0), eval_dataset=ToyText(160, 256, 1),
        data_collator=default_data_collator, compute_metrics=compute_metrics,
    )
    result = trainer.train()
    print(result.metrics)
    print(trainer.evaluate())

print("max_memory_allocated", torch.cuda.max_memory_allocated())
print("max_memory_reserved", torch.cuda.max_memory_reserved())
