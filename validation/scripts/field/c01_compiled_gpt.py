"""A GPT in the manner of nanoGPT, compiled."""
import argparse, math
import torch, torch.nn as nn
from torch.nn import functional as F
p = argparse.ArgumentParser()
p.add_argument("--compile", type=int, default=1); p.add_argument("--dtype", default="bf16"); p.add_argument("--dropout", type=float, default=0.0)
p.add_argument("--acc", type=int, default=1); p.add_argument("--evals", type=int, default=0); p.add_argument("--bias", type=int, default=0)
p.add_argument("--layers", type=int, default=6); p.add_argument("--bs", type=int, default=8); p.add_argument("--parts", type=int, default=0); p.add_argument("--fused", type=int, default=1); p.add_argument("--clip", type=float, default=1.0)
a = p.parse_args()
V, D, H, T = 50304, 768, 12, 1024
class LN(nn.Module):
    def __init__(self, n, bias):
        super().__init__(); self.weight = nn.Parameter(torch.ones(n)); self.bias = nn.Parameter(torch.zeros(n)) if bias else None
    def forward(self, x): return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)
class Attn(nn.Module):
    def __init__(self):
        super().__init__(); self.c_attn = nn.Linear(D, 3 * D, bias=bool(a.bias)); self.c_proj = nn.Linear(D, D, bias=bool(a.bias)); self.drop = nn.Dropout(a.dropout)
    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(D, dim=2)
        k = k.view(B, T, H, C // H).transpose(1, 2); q = q.view(B, T, H, C // H).transpose(1, 2); v = v.view(B, T, H, C // H).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=a.dropout if self.training else 0, is_causal=True)
        return self.drop(self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C)))
class MLP(nn.Module):
    def __init__(self):
        super().__init__(); self.c_fc = nn.Linear(D, 4 * D, bias=bool(a.bias)); self.gelu = nn.GELU(); self.c_proj = nn.Linear(4 * D, D, bias=bool(a.bias)); self.drop = nn.Dropout(a.dropout)
    def forward(self, x): return self.drop(self.c_proj(self.gelu(self.c_fc(x))))
class Block(nn.Module):
    def __init__(self):
        super().__init__(); self.ln_1 = LN(D, a.bias); self.attn = Attn(); self.ln_2 = LN(D, a.bias); self.mlp = MLP()
    def forward(self, x):
        x = x + self.attn(self.ln_1(x)); return x + self.mlp(self.ln_2(x))
class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(V, D); self.wpe = nn.Embedding(T, D); self.drop = nn.Dropout(a.dropout); self.h = nn.ModuleList([Block() for _ in range(a.layers)]); self.ln_f = LN(D, a.bias); self.lm_head = nn.Linear(D, V, bias=False)
        self.wte.weight = self.lm_head.weight
    def forward(self, idx, targets=None):
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
        x = self.drop(self.wte(idx) + self.wpe(pos))
        for b in self.h: x = b(x)
        x = self.ln_f(x)
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
torch.backends.cuda.matmul.allow_tf32 = True
model = GPT().cuda()
opt = torch.optim.AdamW(model.parameters(), lr=6e-4, fused=bool(a.fused))
if a.parts:
    for b in model.h: b.compile()
elif a.compile:
    model = torch.compile(model)
dt = {"bf16": torch.bfloat16, "f32": torch.float32, "f16": torch.float16}[a.dtype]
scaler = torch.amp.GradScaler("cuda", enabled=a.dtype == "f16")
def batch(): return torch.randint(V, (a.bs, T)).pin_memory().to("cuda", non_blocking=True), torch.randint(V, (a.bs, T)).pin_memory().to("cuda", non_blocking=True)
for it in range(5):
    if a.evals and it % 2 == 0:
        model.eval()
        with torch.no_grad():
            for _ in range(2):
                x, y = batch()
                with torch.autocast("cuda", dtype=dt, enabled=a.dtype != "f32"): _, l = model(x, y)
        model.train()
    for _ in range(a.acc):
        x, y = batch()
        with torch.autocast("cuda", dtype=dt, enabled=a.dtype != "f32"): logits, loss = model(x, y)
        scaler.scale(loss / a.acc).backward()
    if a.clip:
        scaler.unscale_(opt); torch.nn.utils.clip_grad_norm_(model.parameters(), a.clip)
    scaler.step(opt); scaler.update(); opt.zero_grad(set_to_none=True)
    print(it, loss.item(), torch.cuda.max_memory_allocated() >> 20)
