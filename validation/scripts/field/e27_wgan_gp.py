"""WGAN-GP, 128x128, n_critic=3, gradient penalty by double backward."""
import torch
import torch.nn as nn
from torch import autograd, optim

torch.manual_seed(1234)
dev = torch.device("cuda:0")

nz, ngf, ndf, bs, lambda_gp, n_critic = 128, 64, 64, 96, 10.0, 3


class Generator(nn.Module):
    def __init__(self):
        super().__init__()

        def up(i, o):
            return [nn.ConvTranspose2d(i, o, 4, 2, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU(True)]

        self.main = nn.Sequential(
            nn.ConvTranspose2d(nz, ngf * 16, 4, 1, 0, bias=False), nn.BatchNorm2d(ngf * 16), nn.ReLU(True),
            *up(ngf * 16, ngf * 8),
            *up(ngf * 8, ngf * 4),
            *up(ngf * 4, ngf * 2),
            *up(ngf * 2, ngf),
            nn.ConvTranspose2d(ngf, 3, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, z):
        return self.main(z.view(z.size(0), nz, 1, 1))


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        layers, c = [nn.Conv2d(3, ndf, 4, 2, 1), nn.LeakyReLU(0.2)], ndf
        for _ in range(4):
            layers += [nn.Conv2d(c, c * 2, 4, 2, 1), nn.InstanceNorm2d(c * 2, affine=True), nn.LeakyReLU(0.2)]
            c *= 2
        layers += [nn.Conv2d(c, 1, 4, 1, 0)]
        self.main = nn.Sequential(*layers)

    def forward(self, x):
        return self.main(x).view(-1)


def weights_init(m):
    if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(m.weight, 0.0, 0.02)
    elif isinstance(m, nn.BatchNorm2d):
        nn.init.normal_(m.weight, 1.0, 0.02)
        nn.init.zeros_(m.bias)


def gradient_penalty(critic, real, fake):
    eps = torch.rand(real.size(0), 1, 1, 1, device=real.device)
    inter = (eps * real + (1 - eps) * fake).requires_grad_(True)
    score = critic(inter)
    (grads,) = autograd.grad(score, inter, torch.ones_like(score), create_graph=True, retain_graph=True)
    return ((grads.flatten(1).norm(2, dim=1) - 1) ** 2).mean()


G, D = Generator().to(dev), Critic().to(dev)
G.apply(weights_init)
D.apply(weights_init)
optG = optim.Adam(G.parameters(), lr=1e-4, betas=(0.0, 0.9))
optD = optim.Adam(D.parameters(), lr=1e-4, betas=(0.0, 0.9))

dataset = torch.randn(1024, 3, 128, 128).clamp_(-1, 1)   # stays on the host
fixed_noise = torch.randn(64, nz, device=dev)

it = 0
for g_iter in range(3):
    for p in D.parameters():
        p.requires_grad = True
    for _ in range(n_critic):
        idx = torch.randint(0, len(dataset), (bs,))
        real = dataset[idx].to(dev)
        with torch.no_grad():
            fake = G(torch.randn(bs, nz, device=dev))
        D.zero_grad()
        d_real = D(real).mean()
        d_fake = D(fake).mean()
        gp = gradient_penalty(D, real, fake)
        lossD = d_fake - d_real + lambda_gp * gp
        lossD.backward()
        optD.step()
        it += 1
        print(f"[{it}] D {lossD.item():.3f} gp {gp.item():.3f} "
              f"max_alloc={torch.cuda.max_memory_allocated()} max_reserved={torch.cuda.max_memory_reserved()}")

    for p in D.parameters():
        p.requires_grad = False
    G.zero_grad()
    lossG = -D(G(torch.randn(bs, nz, device=dev))).mean()
    lossG.backward()
    optG.step()
    print(f"    G {lossG.item():.3f}")

G.eval()
with torch.no_grad():
    samples = G(fixed_noise).cpu()
print("samples", tuple(samples.shape))
print("peak allocated", torch.cuda.max_memory_allocated(), "peak reserved", torch.cuda.max_memory_reserved())
