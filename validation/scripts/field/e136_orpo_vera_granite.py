"""ORPO preference tuning of a Granite-style model with VeRA adapters (no reference model)."""
import os
import random
import tempfile

import torch
import torch.nn.functional as F
from peft import VeraConfig, get_peft_model
from torch.nn.utils.rnn import pad_sequence
from transformers import GraniteConfig, GraniteForCausalLM, get_cosine_schedule_with_warmup

SEED = 136
PAD = 0
BETA = 0.1
MICRO_BATCH = 4
ACCUM = 2
OPT_STEPS = 5
VOCAB = 49155


def build_model():
    config = GraniteConfig(
        vocab_size=VOCAB, hidden_size=2048, intermediate_size=8192, num_hidden_layers=20,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=4096,
        embedding_multiplier=12.0, logits_scaling=8.0, residual_multiplier=0.22,
        attention_multiplier=0.015625, tie_word_embeddings=True, pad_token_id=PAD,
        bos_token_id=1, eos_token_id=2,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = GraniteForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.config.use_cache = False
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    vera = VeraConfig(r=256, target_modules=["q_proj", "o_proj", "down_proj"], d_initial=0.1,
                      vera_dropout=0.05, projection_prng_key=SEED, task_type="CAUSAL_LM")
    model = get_peft_model(model, vera)
    model.print_trainable_parameters()
    return model


def make_pair(rng):
    prompt = [1] + [rng.randrange(3, VOCAB) for _ in range(rng.randint(64, 384))]
    out = {}
    for side, (lo, hi) in {"chosen": (96, 480), "rejected": (48, 640)}.items():
        answer = [rng.randrange(3, VOCAB) for _ in range(rng.randint(lo, hi))] + [2]
        out[side] = torch.tensor(prompt + answer)
        out[side + "_labels"] = torch.tensor([-100] * len(prompt) + answer)
    return out


def collate(pairs):
    ids = [p["chosen"] for p in pairs] + [p["rejected"] for p in pairs]
    labels = [p["chosen_labels"] for p in pairs] + [p["rejected_labels"] for p in pairs]
    ids = pad_sequence(ids, batch_first=True, padding_value=PAD)
    labels = pad_sequence(labels, batch_first=True, padding_value=-100)
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": labels}


def sequence_logps(logits, labels):
    """Mean log-probability per answer token for each row."""
    logits, labels = logits[:, :-1].float(), labels[:, 1:]
    mask = labels != -100
    safe = labels.masked_fill(~mask, 0)
    token_logps = logits.gather(-1, safe.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(logits, dim=-1)
    return (token_logps * mask).sum(-1) / mask.sum(-1)


def orpo_loss(model, batch):
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    logps = sequence_logps(logits, batch["labels"])
    chosen, rejected = logps.chunk(2)
    log_odds = (chosen - rejected) - (torch.log1p(-chosen.exp()) - torch.log1p(-rejected.exp()))
    ratio = F.logsigmoid(log_odds)
    return (-chosen - BETA * ratio).mean(), (log_odds > 0).float().mean()


def mem(tag):
    print(f"[{tag}] allocated {torch.cuda.memory_allocated() / 2**30:.2f} GiB, "
          f"peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")


def main():
    random.seed(SEED)
    torch.manual_seed(SEED)
    model = build_model().to("cuda")   # moves the adapters
    mem("model")
    rng = random.Random(SEED)
    pairs = [make_pair(rng) for _ in range(MICRO_BATCH * ACCUM * OPT_STEPS + MICRO_BATCH)]
    train = torch.utils.data.DataLoader(pairs[MICRO_BATCH:], batch_size=MICRO_BATCH, shuffle=True, collate_fn=collate)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=2e-3, weight_decay=0.0)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 1, OPT_STEPS)

    model.train()
    running = 0.0
    for i, batch in enumerate(train, 1):
        batch = {k: v.to("cuda") for k, v in batch.items()}
        loss, acc = orpo_loss(model, batch)
        (loss / ACCUM).backward()
        running += loss.item() / ACCUM
        if i % ACCUM == 0:
            torch.nn.utils.clip_grad_norm_(trainable, 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            print(f"step {i // ACCUM}: loss {running:.4f} acc {acc.item():.2f} len {batch['input_ids'].shape[1]} "
                  f"lr {scheduler.get_last_lr()[0]:.1e}")
            mem("train")
            running = 0.0

    model.eval()
    with torch.no_grad():
        held = {k: v.to("cuda") for k, v in collate(pairs[:MICRO_BATCH]).items()}
        loss, acc = orpo_loss(model, held)
    print(f"held-out loss {loss.item():.4f} acc {acc.item():.2f}")

    with tempfile.TemporaryDirectory() as tmp:
        model.save_pretrained(tmp)
        size = sum(os.path.getsize(os.path.join(tmp, f)) for f in os.listdir(tmp))
        print(f"adapter on disk: {size / 1e6:.2f} MB")
    mem("end")


if __name__ == "__main__":
    main()
