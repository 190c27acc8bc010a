"""LoRA by hand via nn.utils.parametrize, plus weight norm and spectral norm heads; varying batches."""
import random
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.nn.utils.parametrize as parametrize
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

random.seed(2)
torch.manual_seed(2)
dev = torch.device("cuda")


class LoRA(nn.Module):
    def __init__(self, out_f, in_f, r=8, alpha=16):
        super().__init__()
        self.a = nn.Parameter(torch.randn(r, in_f) * in_f ** -0.5)
        self.b = nn.Parameter(torch.zeros(out_f, r))
        self.scale = alpha / r

    def forward(self, w):
        return w + self.scale * (self.b @ self.a)


class Block(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.f1, self.f2 = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d))
        return x + self.f2(F.gelu(self.f1(self.n2(x))))


class Net(nn.Module):
    def __init__(self, d=1024, depth=10):
        super().__init__()
        self.inp = nn.Linear(200, d)
        self.blocks = nn.Sequential(*[Block(d, 16) for _ in range(depth)])
        self.mid = weight_norm(nn.Linear(d, 2048))
        self.out = spectral_norm(nn.Linear(2048, 50), n_power_iterations=2)

    def forward(self, x):
        return self.out(F.leaky_relu(self.mid(self.blocks(self.inp(x)).mean(1))))


net = Net()
for p in net.blocks.parameters():
    p.requires_grad_(False)
for block in net.blocks:
    for lin in (block.qkv, block.f1, block.f2):
        parametrize.register_parametrization(lin, "weight", LoRA(*lin.weight.shape))
net.to(dev)
params = [p for p in net.parameters() if p.requires_grad]
print("trainable", sum(p.numel() for p in params), "total", sum(p.numel() for p in net.parameters()))
opt = torch.optim.Adamax(params, lr=1e-3)


def step_fn(n, t):
    x = torch.randn(n, t, 200, device=dev)
    y = torch.randint(0, 50, (n,), device=dev)
    loss = F.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    return loss.item()


for step in range(10):
    n, t = random.randint(3, 40), random.choice([100, 150, 230, 333])
    if step % 2:
        with parametrize.cached():
            loss = step_fn(n, t)
    else:
        loss = step_fn(n, t)
    print(f"step {step} batch {n}x{t} loss {loss:.4f} reserved {torch.cuda.memory_reserved()}")

for block in net.blocks:
    for lin in (block.qkv, block.f1, block.f2):
        parametrize.remove_parametrizations(lin, "weight", leave_parametrized=True)
net.eval()
with torch.no_grad():
    print("merged", net(torch.randn(64, 333, 200, device=dev)).shape, torch.cuda.memory_allocated())
print("max_memory_allocated", torch.cuda.max_memory_allocated())
print("max_memory_reserved", torch.cuda.max_memory_reserved())
