"""
Small Falcon-H1 style hybrid (attention + Mamba2 heads in parallel), trained on a synthetic
associative recall task. No mamba_ssm / causal_conv1d on this box, so transformers falls back
to the pure torch SSD scan; keep the chunk size small or it eats all the memory.
"""
import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset
from transformers import FalconH1Config, FalconH1ForCausalLM


class MQAR(IterableDataset):
    """Multi-query associative recall: k v k v ... | filler ... k -> v"""

    def __init__(self, n_samples, seq_len, vocab, n_pairs, seed):
        self.n_samples = n_samples
        self.seq_len = seq_len
        self.vocab = vocab
        self.n_pairs = n_pairs
        self.seed = seed

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed)
        half = self.vocab // 2
        for _ in range(self.n_samples):
            keys = torch.randperm(half - 1, generator=g)[: self.n_pairs] + 1
            vals = torch.randint(half, self.vocab, (self.n_pairs,), generator=g)
            x = torch.zeros(self.seq_len, dtype=torch.long)
            y = torch.full((self.seq_len,), -100, dtype=torch.long)
            x[0 : 2 * self.n_pairs : 2] = keys
            x[1 : 2 * self.n_pairs : 2] = vals
            # queries are scattered in the remaining part of the sequence
            free = self.seq_len - 2 * self.n_pairs
            pos = torch.randperm(free, generator=g)[: self.n_pairs] + 2 * self.n_pairs
            x[pos] = keys
            y[pos] = vals
            yield x, y


def build_model(args):
    cfg = FalconH1Config(
        vocab_size=args.vocab,
        hidden_size=args.d_model,
        intermediate_size=2 * args.d_model,
        num_hidden_layers=args.layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=args.seq_len,
        mamba_d_ssm=3 * args.d_model // 2,
        mamba_n_heads=3 * args.d_model // 2 // 64,
        mamba_d_head=64,
        mamba_n_groups=1,
        mamba_d_state=64,
        mamba_d_conv=4,
        mamba_chunk_size=args.chunk,
        mamba_rms_norm=True,
        use_cache=False,
    )
    return FalconH1ForCausalLM(cfg)


def accuracy(logits, y):
    mask = y != -100
    hit = (logits.argmax(-1) == y) & mask
    return hit.sum().float() / mask.sum()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--d_model", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--seq_len", type=int, default=512)
    parser.add_argument("--n_pairs", type=int, default=64)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--wd", type=float, default=0.1)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda")
    model = build_model(args).to(device)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M params")

    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.wd, betas=(0.9, 0.98))
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=args.lr, total_steps=args.steps, pct_start=0.2)

    train = DataLoader(
        MQAR(args.steps * args.batch_size, args.seq_len, args.vocab, args.n_pairs, seed=1),
        batch_size=args.batch_size,
    )
    test = DataLoader(
        MQAR(2 * args.batch_size, args.seq_len, args.vocab, args.n_pairs, seed=2),
        batch_size=args.batch_size,
    )

    model.train()
    for it, (x, y) in enumerate(train):
        x, y = x.to(device), y.to(device)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(input_ids=x).logits
            loss = F.cross_entropy(logits.reshape(-1, args.vocab), y.reshape(-1), ignore_index=-100)
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        if it % 2 == 0:
            acc = accuracy(logits, y)
            print(f"iter {it} loss {loss.item():.3f} acc {acc.item():.4f} lr {sched.get_last_lr()[0]:.2e}")

    model.eval()
    accs = []
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
        for x, y in test:
            accs.append(accuracy(model(input_ids=x.to(device)).logits, y.to(device)).item())
    print(f"test accuracy {sum(accs) / len(accs):.4f}")

    print(f"peak allocated {torch.cuda.max_memory_allocated()}")
    print(f"peak reserved  {torch.cuda.max_memory_reserved()}")


if __name__ == "__main__":
    main()
