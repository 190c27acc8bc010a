"""Logit distillation (Llama teacher -> GPT-2 student) plus a small evaluation, on synthetic tokens."""
import argparse
import logging

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    get_cosine_schedule_with_warmup,
)

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
log = logging.getLogger("distill")

VOCAB = 50257


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--batch_size", type=int, default=16)
    p.add_argument("--seq_len", type=int, default=768)
    p.add_argument("--train_steps", type=int, default=10)
    p.add_argument("--eval_batches", type=int, default=3)
    p.add_argument("--chunk", type=int, default=2048, help="tokens per KL chunk")
    p.add_argument("--temperature", type=float, default=2.0)
    p.add_argument("--alpha", type=float, default=0.7)
    p.add_argument("--lr", type=float, default=3e-4)
    p.add_argument("--teacher_dim", type=int, default=2048)
    p.add_argument("--teacher_layers", type=int, default=16)
    p.add_argument("--student_dim", type=int, default=768)
    p.add_argument("--student_layers", type=int, default=6)
    p.add_argument("--gen_tokens", type=int, default=24)
    return p.parse_args()


def build_models(args, device):
    t_cfg = LlamaConfig(
        vocab_size=VOCAB, hidden_size=args.teacher_dim, intermediate_size=args.teacher_dim * 4,
        num_hidden_layers=args.teacher_layers, num_attention_heads=args.teacher_dim // 64,
        num_key_value_heads=8, max_position_embeddings=2048, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None,
    )
    with torch.device(device):
        teacher = AutoModelForCausalLM.from_config(t_cfg, dtype=torch.bfloat16, attn_implementation="sdpa")
        s_cfg = GPT2Config(vocab_size=VOCAB, n_embd=args.student_dim, n_layer=args.student_layers,
                           n_head=args.student_dim // 64, n_positions=1024)
        student = GPT2LMHeadModel(s_cfg)
    teacher.eval().requires_grad_(False)
    student.train()
    return teacher, student


def kd_chunk(student_logits, teacher_hidden, labels, head_w, T):
    """sum of KL and CE over one slice of tokens; recomputed in backward"""
    with torch.no_grad():
        t_logp = F.log_softmax(F.linear(teacher_hidden, head_w).float() / T, dim=-1)
    s_logits = student_logits.float()
    s_logp = F.log_softmax(s_logits / T, dim=-1)
    kl = F.kl_div(s_logp, t_logp, reduction="sum", log_target=True) * T * T
    ce = F.cross_entropy(s_logits, labels, reduction="sum")
    return kl, ce


def distill_loss(s_logits, t_hidden, labels, head_w, args):
    s_logits = s_logits[:, :-1].flatten(0, 1)
    t_hidden = t_hidden[:, :-1].flatten(0, 1)
    labels = labels[:, 1:].flatten()
    kl = ce = 0.0
    for sl, th, lb in zip(s_logits.split(args.chunk), t_hidden.split(args.chunk), labels.split(args.chunk)):
        k, c = checkpoint(kd_chunk, sl, th, lb, head_w, args.temperature, use_reentrant=False)
        kl, ce = kl + k, ce + c
    n = labels.numel()
    return args.alpha * kl / n + (1 - args.alpha) * ce / n, ce.detach() / n


def top_k_top_p(logits, k=200, p=0.95):
    kth = torch.topk(logits, k, dim=-1).values[..., -1:]
    logits = logits.masked_fill(logits < kth, float("-inf"))
    sorted_logits, idx = torch.sort(logits, descending=True, dim=-1)
    cum = sorted_logits.softmax(-1).cumsum(-1)
    remove = cum - sorted_logits.softmax(-1) > p
    sorted_logits = sorted_logits.masked_fill(remove, float("-inf"))
    return torch.full_like(logits, float("-inf")).scatter(-1, idx, sorted_logits)


@torch.inference_mode()
def evaluate(teacher, student, loader, args, device):
    student.eval()
    kept_s, kept_t, agree, nll = [], [], [], []
    for i, (ids,) in enumerate(loader):
        if i == args.eval_batches:
            break
        ids = ids.to(device)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            s = student(ids, use_cache=False).logits
        t = teacher(ids, use_cache=False).logits
        nll.append(F.cross_entropy(s[:, :-1].reshape(-1, VOCAB).float(), ids[:, 1:].reshape(-1)))
        s5, t5 = s.topk(5, dim=-1).indices, t.topk(5, dim=-1).indices
        agree.append((s5.unsqueeze(-1) == t5.unsqueeze(-2)).any(-1).float().mean())
        # keep the second half of every sequence for the calibration metrics below
        kept_s.append(s[:, args.seq_len // 2:].contiguous())
        kept_t.append(t[:, args.seq_len // 2:].contiguous())
    s, t = torch.cat(kept_s).flatten(0, 1), torch.cat(kept_t).flatten(0, 1)
    # nucleus mass: how many student tokens are needed to reach 90% of the probability
    sizes = []
    for part in s.split(4096):
        probs = part.float().softmax(-1)
        sizes.append((probs.sort(dim=-1, descending=True).values.cumsum(-1) < 0.9).sum(-1))
    nucleus = torch.cat(sizes).float().mean()
    draws = torch.multinomial(t[:4096].float().softmax(-1), num_samples=8, replacement=True)
    hit = s[:4096].float().log_softmax(-1).gather(-1, draws).mean()
    student.train()
    return {"nll": torch.stack(nll).mean().item(), "top5_overlap": torch.stack(agree).mean().item(),
            "nucleus90": nucleus.item(), "student_logp_of_teacher_draws": hit.item()}


@torch.inference_mode()
def sample(model, prompt, n):
    past, ids, cur = None, prompt, prompt
    for _ in range(n):
        out = model(cur, past_key_values=past, use_cache=True, logits_to_keep=1)
        past = out.past_key_values
        logits = top_k_top_p(out.logits[:, -1].float() / 0.8)
        cur = torch.multinomial(logits.softmax(-1), 1)
        ids = torch.cat([ids, cur], dim=1)
    return ids


def mem(tag):
    log.info("%s | max_memory_allocated %d | max_memory_reserved %d", tag,
             torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())


def main():
    args = parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda")
    teacher, student = build_models(args, device)
    mem("models built")
    data = TensorDataset(torch.randint(0, VOCAB, (args.batch_size * (args.train_steps + args.eval_batches), args.seq_len)))
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=True, pin_memory=True, drop_last=True)
    decay = [p for p in student.parameters() if p.dim() > 1]
    rest = [p for p in student.parameters() if p.dim() <= 1]
    opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=args.lr)
    sched = get_cosine_schedule_with_warmup(opt, 2, args.train_steps)

    for step, (ids,) in zip(range(args.train_steps), loader):
        ids = ids.to(device, non_blocking=True)
        with torch.inference_mode():
            t_hidden = teacher.model(ids, use_cache=False).last_hidden_state
        t_hidden = t_hidden.clone()      # inference tensors cannot be saved for backward
        with torch.autocast("cuda", dtype=torch.bfloat16):
            s_logits = student(ids, use_cache=False).logits
        loss, ce = distill_loss(s_logits, t_hidden, ids, teacher.lm_head.weight, args)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        opt.step()
        sched.step()
        opt.zero_grad()
        log.info("step %d loss %.4f ce %.4f lr %.2e", step, loss.item(), ce.item(), sched.get_last_lr()[0])
    mem("after training")

    log.info("eval: %s", evaluate(teacher, student, loader, args, device))
    mem("after evaluation")
    out = sample(teacher, torch.randint(0, VOCAB, (64, 128), device=device), args.gen_tokens)
    log.info("sampled %s", tuple(out.shape))
    mem("after sampling")


if __name__ == "__main__":
    main()
