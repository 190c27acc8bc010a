# Full fine-tune of a Phi-style model (fp32 weights, bf16 autocast), SGD+momentum warm phase then AdamW,
# with activation-norm hooks, a checkpoint round trip, and memory_stats reporting.
import os
import tempfile
from collections import defaultdict

import torch
from torch.optim.lr_scheduler import LinearLR
from transformers import PhiConfig, PhiForCausalLM

torch.manual_seed(0)
DEVICE = "cuda"
BATCH, SEQ = 10, 1024


def mem(tag):
    s = torch.cuda.memory_stats()
    print(
        f"{tag:<16} max_alloc={torch.cuda.max_memory_allocated()} max_reserved={torch.cuda.max_memory_reserved()} "
        f"active={s['active_bytes.all.current']} inactive_split={s['inactive_split_bytes.all.peak']} "
        f"segments={s['segment.all.current']} retries={s['num_alloc_retries']}"
    )


cfg = PhiConfig(
    vocab_size=40000, hidden_size=1280, intermediate_size=5120, num_hidden_layers=8, num_attention_heads=20,
    partial_rotary_factor=0.5, resid_pdrop=0.1, max_position_embeddings=2048, use_cache=False,
)
with torch.device(DEVICE):
    model = PhiForCausalLM(cfg)
model.train()
mem("built")

norms = defaultdict(list)
handles = []
for i, blk in enumerate(model.model.layers):
    if i % 3 == 0:
        def hook(mod, inp, out, i=i):
            h = out[0] if isinstance(out, tuple) else out
            norms[i].append(h.detach().float().norm(dim=-1).mean())
        handles.append(blk.register_forward_hook(hook))

corpus = torch.randint(0, cfg.vocab_size, (500_000,), dtype=torch.int32, device=DEVICE)
offsets = torch.arange(SEQ, device=DEVICE)


def batch():
    start = torch.randint(0, corpus.numel() - SEQ, (BATCH, 1), device=DEVICE)
    return corpus[start + offsets].long()


def step(opt, sched=None):
    ids = batch()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(input_ids=ids, labels=ids).loss
    opt.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)
    opt.step()
    if sched is not None:
        sched.step()
    return loss.item()


opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
for k in range(2):
    print("sgd", k, step(opt))
    mem(f"sgd{k}")

for h in handles:
    h.remove()
print({k: round(torch.stack(v).mean().item(), 3) for k, v in norms.items()})
norms.clear()

opt = torch.optim.AdamW(model.parameters(), lr=1e-4, amsgrad=False)
sched = LinearLR(opt, start_factor=0.1, total_iters=5)
for k in range(2):
    print("adamw", k, step(opt, sched))
    mem(f"adamw{k}")

with tempfile.TemporaryDirectory() as d:
    f = os.path.join(d, "ckpt.pt")
    torch.save({"opt": opt.state_dict(), "sched": sched.state_dict(), "norm": model.model.final_layernorm.state_dict()}, f)
    del opt, sched
    torch.cuda.empty_cache()
    mem("dropped opt")
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    sched = LinearLR(opt, start_factor=0.1, total_iters=5)
    ck = torch.load(f, map_location="cpu", weights_only=True)
    opt.load_state_dict(ck["opt"])
    sched.load_state_dict(ck["sched"])
    del ck
mem("resumed")
for k in range(2, 4):
    print("adamw", k, step(opt, sched))
    mem(f"adamw{k}")
