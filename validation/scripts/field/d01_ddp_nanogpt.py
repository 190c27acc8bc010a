"""nanoGPT-like DDP training with no_sync gradient accumulation. torchrun --nproc-per-node 2 d01_ddp_nanogpt.py"""
import contextlib
import math
import os
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

V, T, D, H, L = 50304, 512, 768, 12, 10
BATCH, ACC, STEPS = 8, 4, 5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(D, bias=False), nn.LayerNorm(D, bias=False)
        self.c_attn, self.c_proj = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.fc, self.proj = nn.Linear(D, 4 * D, bias=False), nn.Linear(4 * D, D, bias=False)

    def forward(self, x):
        b, t, c = x.size()
        q, k, v = (z.view(b, t, H, c // H).transpose(1, 2) for z in self.c_attn(self.ln1(x)).split(D, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))
        return x + self.proj(F.gelu(self.fc(self.ln2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(V, D), nn.Embedding(T, D)
        self.h = nn.ModuleList(Block() for _ in range(L))
        self.ln_f = nn.LayerNorm(D, bias=False)
        self.lm_head = nn.Linear(D, V, bias=False)
        self.wte.weight = self.lm_head.weight
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02 / math.sqrt(2))

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for b in self.h:
            x = b(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, V), targets.view(-1), ignore_index=-1)


def main():
    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    device = f"cuda:{local}"
    torch.manual_seed(1337 + dist.get_rank())
    torch.backends.cuda.matmul.allow_tf32 = True
    model = DDP(GPT().to(device), device_ids=[local])
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
                            lr=6e-4, betas=(0.9, 0.95), fused=True)
    tokens = torch.randint(0, V, (200_000,))

    def get_batch():
        ix = torch.randint(len(tokens) - T - 1, (BATCH,))
        x = torch.stack([tokens[i:i + T] for i in ix]).pin_memory().to(device, non_blocking=True)
        y = torch.stack([tokens[i + 1:i + 1 + T] for i in ix]).pin_memory().to(device, non_blocking=True)
        return x, y

    x, y = get_batch()
    for step in range(STEPS):
        for micro in range(ACC):
            ctx = model.no_sync() if micro < ACC - 1 else contextlib.nullcontext()
            with ctx:
                with torch.amp.autocast("cuda", dtype=torch.bfloat16):
                    logits, loss = model(x, y)
                    loss = loss / ACC
                x, y = get_batch()
                loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item() * ACC:.4f}")
    print(f"rank {dist.get_rank()} max_memory_allocated {torch.cuda.max_memory_allocated()} "
          f"max_memory_reserved {torch.cuda.max_memory_reserved()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
