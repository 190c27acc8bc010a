# Headline generation with Pegasus (Seq2SeqTrainer).
# Follows the recipe of the paper: Adafactor, label smoothing 0.1; fp16 with dynamic loss scaling.
# Batches are grouped by length, evaluation generates.
import shutil
import tempfile

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import (PegasusConfig, PegasusForConditionalGeneration, Seq2SeqTrainer,
                          Seq2SeqTrainingArguments, set_seed)

set_seed(2024)

config = PegasusConfig(
    vocab_size=96103,
    d_model=1024,
    encoder_layers=12, decoder_layers=12,
    encoder_attention_heads=16, decoder_attention_heads=16,
    encoder_ffn_dim=4096, decoder_ffn_dim=4096,
    max_position_embeddings=512,
    scale_embedding=True,
    activation_function="relu",
    pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, forced_eos_token_id=1,
)
model = PegasusForConditionalGeneration(config)
model.generation_config.max_length = None
model.generation_config.max_new_tokens = 24
print("parameters (M):", round(model.num_parameters() / 1e6, 1))


class Articles(Dataset):
    def __init__(self, n, rng):
        self.src, self.tgt = [], []
        for _ in range(n):
            ls = int(np.clip(rng.lognormal(5.6, 0.5), 40, 511))
            lt = int(rng.integers(10, 64))
            src = rng.zipf(1.3, ls) % 90000 + 105
            self.src.append(src.tolist() + [1])
            # target copies parts of the source, as a headline would
            self.tgt.append(rng.choice(src, lt).tolist() + [1])

    def __len__(self):
        return len(self.src)

    def __getitem__(self, i):
        return {"input_ids": self.src[i], "labels": self.tgt[i], "length": len(self.src[i])}


def collate(features):
    def pad(seqs, value, multiple=8):
        n = max(len(s) for s in seqs)
        n = (n + multiple - 1) // multiple * multiple
        return torch.tensor([s + [value] * (n - len(s)) for s in seqs])

    input_ids = pad([f["input_ids"] for f in features], 0)
    labels = pad([f["labels"] for f in features], -100)
    return {
        "input_ids": input_ids,
        "attention_mask": (input_ids != 0).long(),
        "labels": labels,
        # with label smoothing the Trainer takes the labels away, the decoder needs its own inputs
        "decoder_input_ids": model.prepare_decoder_input_ids_from_labels(labels),
    }


def unigram_f1(pred):
    preds, refs = pred.predictions, pred.label_ids
    scores = []
    for p, r in zip(preds, refs):
        p = {int(t) for t in p if t > 1}
        r = {int(t) for t in r if t > 1}
        hit = len(p & r)
        scores.append(2 * hit / max(len(p) + len(r), 1))
    return {"unigram_f1": float(np.mean(scores)), "gen_len": float(np.mean([(p > 1).sum() for p in preds]))}


rng = np.random.default_rng(2024)
train_ds, eval_ds = Articles(96, rng), Articles(20, rng)
out_dir = tempfile.mkdtemp(prefix="pegasus_")

args = Seq2SeqTrainingArguments(
    output_dir=out_dir,
    num_train_epochs=1,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    per_device_eval_batch_size=10,
    optim="adafactor",
    learning_rate=1e-4,
    lr_scheduler_type="constant_with_warmup",
    warmup_steps=2,
    label_smoothing_factor=0.1,
    fp16=True,
    train_sampling_strategy="group_by_length",
    length_column_name="length",
    logging_steps=2,
    eval_strategy="steps",
    eval_steps=3,
    save_strategy="steps",
    save_steps=6,
    save_total_limit=1,
    save_only_model=True,
    predict_with_generate=True,
    generation_num_beams=2,
    report_to=[],
    seed=2024,
)

trainer = Seq2SeqTrainer(model=model, args=args, train_dataset=train_ds, eval_dataset=eval_ds,
                         data_collator=collate, compute_metrics=unigram_f1)
trainer.train()
for row in trainer.state.log_history:
    print(row)
print("allocated  %.2f GB" % (torch.cuda.memory_allocated() / 1e9))
print("max alloc  %.2f GB" % (torch.cuda.max_memory_allocated() / 1e9))
print("max resv   %.2f GB" % (torch.cuda.max_memory_reserved() / 1e9))
shutil.rmtree(out_dir)
