import torch, torch.nn as nn
from torch import autograd

BS, DIM, NC, LAMBDA = 64, 96, 3, 10


class ResUp(nn.Module):
    def __init__(self, c, o):
        super().__init__()
        self.bn1, self.bn2 = nn.BatchNorm2d(c), nn.BatchNorm2d(o)
        self.c1, self.c2, self.sc = nn.Conv2d(c, o, 3, padding=1), nn.Conv2d(o, o, 3, padding=1), nn.Conv2d(c, o, 1)
        self.up = nn.UpsamplingNearest2d(scale_factor=2)

    def forward(self, x):
        h = self.c1(self.up(torch.relu(self.bn1(x))))
        return self.c2(torch.relu(self.bn2(h))) + self.sc(self.up(x))


class ResDown(nn.Module):
    def __init__(self, c, o):
        super().__init__()
        self.c1, self.c2, self.sc = nn.Conv2d(c, c, 3, padding=1), nn.Conv2d(c, o, 3, padding=1), nn.Conv2d(c, o, 1)
        self.n1, self.n2 = nn.GroupNorm(1, c), nn.GroupNorm(1, c)
        self.pool = nn.AvgPool2d(2)

    def forward(self, x):
        h = self.c1(nn.functional.leaky_relu(self.n1(x), 0.2))
        return self.pool(self.c2(nn.functional.leaky_relu(self.n2(h), 0.2))) + self.sc(self.pool(x))


G = nn.Sequential(nn.Linear(128, 8 * DIM * 16), nn.Unflatten(1, (8 * DIM, 4, 4)), ResUp(8 * DIM, 8 * DIM), ResUp(8 * DIM, 4 * DIM),
                  ResUp(4 * DIM, 2 * DIM), ResUp(2 * DIM, DIM), nn.BatchNorm2d(DIM), nn.ReLU(), nn.Conv2d(DIM, NC, 3, padding=1), nn.Tanh()).cuda()
D = nn.Sequential(nn.Conv2d(NC, DIM, 3, padding=1), ResDown(DIM, 2 * DIM), ResDown(2 * DIM, 4 * DIM), ResDown(4 * DIM, 8 * DIM),
                  ResDown(8 * DIM, 8 * DIM), nn.Flatten(), nn.Linear(8 * DIM * 16, 1)).cuda()
optG = torch.optim.Adam(G.parameters(), 1e-4, betas=(0.0, 0.9))
optD = torch.optim.Adam(D.parameters(), 1e-4, betas=(0.0, 0.9))
one = torch.tensor(1, dtype=torch.float).cuda()
minus_one = one * -1


def gradient_penalty(real, fake):
    alpha = torch.rand(BS, 1, 1, 1).expand_as(real).cuda()
    inter = alpha * real + (1 - alpha) * fake
    inter = autograd.Variable(inter, requires_grad=True)
    out = D(inter)
    grads = autograd.grad(outputs=out, inputs=inter, grad_outputs=torch.ones(out.size()).cuda(),
                          create_graph=True, retain_graph=True, only_inputs=True)[0]
    return ((grads.view(BS, -1).norm(2, dim=1) - 1) ** 2).mean() * LAMBDA


for iteration in range(2):
    for p in D.parameters():
        p.requires_grad_(True)
    for critic_it in range(3):
        D.zero_grad()
        real = torch.randn(BS, NC, 64, 64).cuda()
        d_real = D(real).mean()
        d_real.backward(minus_one)
        with torch.no_grad():
            z = torch.randn(BS, 128).cuda()
            fake = G(z)
        d_fake = D(fake.detach()).mean()
        d_fake.backward(one)
        gp = gradient_penalty(real.data, fake.data)
        gp.backward()
        print("  W", (d_real - d_fake).item(), "gp", gp.item())
        optD.step()
    for p in D.parameters():
        p.requires_grad_(False)
    G.zero_grad()
    g = D(G(torch.randn(BS, 128).cuda())).mean()
    g.backward(minus_one)
    optG.step()
    print("iter", iteration, -g.item(), torch.cuda.memory_allocated())
