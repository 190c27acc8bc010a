"""
MAML, 5-way 5-shot mini-ImageNet-sized tasks, second order, vmapped over the meta-batch (torch.func).
At the end: per-sample gradient norms of the meta-learned initialisation (vmap(grad)).
"""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call, grad, vmap

WAYS, SHOTS, QUERIES = 5, 5, 15
TASKS = 8
INNER_STEPS, INNER_LR = 3, 0.01


class Conv4(nn.Module):
    def __init__(self, hidden=64, ways=WAYS):
        super().__init__()

        def block(i):
            return nn.Sequential(
                nn.Conv2d(i, hidden, 3, padding=1),
                # batch statistics only: running stats would be mutated inside vmap
                nn.BatchNorm2d(hidden, track_running_stats=False),
                nn.ReLU(),
                nn.MaxPool2d(2),
            )

        self.features = nn.Sequential(block(3), block(hidden), block(hidden), block(hidden))
        self.head = nn.Linear(hidden * 5 * 5, ways)

    def forward(self, x):
        return self.head(self.features(x).flatten(1))


def sample_tasks(device):
    xs = torch.randn(TASKS, WAYS * SHOTS, 3, 84, 84, device=device)
    xq = torch.randn(TASKS, WAYS * QUERIES, 3, 84, 84, device=device)
    ys = torch.arange(WAYS, device=device).repeat_interleave(SHOTS).expand(TASKS, -1)
    yq = torch.arange(WAYS, device=device).repeat_interleave(QUERIES).expand(TASKS, -1)
    return xs, ys, xq, yq


def main():
    torch.manual_seed(5)
    device = "cuda"
    net = Conv4().to(device)
    net.train()
    meta_opt = torch.optim.Adam(net.parameters(), lr=1e-3)

    def compute_loss(params, x, y):
        return F.cross_entropy(functional_call(net, params, (x,)), y)

    def loss_for_task(params, xs, ys, xq, yq):
        fast = params
        for _ in range(INNER_STEPS):
            grads = grad(compute_loss)(fast, xs, ys)
            fast = {k: fast[k] - INNER_LR * g for k, g in grads.items()}
        logits = functional_call(net, fast, (xq,))
        loss = F.cross_entropy(logits, yq)
        acc = (logits.argmax(-1) == yq).float().mean()
        return loss, acc

    for step in range(5):
        batch = sample_tasks(device)
        params = dict(net.named_parameters())
        losses, accs = vmap(loss_for_task, in_dims=(None, 0, 0, 0, 0))(params, *batch)
        meta_loss = losses.mean()
        meta_opt.zero_grad()
        meta_loss.backward()
        meta_opt.step()
        print(f"[meta {step}] loss {meta_loss.item():.3f} acc {accs.mean().item():.3f} | "
              f"{torch.cuda.max_memory_allocated()} {torch.cuda.max_memory_reserved()}")

    # how heterogeneous are the per-sample gradients?  (eval only)
    frozen = {k: v.detach() for k, v in net.named_parameters()}
    x = torch.randn(128, 3, 84, 84, device=device)
    y = torch.randint(0, WAYS, (128,), device=device)
    per_sample = vmap(grad(lambda p, a, b: compute_loss(p, a[None], b[None])), in_dims=(None, 0, 0))(frozen, x, y)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in per_sample.values()]).norm(dim=0)
    print("per-sample grad norm mean/std", norms.mean().item(), norms.std().item())
    print("peak", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    main()
