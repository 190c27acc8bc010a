#!/usr/bin/env python
# pix2pix (Isola et al.) facades-like training: U-Net generator + 70x70 PatchGAN, LSGAN + L1, fp32 with TF32.
import random

import torch
import torch.nn as nn
from torch.nn import init
from torch.optim import lr_scheduler

torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cudnn.allow_tf32 = True

# ---- options ----
load_size, crop_size = 286, 256
batch_size = 16
ngf, ndf = 64, 64
lambda_L1 = 100.0
n_images = 112
n_epochs = 2
pool_size = 50
num_downs = 8
lr, beta1 = 2e-4, 0.5


class UnetSkipConnectionBlock(nn.Module):
    def __init__(self, outer_nc, inner_nc, input_nc=None, submodule=None, outermost=False, innermost=False,
                 norm_layer=nn.BatchNorm2d, use_dropout=False):
        super().__init__()
        self.outermost = outermost
        if input_nc is None:
            input_nc = outer_nc
        downconv = nn.Conv2d(input_nc, inner_nc, kernel_size=4, stride=2, padding=1, bias=False)
        downrelu = nn.LeakyReLU(0.2, True)
        downnorm = norm_layer(inner_nc)
        uprelu = nn.ReLU(True)
        upnorm = norm_layer(outer_nc)
        if outermost:
            upconv = nn.ConvTranspose2d(inner_nc * 2, outer_nc, kernel_size=4, stride=2, padding=1)
            model = [downconv, submodule, uprelu, upconv, nn.Tanh()]
        elif innermost:
            upconv = nn.ConvTranspose2d(inner_nc, outer_nc, kernel_size=4, stride=2, padding=1, bias=False)
            model = [downrelu, downconv, uprelu, upconv, upnorm]
        else:
            upconv = nn.ConvTranspose2d(inner_nc * 2, outer_nc, kernel_size=4, stride=2, padding=1, bias=False)
            model = [downrelu, downconv, downnorm, submodule, uprelu, upconv, upnorm]
            if use_dropout:
                model.append(nn.Dropout(0.5))
        self.model = nn.Sequential(*model)

    def forward(self, x):
        if self.outermost:
            return self.model(x)
        return torch.cat([x, self.model(x)], 1)


def define_G():
    block = UnetSkipConnectionBlock(ngf * 8, ngf * 8, innermost=True)
    for _ in range(num_downs - 5):
        block = UnetSkipConnectionBlock(ngf * 8, ngf * 8, submodule=block, use_dropout=True)
    block = UnetSkipConnectionBlock(ngf * 4, ngf * 8, submodule=block)
    block = UnetSkipConnectionBlock(ngf * 2, ngf * 4, submodule=block)
    block = UnetSkipConnectionBlock(ngf, ngf * 2, submodule=block)
    return UnetSkipConnectionBlock(3, ngf, input_nc=3, submodule=block, outermost=True)


def define_D(input_nc=6, n_layers=3):
    seq = [nn.Conv2d(input_nc, ndf, 4, 2, 1), nn.LeakyReLU(0.2, True)]
    mult = 1
    for n in range(1, n_layers + 1):
        prev, mult = mult, min(2 ** n, 8)
        stride = 2 if n < n_layers else 1
        seq += [nn.Conv2d(ndf * prev, ndf * mult, 4, stride, 1, bias=False),
                nn.BatchNorm2d(ndf * mult), nn.LeakyReLU(0.2, True)]
    seq += [nn.Conv2d(ndf * mult, 1, 4, 1, 1)]
    return nn.Sequential(*seq)


def init_weights(m):
    name = m.__class__.__name__
    if "Conv" in name:
        init.normal_(m.weight, 0.0, 0.02)
    elif "BatchNorm2d" in name:
        init.normal_(m.weight, 1.0, 0.02)
        init.zeros_(m.bias)


class ImagePool:
    """History of generated pairs shown to D."""

    def __init__(self, size):
        self.size, self.images = size, []

    def query(self, images):
        out = []
        for image in images.detach():
            image = image.unsqueeze(0)
            if len(self.images) < self.size:
                self.images.append(image.clone())
                out.append(image)
            elif random.random() > 0.5:
                i = random.randrange(self.size)
                out.append(self.images[i].clone())
                self.images[i] = image.clone()
            else:
                out.append(image)
        return torch.cat(out, 0)


def set_requires_grad(net, flag):
    for p in net.parameters():
        p.requires_grad = flag


def make_batch():
    """Random paired data; jitter: random crop of load_size to crop_size + flip, as in the aligned dataset."""
    A = torch.rand(batch_size, 3, load_size, load_size) * 2 - 1
    B = (A.flip(1) * 0.7 + 0.3 * torch.rand_like(A)).clamp(-1, 1)
    x, y = random.randint(0, load_size - crop_size), random.randint(0, load_size - crop_size)
    A, B = (t[:, :, y:y + crop_size, x:x + crop_size] for t in (A, B))
    if random.random() > 0.5:
        A, B = A.flip(-1), B.flip(-1)
    return A.contiguous(), B.contiguous()


random.seed(1)
torch.manual_seed(1)
device = torch.device("cuda")
netG = define_G().apply(init_weights).to(device)
netD = define_D().apply(init_weights).to(device)
criterionGAN, criterionL1 = nn.MSELoss(), nn.L1Loss()
opt_G = torch.optim.Adam(netG.parameters(), lr=lr, betas=(beta1, 0.999))
opt_D = torch.optim.Adam(netD.parameters(), lr=lr, betas=(beta1, 0.999))
scheds = [lr_scheduler.LambdaLR(o, lambda e: 1.0 - e / (n_epochs + 1)) for o in (opt_G, opt_D)]
fake_pool = ImagePool(pool_size)
print("G params", sum(p.numel() for p in netG.parameters()) / 1e6, "M")

for epoch in range(n_epochs):
    for i in range(n_images // batch_size):
        real_A, real_B = (t.to(device) for t in make_batch())
        fake_B = netG(real_A)

        set_requires_grad(netD, True)
        opt_D.zero_grad()
        fake_AB = fake_pool.query(torch.cat((real_A, fake_B), 1))
        pred_fake = netD(fake_AB)
        loss_D_fake = criterionGAN(pred_fake, torch.zeros_like(pred_fake))
        pred_real = netD(torch.cat((real_A, real_B), 1))
        loss_D_real = criterionGAN(pred_real, torch.ones_like(pred_real))
        loss_D = (loss_D_fake + loss_D_real) * 0.5
        loss_D.backward()
        opt_D.step()

        set_requires_grad(netD, False)
        opt_G.zero_grad()
        pred_fake = netD(torch.cat((real_A, fake_B), 1))
        loss_G_GAN = criterionGAN(pred_fake, torch.ones_like(pred_fake))
        loss_G_L1 = criterionL1(fake_B, real_B) * lambda_L1
        (loss_G_GAN + loss_G_L1).backward()
        opt_G.step()
        print(f"(epoch {epoch}, iter {i}) G_GAN {loss_G_GAN.item():.3f} G_L1 {loss_G_L1.item():.3f} "
              f"D_real {loss_D_real.item():.3f} D_fake {loss_D_fake.item():.3f}")
    for s in scheds:
        s.step()

print("max_memory_allocated:", torch.cuda.max_memory_allocated())
print("max_memory_reserved:", torch.cuda.max_memory_reserved())
