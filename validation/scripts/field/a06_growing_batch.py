"""Batch size grows step after step until a budget (a 'find the largest batch' habit), then trains and evaluates."""
import gc
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
dev = "cuda"
BUDGET = 12 * 2 ** 30


class ResMLP(nn.Module):
    def __init__(self, width=2048, depth=10):
        super().__init__()
        self.inp = nn.Linear(512, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.SiLU(inplace=True),
                          nn.Dropout(0.1), nn.Linear(2 * width, width)) for _ in range(depth))
        self.out = nn.Linear(width, 256)

    def forward(self, x):
        x = self.inp(x)
        for b in self.blocks:
            x = x + b(x)
        return F.normalize(self.out(x), dim=-1)


def nt_xent(z, temperature=0.1):
    n = z.size(0) // 2
    sim = z @ z.t() / temperature
    sim.fill_diagonal_(-1e9)
    target = torch.cat([torch.arange(n, 2 * n), torch.arange(n)]).to(z.device)
    return F.cross_entropy(sim, target)


model = ResMLP().to(dev)
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, foreach=False)


def train_step(bs):
    x = torch.randn(bs, 512, device=dev)
    views = torch.cat([x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)])
    loss = nt_xent(model(views))
    opt.zero_grad(set_to_none=False)
    loss.backward()
    opt.step()
    return loss.item()


for bs in [512, 768, 1152, 1728, 2592, 3888, 5832, 8000]:
    loss = train_step(bs)
    print(f"batch {bs} loss {loss:.4f} peak {torch.cuda.max_memory_allocated()} "
          f"reserved {torch.cuda.max_memory_reserved()} within budget {torch.cuda.max_memory_allocated() < BUDGET}")

gc.collect()
torch.cuda.reset_peak_memory_stats()
print("after search: allocated", torch.cuda.memory_allocated(), "reserved", torch.cuda.memory_reserved())
for i in range(3):
    print("train", i, train_step(3000))

model.eval()
with torch.no_grad():
    feats = torch.cat([model(torch.randn(4096, 512, device=dev)).cpu() for _ in range(4)])
print(feats.shape)
print("max_memory_allocated", torch.cuda.max_memory_allocated())
print("max_memory_reserved", torch.cuda.max_memory_reserved())
