"""Fine-tune a small Llama with packed sequences (position_ids restart at each document)."""
import torch
from torch.utils.data import Dataset, DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

SEQ_LEN = 2048
VOCAB = 32000


class PackedDataset(Dataset):
    """Packs random-length documents into fixed-size blocks."""

    def __init__(self, n_blocks, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.blocks = []
        for _ in range(n_blocks):
            ids, pos = [], []
            total = 0
            while total < SEQ_LEN:
                n = int(torch.randint(64, 600, (1,), generator=g))
                n = min(n, SEQ_LEN - total)
                ids.append(torch.randint(3, VOCAB, (n,), generator=g))
                pos.append(torch.arange(n))
                total += n
            ids, pos = torch.cat(ids), torch.cat(pos)
            labels = ids.clone()
            labels[pos == 0] = -100
            self.blocks.append({"input_ids": ids, "position_ids": pos, "labels": labels})

    def __len__(self):
        return len(self.blocks)

    def __getitem__(self, i):
        return self.blocks[i]


def main():
    torch.manual_seed(42)
    device = torch.device("cuda")
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=1024, intermediate_size=2816, num_hidden_layers=12,
        num_attention_heads=16, num_key_value_heads=4, max_position_embeddings=SEQ_LEN,
        attn_implementation="sdpa", use_cache=False,
    )
    model = LlamaForCausalLM(config).to(device=device, dtype=torch.bfloat16)
    model.train()
    print(f"parameters: {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M")

    loader = DataLoader(PackedDataset(24), batch_size=2, shuffle=False, num_workers=2, pin_memory=True)
    no_decay = [p for p in model.parameters() if p.ndim < 2]
    decay = [p for p in model.parameters() if p.ndim >= 2]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}],
        lr=2e-5, betas=(0.9, 0.95),
    )
    scheduler = get_cosine_schedule_with_warmup(optimizer, 2, 12)

    for step, batch in enumerate(loader):
        # with batch > 1 the library does not detect packing by itself; flatten the batch into one row
        batch = {k: v.reshape(1, -1).to(device, non_blocking=True) for k, v in batch.items()}
        out = model(**batch)
        out.loss.backward()
        gn = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        print(f"step {step} loss {out.loss.item():.4f} gn {gn.item():.3f}")

    print("max_memory_allocated", torch.cuda.max_memory_allocated())
    print("max_memory_reserved", torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    main()
