"""Mean-teacher sentence tagging; the process may use only part of the card; lengths change."""
import copy
import random
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.cuda.set_per_process_memory_fraction(0.16)
random.seed(1)
torch.manual_seed(1)
dev = torch.device("cuda")
V, D, TAGS = 25000, 768, 40


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(V, D, padding_idx=0)
        self.pos = nn.Embedding(1024, D)
        layer = nn.TransformerEncoderLayer(D, 12, 4 * D, dropout=0.1, batch_first=True)
        self.enc = nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
        self.out = nn.Linear(D, TAGS)

    def forward(self, ids):
        x = self.emb(ids) + self.pos(torch.arange(ids.size(1), device=ids.device))
        return self.out(self.enc(x, src_key_padding_mask=ids.eq(0)))


def batch(n, length):
    ids = torch.randint(1, V, (n, length))
    for i in range(n):
        cut = random.randint(length // 2, length)
        ids[i, cut:] = 0
    tags = torch.randint(0, TAGS, (n, length)).masked_fill(ids == 0, -100)
    ids[0, :] = torch.randint(1, V, (length,))
    return ids.to(dev), tags.to(dev)


student = Tagger().to(dev)
teacher = copy.deepcopy(student)
for p in teacher.parameters():
    p.requires_grad_(False)
teacher.train()  # teacher keeps its own dropout noise
opt = torch.optim.AdamW(student.parameters(), lr=2e-4)

for step in range(12):
    lab, tags = batch(8, random.randint(60, 512))
    unlab, _ = batch(24, random.randint(60, 512))
    sup = F.cross_entropy(student(lab).flatten(0, 1), tags.flatten(), ignore_index=-100)
    with torch.no_grad():
        target = F.softmax(teacher(unlab), -1)
    cons = F.mse_loss(F.softmax(student(unlab), -1), target)
    weight = min(1.0, (step + 1) / 6) * 10
    loss = sup + weight * cons
    opt.zero_grad()
    loss.backward()
    opt.step()
    with torch.no_grad():
        for pt, ps in zip(teacher.parameters(), student.parameters()):
            pt.mul_(0.99).add_(ps, alpha=0.01)
    print(f"step {step} {lab.size(1)}/{unlab.size(1)} sup {sup.item():.3f} cons {cons.item():.5f} "
          f"reserved {torch.cuda.memory_reserved()}")

print("max_memory_allocated", torch.cuda.max_memory_allocated())
print("max_memory_reserved", torch.cuda.max_memory_reserved())
