import time

import torch
from transformers import MambaConfig, MambaForCausalLM

# HF Mamba without the mamba_ssm / causal_conv1d kernels; short sequences, because the scan is a python loop.
SEED = 1234
BS = 6
SEQ = 192
STEPS = 4


def synthetic_stream(vocab, bs, seq, seed):
    """Markov-ish token stream so that the loss has something to fall on."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    jump = torch.randint(0, vocab, (vocab,), generator=g, device="cuda")
    while True:
        cur = torch.randint(0, vocab, (bs,), generator=g, device="cuda")
        toks = [cur]
        for _ in range(seq - 1):
            noise = torch.randint(0, vocab, (bs,), generator=g, device="cuda")
            keep = torch.rand(bs, generator=g, device="cuda") < 0.8
            cur = torch.where(keep, jump[cur], noise)
            toks.append(cur)
        yield torch.stack(toks, dim=1)


def main():
    torch.manual_seed(SEED)
    cfg = MambaConfig(
        vocab_size=24_000,
        hidden_size=768,
        state_size=16,
        num_hidden_layers=10,
        use_cache=False,
        use_associative_scan=False,
    )
    model = MambaForCausalLM(cfg).cuda()
    model.train()
    n = sum(p.numel() for p in model.parameters())
    print(f"{n:,} params")

    no_wd = {id(p) for name, p in model.named_parameters() if getattr(p, "_no_weight_decay", False) or p.ndim < 2}
    opt = torch.optim.RMSprop(
        [
            {"params": [p for p in model.parameters() if id(p) not in no_wd], "weight_decay": 1e-4},
            {"params": [p for p in model.parameters() if id(p) in no_wd]},
        ],
        lr=1e-4,
        momentum=0.9,
        centered=True,
    )
    stream = synthetic_stream(cfg.vocab_size, BS, SEQ, SEED)
    for step in range(STEPS):
        t = time.perf_counter()
        x = next(stream)
        out = model(input_ids=x, labels=x)
        out.loss.backward()
        gnorm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        opt.step()
        opt.zero_grad()
        torch.cuda.synchronize()
        print(
            f"{step} loss {out.loss.item():.4f} |g| {gnorm.item():.3f} {time.perf_counter() - t:.2f}s "
            f"max_memory_allocated {torch.cuda.max_memory_allocated() / 2**20:.1f} MiB "
            f"max_memory_reserved {torch.cuda.max_memory_reserved() / 2**20:.1f} MiB"
        )

    model.eval()
    with torch.no_grad():
        val = [model(input_ids=(b := next(stream)), labels=b).loss.item() for _ in range(2)]
    print("val", val, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    main()
