"""Direct preference optimisation, by hand, with a frozen reference copy."""
import copy
import torch
import torch.nn.functional as F
from transformers import Qwen2Config, Qwen2ForCausalLM

torch.manual_seed(0)
device = torch.device("cuda")
BETA = 0.1

cfg = Qwen2Config(
    vocab_size=48000, hidden_size=768, intermediate_size=2048, num_hidden_layers=8,
    num_attention_heads=12, num_key_value_heads=4, max_position_embeddings=2048, tie_word_embeddings=True,
)
policy = Qwen2ForCausalLM(cfg).to(device)
ref = copy.deepcopy(policy).to(torch.bfloat16).eval()
for p in ref.parameters():
    p.requires_grad_(False)
policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
policy.config.use_cache = False
policy.train()


def make_batch(seed, n=4):
    """prompt + chosen / prompt + rejected, right padded to the longest of all."""
    g = torch.Generator().manual_seed(seed)
    seqs, masks = [], []
    for kind in range(2):
        for i in range(n):
            pl = int(torch.randint(64, 256, (1,), generator=g))
            rl = int(torch.randint(64, 384, (1,), generator=g))
            ids = torch.randint(5, cfg.vocab_size, (pl + rl,), generator=g)
            m = torch.cat([torch.zeros(pl, dtype=torch.long), torch.ones(rl, dtype=torch.long)])
            seqs.append(ids)
            masks.append(m)
    ids = torch.nn.utils.rnn.pad_sequence(seqs, batch_first=True, padding_value=0)
    loss_mask = torch.nn.utils.rnn.pad_sequence(masks, batch_first=True, padding_value=0)
    att = (ids != 0).long()
    return ids.to(device), att.to(device), loss_mask.to(device)


def sequence_logps(model, ids, att, loss_mask):
    logits = model(input_ids=ids, attention_mask=att).logits[:, :-1]
    labels = ids[:, 1:]
    mask = loss_mask[:, 1:]
    logps = F.log_softmax(logits.float(), dim=-1)
    tok = torch.gather(logps, 2, labels.unsqueeze(-1)).squeeze(-1)
    return (tok * mask).sum(-1)


opt = torch.optim.RMSprop(policy.parameters(), lr=1e-6)
for step in range(6):
    ids, att, lm = make_batch(step)
    with torch.no_grad():
        ref_lp = sequence_logps(ref, ids, att, lm)
    with torch.autocast("cuda", torch.bfloat16):
        pol_lp = sequence_logps(policy, ids, att, lm)
    half = ids.size(0) // 2
    pi = pol_lp[:half] - pol_lp[half:]
    rf = ref_lp[:half] - ref_lp[half:]
    loss = -F.logsigmoid(BETA * (pi - rf)).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 10.0)
    opt.step()
    opt.zero_grad(set_to_none=True)
    acc = (pi > rf).float().mean().item()
    print(f"step {step} len {ids.size(1)} loss {loss.item():.4f} acc {acc:.2f} "
          f"mem {torch.cuda.memory_allocated() / 2**20:.0f}MiB")

print("max_memory_allocated", torch.cuda.max_memory_allocated())
print("max_memory_reserved", torch.cuda.max_memory_reserved())
