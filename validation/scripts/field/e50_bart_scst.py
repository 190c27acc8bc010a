# BART summarisation: cross-entropy warmup, then self-critical sequence training (Rennie et al.)
import math
import random
import time
from collections import Counter

import torch
import torch.nn.functional as F
from transformers import BartConfig, BartForConditionalGeneration, get_linear_schedule_with_warmup

torch.manual_seed(5)
random.seed(5)
DEV = torch.device("cuda")

PAD, BOS, EOS = 1, 0, 2
VOCAB = 32000
SRC_LEN, TGT_LEN = 640, 64
BATCH = 32
MLE_STEPS, RL_STEPS = 5, 4
GAMMA = 0.9            # weight of the rl term in the mixed phase
GEN_LEN = 40


def sample_batch(bs):
    srcs, tgts = [], []
    for _ in range(bs):
        n = random.randint(SRC_LEN // 3, SRC_LEN - 2)
        topic = random.randint(10, 200) * 100
        body = [topic + random.randint(0, 99) if random.random() < 0.3 else random.randint(10, VOCAB - 1)
                for _ in range(n)]
        # summary = the on-topic words in order, truncated
        summ = [w for w in body if topic <= w < topic + 100][:random.randint(20, TGT_LEN - 2)]
        srcs.append([BOS] + body + [EOS])
        tgts.append([BOS] + summ + [EOS])
    S, T = max(map(len, srcs)), max(map(len, tgts))
    src = torch.tensor([s + [PAD] * (S - len(s)) for s in srcs])
    tgt = torch.tensor([t + [PAD] * (T - len(t)) for t in tgts])
    return src.to(DEV), tgt.to(DEV)


def strip(ids):
    out = []
    for t in ids:
        if t == EOS and out:
            break
        if t not in (PAD, BOS, EOS):
            out.append(t)
    return out


def lcs(a, b):
    prev = [0] * (len(b) + 1)
    for x in a:
        cur = [0]
        for j, y in enumerate(b):
            cur.append(prev[j] + 1 if x == y else max(prev[j + 1], cur[-1]))
        prev = cur
    return prev[-1]


def reward(hyp_ids, ref_ids):
    """0.5 * rouge-1-ish + 0.5 * rouge-L-ish, minus a repetition penalty"""
    scores = []
    for h, r in zip(hyp_ids.tolist(), ref_ids.tolist()):
        h, r = strip(h), strip(r)
        if not h or not r:
            scores.append(0.0)
            continue
        overlap = sum((Counter(h) & Counter(r)).values())
        r1 = 2 * overlap / (len(h) + len(r))
        rl = 2 * lcs(h, r) / (len(h) + len(r))
        rep = 1 - len(set(h)) / len(h)
        # topic bonus: cheap dense signal, else everything is 0 early on
        topic = sum(1 for w in h if w // 100 == r[0] // 100) / len(h)
        scores.append(0.4 * r1 + 0.4 * rl + 0.2 * topic - 0.1 * rep)
    return torch.tensor(scores, device=hyp_ids.device)


def build():
    config = BartConfig(
        vocab_size=VOCAB, d_model=1024,
        encoder_layers=8, decoder_layers=8,
        encoder_attention_heads=16, decoder_attention_heads=16,
        encoder_ffn_dim=4096, decoder_ffn_dim=4096,
        max_position_embeddings=1024, dropout=0.1,
        pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS,
        decoder_start_token_id=EOS, forced_eos_token_id=None,
    )
    with DEV:
        m = BartForConditionalGeneration(config)
    return m


def mle_loss(model, src, tgt):
    labels = tgt.masked_fill(tgt == PAD, -100)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = model(input_ids=src, attention_mask=src.ne(PAD).long(), labels=labels).logits
    return F.cross_entropy(logits.float().view(-1, VOCAB), labels.view(-1), label_smoothing=0.1)


def seq_logprob(model, src, seq):
    """log p of sampled tokens (first column is the decoder start token)"""
    dec_in, target = seq[:, :-1], seq[:, 1:]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = model(input_ids=src, attention_mask=src.ne(PAD).long(),
                       decoder_input_ids=dec_in, use_cache=False).logits
    logp = F.log_softmax(logits.float(), dim=-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)
    ended = (target == EOS).long().cumsum(1) - (target == EOS).long()
    mask = (ended == 0).float()
    return logp, mask


def scst_loss(model, src, tgt):
    attn = src.ne(PAD).long()
    model.eval()
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
        greedy = model.generate(src, attention_mask=attn, max_new_tokens=GEN_LEN, do_sample=False, num_beams=1)
        sampled = model.generate(src, attention_mask=attn, max_new_tokens=GEN_LEN, do_sample=True,
                                 top_k=0, temperature=1.0)
    model.train()
    r_greedy, r_sample = reward(greedy, tgt), reward(sampled, tgt)
    adv = r_sample - r_greedy
    logp, mask = seq_logprob(model, src, sampled)
    pg = -(adv.unsqueeze(1) * logp * mask).sum() / mask.sum().clamp(min=1)
    return pg, r_greedy.mean().item(), r_sample.mean().item(), adv


@torch.no_grad()
def validate(model, n=2):
    model.eval()
    losses, rewards = [], []
    for _ in range(n):
        src, tgt = sample_batch(16)
        losses.append(mle_loss(model, src, tgt).item())
        with torch.autocast("cuda", dtype=torch.bfloat16):
            hyp = model.generate(src, attention_mask=src.ne(PAD).long(), max_new_tokens=24,
                                 num_beams=3, early_stopping=True)
        rewards.append(reward(hyp, tgt).mean().item())
    model.train()
    return sum(losses) / n, sum(rewards) / n


def gpu(tag):
    print("   #", tag, "allocated %.2fG reserved %.2fG" % (
        torch.cuda.max_memory_allocated() / 2**30, torch.cuda.max_memory_reserved() / 2**30))


def main():
    model = build()
    model.train()
    print("parameters:", sum(p.numel() for p in model.parameters()) // 10**6, "M")
    opt = torch.optim.AdamW(model.parameters(), lr=2e-4, betas=(0.9, 0.98), weight_decay=0.01)
    sched = get_linear_schedule_with_warmup(opt, 2, MLE_STEPS + RL_STEPS + 2)

    def update(loss):
        opt.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        return norm.item()

    print("== phase 1: teacher forcing")
    for i in range(MLE_STEPS):
        t = time.time()
        src, tgt = sample_batch(BATCH)
        loss = mle_loss(model, src, tgt)
        norm = update(loss)
        print(f"mle {i} loss {loss.item():.4f} |g| {norm:.2f} src {tuple(src.shape)} {time.time() - t:.2f}s")
    gpu("after mle")
    val, best_reward = validate(model)
    print(f"val ce {val:.4f} reward {best_reward:.4f}")

    print("== phase 2: self-critical")
    # lower lr for the policy gradient part
    for g in opt.param_groups:
        g["initial_lr"] = 5e-5
    sched.base_lrs = [5e-5 for _ in opt.param_groups]
    baseline_hist = []
    for i in range(RL_STEPS):
        t = time.time()
        src, tgt = sample_batch(BATCH)
        pg, rg, rs, adv = scst_loss(model, src, tgt)
        baseline_hist.append(rg)
        if adv.abs().max() < 1e-6:
            print(f"rl {i}: no advantage in the batch, ce only")
            loss = mle_loss(model, src, tgt)
        else:
            loss = GAMMA * pg + (1 - GAMMA) * mle_loss(model, src, tgt)
        if math.isnan(loss.item()):
            print("nan, stop")
            break
        norm = update(loss)
        print(f"rl {i} loss {loss.item():.4f} pg {pg.item():.4f} greedy {rg:.4f} sample {rs:.4f} "
              f"|g| {norm:.2f} {time.time() - t:.2f}s")
        if i == 0:
            gpu("first rl step")
    val, rew = validate(model, 1)
    print(f"val ce {val:.4f} reward {rew:.4f}", "(improved)" if rew > best_reward else "(not improved)")
    print("mean greedy baseline", sum(baseline_hist) / max(1, len(baseline_hist)))
    gpu("end")
    print(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())


main()
