"""GRPO in 100 lines: generate with a KV cache, reward on the GPU, policy + frozen reference, static cache option."""
import sys
import copy
import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

impl = sys.argv[1]
if impl == "gpt2":
    policy = GPT2LMHeadModel(GPT2Config(n_embd=1024, n_layer=12, n_head=16)).to(torch.bfloat16).cuda()
else:
    policy = Qwen3ForCausalLM(Qwen3Config(hidden_size=1024, intermediate_size=3072, num_hidden_layers=10, num_attention_heads=16,
                                          num_key_value_heads=8, head_dim=64, vocab_size=50257)).to(torch.bfloat16).cuda()
ref = copy.deepcopy(policy).eval().requires_grad_(False)
opt = torch.optim.AdamW(policy.parameters(), lr=1e-6, weight_decay=0.0)
G, NP, PL, NEW = 6, 4, 64, 32
V = 50257


def logps(m, seq):
    logits = m(input_ids=seq, use_cache=False).logits[:, PL - 1:-1]
    return torch.gather(logits.float().log_softmax(-1), 2, seq[:, PL:, None]).squeeze(2)


for step in range(4):
    prompts = torch.randint(0, V - 10, (NP, PL), device="cuda").repeat_interleave(G, 0)
    policy.eval()
    kw = {"cache_implementation": "static"} if impl == "qwen-static" else {}
    with torch.no_grad():
        seq = policy.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=True, top_k=50, temperature=1.0,
                              pad_token_id=V - 1, eos_token_id=V - 1, disable_compile=True, **kw)
        old = logps(policy, seq)
        rl = logps(ref, seq)
    reward = (seq[:, PL:] % 7 == 0).float().mean(1)
    r = reward.view(NP, G)
    adv = ((r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-4)).view(-1, 1)
    policy.train()
    for mb in range(0, NP * G, 8):
        s = slice(mb, mb + 8)
        lp = logps(policy, seq[s])
        ratio = (lp - old[s]).exp()
        pg = -torch.min(ratio * adv[s], ratio.clamp(0.8, 1.2) * adv[s])
        kl = (rl[s] - lp).exp() - (rl[s] - lp) - 1
        ((pg + 0.04 * kl).mean() / 3).backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    opt.step()
    opt.zero_grad()
    print(step, tuple(seq.shape), reward.mean().item(), torch.cuda.max_memory_allocated() // 2**20)
