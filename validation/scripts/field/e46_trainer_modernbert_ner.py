import os
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import tempfile

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset
from transformers import (
    ModernBertConfig,
    ModernBertForTokenClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

LABELS = ["O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC", "B-MISC", "I-MISC"]
label2id = {l: i for i, l in enumerate(LABELS)}
id2label = dict(enumerate(LABELS))
PAD, CLS, SEP = 0, 1, 2
VOCAB = 50368


class SyntheticNER(Dataset):
    """Entities are spans of tokens drawn from a type specific id range."""

    def __init__(self, size, seed, max_len=1024):
        rng = np.random.default_rng(seed)
        self.items = []
        for _ in range(size):
            n = int(np.clip(rng.gamma(2.0, 200), 24, max_len - 2))
            toks = rng.integers(10_000, VOCAB, n)
            tags = np.zeros(n, dtype=np.int64)
            pos = int(rng.integers(0, 8))
            while pos < n - 5:
                kind = int(rng.integers(0, 4))
                span = int(rng.integers(1, 5))
                toks[pos:pos + span] = rng.integers(100 + kind * 2000, 100 + (kind + 1) * 2000, span)
                tags[pos] = 1 + 2 * kind
                tags[pos + 1:pos + span] = 2 + 2 * kind
                pos += span + int(rng.integers(3, 30))
            self.items.append({
                "input_ids": [CLS] + toks.tolist() + [SEP],
                "labels": [-100] + tags.tolist() + [-100],
            })

    def __len__(self):
        return len(self.items)

    def __getitem__(self, idx):
        return dict(self.items[idx])


class PadCollator:
    def __init__(self, multiple=8):
        self.multiple = multiple

    def __call__(self, features):
        longest = max(len(f["input_ids"]) for f in features)
        longest = (longest + self.multiple - 1) // self.multiple * self.multiple
        ids, mask, labels = [], [], []
        for f in features:
            gap = longest - len(f["input_ids"])
            ids.append(f["input_ids"] + [PAD] * gap)
            mask.append([1] * len(f["input_ids"]) + [0] * gap)
            labels.append(f["labels"] + [-100] * gap)
        return {
            "input_ids": torch.tensor(ids),
            "attention_mask": torch.tensor(mask),
            "labels": torch.tensor(labels),
        }


class WeightedNERTrainer(Trainer):
    def __init__(self, *args, class_weights=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.class_weights = class_weights.to(self.args.device)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.logits
        loss = F.cross_entropy(
            logits.view(-1, logits.size(-1)).float(),
            labels.view(-1),
            weight=self.class_weights,
            ignore_index=-100,
            label_smoothing=self.args.label_smoothing_factor if model.training else 0.0,
            reduction="sum",
        )
        if num_items_in_batch is None:
            num_items_in_batch = (labels != -100).sum()
        loss = loss / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


def preprocess_logits_for_metrics(logits, labels):
    # do not ship the whole logits to the host
    if isinstance(logits, tuple):
        logits = logits[0]
    return logits.argmax(dim=-1)


def compute_metrics(p):
    preds, labels = p.predictions, p.label_ids
    keep = labels != -100
    preds, labels = preds[keep], labels[keep]
    f1s = []
    for c in range(1, len(LABELS)):
        tp = np.sum((preds == c) & (labels == c))
        fp = np.sum((preds == c) & (labels != c))
        fn = np.sum((preds != c) & (labels == c))
        f1s.append(2 * tp / max(1, 2 * tp + fp + fn))
    return {"accuracy": float((preds == labels).mean()), "macro_f1": float(np.mean(f1s))}


class GpuMemoryCallback(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs is not None and torch.cuda.is_available():
            print(f"  step {state.global_step}: "
                  f"peak allocated {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB, "
                  f"peak reserved {torch.cuda.max_memory_reserved() / 2**20:.0f} MiB")


def main():
    set_seed(2024)
    config = ModernBertConfig(
        vocab_size=VOCAB,
        hidden_size=1024,
        intermediate_size=2624,
        num_hidden_layers=20,
        num_attention_heads=16,
        max_position_embeddings=2048,
        local_attention=128,
        classifier_dropout=0.1,
        pad_token_id=PAD, bos_token_id=CLS, eos_token_id=SEP, cls_token_id=CLS, sep_token_id=SEP,
        id2label=id2label, label2id=label2id,
    )
    config._attn_implementation = "sdpa"
    with torch.device("cuda"):
        model = ModernBertForTokenClassification(config)
    print(f"params: {model.num_parameters() / 1e6:.1f}M")

    train_ds = SyntheticNER(512, seed=1)
    eval_ds = SyntheticNER(96, seed=2)

    weights = torch.ones(len(LABELS))
    weights[0] = 0.4

    with tempfile.TemporaryDirectory() as out:
        args = TrainingArguments(
            output_dir=out,
            max_steps=8,
            per_device_train_batch_size=24,
            per_device_eval_batch_size=32,
            gradient_accumulation_steps=2,
            learning_rate=3e-4,
            optim="adafactor",
            lr_scheduler_type="linear",
            warmup_steps=2,
            weight_decay=0.01,
            max_grad_norm=1.0,
            label_smoothing_factor=0.1,
            bf16=True,
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": False},
            train_sampling_strategy="group_by_length",
            eval_strategy="steps",
            eval_steps=4,
            save_strategy="no",
            logging_steps=2,
            disable_tqdm=True,
            report_to="none",
            remove_unused_columns=False,
            label_names=["labels"],
            dataloader_num_workers=0,
            metric_for_best_model="macro_f1",
        )
        trainer = WeightedNERTrainer(
            model=model,
            args=args,
            data_collator=PadCollator(),
            train_dataset=train_ds,
            eval_dataset=eval_ds,
            compute_metrics=compute_metrics,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            callbacks=[GpuMemoryCallback()],
            class_weights=weights,
        )
        result = trainer.train()
        print("train loss", result.training_loss)
        metrics = trainer.evaluate()
        print({k: round(v, 4) for k, v in metrics.items()})
        trainer.save_model(os.path.join(out, "final"))
        print("saved:", sorted(os.listdir(os.path.join(out, "final"))))
        if metrics["eval_macro_f1"] < 0.05:
            print("warning: f1 still near zero (expected after so few steps)")

    print("torch.cuda.max_memory_allocated() =", torch.cuda.max_memory_allocated())
    print("torch.cuda.max_memory_reserved()  =", torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    main()
