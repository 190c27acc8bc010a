import sys
import torch, torch.nn as nn, torch.nn.functional as F
from torch.func import stack_module_state, functional_call, vmap, grad, grad_and_value

torch.manual_seed(0)
device = 'cuda'
mode = sys.argv[1] if len(sys.argv) > 1 else 'ensemble'


class SimpleMLP(nn.Module):
    def __init__(self, din=784, hid=1024, out=10):
        super().__init__()
        self.fc1, self.fc2, self.fc3, self.fc4 = nn.Linear(din, hid), nn.Linear(hid, hid), nn.Linear(hid, hid), nn.Linear(hid, out)

    def forward(self, x):
        x = x.flatten(1)
        x = F.relu(self.fc1(x)); x = F.relu(self.fc2(x)); x = F.relu(self.fc3(x))
        return self.fc4(x)


class SimpleCNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.gn = nn.GroupNorm(8, 64)
        self.fc1 = nn.Linear(64 * 8 * 8, 256)
        self.fc2 = nn.Linear(256, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.gn(self.conv2(x))), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


if mode == 'ensemble':
    num_models, bs = 16, 512
    models = [SimpleMLP().to(device) for _ in range(num_models)]
    params, buffers = stack_module_state(models)
    import copy
    base_model = copy.deepcopy(models[0]).to('meta')
    del models

    def fmodel(params, buffers, x):
        return functional_call(base_model, (params, buffers), (x,))

    opt = torch.optim.Adam(params.values(), lr=1e-3)
    for step in range(8):
        data = torch.randn(num_models, bs, 1, 28, 28, device=device)
        targets = torch.randint(10, (num_models, bs), device=device)
        preds = vmap(fmodel)(params, buffers, data)
        loss = vmap(F.cross_entropy)(preds, targets)
        opt.zero_grad()
        loss.sum().backward()
        opt.step()
        print(step, 'mean loss', loss.mean().item(), 'worst', loss.max().item())
    with torch.no_grad():
        shared = torch.randn(4 * bs, 1, 28, 28, device=device)
        p = vmap(fmodel, in_dims=(0, 0, None))(params, buffers, shared).softmax(-1)
        print('disagreement', p.std(0).mean().item())
else:   # DP-SGD
    bs, clip, sigma = 128, 1.0, 0.8
    model = SimpleCNN().to(device)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def compute_loss(params, buffers, sample, target):
        out = functional_call(model, (params, buffers), (sample.unsqueeze(0),))
        return F.cross_entropy(out, target.unsqueeze(0))

    ft = vmap(grad_and_value(compute_loss), in_dims=(None, None, 0, 0))
    for step in range(8):
        x = torch.randn(bs, 3, 32, 32, device=device)
        y = torch.randint(10, (bs,), device=device)
        params = {k: v.detach() for k, v in model.named_parameters()}
        buffers = {k: v.detach() for k, v in model.named_buffers()}
        g, losses = ft(params, buffers, x, y)
        norms = torch.stack([v.flatten(1).norm(dim=1) for v in g.values()], 1).norm(dim=1)
        scale = (clip / (norms + 1e-6)).clamp(max=1.0)
        for n, p in model.named_parameters():
            s = torch.einsum('b,b...->...', scale, g[n])
            p.grad = (s + torch.randn_like(p) * sigma * clip) / bs
        opt.step()
        opt.zero_grad()
        print(step, 'loss', losses.mean().item(), 'median norm', norms.median().item())
