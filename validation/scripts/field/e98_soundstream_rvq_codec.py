"""Neural audio codec at 24 kHz: SEANet encoder/decoder + residual VQ (EMA codebooks),
multi-resolution STFT losses and a multi-scale STFT discriminator. fp32 everywhere."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.parametrizations import weight_norm

SAMPLE_RATE, SEGMENT = 24000, 48000
BATCH, STEPS = 16, 14
N_FILTERS, DIM = 32, 128
RATIOS = (2, 4, 5, 8)
N_Q, BINS = 8, 1024
DISC_FFTS, DISC_FILTERS = (2048, 1024, 512), 32


wnconv1d = lambda *a, **k: weight_norm(nn.Conv1d(*a, **k))


class ResUnit(nn.Module):
    def __init__(self, c, dilation):
        super().__init__()
        self.block = nn.Sequential(
            nn.ELU(), wnconv1d(c, c // 2, 3, dilation=dilation, padding=dilation),
            nn.ELU(), wnconv1d(c // 2, c, 1))
        self.shortcut = wnconv1d(c, c, 1)

    def forward(self, x):
        return self.shortcut(x) + self.block(x)


class SLSTM(nn.LSTM):
    def forward(self, x):
        return super().forward(x.permute(2, 0, 1))[0].permute(1, 2, 0) + x


def build_encoder():
    c = N_FILTERS
    layers = [wnconv1d(1, c, 7, padding=3)]
    for r in RATIOS:
        layers += [ResUnit(c, 1), ResUnit(c, 3), nn.ELU(),
                   wnconv1d(c, 2 * c, 2 * r, stride=r, padding=(r + 1) // 2)]
        c *= 2
    return nn.Sequential(*layers, SLSTM(c, c, 2), nn.ELU(), wnconv1d(c, DIM, 7, padding=3))


def build_decoder():
    c = N_FILTERS * 2 ** len(RATIOS)
    layers = [wnconv1d(DIM, c, 7, padding=3), SLSTM(c, c, 2)]
    for r in reversed(RATIOS):
        layers += [nn.ELU(), weight_norm(nn.ConvTranspose1d(c, c // 2, 2 * r, r, (r + 1) // 2, output_padding=r % 2)),
                   ResUnit(c // 2, 1), ResUnit(c // 2, 3)]
        c //= 2
    return nn.Sequential(*layers, nn.ELU(), wnconv1d(c, 1, 7, padding=3))


class EuclideanCodebook(nn.Module):
    def __init__(self, decay=0.99, eps=1e-5):
        super().__init__()
        self.decay, self.eps = decay, eps
        self.register_buffer("embed", torch.randn(BINS, DIM))
        self.register_buffer("embed_avg", self.embed.clone())
        self.register_buffer("cluster_size", torch.ones(BINS))

    def forward(self, x):
        flat = x.detach().reshape(-1, DIM)
        dist = flat.pow(2).sum(1, keepdim=True) - 2 * flat @ self.embed.t() + self.embed.pow(2).sum(1)
        idx = dist.argmin(-1)
        if self.training:
            with torch.no_grad():
                onehot = F.one_hot(idx, BINS).type(flat.dtype)
                self.cluster_size.lerp_(onehot.sum(0), 1 - self.decay)
                self.embed_avg.lerp_(onehot.t() @ flat, 1 - self.decay)
                self.embed.copy_(self.embed_avg / (self.cluster_size[:, None] + self.eps))
        return F.embedding(idx, self.embed).view_as(x), idx.view(x.shape[:-1])


class ResidualVQ(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(EuclideanCodebook() for _ in range(N_Q))

    def forward(self, x):
        residual, out, commit, codes = x.transpose(1, 2), 0, 0, []
        for layer in self.layers:
            q, idx = layer(residual)
            commit = commit + F.mse_loss(residual, q.detach())
            q = residual + (q - residual).detach()
            residual = residual - q.detach()
            out = out + q
            codes.append(idx)
        return out.transpose(1, 2), commit / N_Q, torch.stack(codes)


class STFTDisc(nn.Module):
    def __init__(self, n_fft):
        super().__init__()
        self.n_fft, f = n_fft, DISC_FILTERS
        self.register_buffer("window", torch.hann_window(n_fft))
        self.convs = nn.ModuleList([weight_norm(nn.Conv2d(2, f, (3, 9), padding=(1, 4)))])
        for d in (1, 2, 4):
            self.convs.append(weight_norm(nn.Conv2d(f, f, (3, 9), stride=(1, 2), dilation=(d, 1), padding=(d, 4))))
        self.convs.append(weight_norm(nn.Conv2d(f, f, (3, 3), padding=(1, 1))))
        self.post = weight_norm(nn.Conv2d(f, 1, (3, 3), padding=(1, 1)))

    def forward(self, x):
        z = torch.stft(x.squeeze(1), self.n_fft, self.n_fft // 4, window=self.window, normalized=True, return_complex=True)
        z = torch.stack([z.real, z.imag], 1).transpose(2, 3)
        fmap = []
        for conv in self.convs:
            z = F.leaky_relu(conv(z), 0.2)
            fmap.append(z)
        return self.post(z), fmap


def multiscale_stft_loss(x, y):
    loss = 0.0
    for i in range(6, 12):
        n = 2 ** i
        w = torch.hann_window(n, device=x.device)
        X, Y = (torch.stft(s.squeeze(1), n, n // 4, window=w, return_complex=True).abs() for s in (x, y))
        loss = loss + F.l1_loss(X, Y) + F.mse_loss((X + 1e-5).log(), (Y + 1e-5).log()).sqrt()
    return loss / 6


def synth_batch():
    t = torch.arange(SEGMENT) / SAMPLE_RATE
    f0 = 80 + 400 * torch.rand(BATCH, 4, 1)
    wav = (torch.sin(2 * torch.pi * f0 * t) * torch.rand(BATCH, 4, 1)).sum(1, keepdim=True)
    return (0.2 * wav + 0.02 * torch.randn(BATCH, 1, SEGMENT)).cuda()


def main():
    torch.manual_seed(3)
    enc, dec, rvq = build_encoder().cuda(), build_decoder().cuda(), ResidualVQ().cuda()
    discs = nn.ModuleList(STFTDisc(n) for n in DISC_FFTS).to("cuda")
    g_params = list(enc.parameters()) + list(dec.parameters())
    opt_g = torch.optim.Adam(g_params, lr=3e-4, betas=(0.5, 0.9))
    opt_d = torch.optim.Adam(discs.parameters(), lr=3e-4, betas=(0.5, 0.9))
    for step in range(STEPS):
        x = synth_batch()
        q, commit, codes = rvq(enc(x))
        y = dec(q)
        loss_d = 0
        for d in discs:
            real, fake = d(x)[0], d(y.detach())[0]
            loss_d = loss_d + F.relu(1 - real).mean() + F.relu(1 + fake).mean()
        opt_d.zero_grad()
        loss_d.backward()
        opt_d.step()
        adv, feat = 0, 0
        for d in discs:
            with torch.no_grad():
                fr = d(x)[1]
            score, ff = d(y)
            adv = adv + F.relu(1 - score).mean()
            feat = feat + sum(F.l1_loss(a, b) for a, b in zip(ff, fr)) / len(fr)
        loss_t, loss_f = F.l1_loss(y, x), multiscale_stft_loss(y, x)
        loss_g = 0.1 * loss_t + loss_f + 3 * adv / len(discs) + 3 * feat / len(discs) + commit
        opt_g.zero_grad()
        loss_g.backward()
        nn.utils.clip_grad_norm_(g_params, 5.0)
        opt_g.step()
        print(f"{step:3d} l_t {loss_t.item():.4f} l_f {loss_f.item():.3f} adv {adv.item():.3f} d {loss_d.item():.3f} "
              f"used {codes[0].unique().numel()}/{BINS}")
    print("torch.cuda.max_memory_allocated()", torch.cuda.max_memory_allocated())
    print("torch.cuda.max_memory_reserved()", torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    main()
