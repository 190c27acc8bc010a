"""
Minimal GRPO loop.

 * policy: random Qwen2-ish ~0.5B, bf16
 * reference: frozen copy for KL
 * rollout: HF generate(), G samples per prompt, left-padded prompts
 * update: two micro-batched inner epochs with ratio clipping
"""
import time

import torch
import torch.nn.functional as F
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

torch.manual_seed(2024)
DEV = "cuda"

N_PROMPTS, G, MAX_NEW, MICRO = 4, 16, 80, 16
CLIP, KL_COEF, INNER = 0.2, 0.04, 2
EOS, PAD = 2, 0


def build():
    cfg = Qwen2Config(
        vocab_size=65_536, hidden_size=1536, intermediate_size=4096, num_hidden_layers=20,
        num_attention_heads=16, num_key_value_heads=4, max_position_embeddings=2048,
        tie_word_embeddings=True, bos_token_id=1, eos_token_id=EOS, pad_token_id=PAD,
    )
    with torch.device(DEV):
        policy = Qwen2ForCausalLM._from_config(cfg, dtype=torch.bfloat16)
        ref = Qwen2ForCausalLM._from_config(cfg, dtype=torch.bfloat16)
    ref.load_state_dict(policy.state_dict())
    for p in ref.parameters():
        p.requires_grad = False
    ref.eval()
    return cfg, policy, ref


def sample_prompts(vocab):
    lens = torch.randint(40, 129, (N_PROMPTS,))
    L = int(lens.max())
    ids = torch.full((N_PROMPTS, L), PAD)
    mask = torch.zeros((N_PROMPTS, L), dtype=torch.long)
    for i, n in enumerate(lens.tolist()):
        ids[i, L - n:] = torch.randint(10, vocab, (n,))
        mask[i, L - n:] = 1
    return ids.to(DEV), mask.to(DEV)


def logprobs(model, ids, mask, n_completion):
    pos = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=pos, use_cache=False,
                   logits_to_keep=n_completion + 1).logits[:, :-1]
    targets = ids[:, -n_completion:]
    return -F.cross_entropy(logits.transpose(1, 2).float(), targets, reduction="none")


def reward_fn(completion):
    # prefers even tokens and diversity
    even = (completion % 2 == 0).float().mean(-1)
    uniq = torch.tensor([len(set(r)) / len(r) for r in completion.tolist()], device=completion.device)
    return even + 0.5 * uniq


def main():
    cfg, policy, ref = build()
    opt = torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=True)
    gen_cfg = GenerationConfig(
        max_new_tokens=MAX_NEW, min_new_tokens=MAX_NEW, do_sample=True, temperature=1.0, top_k=0,
        eos_token_id=EOS, pad_token_id=PAD,
    )
    for it in range(2):
        t0 = time.time()
        ids, mask = sample_prompts(cfg.vocab_size)
        ids, mask = ids.repeat_interleave(G, 0), mask.repeat_interleave(G, 0)

        policy.eval()
        with torch.no_grad():
            seq = policy.generate(input_ids=ids, attention_mask=mask, generation_config=gen_cfg)
        C = seq.shape[1] - ids.shape[1]
        full_mask = torch.cat([mask, torch.ones_like(seq[:, -C:])], dim=1)
        roll_peak = torch.cuda.max_memory_allocated()

        r = reward_fn(seq[:, -C:]).view(N_PROMPTS, G)
        adv = ((r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-4)).flatten()

        with torch.no_grad():
            old = torch.cat([logprobs(policy, s, m, C) for s, m in zip(seq.split(MICRO), full_mask.split(MICRO))])
            rlp = torch.cat([logprobs(ref, s, m, C) for s, m in zip(seq.split(MICRO), full_mask.split(MICRO))])

        policy.train()
        for _ in range(INNER):
            perm = torch.randperm(seq.size(0), device=DEV)
            opt.zero_grad(set_to_none=True)
            running = 0.0
            chunks = perm.split(MICRO)
            for idx in chunks:
                lp = logprobs(policy, seq[idx], full_mask[idx], C)
                ratio = (lp - old[idx]).exp()
                a = adv[idx, None]
                pg = -torch.min(ratio * a, ratio.clamp(1 - CLIP, 1 + CLIP) * a)
                d = rlp[idx] - lp
                kl = d.exp() - d - 1
                loss = (pg + KL_COEF * kl).mean() / len(chunks)
                loss.backward()
                running += loss.item()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            opt.step()
        print(f"iter {it} loss {running:.5f} reward {r.mean().item():.3f} rollout_peak {roll_peak} "
              f"{time.time() - t0:.1f}s", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())


main()
