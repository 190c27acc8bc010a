"""fp16 autocast + GradScaler + unscale/clip; each layer uses another attention style."""
import math
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
dev = "cuda"
D, H, KV, T, B, V = 1024, 16, 4, 768, 6, 12000
HD = D // H


class Attention(nn.Module):
    def __init__(self, style):
        super().__init__()
        self.style = style
        self.kv = KV if style == "gqa" else H
        self.q = nn.Linear(D, D)
        self.k = nn.Linear(D, self.kv * HD)
        self.v = nn.Linear(D, self.kv * HD)
        self.o = nn.Linear(D, D)

    def forward(self, x, mask):
        b, t, _ = x.shape
        q = self.q(x).view(b, t, H, HD).transpose(1, 2)
        k = self.k(x).view(b, t, self.kv, HD).transpose(1, 2)
        v = self.v(x).view(b, t, self.kv, HD).transpose(1, 2)
        if self.style == "causal":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1 if self.training else 0.0)
        elif self.style == "gqa":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        elif self.style == "boolmask":
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            w = (q @ k.transpose(-2, -1)) / math.sqrt(HD)
            w = w.masked_fill(~mask, float("-inf"))
            w = F.dropout(F.softmax(w, dim=-1), 0.1, self.training)
            y = w @ v
        return self.o(y.transpose(1, 2).reshape(b, t, D))


class Block(nn.Module):
    def __init__(self, style):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attn = Attention(style)
        self.fc1, self.fc2 = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x, mask):
        x = x + self.attn(self.ln1(x), mask)
        return x + self.fc2(F.relu(self.fc1(self.ln2(x))).square())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(V, D, padding_idx=0)
        self.blocks = nn.ModuleList(Block(s) for s in ["causal", "gqa", "boolmask", "eager"] * 2)
        self.head = nn.Linear(D, V, bias=False)

    def forward(self, ids):
        t = ids.size(1)
        causal = torch.ones(t, t, dtype=torch.bool, device=ids.device).tril()
        window = causal & ~torch.ones_like(causal).tril(-256)
        same = (ids.cumsum(1) // 2_000_000).unsqueeze(2) == (ids.cumsum(1) // 2_000_000).unsqueeze(1)
        mask = (window & same).unsqueeze(1)
        x = self.emb(ids)
        for b in self.blocks:
            x = b(x, mask)
        return self.head(x)


model = Model().to(dev)
opt = torch.optim.Adam(model.parameters(), lr=1e-4, foreach=False)
scaler = torch.amp.GradScaler("cuda", init_scale=2.0 ** 12)
for step in range(7):
    ids = torch.randint(1, V, (B, T + 1), device=dev)
    opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(ids[:, :-1]).reshape(-1, V), ids[:, 1:].reshape(-1))
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    print(f"step {step} loss {loss.item():.3f} norm {norm.item():.2f} scale {scaler.get_scale()}")

print("max_memory_allocated", torch.cuda.max_memory_allocated())
print("max_memory_reserved", torch.cuda.max_memory_reserved())
