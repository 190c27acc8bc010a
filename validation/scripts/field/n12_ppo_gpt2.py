import copy
import sys
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel


@dataclass
class Cfg:
    algo: str = "ppo"
    rollouts: int = 2
    batch: int = 32
    minibatch: int = 8
    ppo_epochs: int = 1
    prompt_len: int = 32
    gen_len: int = 48
    kl_coef: float = 0.05
    clip: float = 0.2
    vf_coef: float = 0.1
    gamma: float = 1.0
    lam: float = 0.95
    vocab: int = 20000


cfg = Cfg()
if len(sys.argv) > 1:
    cfg.algo = sys.argv[1]
if cfg.algo == "reinforce":
    cfg.rollouts, cfg.minibatch = 5, 32


class PolicyWithValue(nn.Module):
    def __init__(self, lm):
        super().__init__()
        self.lm = lm
        self.v = nn.Sequential(nn.Dropout(0.1), nn.Linear(lm.config.n_embd, 1))

    def forward(self, ids, mask):
        out = self.lm(input_ids=ids, attention_mask=mask, output_hidden_states=True)
        return out.logits, self.v(out.hidden_states[-1]).squeeze(-1)


def logprobs_of(logits, ids):
    lp = F.log_softmax(logits[:, :-1].float(), dim=-1)
    return lp.gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)


def reward_fn(resp):
    # likes even tokens
    return (resp % 2 == 0).float().mean(1) * 2 - 1


def gae(rewards, values):
    adv = torch.zeros_like(rewards)
    last = 0
    T = rewards.size(1)
    for t in reversed(range(T)):
        nextv = values[:, t + 1] if t + 1 < T else 0.0
        delta = rewards[:, t] + cfg.gamma * nextv - values[:, t]
        last = delta + cfg.gamma * cfg.lam * last
        adv[:, t] = last
    return adv, adv + values


torch.manual_seed(123)
torch.backends.cuda.matmul.allow_tf32 = True
conf = GPT2Config(vocab_size=cfg.vocab, n_embd=640, n_layer=8, n_head=10, n_positions=256, bos_token_id=0,
                  eos_token_id=1, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
policy = PolicyWithValue(GPT2LMHeadModel(conf)).cuda()
ref = copy.deepcopy(policy.lm).eval().requires_grad_(False).half()
opt = torch.optim.AdamW(policy.parameters(), lr=1e-5)
P = cfg.prompt_len

n_upd = 0
for it in range(cfg.rollouts):
    policy.eval()
    prompts = torch.randint(2, cfg.vocab, (cfg.batch, P), device="cuda")
    with torch.no_grad():
        seq = policy.lm.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=True, top_k=50,
                                 min_new_tokens=cfg.gen_len, max_new_tokens=cfg.gen_len, pad_token_id=1)
        mask = torch.ones_like(seq)
        logits, values = policy(seq, mask)
        old_lp = logprobs_of(logits, seq)[:, P - 1:]
        del logits
        ref_lp = logprobs_of(ref(seq, attention_mask=mask).logits, seq)[:, P - 1:]
        values = values[:, P - 1:-1]
        kl = old_lp - ref_lp
        rewards = -cfg.kl_coef * kl
        score = reward_fn(seq[:, P:])
        rewards[:, -1] += score
        adv, ret = gae(rewards, values)
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
    policy.train()
    if cfg.algo == "reinforce":
        logits, _ = policy(seq, mask)
        lp = logprobs_of(logits, seq)[:, P - 1:]
        baseline = score.mean()
        loss = -((score - baseline).unsqueeze(1) * lp).mean() + 0.01 * (lp - ref_lp).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        n_upd += 1
        print(f"rollout {it} update {n_upd} loss {loss.item():.5f} score {score.mean().item():.3f}")
        continue
    for ep in range(cfg.ppo_epochs):
        perm = torch.randperm(cfg.batch, device="cuda")
        for mb in perm.split(cfg.minibatch):
            logits, v = policy(seq[mb], mask[mb])
            lp = logprobs_of(logits, seq[mb])[:, P - 1:]
            v = v[:, P - 1:-1]
            ratio = torch.exp(lp - old_lp[mb])
            a = adv[mb]
            pg = torch.max(-a * ratio, -a * ratio.clamp(1 - cfg.clip, 1 + cfg.clip)).mean()
            vclip = values[mb] + (v - values[mb]).clamp(-0.2, 0.2)
            vf = 0.5 * torch.max((v - ret[mb]) ** 2, (vclip - ret[mb]) ** 2).mean()
            ent = torch.distributions.Categorical(logits=logits[:, P - 1:-1].float()).entropy().mean()
            loss = pg + cfg.vf_coef * vf - 0.001 * ent
            opt.zero_grad()
            loss.backward()
            gn = nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            opt.step()
            n_upd += 1
            print(f"rollout {it} update {n_upd} loss {loss.item():.5f} pg {pg.item():.5f} vf {vf.item():.5f} "
                  f"ent {ent.item():.3f} kl {kl.sum(1).mean().item():.4f} |g| {float(gn):.3f}")
