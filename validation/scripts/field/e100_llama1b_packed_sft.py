#!/usr/bin/env python
"""Full-parameter SFT of a Llama-3.2-1B sized model with the HF Trainer.

Documents are packed into blocks of 2048 tokens (the classic `group_texts` recipe), so there
is no padding at all. Adafactor is used to keep the optimizer state small.
"""
import math
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


@dataclass
class ModelArguments:
    vocab_size: int = 128256
    hidden_size: int = 2048
    intermediate_size: int = 8192
    num_hidden_layers: int = 16
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 64


@dataclass
class DataArguments:
    block_size: int = 2048
    n_train_docs: int = 260
    n_eval_docs: int = 60
    doc_len_mean: float = 6.0  # log-normal
    doc_len_sigma: float = 0.7
    eos_token_id: int = field(default=128001)


def fake_tokenized_docs(n, data_args, vocab_size, seed):
    rng = np.random.default_rng(seed)
    docs = []
    for _ in range(n):
        length = int(np.clip(rng.lognormal(data_args.doc_len_mean, data_args.doc_len_sigma), 32, 4096))
        # zipf-ish unigram distribution, looks a bit more like text than uniform
        ids = np.minimum(rng.zipf(1.2, size=length), vocab_size - 300)
        docs.append(ids.tolist() + [min(data_args.eos_token_id, vocab_size - 1)])
    return docs


def group_texts(docs, block_size):
    stream = list(chain.from_iterable(docs))
    total = (len(stream) // block_size) * block_size
    return [stream[i : i + block_size] for i in range(0, total, block_size)]


class PackedDataset(Dataset):
    def __init__(self, blocks):
        self.blocks = [torch.tensor(b, dtype=torch.long) for b in blocks]

    def __len__(self):
        return len(self.blocks)

    def __getitem__(self, idx):
        ids = self.blocks[idx]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def main():
    set_seed(13)
    model_args, data_args = ModelArguments(), DataArguments()

    config = LlamaConfig(
        vocab_size=model_args.vocab_size,
        hidden_size=model_args.hidden_size,
        intermediate_size=model_args.intermediate_size,
        num_hidden_layers=model_args.num_hidden_layers,
        num_attention_heads=model_args.num_attention_heads,
        num_key_value_heads=model_args.num_key_value_heads,
        head_dim=model_args.head_dim,
        max_position_embeddings=131072,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        use_cache=False,
    )
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    print(f"parameters: {model.num_parameters() / 1e9:.2f} B")

    train_ds = PackedDataset(
        group_texts(fake_tokenized_docs(data_args.n_train_docs, data_args, config.vocab_size, 0), data_args.block_size)
    )
    eval_ds = PackedDataset(
        group_texts(fake_tokenized_docs(data_args.n_eval_docs, data_args, config.vocab_size, 1), data_args.block_size)
    )
    print(f"{len(train_ds)} train blocks, {len(eval_ds)} eval blocks")

    training_args = TrainingArguments(
        output_dir="/tmp/llama1b-sft",
        per_device_train_batch_size=2,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=4,
        max_steps=6,
        learning_rate=1e-5,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        warmup_steps=2,
        optim="adafactor",
        weight_decay=0.01,
        max_grad_norm=1.0,
        bf16=True,
        tf32=True,
        neftune_noise_alpha=5.0,
        gradient_checkpointing=False,
        torch_empty_cache_steps=4,
        eval_strategy="steps",
        eval_steps=3,
        prediction_loss_only=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        dataloader_drop_last=True,
        disable_tqdm=True,
        seed=13,
    )
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_ds,
        eval_dataset=eval_ds,
        data_collator=default_data_collator,
    )
    result = trainer.train()
    trainer.log_metrics("train", result.metrics)

    metrics = trainer.evaluate()
    metrics["perplexity"] = math.exp(min(metrics["eval_loss"], 20.0))
    trainer.log_metrics("eval", metrics)

    print("max_memory_allocated", torch.cuda.max_memory_allocated())
    print("max_memory_reserved", torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    main()
