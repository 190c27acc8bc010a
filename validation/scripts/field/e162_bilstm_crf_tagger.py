"""BiLSTM-CRF sequence tagger: hashed n-gram EmbeddingBag, packed LSTM, scripted CRF,
worker-fed IterableDataset with a copy-stream prefetcher."""
import random

import torch
import torch.nn as nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

VOCAB, NGRAMS, TAGS = 60_000, 200_000, 45
BATCH, STEPS, MAXLEN = 256, 7, 110
WORKERS = 2


class Sentences(IterableDataset):
    def __iter__(self):
        wi = get_worker_info()
        wid = wi.id if wi is not None else 0
        rng = random.Random(100 + wid)
        g = torch.Generator().manual_seed(100 + wid)
        while True:
            pool = sorted(min(MAXLEN, max(5, int(rng.lognormvariate(3.5, 0.6)))) for _ in range(BATCH * 2))
            half = rng.randint(0, 1)                   # one of the two length buckets
            yield [self.sentence(n, g) for n in pool[half * BATCH:(half + 1) * BATCH]]

    @staticmethod
    def sentence(n, g):
        words = (torch.rand(n, generator=g).pow(3) * (VOCAB - 1)).long() + 1
        counts = torch.randint(2, 10, (n,), generator=g)
        grams = torch.randint(0, NGRAMS, (int(counts.sum()),), generator=g)
        return words, counts, grams, words % TAGS


def collate(items):
    sents = items[0]
    words = pad_sequence([s[0] for s in sents], batch_first=True)
    tags = pad_sequence([s[3] for s in sents], batch_first=True)
    lens = torch.tensor([len(s[0]) for s in sents])
    counts = torch.cat([s[1] for s in sents])
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)[:-1]])
    return {"words": words, "tags": tags, "lens": lens, "offsets": offsets,
            "grams": torch.cat([s[2] for s in sents])}


class Prefetcher:
    def __init__(self, loader, device):
        self.it, self.device = iter(loader), device
        self.stream = torch.cuda.Stream()
        self.advance()

    def advance(self):
        cpu = next(self.it)
        with torch.cuda.stream(self.stream):
            self.batch = {k: v if k == "lens" else v.to(self.device, non_blocking=True) for k, v in cpu.items()}

    def next(self):
        torch.cuda.current_stream().wait_stream(self.stream)
        out = self.batch
        for k, v in out.items():
            if k != "lens":
                v.record_stream(torch.cuda.current_stream())
        self.advance()
        return out


@torch.jit.script
def crf_log_z(emit: torch.Tensor, mask: torch.Tensor, trans: torch.Tensor,
              start: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
    alpha = start + emit[:, 0]
    for t in range(1, emit.size(1)):
        nxt = torch.logsumexp(alpha.unsqueeze(2) + trans.unsqueeze(0), dim=1) + emit[:, t]
        alpha = torch.where(mask[:, t].unsqueeze(1), nxt, alpha)
    return torch.logsumexp(alpha + end, dim=1)


class VariationalDropout(nn.Dropout):
    def forward(self, x):
        if not self.training:
            return x
        return x * x.new_empty(x.size(0), 1, x.size(2)).bernoulli_(1 - self.p).div_(1 - self.p)


class Tagger(nn.Module):
    def __init__(self, dw=256, dn=128, hidden=640, layers=3):
        super().__init__()
        self.word = nn.Embedding(VOCAB, dw, padding_idx=0)
        self.gram = nn.EmbeddingBag(NGRAMS, dn, mode="mean")
        self.vdrop = VariationalDropout(0.3)
        self.lstm = nn.LSTM(dw + dn, hidden, layers, bidirectional=True, batch_first=True, dropout=0.2)
        self.out = nn.Linear(2 * hidden, TAGS)
        self.trans = nn.Parameter(torch.randn(TAGS, TAGS) * 0.01)
        self.start = nn.Parameter(torch.zeros(TAGS))
        self.end = nn.Parameter(torch.zeros(TAGS))

    def forward(self, b):
        words, tags, lens = b["words"], b["tags"], b["lens"]
        mask = words != 0
        if self.training:                                   # word dropout, padding untouched
            words = words.masked_fill((torch.rand(words.shape, device=words.device) < 0.05) & mask, 1)
        w = self.word(words)
        g = w.new_zeros(*words.shape, self.gram.embedding_dim)
        g[mask] = self.gram(b["grams"], b["offsets"])
        x = self.vdrop(torch.cat([w, g], -1))
        packed = pack_padded_sequence(x, lens, batch_first=True, enforce_sorted=False)
        h, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        emit = self.out(self.vdrop(h))
        log_z = crf_log_z(emit, mask, self.trans, self.start, self.end)
        gold = (emit.gather(2, tags.unsqueeze(2)).squeeze(2) * mask).sum(1)
        gold = gold + (self.trans[tags[:, :-1], tags[:, 1:]] * mask[:, 1:]).sum(1)
        last = tags.gather(1, (mask.sum(1, keepdim=True) - 1)).squeeze(1)
        gold = gold + self.start[tags[:, 0]] + self.end[last]
        return (log_z - gold).sum() / mask.sum()


def main():
    random.seed(5)
    torch.manual_seed(5)
    torch.jit.set_fusion_strategy([("STATIC", 0), ("DYNAMIC", 0)])
    loader = DataLoader(Sentences(), batch_size=1, collate_fn=collate, num_workers=WORKERS,
                        pin_memory=True, prefetch_factor=2, persistent_workers=True)
    net = Tagger().to("cuda")
    emb = [net.word.weight, net.gram.weight]
    ids = {id(p) for p in emb}
    opt = torch.optim.Adamax([{"params": emb, "lr": 2e-3},
                              {"params": [p for p in net.parameters() if id(p) not in ids]}], lr=1e-3)
    feed = Prefetcher(loader, "cuda")
    for step in range(STEPS):
        batch = feed.next()
        loss = net(batch)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        opt.step()
        print(f"step {step} T={batch['words'].shape[1]:3d} tokens={int(batch['lens'].sum())} nll/token {loss.item():.4f} "
              f"alloc {torch.cuda.memory_allocated() >> 20} MiB peak {torch.cuda.max_memory_allocated() >> 20} MiB")
    print(torch.cuda.memory_summary(abbreviated=True))


if __name__ == "__main__":
    main()
