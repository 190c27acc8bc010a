"""BERT MLM pretraining with HF Trainer: dynamic padding, fp16, grad accumulation, an eval in the middle."""
import tempfile

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainerCallback, TrainingArguments, set_seed

set_seed(42)

VOCAB, MASK_ID, PAD_ID = 30522, 103, 0


class RandomText(Dataset):
    def __init__(self, n, seed):
        rng = np.random.default_rng(seed)
        self.rows = [rng.integers(1000, VOCAB, size=int(rng.integers(100, 512))) for _ in range(n)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": torch.as_tensor(self.rows[i])}


def collate(batch):
    seqs = [b["input_ids"] for b in batch]
    longest = max(len(s) for s in seqs)
    longest = (longest + 7) // 8 * 8
    ids = torch.full((len(seqs), longest), PAD_ID)
    for i, s in enumerate(seqs):
        ids[i, : len(s)] = s
    attention_mask = (ids != PAD_ID).long()
    labels = ids.clone()
    chosen = torch.bernoulli(torch.full(labels.shape, 0.15)).bool() & attention_mask.bool()
    labels[~chosen] = -100
    ids[chosen] = MASK_ID
    return {"input_ids": ids, "attention_mask": attention_mask, "labels": labels}


class MemoryCallback(TrainerCallback):
    def on_step_end(self, args, state, control, **kw):
        print("step", state.global_step, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())

    def on_evaluate(self, args, state, control, **kw):
        print("eval", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())


def preprocess_logits(logits, labels):
    return logits.argmax(-1)


def main():
    model = BertForMaskedLM(BertConfig(vocab_size=VOCAB))
    with tempfile.TemporaryDirectory() as out:
        args = TrainingArguments(
            output_dir=out,
            per_device_train_batch_size=24,
            per_device_eval_batch_size=32,
            gradient_accumulation_steps=2,
            max_steps=6,
            learning_rate=1e-4,
            warmup_steps=2,
            weight_decay=0.01,
            fp16=True,
            eval_strategy="steps",
            eval_steps=3,
            save_strategy="no",
            logging_steps=1,
            report_to=[],
            dataloader_num_workers=0,
            remove_unused_columns=False,
            seed=42,
        )
        trainer = Trainer(
            model=model,
            args=args,
            train_dataset=RandomText(600, 0),
            eval_dataset=RandomText(64, 1),
            data_collator=collate,
            preprocess_logits_for_metrics=preprocess_logits,
            compute_metrics=lambda p: {"acc": float((p.predictions == p.label_ids)[p.label_ids != -100].mean())},
            callbacks=[MemoryCallback()],
        )
        trainer.train()
    print("max_memory_allocated", torch.cuda.max_memory_allocated())
    print("max_memory_reserved", torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    main()
