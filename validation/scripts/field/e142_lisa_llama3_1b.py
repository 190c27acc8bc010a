# LISA (Layerwise Importance Sampled AdamW): embeddings, final norm and head always train,
# plus GAMMA decoder layers drawn anew every K steps. Pure bf16 weights, grad checkpointing.
import random

import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(3)
random.seed(3)

GAMMA, K = 3, 2
BATCH, SEQ = 6, 1536
STEPS = 8
DEV = "cuda"


def gib(x):
    return f"{x / 1024 ** 3:.2f}"


config = LlamaConfig(
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    max_position_embeddings=131072,
    tie_word_embeddings=False,
    rope_parameters={
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    },
)
torch.set_default_dtype(torch.bfloat16)
with torch.device(DEV):
    model = LlamaForCausalLM(config)
torch.set_default_dtype(torch.float32)
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
model.train()
print("weights", gib(torch.cuda.memory_allocated()), "GiB")


class LisaScheduler:
    def __init__(self, model, gamma, every, lr):
        self.model, self.gamma, self.every, self.lr = model, gamma, every, lr
        self.layers = model.model.layers
        self.always = [model.model.embed_tokens.weight, model.model.norm.weight, model.lm_head.weight]
        self.active = []
        model.requires_grad_(False)
        for p in self.always:
            p.requires_grad_(True)
        self.opt = torch.optim.AdamW(self.always, lr=lr, weight_decay=0.01, betas=(0.9, 0.95))

    def maybe_switch(self, step):
        if step % self.every:
            return
        for i in self.active:
            for p in self.layers[i].parameters():
                p.requires_grad_(False)
                p.grad = None
                self.opt.state.pop(p, None)
        if len(self.opt.param_groups) > 1:
            self.opt.param_groups.pop()
        self.active = sorted(random.sample(range(len(self.layers)), self.gamma))
        params = [p for i in self.active for p in self.layers[i].parameters()]
        for p in params:
            p.requires_grad_(True)
        self.opt.add_param_group({"params": params, "lr": self.lr * 2})
        print(f"-- active layers {self.active}")


def loss_fn(hidden, labels, chunk=2048):
    """lm head + cross entropy over token chunks, each recomputed in the backward pass"""
    h = hidden[:, :-1].reshape(-1, hidden.size(-1))
    y = labels[:, 1:].reshape(-1)

    def piece(hc, yc):
        return F.cross_entropy(model.lm_head(hc).float(), yc, reduction="sum")

    total = hidden.new_zeros((), dtype=torch.float32)
    for hc, yc in zip(h.split(chunk), y.split(chunk)):
        total = total + torch.utils.checkpoint.checkpoint(piece, hc, yc, use_reentrant=False)
    return total / y.numel()


lisa = LisaScheduler(model, GAMMA, K, lr=1e-5)
tokens = torch.randint(0, config.vocab_size, (STEPS * BATCH, SEQ))
history = []
for step in range(STEPS):
    lisa.maybe_switch(step)
    ids = tokens[step * BATCH:(step + 1) * BATCH].to(DEV)
    torch.cuda.reset_peak_memory_stats()
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    loss = loss_fn(hidden, ids)
    loss.backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    torch.nn.utils.clip_grad_norm_(trained, 1.0)
    lisa.opt.step()
    lisa.opt.zero_grad(set_to_none=True)
    history.append(loss.item())
    print(f"step {step}  loss {history[-1]:.4f}  trainable {sum(p.numel() for p in trained) / 1e6:.0f}M  "
          f"alloc {gib(torch.cuda.memory_allocated())}  peak {gib(torch.cuda.max_memory_allocated())}")

model.eval()
with torch.no_grad():
    ppl = loss_fn(model.model(input_ids=tokens[:2].to(DEV), use_cache=False).last_hidden_state, tokens[:2].to(DEV)).exp()
print("ppl", round(ppl.item(), 1), "reserved", gib(torch.cuda.memory_reserved()))
