"""Custom autograd.Function layers that save little: int8 dropout masks, recomputed GELU-linear, bf16 stash."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = torch.device("cuda")


class PackedDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, p):
        mask = torch.rand_like(x) > p
        ctx.save_for_backward(mask)
        ctx.scale = 1.0 / (1.0 - p)
        return x * mask * ctx.scale

    @staticmethod
    def backward(ctx, g):
        (mask,) = ctx.saved_tensors
        return g * mask * ctx.scale, None


class FusedMLP(torch.autograd.Function):
    """y = gelu(x W1^T) W2^T; saves x in bf16 only and recomputes the hidden layer."""

    @staticmethod
    def forward(ctx, x, w1, w2):
        ctx.save_for_backward(x.to(torch.bfloat16), w1, w2)
        return F.gelu(x @ w1.t()) @ w2.t()

    @staticmethod
    def backward(ctx, gy):
        xs, w1, w2 = ctx.saved_tensors
        x = xs.to(gy.dtype)
        with torch.enable_grad():
            h = (x @ w1.detach().t()).requires_grad_(True)
            a = F.gelu(h)
        gw2 = gy.flatten(0, -2).t() @ a.detach().flatten(0, -2)
        ga = gy @ w2
        (gh,) = torch.autograd.grad(a, h, ga)
        gw1 = gh.flatten(0, -2).t() @ x.flatten(0, -2)
        return gh @ w1, gw1, gw2


class Layer(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.att = nn.MultiheadAttention(d, 8, batch_first=True)
        self.w1 = nn.Parameter(torch.empty(h, d).normal_(std=d ** -0.5))
        self.w2 = nn.Parameter(torch.empty(d, h).normal_(std=h ** -0.5))

    def forward(self, x):
        y = self.norm1(x)
        x = x + PackedDropout.apply(self.att(y, y, y, need_weights=False)[0], 0.1)
        return x + PackedDropout.apply(FusedMLP.apply(self.norm2(x), self.w1, self.w2), 0.1)


class Net(nn.Module):
    def __init__(self, d=768, n=8):
        super().__init__()
        self.proj = nn.Linear(128, d)
        self.layers = nn.Sequential(*[Layer(d, 4 * d) for _ in range(n)])
        self.out = nn.Linear(d, 128)

    def forward(self, x):
        return self.out(self.layers(self.proj(x)))


def hook_stats():
    return f"alloc {torch.cuda.memory_allocated() >> 20} peak {torch.cuda.max_memory_allocated() >> 20} MiB"


model = Net().to(device)
opt = torch.optim.Adagrad(model.parameters(), lr=1e-3)
gen = torch.Generator(device="cuda").manual_seed(5)
for step in range(6):
    x = torch.randn(12, 600, 128, device=device, generator=gen)
    noise = torch.randn(x.shape, device=device, generator=gen)
    pred = model(x + 0.5 * noise)
    loss = F.mse_loss(pred, noise)
    print("forward done:", hook_stats())
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"step {step} loss {loss.item():.4f}")

print("max_memory_allocated", torch.cuda.max_memory_allocated())
print("max_memory_reserved", torch.cuda.max_memory_reserved())
