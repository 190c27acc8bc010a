"""BERT masked-language modelling with dynamic padding and a warm-up scheduler; empty_cache each epoch."""
import random
import torch
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForMaskedLM, get_linear_schedule_with_warmup

MASK, PAD, VOCAB = 103, 0, 30522
random.seed(0)
torch.manual_seed(0)


class Lines(Dataset):
    def __init__(self, n):
        self.lens = [min(512, int(random.lognormvariate(4.8, 0.6)) + 8) for _ in range(n)]
        self.g = torch.Generator().manual_seed(0)
        self.items = [torch.randint(1000, VOCAB, (k,), generator=self.g) for k in self.lens]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


class MLMCollator:
    def __init__(self, prob=0.15):
        self.prob = prob
        self.g = torch.Generator().manual_seed(9)

    def __call__(self, items):
        n = max(len(x) for x in items)
        n = (n + 7) // 8 * 8
        ids = torch.full((len(items), n), PAD)
        for i, x in enumerate(items):
            ids[i, : len(x)] = x
        att = (ids != PAD).long()
        sel = (torch.rand(ids.shape, generator=self.g) < self.prob) & att.bool()
        labels = torch.where(sel, ids, torch.tensor(-100))
        ids = torch.where(sel, torch.tensor(MASK), ids)
        return {"input_ids": ids, "attention_mask": att, "labels": labels}


def main():
    device = torch.device("cuda")
    cfg = BertConfig(vocab_size=VOCAB, hidden_size=768, num_hidden_layers=8, num_attention_heads=12,
                     intermediate_size=3072)
    model = BertForMaskedLM(cfg).to(device)
    loader = DataLoader(Lines(24 * 5), batch_size=24, collate_fn=MLMCollator(), shuffle=False)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
    sched = get_linear_schedule_with_warmup(opt, 2, 10)
    step = 0
    for epoch in range(2):
        model.train()
        running = 0.0
        for batch in loader:
            batch = {k: v.to(device, non_blocking=True) for k, v in batch.items()}
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sched.step()
            opt.zero_grad()
            running += loss.item()
            step += 1
            print(f"step {step} shape {tuple(batch['input_ids'].shape)} loss {loss.item():.3f} "
                  f"reserved {torch.cuda.memory_reserved()}")
        print(f"epoch {epoch} avg {running / len(loader):.3f} peak {torch.cuda.max_memory_allocated()}")
        del batch, loss
        torch.cuda.empty_cache()
        print("after empty_cache:", torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
    print("max_memory_allocated", torch.cuda.max_memory_allocated())
    print("max_memory_reserved", torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    main()
