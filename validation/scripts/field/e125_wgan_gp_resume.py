import os, tempfile
import torch, torch.nn as nn, torch.nn.functional as F

# WGAN-GP at 128px, two optimisers, n_critic = 2; saved and resumed half way.
BATCH, RES, NF, ZDIM = 48, 128, 64, 256
N_CRITIC, ITERS, LAMBDA = 2, 6, 10.0
DEV = 'cuda'
torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cudnn.allow_tf32 = True


class GBlock(nn.Module):
    def __init__(s, i, o):
        super().__init__()
        s.bn1, s.bn2 = nn.BatchNorm2d(i), nn.BatchNorm2d(o)
        s.c1, s.c2, s.sc = nn.Conv2d(i, o, 3, 1, 1), nn.Conv2d(o, o, 3, 1, 1), nn.Conv2d(i, o, 1)
    def forward(s, x):
        up = lambda t: F.interpolate(t, scale_factor=2, mode='nearest')
        h = s.c1(up(F.relu(s.bn1(x))))
        h = s.c2(F.relu(s.bn2(h)))
        return h + up(s.sc(x))


class DBlock(nn.Module):
    def __init__(s, i, o):
        super().__init__()
        s.n1 = nn.GroupNorm(1, i)
        s.c1, s.c2, s.sc = nn.Conv2d(i, i, 3, 1, 1), nn.Conv2d(i, o, 3, 1, 1), nn.Conv2d(i, o, 1)
    def forward(s, x):
        h = s.c1(F.leaky_relu(s.n1(x), 0.2))
        h = F.avg_pool2d(s.c2(F.leaky_relu(h, 0.2)), 2)
        return h + s.sc(F.avg_pool2d(x, 2))


class G(nn.Module):
    def __init__(s):
        super().__init__()
        w = [8, 8, 4, 2, 1, 1]
        s.fc = nn.Linear(ZDIM, w[0] * NF * 16)
        s.blocks = nn.Sequential(*[GBlock(w[i] * NF, w[i + 1] * NF) for i in range(5)])
        s.out = nn.Sequential(nn.BatchNorm2d(NF), nn.ReLU(), nn.Conv2d(NF, 3, 3, 1, 1), nn.Tanh())
    def forward(s, z):
        return s.out(s.blocks(s.fc(z).view(len(z), -1, 4, 4)))


class D(nn.Module):
    def __init__(s):
        super().__init__()
        w = [1, 1, 2, 4, 8, 8]
        s.stem = nn.Conv2d(3, NF, 3, 1, 1)
        s.blocks = nn.Sequential(*[DBlock(w[i] * NF, w[i + 1] * NF) for i in range(5)])
        s.fc = nn.Linear(w[-1] * NF, 1)
    def forward(s, x):
        return s.fc(F.silu(s.blocks(s.stem(x))).mean((2, 3))).squeeze(1)


def build():
    g, d = G().to(DEV), D().to(DEV)
    og = torch.optim.Adam(g.parameters(), lr=1e-4, betas=(0.0, 0.9))
    od = torch.optim.Adam(d.parameters(), lr=2e-4, betas=(0.0, 0.9))
    return g, d, og, od


def gradient_penalty(d, real, fake):
    eps = torch.rand(real.size(0), 1, 1, 1, device=real.device)
    mix = (eps * real + (1 - eps) * fake).requires_grad_(True)
    out = d(mix)
    grad, = torch.autograd.grad(out.sum(), mix, create_graph=True)
    return ((grad.flatten(1).norm(2, dim=1) - 1) ** 2).mean()


def real_batch():
    # blobs: low-frequency noise upsampled
    z = torch.randn(BATCH, 3, 8, 8, device=DEV)
    return torch.tanh(F.interpolate(z, size=(RES, RES), mode='bicubic', align_corners=False))


def d_step(g, d, od):
    real = real_batch()
    with torch.no_grad():
        fake = g(torch.randn(BATCH, ZDIM, device=DEV))
    wass = d(fake).mean() - d(real).mean()
    gp = gradient_penalty(d, real, fake)
    loss = wass + LAMBDA * gp
    od.zero_grad()
    loss.backward()
    od.step()
    return wass.item(), gp.item()


def g_step(g, d, og):
    for p in d.parameters():
        p.requires_grad_(False)
    loss = -d(g(torch.randn(BATCH, ZDIM, device=DEV))).mean()
    og.zero_grad()
    loss.backward()
    og.step()
    for p in d.parameters():
        p.requires_grad_(True)
    return loss.item()


def main():
    torch.manual_seed(2024)
    g, d, og, od = build()
    path = os.path.join(tempfile.mkdtemp(), 'gan.pt')
    for it in range(ITERS):
        for _ in range(N_CRITIC):
            w, gp = d_step(g, d, od)
        lg = g_step(g, d, og)
        print(f'iter {it}  W {w:+.4f}  gp {gp:.4f}  loss_G {lg:+.4f}')
        if it == ITERS // 2 - 1:
            torch.save({'g': g.state_dict(), 'd': d.state_dict(), 'og': og.state_dict(), 'od': od.state_dict(),
                        'rng': torch.cuda.get_rng_state(), 'it': it}, path)
            # pretend that the job was restarted: new objects, then load into them
            g, d, og, od = build()
            ck = torch.load(path, map_location=DEV)
            g.load_state_dict(ck['g']); d.load_state_dict(ck['d'])
            og.load_state_dict(ck['og']); od.load_state_dict(ck['od'])
            torch.cuda.set_rng_state(ck['rng'].cpu())
            print('resumed from', ck['it'], 'allocated now', torch.cuda.memory_allocated())
    os.remove(path)
    print('peak allocated', torch.cuda.max_memory_allocated(), 'peak reserved', torch.cuda.max_memory_reserved())


main()
