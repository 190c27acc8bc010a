"""DPO written out by hand on a Qwen2.5-0.5B shaped model + LoRA.

The reference policy is just the base model: we switch the adapters off, so only one copy of
the weights lives on the GPU. Chosen and rejected are padded together and run in one forward.
"""
import random
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, Qwen2Config

hp = SimpleNamespace(
    beta=0.1,
    label_smoothing=0.0,
    lr=5e-5,
    batch_size=2,
    grad_accum=4,
    max_prompt_len=256,
    max_len=768,
    n_pairs=48,
    n_eval=8,
    max_grad_norm=1.0,
    layers=24,
    vocab=151936,
    pad_id=151643,
)


def make_pairs(n, seed):
    rng = random.Random(seed)
    sample = lambda k: [rng.randrange(0, hp.pad_id) for _ in range(k)]
    data = []
    for _ in range(n):
        data.append(
            {
                "prompt": sample(rng.randint(32, 300)),
                "chosen": sample(rng.randint(50, 560)),
                "rejected": sample(rng.randint(50, 640)),
            }
        )
    return data


def collate(rows):
    """-> tensors of shape (2B, T): first B rows chosen, last B rows rejected."""
    seqs, labels = [], []
    for key in ("chosen", "rejected"):
        for r in rows:
            prompt = r["prompt"][-hp.max_prompt_len :]
            answer = r[key][: hp.max_len - len(prompt)]
            seqs.append(torch.tensor(prompt + answer))
            labels.append(torch.tensor([-100] * len(prompt) + answer))
    input_ids = torch.nn.utils.rnn.pad_sequence(seqs, batch_first=True, padding_value=hp.pad_id)
    labels = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
    return {"input_ids": input_ids, "attention_mask": (input_ids != hp.pad_id).long(), "labels": labels}


def sequence_logps(model, batch):
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    logits = logits[:, :-1].float()
    labels = batch["labels"][:, 1:].clone()
    mask = labels != -100
    labels[~mask] = 0
    per_token = torch.gather(logits.log_softmax(-1), 2, labels.unsqueeze(2)).squeeze(2)
    return (per_token * mask).sum(-1)


def dpo_loss(policy, reference):
    pi_c, pi_r = policy.chunk(2)
    ref_c, ref_r = reference.chunk(2)
    h = hp.beta * ((pi_c - pi_r) - (ref_c - ref_r))
    loss = -F.logsigmoid(h) * (1 - hp.label_smoothing) - F.logsigmoid(-h) * hp.label_smoothing
    margin = hp.beta * ((pi_c - ref_c) - (pi_r - ref_r)).detach()
    return loss.mean(), margin


def step_fn(model, batch):
    batch = {k: v.to("cuda") for k, v in batch.items()}
    with torch.no_grad(), model.disable_adapter():
        ref = sequence_logps(model, batch)
    pol = sequence_logps(model, batch)
    return dpo_loss(pol, ref)


def main():
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=hp.vocab,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=hp.layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        tie_word_embeddings=True,
        use_cache=False,
    )
    base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to("cuda")
    model = get_peft_model(
        base,
        LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    model.print_trainable_parameters()

    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=hp.lr, weight_decay=0.0)
    train = DataLoader(make_pairs(hp.n_pairs, 0), batch_size=hp.batch_size, shuffle=True, collate_fn=collate)
    held_out = DataLoader(make_pairs(hp.n_eval, 1), batch_size=hp.batch_size, collate_fn=collate)
    updates = len(train) // hp.grad_accum
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: max(0.0, 1 - s / updates))

    model.train()
    running = 0.0
    for i, batch in enumerate(train, start=1):
        loss, margin = step_fn(model, batch)
        (loss / hp.grad_accum).backward()
        running += loss.item() / hp.grad_accum
        if i % hp.grad_accum == 0:
            gn = torch.nn.utils.clip_grad_norm_(trainable, hp.max_grad_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            print(f"update {i // hp.grad_accum} loss {running:.4f} margin {margin.mean():.4f} gnorm {gn:.3f}")
            running = 0.0

    model.eval()
    wins = []
    with torch.no_grad():
        for batch in held_out:
            _, margin = step_fn(model, batch)
            wins.append((margin > 0).float())
    print(f"held-out reward accuracy {torch.cat(wins).mean().item():.3f}")

    print("torch.cuda.max_memory_allocated", torch.cuda.max_memory_allocated())
    print("torch.cuda.max_memory_reserved", torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    main()
