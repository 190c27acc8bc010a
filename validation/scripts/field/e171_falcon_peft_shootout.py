"""Which PEFT method for our Falcon? LoHa vs OFT vs P-tuning on the same frozen base.

Same data, same number of steps, three methods in a row on one base model kept on the GPU.
"""
import gc

import numpy as np
import torch
from peft import LoHaConfig, OFTConfig, PromptEncoderConfig, TaskType, get_peft_model
from torch.utils.data import DataLoader, TensorDataset
from transformers import FalconConfig, FalconForCausalLM

SEED = 99
SEQ = 640
BATCH = 6
STEPS = 4
device = torch.device("cuda")
mb = lambda b: f"{b / 2**20:9.1f} MiB"


def seed_all(s):
    np.random.seed(s)
    torch.manual_seed(s)
    torch.cuda.manual_seed_all(s)


def make_base():
    # a "falcon-0.9b": 7b layout (multi query, parallel attention) but narrower
    cfg = FalconConfig(
        vocab_size=65024, hidden_size=2048, num_hidden_layers=20, num_attention_heads=32,
        multi_query=True, parallel_attn=True, new_decoder_architecture=False, alibi=False, bias=False,
        max_position_embeddings=2048, use_cache=False,
    )
    with device:
        base = FalconForCausalLM(cfg).to(torch.bfloat16)
    gc.collect()
    torch.cuda.empty_cache()
    return base


def make_loaders():
    g = torch.Generator().manual_seed(SEED)
    # order-1 "language": next = (cur * 31 + noise) % 8000
    n = BATCH * STEPS + 10
    x = torch.zeros(n, SEQ, dtype=torch.long)
    x[:, 0] = torch.randint(0, 8000, (n,), generator=g)
    noise = torch.randint(0, 3, (n, SEQ), generator=g)
    for t in range(1, SEQ):
        x[:, t] = (x[:, t - 1] * 31 + noise[:, t]) % 8000
    cut = BATCH * STEPS
    tr = DataLoader(TensorDataset(x[:cut]), batch_size=BATCH, shuffle=True, generator=g, pin_memory=True)
    va = DataLoader(TensorDataset(x[cut:]), batch_size=4)
    return tr, va


METHODS = {
    "loha": (LoHaConfig(task_type=TaskType.CAUSAL_LM, r=16, alpha=16, module_dropout=0.0,
                        target_modules=["query_key_value", "dense"]), 5e-4),
    "oft": (OFTConfig(task_type=TaskType.CAUSAL_LM, oft_block_size=32, use_cayley_neumann=True,
                      target_modules=["query_key_value", "dense_h_to_4h"]), 2e-4),
    "p-tuning": (PromptEncoderConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=32,
                                     encoder_hidden_size=1024), 3e-3),
}


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    tot, cnt = 0.0, 0
    for (ids,) in loader:
        ids = ids.to(device)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
        tot += loss.item() * len(ids)
        cnt += len(ids)
    return tot / cnt


def run(name, base, peft_cfg, lr):
    seed_all(SEED)
    train, val = make_loaders()
    torch.cuda.reset_peak_memory_stats()
    model = get_peft_model(base, peft_cfg).to(device)
    trainable = [p for p in model.parameters() if p.requires_grad]
    n = sum(p.numel() for p in trainable)
    opt = torch.optim.AdamW(trainable, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)

    print(f"--- {name}: {n:,} trainable, before training {mb(torch.cuda.memory_allocated())}")
    model.train()
    for it, (ids,) in enumerate(train):
        ids = ids.to(device, non_blocking=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)
        out.loss.backward()
        gn = torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        print(f"    it {it} loss {out.loss.item():.4f} |g| {gn.item():.3f} peak {mb(torch.cuda.max_memory_allocated())}")
    res = {"trainable": n, "val": evaluate(model, val), "peak": torch.cuda.max_memory_allocated()}

    # give the untouched base back
    base = model.get_base_model() if name == "p-tuning" else model.unload()
    del model, opt, trainable, out
    gc.collect()
    torch.cuda.empty_cache()
    return base, res


if __name__ == "__main__":
    seed_all(SEED)
    base = make_base()
    print("base on gpu:", mb(torch.cuda.memory_allocated()))
    table = {}
    for name, (cfg, lr) in METHODS.items():
        base, table[name] = run(name, base, cfg, lr)
        print("    left after cleanup:", mb(torch.cuda.memory_allocated()))
    print(f"{'method':10s} {'trainable':>12s} {'val loss':>9s} {'peak':>14s}")
    for name, r in table.items():
        print(f"{name:10s} {r['trainable']:12,d} {r['val']:9.4f} {mb(r['peak']):>14s}")
