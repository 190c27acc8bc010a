"""Minimal RLHF from scratch: (1) Bradley-Terry reward model, (2) PPO with a value head and KL penalty."""
import copy
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel


@dataclass
class HP:
    vocab: int = 50257
    n_embd: int = 1024
    n_layer: int = 16
    n_head: int = 16
    rm_embd: int = 768
    rm_layer: int = 8
    query_len: int = 64
    resp_len: int = 96
    rm_steps: int = 15
    rm_batch: int = 24
    iters: int = 3
    rollout_batch: int = 48
    minibatch: int = 16
    ppo_epochs: int = 2
    lr: float = 3e-6
    kl_coef: float = 0.05
    clip: float = 0.2
    vf_coef: float = 0.1
    gamma: float = 1.0
    lam: float = 0.95
    temperature: float = 0.9


hp = HP()
device = torch.device("cuda")
torch.manual_seed(0)
amp = lambda: torch.autocast("cuda", dtype=torch.bfloat16)
no_drop = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


class PolicyWithValue(nn.Module):
    def __init__(self):
        super().__init__()
        cfg = GPT2Config(vocab_size=hp.vocab, n_positions=512, n_embd=hp.n_embd, n_layer=hp.n_layer,
                         n_head=hp.n_head, **no_drop)
        self.lm = GPT2LMHeadModel(cfg)
        self.v_head = nn.Sequential(nn.Linear(hp.n_embd, hp.n_embd), nn.Tanh(), nn.Linear(hp.n_embd, 1))

    def forward(self, ids):
        h = self.lm.transformer(ids, use_cache=False).last_hidden_state[:, hp.query_len - 1:-1]
        return self.lm.lm_head(h), self.v_head(h).squeeze(-1)


@torch.no_grad()
def rollout(policy, query):
    ids, past, step_in = query, None, query
    for _ in range(hp.resp_len):
        out = policy.lm(step_in, past_key_values=past, use_cache=True)
        past = out.past_key_values
        probs = F.softmax(out.logits[:, -1].float() / hp.temperature, dim=-1)
        step_in = torch.multinomial(probs, 1)
        ids = torch.cat([ids, step_in], dim=1)
    return ids


def logprobs_of(logits, tokens):
    logp = F.log_softmax(logits.float() / hp.temperature, dim=-1)
    return logp.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def gae(rewards, values):
    adv, last = torch.zeros_like(rewards), 0.0
    for t in reversed(range(hp.resp_len)):
        next_v = values[:, t + 1] if t < hp.resp_len - 1 else 0.0
        delta = rewards[:, t] + hp.gamma * next_v - values[:, t]
        last = delta + hp.gamma * hp.lam * last
        adv[:, t] = last
    return adv, adv + values


def train_reward_model():
    cfg = GPT2Config(vocab_size=hp.vocab, n_positions=512, n_embd=hp.rm_embd, n_layer=hp.rm_layer, n_head=12,
                     num_labels=1, pad_token_id=hp.vocab - 1, **no_drop)
    rm = GPT2ForSequenceClassification(cfg).to(device)
    opt = torch.optim.AdamW(rm.parameters(), lr=1e-5)
    for step in range(hp.rm_steps):
        chosen = torch.randint(0, hp.vocab // 2, (hp.rm_batch, hp.query_len + hp.resp_len), device=device)
        rejected = torch.randint(hp.vocab // 2, hp.vocab - 1, chosen.shape, device=device)
        with amp():
            r = rm(torch.cat([chosen, rejected])).logits.squeeze(-1).float()
            r_c, r_r = r.chunk(2)
            loss = -F.logsigmoid(r_c - r_r).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(f"[rm] loss {loss.item():.4f} acc {(r_c > r_r).float().mean().item():.2f}")
    return rm.eval().requires_grad_(False)


reward_model = train_reward_model()
print("[rm] peak MiB", torch.cuda.max_memory_allocated() // 2**20, torch.cuda.max_memory_reserved() // 2**20)

policy = PolicyWithValue().to(device)
ref_lm = copy.deepcopy(policy.lm).eval().requires_grad_(False)
optimizer = torch.optim.AdamW(policy.parameters(), lr=hp.lr, betas=(0.9, 0.95), eps=1e-5)
print(f"policy {sum(p.numel() for p in policy.parameters()) / 1e6:.0f}M params")

for it in range(hp.iters):
    # ---------------------------------------------------------------- rollouts
    policy.eval()
    query = torch.randint(0, hp.vocab - 1, (hp.rollout_batch, hp.query_len), device=device)
    with torch.no_grad(), amp():
        ids = rollout(policy, query)
        resp = ids[:, hp.query_len:]
        score = reward_model(ids).logits.squeeze(-1).float()
        old_logp, old_v, ref_logp = [], [], []
        for chunk in ids.split(hp.minibatch):
            tok = chunk[:, hp.query_len:]
            logits, v = policy(chunk)
            old_logp.append(logprobs_of(logits, tok))
            old_v.append(v.float())
            ref_logits = ref_lm(chunk).logits[:, hp.query_len - 1:-1]
            ref_logp.append(logprobs_of(ref_logits, tok))
            del logits, ref_logits
        old_logp, old_v, ref_logp = map(torch.cat, (old_logp, old_v, ref_logp))
        kl = old_logp - ref_logp
        rewards = -hp.kl_coef * kl
        rewards[:, -1] += score
        adv, returns = gae(rewards, old_v)
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)

    # ---------------------------------------------------------------- ppo updates
    policy.train()
    stats = []
    for _ in range(hp.ppo_epochs):
        for mb in torch.randperm(hp.rollout_batch, device=device).split(hp.minibatch):
            with amp():
                logits, v = policy(ids[mb])
                new_logp = logprobs_of(logits, resp[mb])
            ratio = (new_logp - old_logp[mb]).exp()
            pg = torch.max(-adv[mb] * ratio, -adv[mb] * ratio.clamp(1 - hp.clip, 1 + hp.clip)).mean()
            v = v.float()
            v_clip = old_v[mb] + (v - old_v[mb]).clamp(-hp.clip, hp.clip)
            vf = 0.5 * torch.max((v - returns[mb]) ** 2, (v_clip - returns[mb]) ** 2).mean()
            loss = pg + hp.vf_coef * vf
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            stats.append(torch.stack([pg.detach(), vf.detach(), ((ratio - 1).abs() > hp.clip).float().mean()]))
    pg_m, vf_m, cf = torch.stack(stats).mean(0).tolist()
    print(f"iter {it} score {score.mean().item():+.3f} kl {kl.sum(1).mean().item():.3f} pg {pg_m:+.4f} "
          f"vf {vf_m:.4f} clipfrac {cf:.3f} peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")

print("max_memory_allocated:", torch.cuda.max_memory_allocated())
print("max_memory_reserved:", torch.cuda.max_memory_reserved())
