# sequence classification with Accelerate (modelled on the nlp_example)
import argparse
import random

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

MAX_GPU_BATCH_SIZE = 32
EVAL_BATCH_SIZE = 64


class FakeMRPC(Dataset):
    def __init__(self, n, seed):
        rnd = random.Random(seed)
        self.items = []
        for _ in range(n):
            ln = rnd.randint(24, 256)
            y = rnd.randint(0, 1)
            ids = [101] + [rnd.randint(1000, 15000) + y * 10 for _ in range(ln)] + [102]
            self.items.append((ids, y))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate_fn(batch, multiple=8):
    m = max(len(x[0]) for x in batch)
    m = -(-m // multiple) * multiple
    ids = torch.zeros(len(batch), m, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, (x, _) in enumerate(batch):
        ids[i, : len(x)] = torch.tensor(x)
        mask[i, : len(x)] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([y for _, y in batch])}


def training_function(config, args):
    accelerator = Accelerator(mixed_precision=args.mixed_precision,
                              gradient_accumulation_steps=args.gradient_accumulation_steps)
    set_seed(config["seed"])
    train_dl = DataLoader(FakeMRPC(config["batch_size"] * 12, 0), shuffle=True, collate_fn=collate_fn,
                          batch_size=config["batch_size"], drop_last=True)
    eval_dl = DataLoader(FakeMRPC(150, 1), shuffle=False, collate_fn=collate_fn, batch_size=EVAL_BATCH_SIZE)
    model = BertForSequenceClassification(BertConfig(
        vocab_size=16000, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, num_labels=2))
    model = model.to(accelerator.device)
    no_decay = ["bias", "LayerNorm.weight"]
    groups = [
        {"params": [p for n, p in model.named_parameters() if not any(d in n for d in no_decay)], "weight_decay": 0.01},
        {"params": [p for n, p in model.named_parameters() if any(d in n for d in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=config["lr"])
    sched = get_linear_schedule_with_warmup(optimizer, 2, len(train_dl) * config["num_epochs"])
    model, optimizer, train_dl, eval_dl, sched = accelerator.prepare(model, optimizer, train_dl, eval_dl, sched)

    for epoch in range(config["num_epochs"]):
        model.train()
        running = torch.zeros((), device=accelerator.device)
        for step, batch in enumerate(train_dl):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                running += loss.detach().float()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                sched.step()
                optimizer.zero_grad()
            accelerator.print(f"epoch {epoch} micro {step} loss {loss.item():.4f} len {batch['input_ids'].shape[1]}")

        model.eval()
        preds, refs = [], []
        for batch in eval_dl:
            with torch.no_grad():
                out = model(**batch)
            p, r = accelerator.gather_for_metrics((out.logits.argmax(-1), batch["labels"]))
            preds.append(p)
            refs.append(r)
        preds, refs = torch.cat(preds), torch.cat(refs)
        accelerator.print(f"epoch {epoch}: n={len(preds)} acc={(preds == refs).float().mean().item():.3f}")
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mixed_precision", default="bf16", choices=["no", "fp16", "bf16"])
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    args = parser.parse_args()
    training_function({"lr": 2e-5, "num_epochs": 1, "seed": 42, "batch_size": MAX_GPU_BATCH_SIZE}, args)


if __name__ == "__main__":
    main()
