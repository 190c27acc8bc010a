# Tiny Qwen3-MoE pretraining run, pure bf16 weights, plain loop.
# Want to see whether the load balancing loss goes down with 64 experts / top-8.
import math
import time

import torch
from torch.nn.utils import clip_grad_norm_
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

device = "cuda"
torch.manual_seed(1234)
torch.backends.cuda.matmul.allow_tf32 = True

# ---------------------------------------------------------------- hyperparameters
VOCAB = 151936
SEQ = 1024
MICRO_BS = 6
ACCUM = 2
STEPS = 8
WARMUP = 2
PEAK_LR = 4e-4
MIN_LR = 4e-5
EVAL_EVERY = 4
EVAL_BATCHES = 3

config = Qwen3MoeConfig(
    vocab_size=VOCAB,
    hidden_size=1024,
    intermediate_size=3072,
    moe_intermediate_size=384,
    num_hidden_layers=10,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=64,
    num_experts=64,
    num_experts_per_tok=8,
    norm_topk_prob=True,
    decoder_sparse_step=1,
    mlp_only_layers=[0],  # first layer dense, like deepseek
    router_aux_loss_coef=0.001,
    output_router_logits=True,
    max_position_embeddings=SEQ,
    tie_word_embeddings=True,
    use_cache=False,
)

with torch.device(device):
    model = Qwen3MoeForCausalLM(config)
model = model.to(torch.bfloat16)
torch.cuda.empty_cache()  # drop the fp32 copy
model.train()

total = sum(p.numel() for p in model.parameters())
expert = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
active = total - expert + expert * config.num_experts_per_tok // config.num_experts
print(f"total {total/1e6:.0f}M, active {active/1e6:.0f}M")

# ---------------------------------------------------------------- optimizer
decay, no_decay = [], []
for name, p in model.named_parameters():
    if p.ndim < 2 or "embed_tokens" in name or name.endswith("gate.weight"):
        no_decay.append(p)
    else:
        decay.append(p)
optimizer = torch.optim.AdamW(
    [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}],
    lr=PEAK_LR,
    betas=(0.9, 0.95),
    fused=True,
)


def get_lr(step):
    if step < WARMUP:
        return PEAK_LR * (step + 1) / WARMUP
    t = (step - WARMUP) / max(1, STEPS - WARMUP)
    return MIN_LR + 0.5 * (PEAK_LR - MIN_LR) * (1 + math.cos(math.pi * t))


# ---------------------------------------------------------------- data: one long token stream
stream = torch.randint(0, VOCAB // 8, (2_000_000,), dtype=torch.int32)
split = int(0.9 * len(stream))
train_stream, val_stream = stream[:split], stream[split:]


def get_batch(data, generator):
    ix = torch.randint(len(data) - SEQ, (MICRO_BS,), generator=generator)
    x = torch.stack([data[i : i + SEQ].long() for i in ix.tolist()])
    return x.pin_memory().to(device, non_blocking=True)


train_gen = torch.Generator().manual_seed(0)


@torch.no_grad()
def evaluate():
    model.eval()
    gen = torch.Generator().manual_seed(99)
    losses = []
    for _ in range(EVAL_BATCHES):
        x = get_batch(val_stream, gen)
        out = model(input_ids=x, labels=x, output_router_logits=False)
        losses.append(out.loss.item())
    model.train()
    return sum(losses) / len(losses)


# ---------------------------------------------------------------- train
t0 = time.time()
for step in range(STEPS):
    lr = get_lr(step)
    for group in optimizer.param_groups:
        group["lr"] = lr

    optimizer.zero_grad(set_to_none=True)
    lm_loss_sum, aux_sum = 0.0, 0.0
    for _ in range(ACCUM):
        x = get_batch(train_stream, train_gen)
        out = model(input_ids=x, labels=x)
        # out.loss already includes router_aux_loss_coef * aux_loss
        (out.loss / ACCUM).backward()
        aux_sum += out.aux_loss.detach().float() / ACCUM
        lm_loss_sum += out.loss.detach().float() / ACCUM
    gnorm = clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()

    dt, t0 = time.time() - t0, time.time()
    tok_s = MICRO_BS * SEQ * ACCUM / dt
    print(
        f"step {step:3d} | loss {lm_loss_sum.item():.4f} | aux {aux_sum.item():.4f} | "
        f"gnorm {gnorm.item():.2f} | lr {lr:.2e} | {tok_s:.0f} tok/s"
    )
    if (step + 1) % EVAL_EVERY == 0:
        print(f"  val loss {evaluate():.4f}")

print("max allocated:", torch.cuda.max_memory_allocated())
print("max reserved:", torch.cuda.max_memory_reserved())
