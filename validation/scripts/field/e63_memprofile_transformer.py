"""
Where does the memory go?  Per-phase / per-layer memory accounting for a
decoder-only transformer.  Prints caching allocator statistics between
forward, backward and optimizer step.
"""
import gc
import math
import time
from collections import OrderedDict, defaultdict
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

MB = 1024 ** 2
GB = 1024 ** 3


@dataclass
class Config:
    vocab: int = 32000
    d_model: int = 1536
    n_head: int = 12
    n_layer: int = 12
    seq: int = 1024
    batch: int = 8
    lr: float = 3e-4
    steps: int = 8


class Attention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.n_head = cfg.n_head
        self.qkv = nn.Linear(cfg.d_model, 3 * cfg.d_model, bias=False)
        self.proj = nn.Linear(cfg.d_model, cfg.d_model, bias=False)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(x).split(C, dim=-1)
        q = q.view(B, T, self.n_head, -1).transpose(1, 2)
        k = k.view(B, T, self.n_head, -1).transpose(1, 2)
        v = v.view(B, T, self.n_head, -1).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.fc1 = nn.Linear(cfg.d_model, 4 * cfg.d_model)
        self.fc2 = nn.Linear(4 * cfg.d_model, cfg.d_model)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return self.drop(self.fc2(F.gelu(self.fc1(x), approximate="tanh")))


class Block(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.ln1 = nn.LayerNorm(cfg.d_model)
        self.attn = Attention(cfg)
        self.ln2 = nn.LayerNorm(cfg.d_model)
        self.mlp = MLP(cfg)

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        x = x + self.mlp(self.ln2(x))
        return x


class LM(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.tok = nn.Embedding(cfg.vocab, cfg.d_model)
        self.pos = nn.Embedding(cfg.seq, cfg.d_model)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layer))
        self.ln_f = nn.LayerNorm(cfg.d_model)
        self.head = nn.Linear(cfg.d_model, cfg.vocab, bias=False)
        self.apply(self._init)
        self.head.weight = self.tok.weight

    def _init(self, m):
        if isinstance(m, (nn.Linear, nn.Embedding)):
            nn.init.normal_(m.weight, std=0.02)
            if getattr(m, "bias", None) is not None:
                nn.init.zeros_(m.bias)

    def forward(self, idx):
        pos = torch.arange(idx.size(1), device=idx.device)
        x = self.tok(idx) + self.pos(pos)
        for b in self.blocks:
            x = b(x)
        return self.head(self.ln_f(x))


class LayerMemoryRecorder:
    """Forward / backward hooks writing down allocated bytes around each submodule."""

    def __init__(self, model, kinds):
        self.handles = []
        self.before = {}
        self.forward_delta = OrderedDict()
        self.backward_after = OrderedDict()
        self.by_kind = defaultdict(int)
        for name, mod in model.named_modules():
            if isinstance(mod, kinds):
                self.handles.append(mod.register_forward_pre_hook(self._pre(name)))
                self.handles.append(mod.register_forward_hook(self._post(name)))
                self.handles.append(mod.register_full_backward_hook(self._bwd(name)))

    def _pre(self, name):
        def hook(mod, args):
            self.before[name] = torch.cuda.memory_allocated()
        return hook

    def _post(self, name):
        def hook(mod, args, out):
            d = torch.cuda.memory_allocated() - self.before[name]
            self.forward_delta[name] = d
            self.by_kind[type(mod).__name__] += d
        return hook

    def _bwd(self, name):
        def hook(mod, gin, gout):
            self.backward_after[name] = torch.cuda.memory_allocated()
        return hook

    def remove(self):
        for h in self.handles:
            h.remove()
        self.handles.clear()

    def table(self):
        print(f"{'module':<22}{'fwd delta MB':>14}{'alloc after bwd MB':>22}")
        for k, v in self.forward_delta.items():
            b = self.backward_after.get(k, 0)
            print(f"{k:<22}{v / MB:>14.1f}{b / MB:>22.1f}")
        for k, v in self.by_kind.items():
            print(f"  total kept by {k:<14} {v / MB:10.1f} MB")


class Phase:
    """with Phase("forward"): ... -- resets the peak, prints what happened."""
    history = defaultdict(list)

    def __init__(self, name, verbose=True):
        self.name, self.verbose = name, verbose

    def __enter__(self):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self.start = torch.cuda.memory_allocated()
        return self

    def __exit__(self, *exc):
        torch.cuda.synchronize()
        end = torch.cuda.memory_allocated()
        peak = torch.cuda.max_memory_allocated()
        res = torch.cuda.max_memory_reserved()
        Phase.history[self.name].append((self.start, end, peak, res))
        if self.verbose:
            print(f"  [{self.name:<9}] start {self.start / MB:9.1f}  end {end / MB:9.1f}  "
                  f"peak {peak / MB:9.1f}  reserved peak {res / MB:9.1f} MB")
        return False


