import argparse
import tempfile

import numpy as np
import torch
from transformers import (
    BartConfig, BartForConditionalGeneration, GenerationConfig, Seq2SeqTrainer,
    Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration, TrainerCallback, set_seed,
)


class ReverseDataset(torch.utils.data.Dataset):
    """source: random tokens; target: the tokens reversed."""

    def __init__(self, n, vocab, min_len, max_len, eos, seed):
        rng = np.random.RandomState(seed)
        self.rows = []
        for _ in range(n):
            ln = rng.randint(min_len, max_len + 1)
            ids = rng.randint(10, vocab, size=ln).tolist()
            self.rows.append({"input_ids": ids + [eos], "labels": ids[::-1][: ln // 2] + [eos]})

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def make_collate(pad, model):
    def collate(feats):
        s = max(len(f["input_ids"]) for f in feats)
        t = max(len(f["labels"]) for f in feats)
        t = (t + 7) // 8 * 8
        batch = {
            "input_ids": torch.tensor([f["input_ids"] + [pad] * (s - len(f["input_ids"])) for f in feats]),
            "attention_mask": torch.tensor([[1] * len(f["input_ids"]) + [0] * (s - len(f["input_ids"])) for f in feats]),
            "labels": torch.tensor([f["labels"] + [-100] * (t - len(f["labels"])) for f in feats]),
        }
        # label smoothing happens in the Trainer, so the model is not given the labels
        batch["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels=batch["labels"])
        return batch
    return collate


def compute_metrics(p):
    preds, labels = p
    n = min(preds.shape[1] - 1, labels.shape[1])
    mask = labels[:, :n] != -100
    acc = ((preds[:, 1:n + 1] == labels[:, :n]) & mask).sum() / mask.sum()
    return {"token_acc": float(acc), "gen_len": float(preds.shape[1])}


class PrintLoss(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kw):
        if logs and "loss" in logs:
            print("step", state.global_step, "loss", logs["loss"])


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--arch", choices=["t5", "bart"], default="t5")
    p.add_argument("--beams", type=int, default=1)
    p.add_argument("--bs", type=int, default=16)
    a = p.parse_args()
    set_seed(11)
    vocab = 8000
    if a.arch == "t5":
        model = T5ForConditionalGeneration(T5Config(
            vocab_size=vocab, d_model=512, d_kv=64, d_ff=1024, num_layers=6, num_heads=8,
            feed_forward_proj="gated-gelu", decoder_start_token_id=0, pad_token_id=0, eos_token_id=1))
        pad, eos = 0, 1
    else:
        model = BartForConditionalGeneration(BartConfig(
            vocab_size=vocab, d_model=512, encoder_layers=6, decoder_layers=6, encoder_attention_heads=8,
            decoder_attention_heads=8, encoder_ffn_dim=2048, decoder_ffn_dim=2048, max_position_embeddings=512))
        pad, eos = model.config.pad_token_id, model.config.eos_token_id
    train = ReverseDataset(a.bs * 8, vocab, 90, 250, eos, 0)
    evald = ReverseDataset(24, vocab, 90, 120, eos, 1)
    gen = GenerationConfig(
        max_length=40, num_beams=a.beams, min_length=40, pad_token_id=pad, eos_token_id=eos,
        decoder_start_token_id=model.config.decoder_start_token_id)
    with tempfile.TemporaryDirectory() as tmp:
        args = Seq2SeqTrainingArguments(
            output_dir=tmp, per_device_train_batch_size=a.bs, per_device_eval_batch_size=8, max_steps=8,
            learning_rate=3e-4, warmup_steps=2, lr_scheduler_type="cosine", bf16=True, logging_steps=1,
            eval_strategy="steps", eval_steps=4, predict_with_generate=True, generation_config=gen,
            save_strategy="no", report_to=[], label_smoothing_factor=0.1, train_sampling_strategy="random",
            disable_tqdm=True, dataloader_num_workers=0)
        tr = Seq2SeqTrainer(model=model, args=args, train_dataset=train, eval_dataset=evald,
                            data_collator=make_collate(pad, model), compute_metrics=compute_metrics,
                            callbacks=[PrintLoss()])
        tr.train()
        out = tr.predict(evald, max_length=48, num_beams=a.beams)
        print("predictions", out.predictions.shape)


if __name__ == "__main__":
    main()
