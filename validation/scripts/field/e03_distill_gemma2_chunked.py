# Distil a Gemma2-like teacher into a shallower student. The vocab is large, so KL is computed in chunks over
# tokens by a custom autograd.Function that never keeps the logits around.
import gc

import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers import Gemma2Config, Gemma2Model

torch.manual_seed(5)
device = "cuda"
V = 96_000
SOFTCAP = 30.0


class ChunkedKL(torch.autograd.Function):
    """mean_t KL(teacher || student) from hidden states; grads for student hidden and student head weight."""

    @staticmethod
    def forward(ctx, h_s, w_s, h_t, w_t, temp, chunk):
        n = h_s.shape[0]
        grad_h = torch.empty_like(h_s)
        grad_w = torch.zeros(w_s.shape, dtype=torch.float32, device=w_s.device)
        total = torch.zeros((), device=h_s.device)
        for i in range(0, n, chunk):
            hs, ht = h_s[i:i + chunk], h_t[i:i + chunk]
            ls = (hs @ w_s.t()).float()
            lt = (ht @ w_t.t()).float()
            lt = torch.tanh(lt / SOFTCAP) * SOFTCAP
            log_ps = F.log_softmax(ls / temp, dim=-1)
            pt = F.softmax(lt / temp, dim=-1)
            total += F.kl_div(log_ps, pt, reduction="sum")
            g = (log_ps.exp() - pt) / (temp * n)
            g = g.to(hs.dtype)
            grad_h[i:i + chunk] = g @ w_s
            grad_w += (g.t() @ hs).float()
        ctx.save_for_backward(grad_h, grad_w.to(w_s.dtype))
        return total / n

    @staticmethod
    def backward(ctx, grad_out):
        gh, gw = ctx.saved_tensors
        return gh * grad_out, gw * grad_out, None, None, None, None


def config(layers, hidden, inter, heads, kv):
    return Gemma2Config(
        vocab_size=V, hidden_size=hidden, intermediate_size=inter, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv, head_dim=128, query_pre_attn_scalar=128,
        sliding_window=512, max_position_embeddings=2048, attn_implementation="eager",
    )


torch.set_default_dtype(torch.bfloat16)
with torch.device(device):
    teacher = Gemma2Model(config(16, 2048, 6144, 16, 8))
    student = Gemma2Model(config(8, 1024, 3072, 8, 4))
torch.set_default_dtype(torch.float32)
teacher.eval().requires_grad_(False)
student.train()
print("teacher", sum(p.numel() for p in teacher.parameters()) / 1e6,
      "student", sum(p.numel() for p in student.parameters()) / 1e6)

opt = torch.optim.AdamW(student.parameters(), lr=1e-4, betas=(0.9, 0.98), foreach=True)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=10)

for step in range(5):
    ids = torch.randint(0, V, (8, 768), device=device)
    with torch.no_grad():
        ht = teacher(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)
    hs = student(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)
    loss = ChunkedKL.apply(hs, student.embed_tokens.weight, ht, teacher.embed_tokens.weight, 2.0, 1024)
    loss.backward()
    gn = nn.utils.clip_grad_norm_(student.parameters(), 1.0)
    opt.step()
    sched.step()
    opt.zero_grad(set_to_none=True)
    print(step, round(loss.item(), 4), round(gn.item(), 4),
          torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())

# teacher no longer needed: plain CE cooldown
del teacher, ht, hs, loss
gc.collect()
torch.cuda.empty_cache()
print("after drop: alloc", torch.cuda.memory_allocated(), "reserved", torch.cuda.memory_reserved())

for step in range(2):
    ids = torch.randint(0, V, (8, 769), device=device)
    h = student(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    logits = h @ student.embed_tokens.weight.t()
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    opt.step()
    opt.zero_grad(set_to_none=True)
    print("ce", step, round(loss.item(), 4), torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
