"""PPO on a small (random) Llama with LoRA adapters. Finished sequences leave the generation batch,
the PPO loss only sees real response tokens, and the evaluation is a beam search in which ended beams are set aside."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, set_seed

VOCAB, EOS, PAD = 8192, 2, 0
N_PROMPTS, PROMPT_LEN, MAX_NEW = 96, 32, 64
PPO_ROUNDS, EPOCHS, MINIBATCHES = 2, 2, 2
CLIP, VF_COEF, ENT_COEF, KL_COEF, GAMMA, LAM = 0.2, 0.5, 0.01, 0.05, 1.0, 0.95
EOS_BIAS = 5.5            # random weights hardly ever say EOS by themselves
DEVICE = "cuda"


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        cfg = LlamaConfig(vocab_size=VOCAB, hidden_size=768, intermediate_size=2048, num_hidden_layers=10,
                          num_attention_heads=12, num_key_value_heads=4, max_position_embeddings=256,
                          pad_token_id=PAD, bos_token_id=1, eos_token_id=EOS)
        lora = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules=["q_proj", "v_proj", "o_proj", "down_proj"])
        self.lm = get_peft_model(LlamaForCausalLM(cfg), lora)
        self.v_head = nn.Linear(768, 1)
        bias = torch.zeros(VOCAB)
        bias[EOS], bias[PAD] = EOS_BIAS, -1e4
        self.register_buffer("bias", bias)

    def forward(self, ids, mask=None, cache=None):
        out = self.lm(input_ids=ids, attention_mask=mask, past_key_values=cache,
                      use_cache=cache is not None, output_hidden_states=True)
        return out.logits.float() + self.bias, self.v_head(out.hidden_states[-1].float()).squeeze(-1)


@torch.no_grad()
def rollout(policy, prompts):
    seqs = torch.full((len(prompts), PROMPT_LEN + MAX_NEW), PAD, device=DEVICE)
    seqs[:, :PROMPT_LEN] = prompts
    alive = torch.arange(len(prompts), device=DEVICE)
    cache, inp = DynamicCache(), prompts
    for t in range(PROMPT_LEN, PROMPT_LEN + MAX_NEW):
        logits, _ = policy(inp, cache=cache)
        tok = torch.multinomial(logits[:, -1].softmax(-1), 1)
        seqs[alive, t] = tok.squeeze(1)
        go = (tok.squeeze(1) != EOS).nonzero().squeeze(1)
        if go.numel() == 0:
            break
        if go.numel() < alive.numel():
            cache.batch_select_indices(go)
            alive, tok = alive[go], tok[go]
        inp = tok
    return seqs


def reward_fn(seqs):
    """Share of even tokens in the response, plus a bonus for ending within the budget."""
    resp = seqs[:, PROMPT_LEN:]
    real = resp != PAD
    return ((resp % 2 == 0) & real).sum(1) / real.sum(1).clamp(min=1) + 0.2 * (resp == EOS).any(1).float()


def evaluate_tokens(policy, seqs):
    logits, values = policy(seqs, mask=torch.cat([torch.ones_like(seqs[:, :PROMPT_LEN]), (seqs[:, PROMPT_LEN:] != PAD).long()], 1))
    logp = F.log_softmax(logits[:, PROMPT_LEN - 1:-1], -1)
    tok = seqs[:, PROMPT_LEN:]
    return logp.gather(-1, tok.unsqueeze(-1)).squeeze(-1), values[:, PROMPT_LEN - 1:-1], logp


def gae(rewards, values, mask):
    adv, last = torch.zeros_like(rewards), torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.size(1))):
        nxt = values[:, t + 1] * mask[:, t + 1] if t + 1 < rewards.size(1) else 0.0
        last = (rewards[:, t] + GAMMA * nxt - values[:, t] + GAMMA * LAM * last) * mask[:, t]
        adv[:, t] = last
    return adv


@torch.no_grad()
def beam_search(policy, prompt, beams=6, steps=24, min_new=6, alpha=0.7):
    live, scores, ended = prompt, torch.zeros(1, device=DEVICE), []
    for t in range(steps):
        logits = policy(live)[0][:, -1]
        if t < min_new:
            logits[:, EOS] = -1e4
        logp = F.log_softmax(logits, -1) + scores[:, None]
        top, flat = logp.view(-1).topk(min(2 * beams, logp.numel()))
        cand = torch.cat([live[flat // VOCAB], (flat % VOCAB)[:, None]], 1)
        fin = cand[:, -1] == EOS
        for s, c in zip(top[fin].tolist(), cand[fin]):
            ended.append((s / (c.numel() - PROMPT_LEN) ** alpha, c))
        live, scores = cand[~fin][:beams], top[~fin][:beams]
        if len(ended) >= 4 * beams or len(live) == 0:
            break
    ended += [(s / (c.numel() - PROMPT_LEN) ** alpha, c) for s, c in zip(scores.tolist(), live)]
    return max(ended, key=lambda e: e[0]), len(ended)


def main():
    set_seed(17)
    policy = ActorCritic().to(DEVICE)
    policy.lm.print_trainable_parameters()
    params = [p for p in policy.parameters() if p.requires_grad]
    opt = torch.optim.AdamW(params, lr=5e-4)
    sched = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.1, PPO_ROUNDS * EPOCHS * MINIBATCHES)
    step = 0
    for rnd in range(PPO_ROUNDS):
        policy.eval()
        seqs = rollout(policy, torch.randint(3, VOCAB, (N_PROMPTS, PROMPT_LEN), device=DEVICE))
        mask = seqs[:, PROMPT_LEN:] != PAD
        with torch.no_grad():
            old_logp, old_v, _ = evaluate_tokens(policy, seqs)
            with policy.lm.disable_adapter():
                ref_logp, _, _ = evaluate_tokens(policy, seqs)
            score = reward_fn(seqs)
            rewards = -KL_COEF * (old_logp - ref_logp) * mask
            rewards[torch.arange(len(seqs), device=DEVICE), mask.sum(1) - 1] += score
            adv = gae(rewards, old_v, mask)
            returns = adv + old_v
            adv = (adv - adv[mask].mean()) / (adv[mask].std() + 1e-8)
        print(f"round {rnd}: reward {score.mean().item():.3f}, response tokens {int(mask.sum())}, ended {int((seqs == EOS).any(1).sum())}")
        policy.train()
        for _ in range(EPOCHS):
            for mb in torch.randperm(N_PROMPTS, device=DEVICE).chunk(MINIBATCHES):
                m = mask[mb]
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    logp, v, full = evaluate_tokens(policy, seqs[mb])
                ratio = (logp[m] - old_logp[mb][m]).exp()
                a = adv[mb][m]
                pg = -torch.min(ratio * a, ratio.clamp(1 - CLIP, 1 + CLIP) * a).mean()
                vf = F.mse_loss(v[m].float(), returns[mb][m])
                chosen = full[m]
                ent = -(chosen.exp() * chosen).sum(-1).mean()
                loss = pg + VF_COEF * vf - ENT_COEF * ent
                opt.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(params, 1.0)
                opt.step(); sched.step()
                clipped = ((ratio - 1).abs() > CLIP).float().mean().item()
                print(f"  step {step} loss {loss.item():.4f} pg {pg.item():.4f} vf {vf.item():.4f} ent {ent.item():.3f} clipfrac {clipped:.3f}")
                step += 1
    policy.eval()
    for i in range(3):
        (s, best), n = beam_search(policy, torch.randint(3, VOCAB, (1, PROMPT_LEN), device=DEVICE))
        print(f"beam {i}: score {s:.3f} length {best.numel() - PROMPT_LEN} hypotheses {n}")
    print("max_memory_allocated", torch.cuda.max_memory_allocated())
    print("max_memory_reserved", torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    main()
