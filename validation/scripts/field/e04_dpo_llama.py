# DPO on a small llama: bf16 policy, frozen bf16 reference, right-padded chosen/rejected pairs.
import copy
import random

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

SEED = 7
random.seed(SEED)
torch.manual_seed(SEED)

device = torch.device("cuda")
PAD = 0
BETA = 0.1

cfg = LlamaConfig(
    vocab_size=32000,
    hidden_size=1536,
    intermediate_size=4096,
    num_hidden_layers=16,
    num_attention_heads=16,
    num_key_value_heads=8,
    max_position_embeddings=2048,
    pad_token_id=PAD,
    use_cache=False,
)

with device:
    policy = LlamaForCausalLM(cfg).to(torch.bfloat16)
ref = copy.deepcopy(policy).eval()
ref.requires_grad_(False)
policy.train()
print("policy params (M):", sum(p.numel() for p in policy.parameters()) / 1e6)


def make_pairs(n):
    prompts, chosen, rejected = [], [], []
    for _ in range(n):
        p = torch.randint(5, cfg.vocab_size, (random.randint(48, 192),))
        prompts.append(p)
        chosen.append(torch.randint(5, cfg.vocab_size, (random.randint(64, 384),)))
        rejected.append(torch.randint(5, cfg.vocab_size, (random.randint(64, 384),)))
    return prompts, chosen, rejected


def collate(prompts, chosen, rejected):
    seqs, masks = [], []
    for group in (chosen, rejected):
        for p, r in zip(prompts, group):
            seqs.append(torch.cat([p, r]))
            m = torch.zeros(len(p) + len(r))
            m[len(p):] = 1
            masks.append(m)
    L = max(len(s) for s in seqs)
    ids = torch.full((len(seqs), L), PAD, dtype=torch.long)
    attn = torch.zeros((len(seqs), L), dtype=torch.long)
    resp = torch.zeros((len(seqs), L))
    for i, (s, m) in enumerate(zip(seqs, masks)):
        ids[i, : len(s)] = s
        attn[i, : len(s)] = 1
        resp[i, : len(s)] = m
    return ids.to(device), attn.to(device), resp.to(device)


def sequence_logps(model, ids, attn, resp):
    logits = model(input_ids=ids, attention_mask=attn).logits[:, :-1].float()
    logps = torch.log_softmax(logits, dim=-1)
    tok = torch.gather(logps, 2, ids[:, 1:].unsqueeze(-1)).squeeze(-1)
    return (tok * resp[:, 1:]).sum(-1)


opt = torch.optim.AdamW(policy.parameters(), lr=5e-7, betas=(0.9, 0.95), weight_decay=0.0)
sched = get_cosine_schedule_with_warmup(opt, 2, 20)

for step in range(6):
    ids, attn, resp = collate(*make_pairs(6))
    n = ids.shape[0] // 2

    with torch.no_grad():
        ref_lp = sequence_logps(ref, ids, attn, resp)
    lp = sequence_logps(policy, ids, attn, resp)

    pi_ratio = lp[:n] - lp[n:]
    ref_ratio = ref_lp[:n] - ref_lp[n:]
    logits = BETA * (pi_ratio - ref_ratio)
    loss = -F.logsigmoid(logits).mean()
    acc = (logits > 0).float().mean()

    opt.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 10.0)
    opt.step()
    sched.step()

    print(
        f"step={step} len={ids.shape[1]} loss={loss.item():.4f} acc={acc.item():.2f} "
        f"alloc={torch.cuda.max_memory_allocated()} reserved={torch.cuda.max_memory_reserved()}"
    )
