# CycleGAN, following the paper: 9-block resnet generators, 70x70 PatchGAN, LSGAN, image pool of 50
import itertools
import random

import torch
import torch.nn as nn

random.seed(3)
torch.manual_seed(3)
device = "cuda"

IMG = 256
BATCH = 6
STEPS = 6
LAMBDA = 10.0
LAMBDA_IDT = 0.5


class ResBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.block = nn.Sequential(
            nn.ReflectionPad2d(1), nn.Conv2d(c, c, 3), nn.InstanceNorm2d(c), nn.ReLU(True),
            nn.ReflectionPad2d(1), nn.Conv2d(c, c, 3), nn.InstanceNorm2d(c))

    def forward(self, x):
        return x + self.block(x)


def make_generator(ngf=64, n_blocks=9):
    layers = [nn.ReflectionPad2d(3), nn.Conv2d(3, ngf, 7), nn.InstanceNorm2d(ngf), nn.ReLU(True)]
    c = ngf
    for _ in range(2):
        layers += [nn.Conv2d(c, c * 2, 3, stride=2, padding=1), nn.InstanceNorm2d(c * 2), nn.ReLU(True)]
        c *= 2
    layers += [ResBlock(c) for _ in range(n_blocks)]
    for _ in range(2):
        layers += [nn.ConvTranspose2d(c, c // 2, 3, stride=2, padding=1, output_padding=1),
                   nn.InstanceNorm2d(c // 2), nn.ReLU(True)]
        c //= 2
    layers += [nn.ReflectionPad2d(3), nn.Conv2d(c, 3, 7), nn.Tanh()]
    return nn.Sequential(*layers)


def make_discriminator(ndf=64):
    layers = [nn.Conv2d(3, ndf, 4, 2, 1), nn.LeakyReLU(0.2, True)]
    c = ndf
    for stride in (2, 2, 1):
        n = min(c * 2, 512)
        layers += [nn.Conv2d(c, n, 4, stride, 1), nn.InstanceNorm2d(n), nn.LeakyReLU(0.2, True)]
        c = n
    layers += [nn.Conv2d(c, 1, 4, 1, 1)]
    return nn.Sequential(*layers)


def init_weights(m):
    if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(m.weight, 0.0, 0.02)
        nn.init.zeros_(m.bias)


class ImagePool:
    def __init__(self, size=50):
        self.size = size
        self.images = []

    def query(self, images):
        out = []
        for img in images:
            img = img.detach().unsqueeze(0)
            if len(self.images) < self.size:
                self.images.append(img.clone())
                out.append(img)
            elif random.random() > 0.5:
                k = random.randrange(self.size)
                old = self.images[k].clone()
                self.images[k] = img.clone()
                out.append(old)
            else:
                out.append(img)
        return torch.cat(out, 0)


def set_requires_grad(nets, flag):
    for net in nets:
        for p in net.parameters():
            p.requires_grad = flag


G_A, G_B = make_generator().to(device), make_generator().to(device)
D_A, D_B = make_discriminator().to(device), make_discriminator().to(device)
for net in (G_A, G_B, D_A, D_B):
    net.apply(init_weights)

opt_G = torch.optim.Adam(itertools.chain(G_A.parameters(), G_B.parameters()), lr=2e-4, betas=(0.5, 0.999))
opt_D = torch.optim.Adam(itertools.chain(D_A.parameters(), D_B.parameters()), lr=2e-4, betas=(0.5, 0.999))
gan_loss = nn.MSELoss()
l1 = nn.L1Loss()
pool_A, pool_B = ImagePool(), ImagePool()


def adv(pred, real):
    target = torch.ones_like(pred) if real else torch.zeros_like(pred)
    return gan_loss(pred, target)


for step in range(STEPS):
    real_A = torch.rand(BATCH, 3, IMG, IMG, device=device) * 2 - 1
    real_B = torch.rand(BATCH, 3, IMG, IMG, device=device) * 2 - 1

    # generators
    fake_B = G_A(real_A)
    rec_A = G_B(fake_B)
    fake_A = G_B(real_B)
    rec_B = G_A(fake_A)
    set_requires_grad([D_A, D_B], False)
    opt_G.zero_grad()
    idt_A = l1(G_A(real_B), real_B) * LAMBDA * LAMBDA_IDT
    idt_B = l1(G_B(real_A), real_A) * LAMBDA * LAMBDA_IDT
    loss_G = (adv(D_A(fake_B), True) + adv(D_B(fake_A), True)
              + LAMBDA * l1(rec_A, real_A) + LAMBDA * l1(rec_B, real_B) + idt_A + idt_B)
    loss_G.backward()
    opt_G.step()

    # discriminators
    set_requires_grad([D_A, D_B], True)
    opt_D.zero_grad()
    loss_D_A = 0.5 * (adv(D_A(real_B), True) + adv(D_A(pool_B.query(fake_B)), False))
    loss_D_A.backward()
    loss_D_B = 0.5 * (adv(D_B(real_A), True) + adv(D_B(pool_A.query(fake_A)), False))
    loss_D_B.backward()
    opt_D.step()

    print(f"step {step}: G {loss_G.item():.3f} D_A {loss_D_A.item():.3f} D_B {loss_D_B.item():.3f} | "
          f"max_alloc {torch.cuda.max_memory_allocated()} max_reserved {torch.cuda.max_memory_reserved()}")

print("max_memory_allocated", torch.cuda.max_memory_allocated())
print("max_memory_reserved", torch.cuda.max_memory_reserved())
