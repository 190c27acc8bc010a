"""AdaLoRA on an XLM-R-base-shaped classifier through the HF Trainer, length-grouped batches."""
import tempfile

import numpy as np
import torch
from peft import AdaLoraConfig, TaskType, get_peft_model
from torch.utils.data import Dataset
from transformers import (Trainer, TrainerCallback, TrainingArguments, XLMRobertaConfig,
                          XLMRobertaForSequenceClassification, set_seed)

NUM_LABELS = 5
VOCAB = 250002


class ReviewDataset(Dataset):
    """Synthetic reviews: log-normal lengths, star rating hidden in the first few tokens."""

    def __init__(self, n, seed, max_len=512):
        rng = np.random.default_rng(seed)
        lengths = np.clip(rng.lognormal(5.0, 0.7, n).astype(int), 16, max_len)
        self.rows = []
        for length in lengths:
            label = int(rng.integers(NUM_LABELS))
            ids = rng.integers(5, VOCAB, length)
            ids[0], ids[-1] = 0, 2
            ids[1:6] = 1000 + label
            self.rows.append({"input_ids": ids.tolist(), "labels": label, "length": int(length)})

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


class PadCollator:
    def __init__(self, multiple=8):
        self.multiple = multiple

    def __call__(self, rows):
        longest = max(len(r["input_ids"]) for r in rows)
        longest = -(-longest // self.multiple) * self.multiple
        ids = torch.ones(len(rows), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for i, r in enumerate(rows):
            ids[i, : len(r["input_ids"])] = torch.tensor(r["input_ids"])
            mask[i, : len(r["input_ids"])] = 1
        return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([r["labels"] for r in rows])}


class RankAllocator(TrainerCallback):
    def on_optimizer_step(self, args, state, control, model=None, **kwargs):
        model.base_model.update_and_allocate(state.global_step)


class MemoryCallback(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        print(f"  step {state.global_step}: {torch.cuda.memory_allocated() / 1e9:.2f} GB now, "
              f"{torch.cuda.max_memory_allocated() / 1e9:.2f} GB peak")


def metrics(pred):
    guess = pred.predictions.argmax(-1)
    return {"accuracy": float((guess == pred.label_ids).mean()),
            "mae": float(np.abs(guess - pred.label_ids).mean())}


def main():
    set_seed(139)
    config = XLMRobertaConfig(vocab_size=VOCAB, hidden_size=768, num_hidden_layers=12, num_attention_heads=12,
                              intermediate_size=3072, max_position_embeddings=514, type_vocab_size=1,
                              pad_token_id=1, bos_token_id=0, eos_token_id=2, num_labels=NUM_LABELS)
    model = XLMRobertaForSequenceClassification(config)

    max_steps = 7
    peft_config = AdaLoraConfig(
        task_type=TaskType.SEQ_CLS, init_r=24, target_r=8, lora_alpha=32, lora_dropout=0.1,
        tinit=1, tfinal=2, deltaT=1, total_step=max_steps, orth_reg_weight=0.3,
        target_modules=["query", "key", "value", "intermediate.dense"],
    )
    model = get_peft_model(model, peft_config)
    model.print_trainable_parameters()

    with tempfile.TemporaryDirectory() as out:
        args = TrainingArguments(
            output_dir=out,
            per_device_train_batch_size=64,
            per_device_eval_batch_size=64,
            max_steps=max_steps,
            learning_rate=1e-3,
            warmup_steps=1,
            lr_scheduler_type="linear",
            bf16=True,
            max_grad_norm=1.0,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=4,
            save_strategy="no",
            report_to=[],
            train_sampling_strategy="group_by_length",
            length_column_name="length",
            label_names=["labels"],
            remove_unused_columns=False,
            dataloader_num_workers=0,
            disable_tqdm=True,
            seed=139,
        )
        trainer = Trainer(
            model=model,
            args=args,
            train_dataset=ReviewDataset(64 * max_steps, seed=1),
            eval_dataset=ReviewDataset(160, seed=2),
            data_collator=PadCollator(),
            compute_metrics=metrics,
            callbacks=[RankAllocator(), MemoryCallback()],
        )
        trainer.train()
        print(trainer.evaluate())
        trainer.save_model(out + "/adapter")
    print(f"final peak {torch.cuda.max_memory_allocated() / 2**30:.3f} GiB, "
          f"reserved {torch.cuda.max_memory_reserved() / 2**30:.3f} GiB")


if __name__ == "__main__":
    main()
