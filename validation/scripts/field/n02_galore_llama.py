# GaLore style training of a llama: project grads of 2D weights onto the top-r singular subspace
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM

RANK = int(sys.argv[1]) if len(sys.argv) > 1 else 128
DTYPE = torch.bfloat16 if "bf16" in sys.argv else torch.float32
UPDATE_GAP = 4
STEPS = 7
SCALE = 0.25

torch.manual_seed(0)
device = "cuda"


class GaLoreProjector:
    def __init__(self, rank, update_gap, scale):
        self.rank, self.gap, self.scale = rank, update_gap, scale
        self.ortho = None

    def get_ortho(self, w, kind):
        dtype = w.dtype
        m = w.float() if dtype != torch.float32 else w
        U, s, Vh = torch.linalg.svd(m, full_matrices=False)
        if kind == "right":
            return Vh[: self.rank, :].to(dtype)
        return U[:, : self.rank].to(dtype)

    def project(self, g, it):
        if g.shape[0] >= g.shape[1]:
            if self.ortho is None or it % self.gap == 0:
                self.ortho = self.get_ortho(g, "right")
            return g @ self.ortho.t()
        if self.ortho is None or it % self.gap == 0:
            self.ortho = self.get_ortho(g, "left")
        return self.ortho.t() @ g

    def project_back(self, low, shape):
        if shape[0] >= shape[1]:
            return (low @ self.ortho) * self.scale
        return (self.ortho @ low) * self.scale


class GaLoreAdamW(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-6):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = p.grad
                state = self.state[p]
                if "step" not in state:
                    state["step"] = 0
                if "rank" in group:
                    if "projector" not in state:
                        state["projector"] = GaLoreProjector(group["rank"], UPDATE_GAP, SCALE)
                    grad = state["projector"].project(grad, state["step"])
                if "exp_avg" not in state:
                    state["exp_avg"] = torch.zeros_like(grad)
                    state["exp_avg_sq"] = torch.zeros_like(grad)
                m, v = state["exp_avg"], state["exp_avg_sq"]
                b1, b2 = group["betas"]
                state["step"] += 1
                m.mul_(b1).add_(grad, alpha=1.0 - b1)
                v.mul_(b2).addcmul_(grad, grad, value=1.0 - b2)
                denom = v.sqrt().add_(group["eps"])
                lr = group["lr"] * (1 - b2 ** state["step"]) ** 0.5 / (1 - b1 ** state["step"])
                upd = m / denom
                if "rank" in group:
                    upd = state["projector"].project_back(upd, p.shape)
                p.add_(upd, alpha=-lr)


config = LlamaConfig(
    vocab_size=16000, hidden_size=512, intermediate_size=1376, num_hidden_layers=4,
    num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=1024,
)
model = LlamaForCausalLM(config).to(device=device, dtype=DTYPE)
model.train()
n = sum(p.numel() for p in model.parameters())
print(f"params: {n/1e6:.1f}M rank={RANK} dtype={DTYPE}")

galore_params, ids = [], set()
for name, mod in model.named_modules():
    if isinstance(mod, torch.nn.Linear) and any(k in name for k in ("attn", "mlp")):
        galore_params.append(mod.weight)
        ids.add(id(mod.weight))
regular = [p for p in model.parameters() if id(p) not in ids]
opt = GaLoreAdamW([{"params": regular}, {"params": galore_params, "rank": RANK}], lr=5e-4)
sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 4))

for step in range(STEPS):
    ids_ = torch.randint(0, config.vocab_size, (8, 512), device=device)
    labels = ids_.clone()
    labels[:, :16] = -100
    out = model(input_ids=ids_, labels=labels)
    out.loss.backward()
    opt.step()
    sched.step()
    opt.zero_grad()
    print(step, out.loss.item(), sched.get_last_lr()[0])
