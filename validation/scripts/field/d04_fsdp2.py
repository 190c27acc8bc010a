"""FSDP2: fully_shard per block, bf16 params / fp32 reduce, no resharding after forward for the last block."""
import os
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy

V, D, H, L, T, B, ACC = 32000, 1536, 12, 12, 1024, 4, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(D), nn.RMSNorm(D)
        self.qkv, self.o = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.up, self.gate, self.down = (nn.Linear(D, 4096, bias=False), nn.Linear(D, 4096, bias=False),
                                         nn.Linear(4096, D, bias=False))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, H, D // H).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, D)
        x = x + self.o(y)
        h = self.n2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(V, D)
        self.pos = nn.Embedding(T, D)
        self.blocks = nn.ModuleList(Block() for _ in range(L))
        self.norm = nn.RMSNorm(D)
        self.head = nn.Linear(D, V, bias=False)

    def reset(self):
        for m in self.modules():
            if isinstance(m, (nn.Linear, nn.Embedding)):
                nn.init.normal_(m.weight, std=0.02)
            elif isinstance(m, nn.RMSNorm):
                nn.init.ones_(m.weight)

    def forward(self, ids):
        x = self.emb(ids) + self.pos(torch.arange(ids.size(1), device=ids.device))
        for b in self.blocks:
            x = b(x)
        return self.head(self.norm(x))


def main():
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank = dist.get_rank()
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    torch.manual_seed(0)
    with torch.device("meta"):
        model = LM()
    mp = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for i, b in enumerate(model.blocks):
        fully_shard(b, mesh=mesh, mp_policy=mp, reshard_after_forward=i < L - 1)
    fully_shard(model, mesh=mesh, mp_policy=mp, reshard_after_forward=False)
    model.to_empty(device=device)
    model.reset()
    print(f"rank {rank} after init {torch.cuda.memory_allocated()}")
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95))
    torch.manual_seed(100 + rank)
    for step in range(5):
        for m in range(ACC):
            ids = torch.randint(0, V, (B, T + 1), device=device)
            model.set_requires_gradient_sync(m == ACC - 1)
            loss = F.cross_entropy(model(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten()) / ACC
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        value = norm.full_tensor().item()
        if rank == 0:
            print(f"step {step} loss {loss.item() * ACC:.4f} norm {value:.3f}")
            if step == 0:
                print("first step", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
    print(f"rank {rank} max_memory_allocated {torch.cuda.max_memory_allocated()} "
          f"max_memory_reserved {torch.cuda.max_memory_reserved()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
