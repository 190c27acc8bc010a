"""Optimizer step inside backward, see the PyTorch tutorial. ViT-L written by hand."""
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self, d=1024, h=16):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn = nn.MultiheadAttention(d, h, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(approximate="tanh"), nn.Linear(4 * d, d))

    def forward(self, x):
        y = self.ln1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.ln2(x))

class ViT(nn.Module):
    def __init__(self, n=18, d=1024):
        super().__init__()
        self.patch = nn.Conv2d(3, d, 16, 16)
        self.cls = nn.Parameter(torch.zeros(1, 1, d))
        self.pos = nn.Parameter(torch.randn(1, 197, d) * .02)
        self.layers = nn.ModuleList([Layer(d) for _ in range(n)])
        self.head = nn.Linear(d, 1000)

    def forward(self, img):
        x = self.patch(img).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.size(0), -1, -1), x], 1) + self.pos
        for l in self.layers:
            x = l(x)
        return self.head(x[:, 0])

model = ViT().cuda()
optimizer_dict = {p: torch.optim.Adam([p], foreach=False) for p in model.parameters()}

def optimizer_hook(parameter) -> None:
    optimizer_dict[parameter].step()
    optimizer_dict[parameter].zero_grad()

for p in model.parameters():
    p.register_post_accumulate_grad_hook(optimizer_hook)

for i in range(3):
    image = torch.rand(24, 3, 224, 224, device="cuda")
    loss = model(image).sum()
    loss.backward()
    print(i, torch.cuda.memory_allocated() / 2**20)
s = torch.cuda.memory_stats()
print({k: s[k] for k in ("allocated_bytes.all.peak", "reserved_bytes.all.peak", "num_alloc_retries", "active_bytes.all.current")})
