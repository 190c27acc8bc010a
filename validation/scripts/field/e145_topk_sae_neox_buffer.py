"""Train a TopK sparse autoencoder on the residual stream of a frozen (pythia-like) language model.

 * activations harvested with a forward hook that stops the model early
 * shuffled activation buffer on the GPU, refilled when half used
 * auxiliary loss on dead latents, unit-norm decoder rows, gradient projection
 * evaluation: LM loss with the reconstruction spliced in
"""
import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM


class StopForward(Exception): ...


class ActivationBuffer:
    def __init__(self, lm, layer, rows, width, ctx, lm_batch):
        self.lm, self.module, self.ctx, self.lm_batch = lm, lm.gpt_neox.layers[layer], ctx, lm_batch
        self.data = torch.empty(rows, width, device="cuda", dtype=torch.bfloat16)
        self.cursor = rows
        self.fill(0)

    @torch.no_grad()
    def harvest(self):
        got = []

        def hook(mod, args, out):
            got.append((out[0] if isinstance(out, tuple) else out).detach())
            raise StopForward

        handle = self.module.register_forward_hook(hook)
        ids = torch.randint(0, self.lm.config.vocab_size, (self.lm_batch, self.ctx), device="cuda")
        try:
            self.lm(input_ids=ids, use_cache=False)
        except StopForward:
            pass
        finally:
            handle.remove()
        return got[0].flatten(0, 1)

    def fill(self, start):
        pos = start
        while pos < len(self.data):
            acts = self.harvest()[: len(self.data) - pos]
            self.data[pos: pos + len(acts)] = acts
            pos += len(acts)
        self.data = self.data[torch.randperm(len(self.data), device="cuda")]
        self.cursor = 0

    def next(self, n):
        if self.cursor + n > len(self.data) // 2:
            self.data = self.data.roll(-self.cursor, 0)
            self.fill(len(self.data) - self.cursor)
        out = self.data[self.cursor: self.cursor + n].float()
        self.cursor += n
        return out


class TopKSAE(nn.Module):
    def __init__(self, d, latents, k, k_aux):
        super().__init__()
        self.k, self.k_aux = k, k_aux
        w = F.normalize(torch.randn(latents, d), dim=1)
        self.dec = nn.Parameter(w)
        self.enc = nn.Parameter(w.t().contiguous().clone())
        self.b_enc, self.b_dec = nn.Parameter(torch.zeros(latents)), nn.Parameter(torch.zeros(d))
        self.register_buffer("since_fired", torch.zeros(latents, dtype=torch.long))

    def decode(self, idx, val):
        codes = val.new_zeros(val.size(0), self.dec.size(0)).scatter(1, idx, val)
        return codes @ self.dec

    def forward(self, x):
        pre = F.relu((x - self.b_dec) @ self.enc + self.b_enc)
        val, idx = pre.topk(self.k, dim=1, sorted=False)
        return self.decode(idx, val) + self.b_dec, pre, idx

    def loss(self, x, dead_after):
        recon, pre, idx = self(x)
        err = x - recon
        fvu = err.pow(2).sum() / (x - x.mean(0)).pow(2).sum()
        self.since_fired += x.size(0)
        self.since_fired[idx.unique()] = 0
        dead = self.since_fired > dead_after
        n_dead = int(dead.sum())
        aux = x.new_zeros(())
        if n_dead:
            v, i = torch.where(dead, pre, -torch.inf).topk(min(self.k_aux, n_dead), dim=1, sorted=False)
            aux = F.mse_loss(self.decode(i, v), err.detach()) / err.detach().pow(2).mean()
        return fvu, aux, n_dead

    @torch.no_grad()
    def project_grad(self):
        self.dec.grad -= (self.dec.grad * self.dec).sum(1, keepdim=True) * self.dec

    @torch.no_grad()
    def renorm(self):
        self.dec.data = F.normalize(self.dec.data, dim=1)


@torch.no_grad()
def spliced_loss(lm, layer, sae, ids):
    def ce():
        logits = lm(input_ids=ids, use_cache=False).logits[:, :-1].float()
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item()

    def replace(mod, args, out):
        h = out[0] if isinstance(out, tuple) else out
        r = sae(h.flatten(0, 1).float())[0].view_as(h).to(h.dtype)
        return (r, *out[1:]) if isinstance(out, tuple) else r

    clean = ce()
    handle = lm.gpt_neox.layers[layer].register_forward_hook(replace)
    patched = ce()
    handle.remove()
    return clean, patched


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--hidden", type=int, default=2048)
    ap.add_argument("--layers", type=int, default=16)
    ap.add_argument("--layer", type=int, default=8)
    ap.add_argument("--expansion", type=int, default=24)
    ap.add_argument("--k", type=int, default=64)
    ap.add_argument("--batch", type=int, default=4096)
    ap.add_argument("--buffer", type=int, default=65536)
    ap.add_argument("--ctx", type=int, default=512)
    ap.add_argument("--lm-batch", type=int, default=32)
    ap.add_argument("--steps", type=int, default=8)
    a = ap.parse_args()
    torch.manual_seed(145)
    torch.set_float32_matmul_precision("high")
    cfg = GPTNeoXConfig(hidden_size=a.hidden, num_hidden_layers=a.layers, num_attention_heads=16,
                        intermediate_size=4 * a.hidden, vocab_size=50304)
    with torch.device("cuda"):
        lm = GPTNeoXForCausalLM(cfg)
    lm = lm.to(torch.bfloat16).eval().requires_grad_(False)
    print(f"LM loaded: {torch.cuda.memory_allocated() / 2**30:.2f} GiB")
    buf = ActivationBuffer(lm, a.layer, a.buffer, a.hidden, a.ctx, a.lm_batch)
    print(f"buffer filled: peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
    sae = TopKSAE(a.hidden, a.expansion * a.hidden, a.k, k_aux=512).to("cuda")
    opt = torch.optim.Adam(sae.parameters(), lr=2e-4, betas=(0.9, 0.999), eps=6.25e-10)
    for step in range(a.steps):
        fvu, aux, n_dead = sae.loss(buf.next(a.batch), dead_after=4 * a.batch)
        opt.zero_grad()
        (fvu + aux / 32).backward()
        sae.project_grad()
        opt.step()
        sae.renorm()
        print(f"{step}: fvu {fvu.item():.4f} aux {aux.item():.4f} dead {n_dead} "
              f"peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
    opt.zero_grad()
    clean, patched = spliced_loss(lm, a.layer, sae, torch.randint(0, 50304, (8, a.ctx), device="cuda"))
    print(f"LM loss {clean:.4f} -> {patched:.4f}; reserved {torch.cuda.memory_reserved() / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
