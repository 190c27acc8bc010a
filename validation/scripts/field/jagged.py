"""Ragged batches as nested tensors (torch.jagged layout): linear layers, norm, SDPA over variable lengths."""
import torch
import torch.nn as nn
import torch.nn.functional as F

D, H = 768, 12


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.ff = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))

    def forward(self, x):
        h = self.n1(x)
        q, k, v = (f(h).unflatten(-1, [H, D // H]).transpose(1, 2) for f in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        x = x + self.o(a)
        return x + self.ff(self.n2(x))


layers = nn.Sequential(*[Layer() for _ in range(6)]).cuda().bfloat16()
emb = nn.Embedding(20000, D, device="cuda", dtype=torch.bfloat16)
head = nn.Linear(D, 30, device="cuda", dtype=torch.bfloat16)
opt = torch.optim.AdamW([*layers.parameters(), *emb.parameters(), *head.parameters()], 1e-4)
g = torch.Generator().manual_seed(2)
for it in range(5):
    lens = torch.randint(40, 500, (24,), generator=g).tolist()
    seqs = [torch.randint(0, 20000, (n,), generator=g).cuda() for n in lens]
    offs = torch.tensor([0] + lens).cumsum(0).cuda()
    x = torch.nested.nested_tensor_from_jagged(emb(torch.cat(seqs)), offs)
    y = layers(x)
    pooled = torch.stack([t.mean(0) for t in y.unbind()])
    loss = F.cross_entropy(head(pooled).float(), torch.randint(0, 30, (24,), generator=g).cuda())
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(it, sum(lens), loss.item())
