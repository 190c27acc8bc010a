"""ColBERT-style late interaction retriever with mined hard negatives (accelerate, bf16)."""
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertModel, BertPreTrainedModel, get_linear_schedule_with_warmup

PAD, CLS, SEP, MASK = 0, 101, 102, 103
Q_MARK, D_MARK = 1, 2  # [unused0], [unused1]
QUERY_MAXLEN = 32
DOC_MAXLEN = 180
DIM = 128
NWAY = 4  # 1 positive + 3 hard negatives
BATCH_SIZE = 32
N_TRAIN = 512
N_DEV = 64
TEMPERATURE = 0.02


class ColBERT(BertPreTrainedModel):
    def __init__(self, config, dim=DIM):
        super().__init__(config)
        self.bert = BertModel(config, add_pooling_layer=False)
        self.linear = nn.Linear(config.hidden_size, dim, bias=False)
        self.post_init()

    def encode(self, input_ids, attention_mask):
        h = self.bert(input_ids, attention_mask=attention_mask).last_hidden_state
        return F.normalize(self.linear(h), p=2, dim=-1)

    def forward(self, query, docs):
        q = self.encode(**query)
        d = self.encode(**docs)
        # MaxSim of every query against every document in the batch
        sim = torch.einsum("qnd,mtd->qmnt", q.float(), d.float())
        sim = sim.masked_fill(docs["attention_mask"][None, :, None, :] == 0, -1e4)
        return sim.max(dim=-1).values.sum(dim=-1)  # (Q, Q * NWAY)


class Triples(Dataset):
    def __init__(self, n, vocab_size, seed):
        rng = random.Random(seed)
        word = lambda: rng.randrange(1000, vocab_size)
        self.rows = []
        for _ in range(n):
            q = [word() for _ in range(rng.randint(4, 14))]
            docs = []
            for j in range(NWAY):
                body = [word() for _ in range(rng.randint(40, 240))]
                if j == 0:  # the positive contains the query words
                    body[: len(q)] = q
                docs.append(body)
            self.rows.append((q, docs))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def pad_to_multiple(seqs, multiple=8):
    longest = max(len(s) for s in seqs)
    longest = (longest + multiple - 1) // multiple * multiple
    ids = torch.full((len(seqs), longest), PAD, dtype=torch.long)
    for i, s in enumerate(seqs):
        ids[i, : len(s)] = torch.tensor(s)
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


def collate(rows):
    # query augmentation: fill up to 32 tokens with [MASK]
    queries = []
    for q, _ in rows:
        ids = [CLS, Q_MARK] + q + [SEP]
        queries.append(ids + [MASK] * (QUERY_MAXLEN - len(ids)))
    docs = [[CLS, D_MARK] + d[: DOC_MAXLEN - 3] + [SEP] for _, ds in rows for d in ds]
    return pad_to_multiple(queries), pad_to_multiple(docs)


def main():
    set_seed(42)
    accelerator = Accelerator(mixed_precision="bf16")
    assert accelerator.device.type == "cuda"

    config = BertConfig(vocab_size=30522, attn_implementation="sdpa")
    model = ColBERT(config)

    train_loader = DataLoader(Triples(N_TRAIN, config.vocab_size, 0), batch_size=BATCH_SIZE, shuffle=True, collate_fn=collate, drop_last=True)
    dev_loader = DataLoader(Triples(N_DEV, config.vocab_size, 1), batch_size=BATCH_SIZE, collate_fn=collate)

    no_decay = ("bias", "LayerNorm.weight")
    groups = [
        {"params": [p for n, p in model.named_parameters() if not n.endswith(no_decay)], "weight_decay": 0.01},
        {"params": [p for n, p in model.named_parameters() if n.endswith(no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=2e-5)
    scheduler = get_linear_schedule_with_warmup(optimizer, 4, len(train_loader))
    model, optimizer, train_loader, dev_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, dev_loader, scheduler
    )

    model.train()
    for step, (query, docs) in enumerate(train_loader):
        scores = model(query, docs) / (TEMPERATURE * QUERY_MAXLEN)
        bsz = scores.size(0)
        target = torch.arange(bsz, device=scores.device) * NWAY
        in_batch = F.cross_entropy(scores, target)
        # hard-negative part: only the query's own NWAY documents
        own = scores.view(bsz, bsz, NWAY)[torch.arange(bsz), torch.arange(bsz)]
        nway = F.cross_entropy(own, torch.zeros(bsz, dtype=torch.long, device=scores.device))
        loss = nway + in_batch

        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 4 == 0:
            accelerator.print(f"step {step} docs {tuple(docs['input_ids'].shape)} nway {nway.item():.3f} ib {in_batch.item():.3f}")

    model.eval()
    rr, n = 0.0, 0
    for query, docs in dev_loader:
        with torch.no_grad():
            scores = model(query, docs)
        gold = torch.arange(scores.size(0), device=scores.device) * NWAY
        rank = (scores > scores.gather(1, gold[:, None])).sum(1) + 1
        rank = accelerator.gather_for_metrics(rank)
        rr += (1.0 / rank.float()).sum().item()
        n += rank.numel()
    accelerator.print(f"dev MRR {rr / n:.4f}")

    accelerator.print("max_memory_allocated:", torch.cuda.max_memory_allocated())
    accelerator.print("max_memory_reserved:", torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    main()
