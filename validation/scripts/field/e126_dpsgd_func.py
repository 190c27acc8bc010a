"""Differentially private training of a ViT with torch.func per-sample gradients, followed by a small
Hessian/NTK analysis (jvp over grad, jacrev) of the trained network."""
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, jacrev, jvp, vmap, grad


@dataclass
class Cfg:
    image: int = 64
    patch: int = 8
    dim: int = 320
    depth: int = 6
    heads: int = 8
    classes: int = 100
    batch: int = 256
    chunk: int = 64
    clip: float = 1.0
    noise: float = 0.6
    steps: int = 5
    lr: float = 5e-4
    seed: int = 3


class Layer(nn.Module):
    def __init__(self, dim: int, heads: int, drop: float = 0.1):
        super().__init__()
        self.heads = heads
        self.ln1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.ln2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Dropout(drop), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        att = (q @ k.transpose(-2, -1) * (d // self.heads) ** -0.5).softmax(-1)
        x = x + self.proj((att @ v).transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.ln2(x))


class ViT(nn.Module):
    def __init__(self, c: Cfg):
        super().__init__()
        self.embed = nn.Conv2d(3, c.dim, c.patch, c.patch)
        self.pos = nn.Parameter(0.02 * torch.randn(1, (c.image // c.patch) ** 2, c.dim))
        self.layers = nn.Sequential(*[Layer(c.dim, c.heads) for _ in range(c.depth)])
        self.head = nn.Sequential(nn.LayerNorm(c.dim), nn.Linear(c.dim, c.classes))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2) + self.pos
        return self.head(self.layers(x).mean(1))


def main(c: Cfg) -> None:
    torch.manual_seed(c.seed)
    device = torch.device("cuda")
    net = ViT(c).to(device)
    opt = torch.optim.NAdam(net.parameters(), lr=c.lr)
    buffers = dict(net.named_buffers())

    def sample_loss(params, x, y):
        out = functional_call(net, (params, buffers), (x.unsqueeze(0),))
        return nn.functional.cross_entropy(out, y.unsqueeze(0))

    per_sample = vmap(grad_and_value(sample_loss), in_dims=(None, 0, 0), randomness="different", chunk_size=c.chunk)

    protos = torch.randn(c.classes, 3, c.image, c.image, device=device)

    def get_batch(n: int):
        y = torch.randint(0, c.classes, (n,), device=device)
        return protos[y] + 0.5 * torch.randn(n, 3, c.image, c.image, device=device), y

    net.train()
    for step in range(c.steps):
        x, y = get_batch(c.batch)
        params = {k: p.detach() for k, p in net.named_parameters()}
        grads, losses = per_sample(params, x, y)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
        factor = (c.clip / (norms + 1e-6)).clamp(max=1.0)
        for name, p in net.named_parameters():
            g = torch.einsum("n,n...->...", factor, grads[name])
            g += torch.randn_like(g) * c.noise * c.clip
            p.grad = g / c.batch
        del grads
        opt.step()
        opt.zero_grad()
        print(f"step {step} loss {losses.mean().item():.4f} median grad norm {norms.median().item():.3f}")
    print("dp training peak", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())

    # --- curvature: a few power iterations on the Hessian with forward-over-reverse --------------------
    net.eval()
    x, y = get_batch(c.batch // 2)
    params = {k: p.detach() for k, p in net.named_parameters()}

    def full_loss(p):
        return nn.functional.cross_entropy(functional_call(net, (p, buffers), (x,)), y)

    v = {k: torch.randn_like(p) for k, p in params.items()}
    for it in range(3):
        n = torch.sqrt(sum((t**2).sum() for t in v.values()))
        v = {k: t / n for k, t in v.items()}
        _, hv = jvp(grad(full_loss), (params,), (v,))
        eig = sum((hv[k] * v[k]).sum() for k in v)
        print(f"power iteration {it} eigenvalue {eig.item():.4f}")
        v = {k: t.detach() for k, t in hv.items()}

    # --- empirical NTK of the last layer features over a small set --------------------------------------
    sub = x[:8]

    def logits(p, xi):
        return functional_call(net, (p, buffers), (xi.unsqueeze(0),)).squeeze(0)[:10]

    jac = vmap(jacrev(logits), (None, 0))(params, sub)
    ntk = sum(torch.einsum("Naf,Maf->NM", j.flatten(2), j.flatten(2)) for j in jac.values())
    print("ntk trace", ntk.trace().item())

    print("max_memory_allocated", torch.cuda.max_memory_allocated())
    print("max_memory_reserved", torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    main(Cfg())
