"""LayoutLMv3-large token tagging on (fake) receipts, full precision, Trainer with a class-weighted loss."""
import tempfile

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import (EarlyStoppingCallback, LayoutLMv3Config, LayoutLMv3ForTokenClassification, Trainer,
                          TrainerCallback, TrainingArguments, set_seed)

LABELS = ["O", "B-TOTAL", "I-TOTAL", "B-DATE", "I-DATE", "B-SHOP", "I-SHOP"]
MAX_LEN = 384


class Receipts(Dataset):
    def __init__(self, n, seed):
        self.rng = np.random.RandomState(seed)
        self.docs = [self._doc() for _ in range(n)]

    def _doc(self):
        r = self.rng
        n = r.randint(120, MAX_LEN + 1)
        words = r.randint(10, 50000, n)
        words[0], words[-1] = 0, 2
        # words go line by line down the page, boxes in 0..1000
        x0 = (np.arange(n) % 6) * 160 + r.randint(0, 20, n)
        y0 = (np.arange(n) // 6) * 14
        box = np.stack([x0, y0, x0 + r.randint(30, 130, n), y0 + 12], 1).clip(0, 1000)
        tags = np.where(r.rand(n) < 0.8, 0, r.randint(1, len(LABELS), n))
        tags[0] = tags[-1] = -100
        image = r.rand(3, 224, 224).astype(np.float32) * 2 - 1
        return {"input_ids": words, "bbox": box, "labels": tags, "pixel_values": image}

    def __len__(self):
        return len(self.docs)

    def __getitem__(self, i):
        return self.docs[i]


def collate(docs):
    n = max(len(d["input_ids"]) for d in docs)

    def padded(key, fill):
        rows = []
        for d in docs:
            a = d[key]
            width = [(0, n - len(a))] + [(0, 0)] * (a.ndim - 1)
            rows.append(np.pad(a, width, constant_values=fill))
        return torch.from_numpy(np.stack(rows)).long()

    ids = padded("input_ids", 1)
    return {"input_ids": ids, "bbox": padded("bbox", 0), "attention_mask": (ids != 1).long(),
            "labels": padded("labels", -100),
            "pixel_values": torch.from_numpy(np.stack([d["pixel_values"] for d in docs]))}


class WeightedTrainer(Trainer):
    def __init__(self, *args, class_weights=None, **kw):
        super().__init__(*args, **kw)
        self.class_weights = class_weights.to(self.args.device)
        self.model_accepts_loss_kwargs = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        # the visual tokens are behind the text tokens, the model already cut them off
        logits = outputs.logits
        loss = nn.functional.cross_entropy(logits.reshape(-1, logits.size(-1)), labels.reshape(-1),
                                           weight=self.class_weights, ignore_index=-100)
        inputs["labels"] = labels
        return (loss, outputs) if return_outputs else loss


class GpuReport(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        logs["gpu_peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 3)

    def on_train_end(self, args, state, control, **kwargs):
        print("optimizer states + weights at the end: %.3f GB" % (torch.cuda.memory_allocated() / 1e9))


def metrics(p):
    pred, gold = p.predictions, p.label_ids
    keep = gold != -100
    ent = keep & (gold > 0)
    return {"accuracy": float((pred == gold)[keep].mean()), "entity_recall": float((pred == gold)[ent].mean())}


def main():
    set_seed(31)
    config = LayoutLMv3Config(
        vocab_size=50265, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
        max_position_embeddings=514, coordinate_size=171, shape_size=170, input_size=224, patch_size=16,
        num_labels=len(LABELS), pad_token_id=1, bos_token_id=0, eos_token_id=2)
    model = LayoutLMv3ForTokenClassification(config)
    train, dev = Receipts(72, 0), Receipts(14, 1)
    counts = np.bincount(np.concatenate([d["labels"][d["labels"] >= 0] for d in train.docs]), minlength=len(LABELS))
    weights = torch.tensor(counts.sum() / (len(LABELS) * counts), dtype=torch.float32)
    print("class weights", [round(w, 2) for w in weights.tolist()])

    with tempfile.TemporaryDirectory() as tmp:
        args = TrainingArguments(
            output_dir=tmp, num_train_epochs=2, per_device_train_batch_size=6, gradient_accumulation_steps=3,
            per_device_eval_batch_size=8, learning_rate=2e-5, weight_decay=0.01, warmup_steps=0.1,
            optim="adamw_torch_fused", tf32=True, logging_steps=1, eval_strategy="epoch", save_strategy="epoch",
            save_total_limit=1, save_only_model=True, load_best_model_at_end=True, metric_for_best_model="accuracy",
            dataloader_num_workers=2, torch_empty_cache_steps=4, remove_unused_columns=False, report_to="none", seed=31)
        trainer = WeightedTrainer(
            model=model, args=args, train_dataset=train, eval_dataset=dev, data_collator=collate,
            compute_metrics=metrics, class_weights=weights,
            preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
            callbacks=[GpuReport(), EarlyStoppingCallback(early_stopping_patience=2)])
        trainer.train()
        print(trainer.evaluate())
    print("peak %.2f GB" % (torch.cuda.max_memory_allocated() / 1e9))


if __name__ == "__main__":
    main()
