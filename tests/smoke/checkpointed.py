"""Compiled transformer blocks with dropout, each under a checkpoint."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width: int = 768, heads: int = 12) -> None:
        super().__init__()
        self.heads = heads
        self.n1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.o = nn.Linear(width, width)
        self.n2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, D = x.shape
        heads = (
            t.view(B, T, self.heads, D // self.heads).transpose(1, 2)
            for t in self.qkv(self.n1(x)).split(D, 2)
        )
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True, dropout_p=0.1)
        x = x + F.dropout(self.o(mixed.transpose(1, 2).reshape(B, T, D)), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.n2(x)))), 0.1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32000, 768)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(768)
        self.head = nn.Linear(768, 32000, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))


torch.manual_seed(0)
model = Model().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
compiled = torch.compile(model)
for _ in range(3):
    ids = torch.randint(0, 32000, (8, 512), device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = compiled(ids, ids)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
