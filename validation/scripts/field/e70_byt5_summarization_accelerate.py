#!/usr/bin/env python
"""Fine-tune a ByT5-small sized encoder-decoder on (fake) article/summary pairs with Accelerate, fp16."""
import argparse
from collections import Counter

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset
from transformers import T5Config, T5ForConditionalGeneration, get_scheduler
from transformers.optimization import Adafactor

BYTE_OFFSET = 3  # 0 = pad, 1 = eos, 2 = unk


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--max_source_length", type=int, default=1024)
    p.add_argument("--max_target_length", type=int, default=192)
    p.add_argument("--train_batch_size", type=int, default=8)
    p.add_argument("--eval_batch_size", type=int, default=16)
    p.add_argument("--num_train_examples", type=int, default=160)
    p.add_argument("--num_eval_examples", type=int, default=40)
    p.add_argument("--num_epochs", type=int, default=2)
    p.add_argument("--learning_rate", type=float, default=1e-3)
    p.add_argument("--label_smoothing", type=float, default=0.1)
    p.add_argument("--num_beams", type=int, default=2)
    p.add_argument("--gen_tokens", type=int, default=40)
    p.add_argument("--gradient_accumulation_steps", type=int, default=2)
    p.add_argument("--seed", type=int, default=42)
    return p.parse_args()


class FakeNews(Dataset):
    words = "the market rose fell after minister said on monday that growth rain team won lost city plan".split()

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.items = []
        for _ in range(n):
            n_src = int(torch.randint(90, 260, (1,), generator=g))
            n_tgt = int(torch.randint(12, 45, (1,), generator=g))
            src = torch.randint(len(self.words), (n_src,), generator=g).tolist()
            article = " ".join(self.words[i] for i in src)
            summary = " ".join(self.words[i] for i in src[:n_tgt])
            self.items.append((article, summary))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def byte_encode(text, max_len):
    return [b + BYTE_OFFSET for b in text.encode("utf-8")][: max_len - 1] + [1]


def byte_decode(ids):
    return bytes(max(0, i - BYTE_OFFSET) % 256 for i in ids if i >= BYTE_OFFSET).decode("utf-8", errors="ignore")


def pad(seqs, value):
    n = max(map(len, seqs))
    return torch.tensor([s + [value] * (n - len(s)) for s in seqs])


def unigram_f1(pred, ref):
    p, r = Counter(pred.split()), Counter(ref.split())
    overlap = sum((p & r).values())
    if overlap == 0:
        return 0.0
    prec, rec = overlap / sum(p.values()), overlap / sum(r.values())
    return 2 * prec * rec / (prec + rec)


def main():
    args = parse_args()
    accelerator = Accelerator(
        mixed_precision="fp16", gradient_accumulation_steps=args.gradient_accumulation_steps
    )
    assert accelerator.device.type == "cuda"
    set_seed(args.seed)

    config = T5Config(
        vocab_size=384, d_model=1472, d_kv=64, d_ff=3584, num_layers=12, num_decoder_layers=4, num_heads=6,
        feed_forward_proj="gated-gelu", dropout_rate=0.1, tie_word_embeddings=False,
        pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
    )
    model = T5ForConditionalGeneration(config)

    def collate(batch):
        src = pad([byte_encode(a, args.max_source_length) for a, _ in batch], 0)
        tgt = pad([byte_encode(s, args.max_target_length) for _, s in batch], -100)
        return {"input_ids": src, "attention_mask": (src != 0).long(), "labels": tgt}

    train_dl = DataLoader(
        FakeNews(args.num_train_examples, 0), shuffle=True, batch_size=args.train_batch_size, collate_fn=collate
    )
    eval_dl = DataLoader(FakeNews(args.num_eval_examples, 1), batch_size=args.eval_batch_size, collate_fn=collate)

    optimizer = Adafactor(
        model.parameters(), lr=args.learning_rate, scale_parameter=False, relative_step=False, warmup_init=False
    )
    max_steps = args.num_epochs * len(train_dl) // args.gradient_accumulation_steps
    lr_scheduler = get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=max_steps)
    model, optimizer, train_dl, eval_dl, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dl, eval_dl, lr_scheduler
    )
    accelerator.print(f"***** {sum(p.numel() for p in model.parameters()) / 1e6:.0f}M params, {max_steps} updates *****")

    for epoch in range(args.num_epochs):
        model.train()
        total_loss = torch.zeros((), device=accelerator.device)
        for batch in train_dl:
            with accelerator.accumulate(model):
                labels = batch.pop("labels")
                decoder_input_ids = accelerator.unwrap_model(model).prepare_decoder_input_ids_from_labels(labels)
                logits = model(**batch, decoder_input_ids=decoder_input_ids, use_cache=False).logits
                loss = F.cross_entropy(
                    logits.view(-1, logits.size(-1)),
                    labels.view(-1),
                    ignore_index=-100,
                    label_smoothing=args.label_smoothing,
                )
                total_loss += loss.detach().float()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()

        model.eval()
        scores = []
        for batch in eval_dl:
            with torch.no_grad():
                generated = accelerator.unwrap_model(model).generate(
                    batch["input_ids"],
                    attention_mask=batch["attention_mask"],
                    num_beams=args.num_beams,
                    min_new_tokens=args.gen_tokens,
                    max_new_tokens=args.gen_tokens,
                )
            generated = accelerator.pad_across_processes(generated, dim=1, pad_index=0)
            labels = accelerator.pad_across_processes(batch["labels"], dim=1, pad_index=-100)
            generated, labels = accelerator.gather_for_metrics((generated, labels))
            for p, r in zip(generated.cpu().tolist(), labels.cpu().tolist()):
                scores.append(unigram_f1(byte_decode(p), byte_decode(r)))
        accelerator.print(
            f"epoch {epoch}: train_loss {total_loss.item() / len(train_dl):.4f} "
            f"unigram-F1 {sum(scores) / len(scores):.4f} (n={len(scores)}) "
            f"peak {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB"
        )

    accelerator.print("max_memory_allocated", torch.cuda.max_memory_allocated())
    accelerator.print("max_memory_reserved", torch.cuda.max_memory_reserved())
    accelerator.end_training()


if __name__ == "__main__":
    main()
