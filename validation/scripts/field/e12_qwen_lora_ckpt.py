#!/usr/bin/env python
"""LoRA (rsLoRA + DoRA flag) finetuning of a Qwen3-style 1.3B base in bf16 with gradient checkpointing + 8-bit Adam."""
import argparse

import bitsandbytes as bnb
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen3Config


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--bs", type=int, default=8)
    p.add_argument("--seq", type=int, default=1024)
    p.add_argument("--steps", type=int, default=4)
    p.add_argument("--accum", type=int, default=2)
    p.add_argument("--rank", type=int, default=32)
    p.add_argument("--no-dora", action="store_true")
    p.add_argument("--seed", type=int, default=0)
    return p.parse_args()


def main():
    a = parse()
    torch.manual_seed(a.seed)
    cfg = Qwen3Config(
        vocab_size=100_000,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=20,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    with torch.device("cuda"):
        base = AutoModelForCausalLM.from_config(cfg, dtype=torch.bfloat16)
    base.config.use_cache = False
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    base.enable_input_require_grads()

    peft_cfg = LoraConfig(
        r=a.rank,
        lora_alpha=2 * a.rank,
        lora_dropout=0.05,
        use_dora=not a.no_dora,
        use_rslora=True,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, peft_cfg)
    model.print_trainable_parameters()
    model.train()

    params = [p for p in model.parameters() if p.requires_grad]
    opt = bnb.optim.AdamW8bit(params, lr=2e-4, weight_decay=0.01)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 2))

    gen = torch.Generator().manual_seed(a.seed)
    for step in range(a.steps):
        total = 0.0
        for _ in range(a.accum):
            ids = torch.randint(0, cfg.vocab_size, (a.bs, a.seq), generator=gen)
            labels = ids.clone()
            prompt_len = int(torch.randint(32, 256, (1,), generator=gen))
            labels[:, :prompt_len] = -100
            out = model(input_ids=ids.cuda(), labels=labels.cuda())
            (out.loss / a.accum).backward()
            total += out.loss.detach().item() / a.accum
        torch.nn.utils.clip_grad_norm_(params, 0.3)
        opt.step()
        sched.step()
        opt.zero_grad(set_to_none=True)
        print(f"[{step}] loss {total:.4f} alloc {torch.cuda.max_memory_allocated()} "
              f"reserved {torch.cuda.max_memory_reserved()}")


if __name__ == "__main__":
    main()
