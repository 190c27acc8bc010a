# VQGAN (taming-transformers flavour), f=16, random-weight VGG perceptual loss, PatchGAN with hinge loss,
# adaptive discriminator weight, and lazy R1 every few steps. Everything in fp32.
import torch
import torch.nn as nn
import torch.nn.functional as F

device = "cuda"
bs, res = 6, 256
ch, ch_mult, num_res = 128, (1, 1, 2, 2, 4), 2
z_dim, n_embed = 256, 1024
steps, disc_start, r1_every, r1_gamma = 28, 6, 8, 10.0

Norm = lambda c: nn.GroupNorm(32, c, eps=1e-6)
nonlin = lambda x: x * torch.sigmoid(x)

class ResnetBlock(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.norm1, self.conv1 = Norm(cin), nn.Conv2d(cin, cout, 3, 1, 1)
        self.norm2, self.conv2 = Norm(cout), nn.Conv2d(cout, cout, 3, 1, 1)
        self.n_in = nn.Conv2d(cin, cout, 1) if cin != cout else None

    def forward(self, x):
        h = self.conv1(nonlin(self.norm1(x)))
        h = self.conv2(nonlin(self.norm2(h)))
        return (x if self.n_in is None else self.n_in(x)) + h

class AttnBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm = Norm(c)
        self.q, self.k, self.v, self.proj = (nn.Conv2d(c, c, 1) for _ in range(4))

    def forward(self, x):
        y, c = self.norm(x), x.shape[1]
        q, k, v = self.q(y).flatten(2), self.k(y).flatten(2), self.v(y).flatten(2)
        a = F.softmax(torch.bmm(q.transpose(1, 2), k) * c ** -0.5, dim=2)
        return x + self.proj(torch.bmm(v, a.transpose(1, 2)).reshape(x.shape))

def Down(c):
    return nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(c, c, 3, 2, 0))

def Up(c):
    return nn.Sequential(nn.Upsample(scale_factor=2.0, mode="nearest"), nn.Conv2d(c, c, 3, 1, 1))

def make_encoder():
    layers, c = [nn.Conv2d(3, ch, 3, 1, 1)], ch
    for i, m in enumerate(ch_mult):
        for _ in range(num_res):
            layers.append(ResnetBlock(c, ch * m))
            c = ch * m
            if i == len(ch_mult) - 1:
                layers.append(AttnBlock(c))
        if i < len(ch_mult) - 1:
            layers.append(Down(c))
    layers += [ResnetBlock(c, c), AttnBlock(c), ResnetBlock(c, c), Norm(c), nn.SiLU(), nn.Conv2d(c, z_dim, 3, 1, 1)]
    return nn.Sequential(*layers)

class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        c = ch * ch_mult[-1]
        layers = [nn.Conv2d(z_dim, c, 3, 1, 1), ResnetBlock(c, c), AttnBlock(c), ResnetBlock(c, c)]
        for i, m in reversed(list(enumerate(ch_mult))):
            for _ in range(num_res + 1):
                layers.append(ResnetBlock(c, ch * m))
                c = ch * m
                if i == len(ch_mult) - 1:
                    layers.append(AttnBlock(c))
            if i > 0:
                layers.append(Up(c))
        self.body = nn.Sequential(*layers, Norm(c), nn.SiLU())
        self.conv_out = nn.Conv2d(c, 3, 3, 1, 1)

    def forward(self, z):
        return self.conv_out(self.body(z))

class VectorQuantizer(nn.Module):
    def __init__(self, beta=0.25):
        super().__init__()
        self.beta = beta
        self.embedding = nn.Embedding(n_embed, z_dim)
        self.embedding.weight.data.uniform_(-1.0 / n_embed, 1.0 / n_embed)

    def forward(self, z):
        z = z.permute(0, 2, 3, 1).contiguous()
        flat = z.view(-1, z_dim)
        d = flat.pow(2).sum(1, keepdim=True) + self.embedding.weight.pow(2).sum(1) - 2 * flat @ self.embedding.weight.t()
        idx = d.argmin(1)
        zq = self.embedding(idx).view(z.shape)
        loss = self.beta * ((zq.detach() - z) ** 2).mean() + ((zq - z.detach()) ** 2).mean()
        zq = z + (zq - z).detach()   # straight-through
        return zq.permute(0, 3, 1, 2).contiguous(), loss

class VQModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder, self.quantize = make_encoder(), Decoder(), VectorQuantizer()
        self.quant_conv, self.post_quant_conv = nn.Conv2d(z_dim, z_dim, 1), nn.Conv2d(z_dim, z_dim, 1)

    def forward(self, x):
        zq, loss = self.quantize(self.quant_conv(self.encoder(x)))
        return self.decoder(self.post_quant_conv(zq)), loss

