#!/usr/bin/env python
# long-context continued pretraining, gemma3-like stack, activations of checkpointed layers offloaded to host
import functools
import math
import time

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, get_cosine_schedule_with_warmup

SEQ_LEN = 6144
MICRO_BS = 1
ACCUM = 4
OPT_STEPS = 5
LR = 3e-4
CLIP = 1.0
LOG_EVERY = 1
EVAL_EVERY = 2
OFFLOAD_EVERY = 2   # every second layer's input goes to pinned host memory


class NeedleStream(IterableDataset):
    """random 'documents' packed to SEQ_LEN; phrases seen early in the window are repeated late in it"""

    def __init__(self, vocab_size, n, seed):
        self.vocab_size, self.n, self.seed = vocab_size, n, seed

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed)
        for _ in range(self.n):
            x = torch.randint(4, 3000, (SEQ_LEN,), generator=g)
            needle = torch.randint(4, self.vocab_size, (128,), generator=g)
            for frac in (0.05, 0.3, 0.55, 0.8):
                s = int(frac * SEQ_LEN) + int(torch.randint(0, 64, (1,), generator=g))
                x[s:s + 128] = needle
            yield {"input_ids": x, "labels": x.clone()}


def build_model():
    n_layers = 10
    cfg = Gemma3TextConfig(
        vocab_size=65536,
        hidden_size=1536,
        intermediate_size=6144,
        num_hidden_layers=n_layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        sliding_window=1024,
        layer_types=["full_attention" if (i + 1) % 5 == 0 else "sliding_attention" for i in range(n_layers)],
        max_position_embeddings=16384,
        attn_implementation="sdpa",
        use_cache=False,
    )
    with torch.device("cuda"):
        model = Gemma3ForCausalLM(cfg)
    return model


def wrap_layers(model):
    for i, layer in enumerate(model.model.layers):
        inner = layer.forward

        def fwd(*args, _inner=inner, _layer=layer, _offload=(i % OFFLOAD_EVERY == 0), **kwargs):
            if not _layer.training:
                return _inner(*args, **kwargs)
            run = functools.partial(checkpoint, _inner, *args, use_reentrant=False, **kwargs)
            if _offload:
                with save_on_cpu(pin_memory=True):
                    return run()
            return run()

        layer.forward = fwd


def param_groups(model, wd):
    decay, plain = [], []
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        (plain if p.ndim < 2 or "embed" in name else decay).append(p)
    return [{"params": decay, "weight_decay": wd}, {"params": plain, "weight_decay": 0.0}]


@torch.no_grad()
def evaluate(model, loader, accelerator):
    model.eval()
    tot, n = 0.0, 0
    for batch in loader:
        out = model(**batch)
        tot += accelerator.gather(out.loss).mean().item()
        n += 1
    model.train()
    return tot / max(n, 1)


def report(accelerator, tag):
    accelerator.print(
        f"[{tag}] max_memory_allocated={torch.cuda.max_memory_allocated() / 1e9:.2f}GB "
        f"max_memory_reserved={torch.cuda.max_memory_reserved() / 1e9:.2f}GB"
    )


def main():
    set_seed(0)
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=ACCUM)
    model = build_model()
    wrap_layers(model)
    accelerator.print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.0f}M params, ctx {SEQ_LEN}")

    optimizer = torch.optim.AdamW(param_groups(model, 0.1), lr=LR, betas=(0.9, 0.95))
    vocab = model.config.vocab_size
    train_dl = DataLoader(NeedleStream(vocab, OPT_STEPS * ACCUM, seed=11), batch_size=MICRO_BS)
    val_dl = DataLoader(NeedleStream(vocab, 2, seed=99), batch_size=MICRO_BS)
    scheduler = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=1, num_training_steps=OPT_STEPS)

    model, optimizer, train_dl, val_dl, scheduler = accelerator.prepare(
        model, optimizer, train_dl, val_dl, scheduler
    )
    report(accelerator, "prepared")

    model.train()
    step, running, best_val = 0, 0.0, math.inf
    tic = time.perf_counter()
    for micro, batch in enumerate(train_dl):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            running += loss.detach().float()
            grad_norm = None
            if accelerator.sync_gradients:
                grad_norm = accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

        if not accelerator.sync_gradients:
            continue
        step += 1
        avg = (running / ACCUM).item()
        running = 0.0
        if math.isnan(avg):
            accelerator.print("nan loss, aborting")
            break
        if step % LOG_EVERY == 0:
            toks = ACCUM * MICRO_BS * SEQ_LEN / (time.perf_counter() - tic)
            accelerator.print(f"step {step} loss {avg:.4f} gnorm {grad_norm.item():.3f} "
                              f"lr {scheduler.get_last_lr()[0]:.2e} {toks:,.0f} tok/s")
        if step == 1:
            report(accelerator, "first step")
        if step % EVAL_EVERY == 0:
            val = evaluate(model, val_dl, accelerator)
            improved = val < best_val
            best_val = min(val, best_val)
            accelerator.print(f"  val loss {val:.4f} ppl {math.exp(min(val, 20)):.1f}{' (best)' if improved else ''}")
            report(accelerator, f"eval@{step}")
        tic = time.perf_counter()

    accelerator.wait_for_everyone()
    report(accelerator, "end")
    accelerator.print(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
    accelerator.end_training()


if __name__ == "__main__":
    main()