def dump_stats(tag):
    s = torch.cuda.memory_stats()
    free, total = torch.cuda.mem_get_info()
    print(f"-- {tag}")
    for key in ("allocated_bytes.all", "active_bytes.all", "inactive_split_bytes.all",
                "reserved_bytes.all", "requested_bytes.all"):
        print(f"   {key:<28} cur {s[key + '.current'] / MB:9.1f}  peak {s[key + '.peak'] / MB:9.1f} MB")
    for key in ("allocation.all", "allocation.small_pool", "allocation.large_pool",
                "segment.all", "active.all", "inactive_split.all"):
        print(f"   {key:<28} cur {s[key + '.current']:>7}  total {s[key + '.allocated']:>9}")
    print(f"   num_alloc_retries {s['num_alloc_retries']}  num_ooms {s['num_ooms']}  "
          f"num_device_alloc {s.get('num_device_alloc', -1)}  num_device_free {s.get('num_device_free', -1)}")
    print(f"   mem_get_info free {free / GB:.2f} / total {total / GB:.2f} GB")


def lr_at(step, cfg):
    return cfg.lr * 0.5 * (1 + math.cos(math.pi * step / cfg.steps))


def main():
    torch.manual_seed(1234)
    torch.backends.cuda.matmul.allow_tf32 = True
    cfg = Config()
    overall_alloc = overall_res = 0

    print(torch.cuda.get_device_name(), torch.__version__)
    with Phase("build"):
        with torch.device("cuda"):
            model = LM(cfg)
    n = sum(p.numel() for p in model.parameters())
    print(f"parameters: {n / 1e6:.1f}M -> {n * 4 / MB:.0f} MB fp32")

    decay = [p for p in model.parameters() if p.dim() >= 2]
    nodecay = [p for p in model.parameters() if p.dim() < 2]
    opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1},
                             {"params": nodecay, "weight_decay": 0.0}], lr=cfg.lr, betas=(0.9, 0.95))

    # markov-ish tokens so the loss actually goes down
    g = torch.Generator(device="cuda").manual_seed(0)
    trans = torch.randint(0, cfg.vocab, (cfg.vocab,), device="cuda", generator=g)

    def batch():
        start = torch.randint(0, cfg.vocab, (cfg.batch, 1), device="cuda", generator=g)
        seqs = [start]
        for _ in range(7):
            seqs.append(trans[seqs[-1]])
        chunk = torch.cat(seqs, 1)
        toks = chunk.repeat(1, cfg.seq // 8 + 1)[:, : cfg.seq + 1]
        return toks[:, :-1].contiguous(), toks[:, 1:].contiguous()

    model.train()
    for step in range(cfg.steps):
        verbose = step in (0, 1, cfg.steps - 1)
        rec = LayerMemoryRecorder(model, (Attention, MLP, nn.LayerNorm)) if step == 1 else None
        for grp in opt.param_groups:
            grp["lr"] = lr_at(step, cfg)
        if verbose:
            print(f"step {step}")
        t0 = time.perf_counter()
        x, y = batch()
        with Phase("forward", verbose):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                logits = model(x)
            loss = F.cross_entropy(logits.float().view(-1, cfg.vocab), y.view(-1))
        if step in (0, cfg.steps - 1):
            dump_stats(f"after forward, step {step}")
        with Phase("backward", verbose):
            loss.backward()
        loss_val = loss.item()
        del logits, loss, x, y
        if step < 3:
            gc.collect()
            torch.cuda.empty_cache()
        with Phase("optimizer", verbose):
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad(set_to_none=True)
        if step == 0:
            dump_stats("after first optimizer step (Adam state created)")
        if rec is not None:
            rec.table()
            rec.remove()
        for name in ("forward", "backward", "optimizer"):
            overall_alloc = max(overall_alloc, Phase.history[name][-1][2])
            overall_res = max(overall_res, Phase.history[name][-1][3])
        print(f"step {step} loss {loss_val:.4f} gnorm {norm.item():.3f} {1000 * (time.perf_counter() - t0):.0f} ms")

    # evaluation pass: how much less without a graph?
    model.eval()
    gc.collect()
    torch.cuda.empty_cache()
    with Phase("eval"), torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
        tot = 0.0
        for _ in range(3):
            x, y = batch()
            out = model(x)
            tot += F.cross_entropy(out.view(-1, cfg.vocab), y.view(-1)).item()
            del out
    print(f"eval loss {tot / 3:.4f}")

    print(torch.cuda.memory_summary(abbreviated=True))
    state_bytes = sum(t.numel() * t.element_size() for st in opt.state.values()
                      for t in st.values() if torch.is_tensor(t))
    print(f"optimizer state: {state_bytes / MB:.1f} MB")

    del opt
    gc.collect()
    torch.cuda.empty_cache()
    dump_stats("after deleting the optimizer")
    print("phase peaks (MB):", {k: round(max(h[2] for h in v) / MB, 1) for k, v in Phase.history.items()})
    print(f"overall peak over phases: allocated {overall_alloc / MB:.1f} MB reserved {overall_res / MB:.1f} MB")
    print(f"final max_memory_allocated {torch.cuda.max_memory_allocated()} "
          f"max_memory_reserved {torch.cuda.max_memory_reserved()}")


if __name__ == "__main__":
    main()
