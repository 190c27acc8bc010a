"""GRPO-like loop: sample rollouts with a hand-written KV cache, score, several micro-batch updates."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
dev = "cuda"
V, D, H, L = 16384, 768, 12, 8
PROMPT, GEN, GROUP, NPROMPT, MICRO = 64, 128, 8, 4, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv = nn.Linear(D, 3 * D)
        self.o = nn.Linear(D, D)
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))

    def forward(self, x, past=None):
        B, T, _ = x.shape
        q, k, v = self.qkv(self.n1(x)).view(B, T, 3, H, D // H).permute(2, 0, 3, 1, 4)
        if past is not None:
            k = torch.cat([past[0], k], dim=2)
            v = torch.cat([past[1], v], dim=2)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=past is None)
        x = x + self.o(a.transpose(1, 2).reshape(B, T, D))
        return x + self.mlp(self.n2(x)), (k, v)


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(V, D), nn.Embedding(PROMPT + GEN, D)
        self.blocks = nn.ModuleList(Block() for _ in range(L))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, V, bias=False)

    def forward(self, ids, past=None):
        start = 0 if past is None else past[0][0].size(2)
        x = self.tok(ids) + self.pos(torch.arange(start, start + ids.size(1), device=ids.device))
        new = []
        for i, b in enumerate(self.blocks):
            x, kv = b(x, None if past is None else past[i])
            new.append(kv)
        return self.head(self.norm(x)), new


@torch.no_grad()
def rollout(model, prompts):
    ids = prompts
    logits, past = model(ids)
    for _ in range(GEN):
        nxt = torch.multinomial(F.softmax(logits[:, -1].float(), -1), 1)
        ids = torch.cat([ids, nxt], 1)
        logits, past = model(nxt, past)
        if ids.size(1) == PROMPT + GEN:
            break
    return ids


def logprobs(model, ids):
    logits = model(ids[:, :-1])[0][:, PROMPT - 1:]
    tgt = ids[:, PROMPT:]
    return -F.cross_entropy(logits.float().reshape(-1, V), tgt.reshape(-1), reduction="none").view(tgt.shape)


# one position is appended past the last generated token, so give the table one spare row
policy = LM()
policy.pos = nn.Embedding(PROMPT + GEN + 1, D)
policy.to(dev)
ref = LM()
ref.pos = nn.Embedding(PROMPT + GEN + 1, D)
ref.load_state_dict(policy.state_dict())
ref.to(dev).requires_grad_(False)
opt = torch.optim.AdamW(policy.parameters(), lr=1e-5, foreach=False)

for it in range(3):
    prompts = torch.randint(0, V, (NPROMPT, PROMPT), device=dev).repeat_interleave(GROUP, 0)
    with torch.autocast("cuda", torch.bfloat16):
        ids = rollout(policy, prompts)
    reward = (ids[:, PROMPT:] % 7 == 0).float().mean(1).view(NPROMPT, GROUP)
    adv = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)).view(-1, 1)
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        old = torch.cat([logprobs(policy, c) for c in ids.split(MICRO)])
        refl = torch.cat([logprobs(ref, c) for c in ids.split(MICRO)])
    print(f"iter {it} after rollout: {torch.cuda.max_memory_allocated()}")
    for epoch in range(2):
        n = ids.size(0) // MICRO
        for i in range(n):
            s = slice(i * MICRO, (i + 1) * MICRO)
            with torch.autocast("cuda", torch.bfloat16):
                lp = logprobs(policy, ids[s])
            ratio = (lp - old[s]).exp()
            pg = -torch.min(ratio * adv[s], ratio.clamp(0.8, 1.2) * adv[s])
            kl = (refl[s] - lp).exp() - (refl[s] - lp) - 1
            loss = (pg + 0.04 * kl).mean() / n
            loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
    print(f"iter {it} reward {reward.mean().item():.4f} loss {loss.item():.5f}")

print("max_memory_allocated", torch.cuda.max_memory_allocated())
print("max_memory_reserved", torch.cuda.max_memory_reserved())
