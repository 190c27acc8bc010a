"""First order and second order meta learning with torch.func. usage: maml_func.py {maml,persample,ntk}"""
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call, grad, vmap, jvp, jacrev, grad_and_value

what = sys.argv[1]
net = nn.Sequential(
    nn.Conv2d(3, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(64, 128, 3, padding=1), nn.GroupNorm(8, 128), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(128, 128, 3, padding=1), nn.GroupNorm(8, 128), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(128 * 16, 512), nn.ReLU(), nn.Linear(512, 20)).cuda()
params = {k: v.detach().clone().requires_grad_() for k, v in net.named_parameters()}
opt = torch.optim.Adam(params.values(), lr=1e-3)


def loss_fn(p, x, y):
    return F.cross_entropy(functional_call(net, p, (x,)), y)


def adapted_loss(p, xs, ys, xq, yq):
    fast = p
    for _ in range(2):
        g = grad(loss_fn)(fast, xs, ys)
        fast = {k: fast[k] - 0.4 * g[k] for k in fast}
    return loss_fn(fast, xq, yq)


for it in range(5):
    opt.zero_grad()
    if what == "maml":
        tasks = 4
        xs, xq = torch.randn(tasks, 40, 3, 32, 32, device="cuda"), torch.randn(tasks, 60, 3, 32, 32, device="cuda")
        ys, yq = torch.randint(20, (tasks, 40), device="cuda"), torch.randint(20, (tasks, 60), device="cuda")
        loss = torch.stack([adapted_loss(params, *t) for t in zip(xs, ys, xq, yq)]).mean()
        loss.backward()
    elif what == "persample":        # DP-SGD
        x, y = torch.randn(96, 3, 32, 32, device="cuda"), torch.randint(20, (96,), device="cuda")
        det = {k: v.detach() for k, v in params.items()}

        def one(p, a, b):
            return loss_fn(p, a[None], b[None])

        g, losses = vmap(grad_and_value(one), in_dims=(None, 0, 0))(det, x, y)
        norms = torch.sqrt(sum(v.flatten(1).pow(2).sum(1) for v in g.values()))
        factor = (1.0 / (norms + 1e-6)).clamp(max=1.0)
        for k, p in params.items():
            p.grad = torch.einsum("b,b...->...", factor, g[k]) + torch.randn_like(p) * 0.1
            p.grad /= len(x)
        loss = losses.mean()
    else:                            # directional derivative regulariser
        x, y = torch.randn(256, 3, 32, 32, device="cuda"), torch.randint(20, (256,), device="cuda")
        v = torch.randn_like(x)
        out, tangent = jvp(lambda inp: functional_call(net, params, (inp,)), (x,), (v,))
        loss = F.cross_entropy(out, y) + 1e-3 * tangent.pow(2).mean()
        loss.backward()
    opt.step()
    print(it, loss.item())
print(torch.cuda.max_memory_allocated() // 2**20)
