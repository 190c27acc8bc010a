import argparse
import os
import tempfile

import torch
import torch.nn as nn
from torch.utils.data import Dataset
from transformers import (RobertaConfig, RobertaForTokenClassification, Trainer, TrainerCallback, TrainingArguments,
                          set_seed)

os.environ["TOKENIZERS_PARALLELISM"] = "false"
NUM_LABELS = 17


class NERDataset(Dataset):
    def __init__(self, n, seq, vocab, seed):
        g = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(5, vocab, (n, seq), generator=g)
        self.labels = torch.randint(0, NUM_LABELS, (n, seq), generator=g)
        self.labels[torch.rand(n, seq, generator=g) < 0.2] = -100
        self.mask = torch.ones(n, seq, dtype=torch.long)
        for i in range(n):
            k = int(torch.randint(seq // 2, seq + 1, (1,), generator=g))
            self.mask[i, k:] = 0
            self.ids[i, k:] = 1
            self.labels[i, k:] = -100

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "attention_mask": self.mask[i], "labels": self.labels[i]}


class FocalTrainer(Trainer):
    def __init__(self, *args, class_weights=None, focal_gamma=2.0, smoothing=0.05, **kw):
        super().__init__(*args, **kw)
        self.class_weights, self.gamma, self.smoothing = class_weights, focal_gamma, smoothing

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.logits.float().view(-1, NUM_LABELS)
        flat = labels.view(-1)
        w = self.class_weights.to(logits.device) if self.class_weights is not None else None
        ce = nn.functional.cross_entropy(logits, flat, weight=w, reduction="none",
                                         label_smoothing=self.smoothing, ignore_index=-100)
        pt = torch.exp(-ce)
        keep = flat != -100
        loss = ((1 - pt) ** self.gamma * ce)[keep].mean()
        return (loss, outputs) if return_outputs else loss


class MemoryCallback(TrainerCallback):
    def on_step_end(self, args, state, control, **kw):
        print(f"[mem] step {state.global_step}: max {torch.cuda.max_memory_allocated() / 2**20:.1f} MiB, "
              f"reserved {torch.cuda.memory_reserved() / 2**20:.1f} MiB")

    def on_log(self, args, state, control, logs=None, **kw):
        print({k: v for k, v in (logs or {}).items() if "loss" in k})


def compute_metrics(p):
    pred = p.predictions.argmax(-1)
    ok = p.label_ids != -100
    return {"acc": float((pred[ok] == p.label_ids[ok]).mean())}


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--optim", default="adafactor")
    ap.add_argument("--bs", type=int, default=16)
    ap.add_argument("--fp16", action="store_true")
    ap.add_argument("--no-gc", action="store_true")
    a = ap.parse_args()
    set_seed(99)
    model = RobertaForTokenClassification(RobertaConfig(
        vocab_size=30000, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072,
        max_position_embeddings=520, num_labels=NUM_LABELS))
    with tempfile.TemporaryDirectory() as out:
        targs = TrainingArguments(
            output_dir=out, max_steps=6, per_device_train_batch_size=a.bs, gradient_accumulation_steps=2,
            per_device_eval_batch_size=a.bs * 2, eval_strategy="steps", eval_steps=3, eval_accumulation_steps=2,
            learning_rate=1e-4, optim=a.optim, gradient_checkpointing=not a.no_gc, fp16=a.fp16, bf16=not a.fp16,
            weight_decay=0.01, max_grad_norm=1.0, logging_steps=1, save_strategy="no", report_to="none",
            disable_tqdm=True, dataloader_pin_memory=True)
        trainer = FocalTrainer(model=model, args=targs, train_dataset=NERDataset(a.bs * 12, 384, 30000, 0),
                               eval_dataset=NERDataset(a.bs * 7, 384, 30000, 1), compute_metrics=compute_metrics,
                               callbacks=[MemoryCallback()], class_weights=torch.linspace(0.5, 1.5, NUM_LABELS))
        trainer.train()
        print(trainer.evaluate())