class VGGPerceptual(nn.Module):
    """LPIPS structure: 5 VGG16 slices, unit-normalised features, 1x1 lin layers. Frozen."""
    def __init__(self):
        super().__init__()
        self.slices, self.linears, c = nn.ModuleList(), nn.ModuleList(), 3
        for i, (n, w) in enumerate([(2, 64), (2, 128), (3, 256), (3, 512), (3, 512)]):
            layers = [nn.MaxPool2d(2, 2)] if i else []
            for _ in range(n):
                layers += [nn.Conv2d(c, w, 3, padding=1), nn.ReLU(inplace=True)]
                c = w
            self.slices.append(nn.Sequential(*layers))
            self.linears.append(nn.Sequential(nn.Dropout(), nn.Conv2d(w, 1, 1, bias=False)))
            self.linears[-1][1].weight.data.abs_()
        self.register_buffer("shift", torch.tensor([-.030, -.088, -.188])[None, :, None, None])
        self.register_buffer("scale", torch.tensor([.458, .448, .450])[None, :, None, None])
        self.requires_grad_(False)

    def forward(self, x, y):
        x, y, val = (x - self.shift) / self.scale, (y - self.shift) / self.scale, 0
        for s, lin in zip(self.slices, self.linears):
            x, y = s(x), s(y)
            nx = x * torch.rsqrt(x.pow(2).sum(1, keepdim=True) + 1e-10)
            ny = y * torch.rsqrt(y.pow(2).sum(1, keepdim=True) + 1e-10)
            val = val + lin((nx - ny) ** 2).mean([2, 3], keepdim=True)
        return val

def make_disc(ndf=64, n_layers=3):
    layers, c = [nn.Conv2d(3, ndf, 4, 2, 1), nn.LeakyReLU(0.2, True)], ndf
    for n in range(1, n_layers + 1):
        cout = ndf * min(2 ** n, 8)
        layers += [nn.Conv2d(c, cout, 4, 2 if n < n_layers else 1, 1, bias=False), nn.BatchNorm2d(cout), nn.LeakyReLU(0.2, True)]
        c = cout
    return nn.Sequential(*layers, nn.Conv2d(c, 1, 4, 1, 1))

torch.manual_seed(23)
model, disc, lpips = VQModel().to(device), make_disc().to(device), VGGPerceptual().to(device).eval()
opt_g = torch.optim.Adam(model.parameters(), lr=4.5e-6 * bs, betas=(0.5, 0.9))
opt_d = torch.optim.Adam(disc.parameters(), lr=4.5e-6 * bs, betas=(0.5, 0.9))

for step in range(steps):
    x = torch.rand(bs, 3, res, res, device=device) * 2 - 1

    # generator / autoencoder
    xrec, q_loss = model(x)
    nll = ((x - xrec).abs() + lpips(x, xrec)).mean()
    g_loss = -disc(xrec).mean()
    last = model.decoder.conv_out.weight
    nll_g = torch.autograd.grad(nll, last, retain_graph=True)[0]
    gan_g = torch.autograd.grad(g_loss, last, retain_graph=True)[0]
    d_weight = (nll_g.norm() / (gan_g.norm() + 1e-4)).clamp(0.0, 1e4).detach() * 0.8
    loss = nll + (d_weight if step >= disc_start else 0.0) * g_loss + q_loss
    opt_g.zero_grad()
    loss.backward()
    opt_g.step()

    # discriminator
    d_loss = torch.zeros((), device=device)
    if step >= disc_start:
        real, fake = disc(x), disc(xrec.detach())
        d_loss = 0.5 * (F.relu(1 - real).mean() + F.relu(1 + fake).mean())
        opt_d.zero_grad()
        d_loss.backward()
        opt_d.step()
        if step % r1_every == 0:
            xr = x.detach().requires_grad_(True)
            grad, = torch.autograd.grad(disc(xr).sum(), xr, create_graph=True)
            r1 = grad.pow(2).sum([1, 2, 3]).mean()
            opt_d.zero_grad()
            (0.5 * r1_gamma * r1_every * r1).backward()
            opt_d.step()
    if step % 4 == 0:
        print(f"step {step} nll {nll.item():.4f} q {q_loss.item():.4f} g {g_loss.item():.4f} d {d_loss.item():.4f} "
              f"dw {d_weight.item():.3f} | {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")

print("max_memory_allocated", torch.cuda.max_memory_allocated())
print("max_memory_reserved", torch.cuda.max_memory_reserved())
