"""Continued pre-training of an OLMo2-style 0.5B decoder on a (synthetic) domain corpus.

Documents keep their natural length; we group similar lengths together and pad
dynamically instead of packing.
"""
import math
import tempfile

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import (
    Olmo2Config,
    Olmo2ForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

VOCAB_SIZE = 32768
PAD_ID = 1
EOS_ID = 2
MAX_LEN = 1024
N_TRAIN = 480
N_EVAL = 48


class DomainCorpus(Dataset):
    """Log-normal document lengths, Zipf-distributed tokens."""

    def __init__(self, n_docs, seed):
        rng = np.random.default_rng(seed)
        lengths = np.clip(rng.lognormal(mean=6.2, sigma=0.5, size=n_docs), 96, MAX_LEN).astype(int)
        self.docs = []
        for n in lengths:
            toks = np.minimum(rng.zipf(1.2, size=n - 1) + 3, VOCAB_SIZE - 1)
            self.docs.append(toks.tolist() + [EOS_ID])

    def __len__(self):
        return len(self.docs)

    def __getitem__(self, i):
        return {"input_ids": self.docs[i]}


class DynamicPaddingCollator:
    def __init__(self, pad_token_id, pad_to_multiple_of=64):
        self.pad_token_id = pad_token_id
        self.multiple = pad_to_multiple_of

    def __call__(self, features):
        longest = max(len(f["input_ids"]) for f in features)
        longest = min(MAX_LEN, math.ceil(longest / self.multiple) * self.multiple)
        input_ids = torch.full((len(features), longest), self.pad_token_id, dtype=torch.long)
        attention_mask = torch.zeros_like(input_ids)
        for row, f in enumerate(features):
            ids = f["input_ids"][:longest]
            input_ids[row, : len(ids)] = torch.tensor(ids)
            attention_mask[row, : len(ids)] = 1
        labels = input_ids.masked_fill(attention_mask == 0, -100)
        return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


class MemoryLogger(TrainerCallback):
    def on_evaluate(self, args, state, control, **kwargs):
        alloc = torch.cuda.max_memory_allocated() / 2**30
        reserved = torch.cuda.max_memory_reserved() / 2**30
        print(f"[step {state.global_step}] peak alloc {alloc:.2f} GiB / reserved {reserved:.2f} GiB")


def preprocess_logits_for_metrics(logits, labels):
    # keep only the argmax, otherwise the full logits pile up during evaluation
    if isinstance(logits, tuple):
        logits = logits[0]
    return logits.argmax(dim=-1)


def compute_metrics(eval_pred):
    preds, labels = eval_pred
    preds, labels = preds[:, :-1], labels[:, 1:]
    mask = labels != -100
    return {"token_accuracy": float((preds[mask] == labels[mask]).mean())}


def main():
    set_seed(1234)
    config = Olmo2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=1280,
        intermediate_size=5120,
        num_hidden_layers=16,
        num_attention_heads=20,
        num_key_value_heads=20,
        max_position_embeddings=4096,
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
        bos_token_id=None,
        tie_word_embeddings=False,
        use_cache=False,
    )
    model = Olmo2ForCausalLM(config)
    print(f"parameters: {model.num_parameters() / 1e6:.1f}M")

    train_ds, eval_ds = DomainCorpus(N_TRAIN, seed=0), DomainCorpus(N_EVAL, seed=1)

    with tempfile.TemporaryDirectory() as output_dir:
        args = TrainingArguments(
            output_dir=output_dir,
            max_steps=12,
            per_device_train_batch_size=8,
            per_device_eval_batch_size=8,
            gradient_accumulation_steps=4,
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": False},
            bf16=True,
            optim="adamw_torch_fused",
            learning_rate=1e-4,
            weight_decay=0.1,
            adam_beta2=0.95,
            max_grad_norm=1.0,
            lr_scheduler_type="cosine",
            warmup_steps=2,
            train_sampling_strategy="group_by_length",
            logging_steps=2,
            eval_strategy="steps",
            eval_steps=6,
            save_strategy="steps",
            save_steps=12,
            save_only_model=True,
            save_total_limit=1,
            dataloader_num_workers=0,
            report_to="none",
            disable_tqdm=True,
            seed=1234,
        )
        trainer = Trainer(
            model=model,
            args=args,
            train_dataset=train_ds,
            eval_dataset=eval_ds,
            data_collator=DynamicPaddingCollator(PAD_ID),
            compute_metrics=compute_metrics,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            callbacks=[MemoryLogger()],
        )
        result = trainer.train()
        print("train loss:", result.training_loss)
        print("last eval:", [h for h in trainer.state.log_history if "eval_loss" in h][-1])

    print("max_memory_allocated:", torch.cuda.max_memory_allocated())
    print("max_memory_reserved:", torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    main()
