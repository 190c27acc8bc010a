"""Seq2SeqTrainer on made-up summarisation data; adafactor + label smoothing + generate in evaluation."""
import sys
import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import (BartConfig, BartForConditionalGeneration, GenerationConfig, Seq2SeqTrainer,
                          Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration, set_seed)

set_seed(5)
which = sys.argv[1]
if which == "t5":
    model = T5ForConditionalGeneration(T5Config(d_model=768, d_ff=2048, d_kv=64, num_heads=12, num_layers=8, vocab_size=32128,
                                                feed_forward_proj="gated-gelu", decoder_start_token_id=0, pad_token_id=0, eos_token_id=1))
else:
    model = BartForConditionalGeneration(BartConfig(vocab_size=50265, d_model=768, encoder_layers=6, decoder_layers=6,
                                                    encoder_ffn_dim=3072, decoder_ffn_dim=3072, encoder_attention_heads=12, decoder_attention_heads=12))


class Rows(Dataset):
    def __init__(self, n, seed):
        r = np.random.default_rng(seed)
        self.rows = [dict(input_ids=r.integers(5, 30000, r.integers(100, 400)).tolist(), labels=r.integers(5, 30000, r.integers(20, 80)).tolist())
                     for _ in range(n)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def collate(rows):
    def pad(key, value):
        m = max(len(r[key]) for r in rows)
        m = (m + 7) // 8 * 8
        return torch.tensor([r[key] + [value] * (m - len(r[key])) for r in rows])

    ids = pad("input_ids", model.config.pad_token_id)
    labels = pad("labels", -100)
    return {"input_ids": ids, "attention_mask": (ids != model.config.pad_token_id).long(), "labels": labels,
            "decoder_input_ids": model.prepare_decoder_input_ids_from_labels(labels=labels)}


args = Seq2SeqTrainingArguments(
    output_dir="/tmp/memest_out/t5", per_device_train_batch_size=12, per_device_eval_batch_size=8, max_steps=6, eval_strategy="steps", eval_steps=3,
    save_strategy="no", logging_steps=1, report_to=[], bf16=which == "bart", label_smoothing_factor=0.1, optim="adafactor",
    learning_rate=1e-3, lr_scheduler_type="constant", predict_with_generate=which == "t5", dataloader_num_workers=0,
    generation_config=GenerationConfig(max_new_tokens=10, min_new_tokens=10, num_beams=2, decoder_start_token_id=model.config.decoder_start_token_id, pad_token_id=model.config.pad_token_id,
                                       eos_token_id=model.config.eos_token_id))
trainer = Seq2SeqTrainer(model=model, args=args, train_dataset=Rows(72, 0), eval_dataset=Rows(20, 1), data_collator=collate,
                         compute_metrics=lambda p: {"len": float(np.mean([len(x) for x in p.predictions]))} if which == "t5" else {})
print(trainer.train())
