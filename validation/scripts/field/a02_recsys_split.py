"""Recommender: big embedding tables, DLRM-like interaction, batch sizes that vary; for max_split_size_mb."""
import random
import torch
import torch.nn as nn
import torch.nn.functional as F

random.seed(4)
torch.manual_seed(4)
dev = "cuda"
TABLES = [400_000, 150_000, 90_000, 60_000, 20_000, 5_000, 1_000, 200]
DIM = 128


class DLRM(nn.Module):
    def __init__(self):
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(n, DIM, mode="sum", padding_idx=0) for n in TABLES)
        self.dense = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, DIM), nn.ReLU())
        f = len(TABLES) + 1
        self.register_buffer("tri", torch.triu_indices(f, f, 1))
        self.top = nn.Sequential(nn.Linear(DIM + f * (f - 1) // 2, 2048), nn.ReLU(), nn.Dropout(0.2),
                                 nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 1))
        self.cross = nn.ModuleList(nn.Linear(DIM * f, DIM * f) for _ in range(3))
        self.out = nn.Linear(DIM * f, 1)

    def forward(self, dense, sparse):
        d = self.dense(dense)
        emb = [d] + [bag(s) for bag, s in zip(self.bags, sparse)]
        z = torch.stack(emb, 1)
        inter = torch.bmm(z, z.transpose(1, 2))[:, self.tri[0], self.tri[1]]
        x0 = z.flatten(1)
        x = x0
        for c in self.cross:
            x = x0 * c(x) + x
        return (self.top(torch.cat([d, inter], 1)) + self.out(x)).squeeze(1)


def batch(n):
    dense = torch.randn(n, 64)
    sparse = [torch.randint(0, t, (n, random.randint(4, 30))) for t in TABLES]
    y = (torch.rand(n) < 0.1).float()
    return dense.to(dev), [s.to(dev) for s in sparse], y.to(dev)


model = DLRM().to(dev)
emb_params = list(model.bags.parameters())
emb_ids = {id(p) for p in emb_params}
net_params = [p for p in model.parameters() if id(p) not in emb_ids]
opts = [torch.optim.Adagrad(emb_params, lr=0.02, initial_accumulator_value=0.1),
        torch.optim.Adam(net_params, lr=1e-3)]

for step in range(12):
    n = random.choice([6000, 9000, 16384, 20000, 32768, 40000])
    dense, sparse, y = batch(n)
    loss = F.binary_cross_entropy_with_logits(model(dense, sparse), y)
    for o in opts:
        o.zero_grad()
    loss.backward()
    for o in opts:
        o.step()
    print(f"step {step} n {n} loss {loss.item():.4f} reserved {torch.cuda.memory_reserved()}")
    if step == 5:
        print("middle", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
        torch.cuda.reset_peak_memory_stats()

print("max_memory_allocated", torch.cuda.max_memory_allocated())
print("max_memory_reserved", torch.cuda.max_memory_reserved())
