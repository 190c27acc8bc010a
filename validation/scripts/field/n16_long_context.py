"""How long a sequence can I push? per-layer checkpointing + chunked CE + CPU offload."""
import argparse
import contextlib

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers import MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM


def build(kind):
    common = dict(vocab_size=64000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8,
                  num_attention_heads=16, num_key_value_heads=4, max_position_embeddings=32768, use_cache=False,
                  attn_implementation="sdpa")
    if kind == "mistral":
        return MistralForCausalLM(MistralConfig(sliding_window=None, **common))
    return Qwen2ForCausalLM(Qwen2Config(tie_word_embeddings=True, **common))


def chunked_ce(hidden, weight, labels, chunk):
    """never hold the whole [T, V] logits."""
    def one(h, w, y):
        return F.cross_entropy((h @ w.t()).float(), y, reduction="sum", ignore_index=-100)

    hidden, labels = hidden[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    total = hidden.new_zeros((), dtype=torch.float32)
    for h, y in zip(hidden.split(chunk), labels.split(chunk)):
        total = total + checkpoint(one, h, weight, y, use_reentrant=False)
    return total / (labels != -100).sum()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--model", choices=["mistral", "qwen2"], default="mistral")
    ap.add_argument("--seq", type=int, default=8192)
    ap.add_argument("--chunk", type=int, default=1024)
    ap.add_argument("--offload", choices=["none", "cpu", "pinned"], default="cpu")
    ap.add_argument("--no-ckpt", action="store_true")
    ap.add_argument("--steps", type=int, default=5)
    a = ap.parse_args()
    torch.manual_seed(0)
    model = build(a.model).to(torch.bfloat16).cuda()
    if not a.no_ckpt:
        model.gradient_checkpointing_enable()
    model.train()
    opt = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)

    def ctx():
        if a.offload == "none":
            return contextlib.nullcontext()
        return torch.autograd.graph.save_on_cpu(pin_memory=a.offload == "pinned")

    for step in range(a.steps):
        ids = torch.randint(0, 64000, (1, a.seq), device="cuda")
        labels = ids.clone()
        labels[:, : a.seq // 8] = -100
        with ctx():
            h = model.model(input_ids=ids).last_hidden_state
            loss = chunked_ce(h, model.lm_head.weight, labels, a.chunk)
        del h
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        print(f"step {step}: loss {loss.item():.4f}  peak {torch.cuda.max_memory_allocated() / 1e9:.2f} GB")
        torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
