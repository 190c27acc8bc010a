import itertools
import math
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import spectral_norm
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils import parametrize

torch.backends.cudnn.benchmark = False
LRELU_SLOPE = 0.1


class AttrDict(dict):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.__dict__ = self


h = AttrDict(
    batch_size=16, segment_size=16384, n_fft=1024, hop_size=256, win_size=1024, num_mels=80,
    sampling_rate=22050, fmin=0, fmax=8000,
    upsample_rates=[8, 8, 2, 2], upsample_kernel_sizes=[16, 16, 4, 4], upsample_initial_channel=512,
    resblock_kernel_sizes=[3, 7, 11], resblock_dilation_sizes=[[1, 3, 5]] * 3,
    learning_rate=2e-4, adam_b1=0.8, adam_b2=0.99, lr_decay=0.999,
    steps_per_epoch=4, epochs=3, seed=1234,
)


def get_padding(k, d=1):
    return (k * d - d) // 2


def init_weights(m, mean=0.0, std=0.01):
    if isinstance(m, (nn.Conv1d, nn.ConvTranspose1d)):
        m.weight.data.normal_(mean, std)


# --------------------------------------------------------------------------- mel
def mel_filterbank(sr, n_fft, n_mels, fmin, fmax, device):
    def hz2mel(f):
        return 2595.0 * math.log10(1.0 + f / 700.0)
    pts = torch.linspace(hz2mel(fmin), hz2mel(fmax), n_mels + 2, device=device)
    hz = 700.0 * (10 ** (pts / 2595.0) - 1)
    freqs = torch.linspace(0, sr / 2, n_fft // 2 + 1, device=device)
    up = (freqs[None] - hz[:-2, None]) / (hz[1:-1] - hz[:-2])[:, None]
    down = (hz[2:, None] - freqs[None]) / (hz[2:] - hz[1:-1])[:, None]
    fb = torch.clamp(torch.minimum(up, down), min=0)
    return fb * (2.0 / (hz[2:] - hz[:-2]))[:, None]


_cache = {}


def mel_spectrogram(y):
    if y.device not in _cache:
        _cache[y.device] = (
            mel_filterbank(h.sampling_rate, h.n_fft, h.num_mels, h.fmin, h.fmax, y.device),
            torch.hann_window(h.win_size, device=y.device),
        )
    fb, window = _cache[y.device]
    pad = (h.n_fft - h.hop_size) // 2
    y = F.pad(y.unsqueeze(1), (pad, pad), mode="reflect").squeeze(1)
    spec = torch.stft(y, h.n_fft, hop_length=h.hop_size, win_length=h.win_size, window=window,
                      center=False, normalized=False, onesided=True, return_complex=True)
    spec = torch.sqrt(torch.view_as_real(spec).pow(2).sum(-1) + 1e-9)
    return torch.log(torch.clamp(torch.matmul(fb, spec), min=1e-5))


# --------------------------------------------------------------------------- generator
class ResBlock(nn.Module):
    def __init__(self, channels, k, dilation):
        super().__init__()
        self.convs1 = nn.ModuleList(
            [weight_norm(nn.Conv1d(channels, channels, k, 1, dilation=d, padding=get_padding(k, d))) for d in dilation])
        self.convs2 = nn.ModuleList(
            [weight_norm(nn.Conv1d(channels, channels, k, 1, padding=get_padding(k))) for _ in dilation])
        self.convs1.apply(init_weights)
        self.convs2.apply(init_weights)

    def forward(self, x):
        for c1, c2 in zip(self.convs1, self.convs2):
            xt = F.leaky_relu(x, LRELU_SLOPE)
            xt = c1(xt)
            xt = F.leaky_relu(xt, LRELU_SLOPE)
            xt = c2(xt)
            x = xt + x
        return x


class Generator(nn.Module):
    def __init__(self, h):
        super().__init__()
        self.num_kernels = len(h.resblock_kernel_sizes)
        self.conv_pre = weight_norm(nn.Conv1d(h.num_mels, h.upsample_initial_channel, 7, 1, padding=3))
        self.ups = nn.ModuleList()
        self.resblocks = nn.ModuleList()
        for i, (u, k) in enumerate(zip(h.upsample_rates, h.upsample_kernel_sizes)):
            cin = h.upsample_initial_channel // 2 ** i
            self.ups.append(weight_norm(nn.ConvTranspose1d(cin, cin // 2, k, u, padding=(k - u) // 2)))
            for rk, rd in zip(h.resblock_kernel_sizes, h.resblock_dilation_sizes):
                self.resblocks.append(ResBlock(cin // 2, rk, rd))
        self.conv_post = weight_norm(nn.Conv1d(cin // 2, 1, 7, 1, padding=3))
        self.ups.apply(init_weights)
        self.conv_post.apply(init_weights)

    def forward(self, x):
        x = self.conv_pre(x)
        for i, up in enumerate(self.ups):
            x = up(F.leaky_relu(x, LRELU_SLOPE))
            xs = None
            for j in range(self.num_kernels):
                r = self.resblocks[i * self.num_kernels + j](x)
                xs = r if xs is None else xs + r
            x = xs / self.num_kernels
        return torch.tanh(self.conv_post(F.leaky_relu(x)))

    def remove_weight_norm(self):
        for m in self.modules():
            if parametrize.is_parametrized(m, "weight"):
                parametrize.remove_parametrizations(m, "weight")


# --------------------------------------------------------------------------- discriminators
class DiscriminatorP(nn.Module):
    def __init__(self, period, k=5, stride=3):
        super().__init__()
        self.period = period
        ch = [1, 32, 128, 512, 1024]
        self.convs = nn.ModuleList(
            [weight_norm(nn.Conv2d(a, b, (k, 1), (stride, 1), padding=(get_padding(5), 0))) for a, b in zip(ch[:-1], ch[1:])]
            + [weight_norm(nn.Conv2d(1024, 1024, (k, 1), 1, padding=(2, 0)))])
        self.conv_post = weight_norm(nn.Conv2d(1024, 1, (3, 1), 1, padding=(1, 0)))

    def forward(self, x):
        fmap = []
        b, c, t = x.shape
        if t % self.period != 0:
            n_pad = self.period - (t % self.period)
            x = F.pad(x, (0, n_pad), "reflect")
            t = t + n_pad
        x = x.view(b, c, t // self.period, self.period)
        for l in self.convs:
            x = F.leaky_relu(l(x), LRELU_SLOPE)
            fmap.append(x)
        x = self.conv_post(x)
        fmap.append(x)
        return torch.flatten(x, 1, -1), fmap


class DiscriminatorS(nn.Module):
    def __init__(self, use_spectral_norm=False):
        super().__init__()
        norm_f = spectral_norm if use_spectral_norm else weight_norm
        self.convs = nn.ModuleList([
            norm_f(nn.Conv1d(1, 128, 15, 1, padding=7)),
            norm_f(nn.Conv1d(128, 128, 41, 2, groups=4, padding=20)),
            norm_f(nn.Conv1d(128, 256, 41, 2, groups=16, padding=20)),
            norm_f(nn.Conv1d(256, 512, 41, 4, groups=16, padding=20)),
            norm_f(nn.Conv1d(512, 1024, 41, 4, groups=16, padding=20)),
            norm_f(nn.Conv1d(1024, 1024, 41, 1, groups=16, padding=20)),
            norm_f(nn.Conv1d(1024, 1024, 5, 1, padding=2)),
        ])
        self.conv_post = norm_f(nn.Conv1d(1024, 1, 3, 1, padding=1))

    def forward(self, x):
        fmap = []
        for l in self.convs:
            x = F.leaky_relu(l(x), LRELU_SLOPE)
            fmap.append(x)
        x = self.conv_post(x)
        fmap.append(x)
        return torch.flatten(x, 1, -1), fmap


class MultiPeriodDiscriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.discriminators = nn.ModuleList([DiscriminatorP(p) for p in (2, 3, 5, 7, 11)])

    def forward(self, y, y_hat):
        rs, gs, fr, fg = [], [], [], []
        for d in self.discriminators:
            r, f_r = d(y)
            g, f_g = d(y_hat)
            rs.append(r); gs.append(g); fr.append(f_r); fg.append(f_g)
        return rs, gs, fr, fg


class MultiScaleDiscriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.discriminators = nn.ModuleList([DiscriminatorS(True), DiscriminatorS(), DiscriminatorS()])
        self.meanpools = nn.ModuleList([nn.AvgPool1d(4, 2, padding=2), nn.AvgPool1d(4, 2, padding=2)])

    def forward(self, y, y_hat):
        rs, gs, fr, fg = [], [], [], []
        for i, d in enumerate(self.discriminators):
            if i != 0:
                y, y_hat = self.meanpools[i - 1](y), self.meanpools[i - 1](y_hat)
            r, f_r = d(y)
            g, f_g = d(y_hat)
            rs.append(r); gs.append(g); fr.append(f_r); fg.append(f_g)
        return rs, gs, fr, fg


def feature_loss(fmap_r, fmap_g):
    loss = 0
    for dr, dg in zip(fmap_r, fmap_g):
        for rl, gl in zip(dr, dg):
            loss += torch.mean(torch.abs(rl - gl))
    return loss * 2


def discriminator_loss(real, fake):
    return sum(torch.mean((1 - r) ** 2) + torch.mean(f ** 2) for r, f in zip(real, fake))


def generator_loss(fake):
    return sum(torch.mean((1 - f) ** 2) for f in fake)


# --------------------------------------------------------------------------- data
def synth_voices(n, length, device):
    """harmonic stacks with vibrato and an amplitude envelope"""
    t = torch.arange(length, device=device) / h.sampling_rate
    f0 = 80 + 240 * torch.rand(n, 1, device=device)
    vib = 1 + 0.01 * torch.sin(2 * math.pi * (4 + 2 * torch.rand(n, 1, device=device)) * t)
    phase = torch.cumsum(2 * math.pi * f0 * vib / h.sampling_rate, dim=1)
    y = torch.zeros(n, length, device=device)
    for k in range(1, 9):
        y += torch.rand(n, 1, device=device) / k * torch.sin(k * phase)
    env = 0.6 + 0.4 * torch.sin(2 * math.pi * torch.rand(n, 1, device=device) * 3 * t)
    y = y * env + 0.01 * torch.randn_like(y)
    return 0.95 * y / y.abs().amax(1, keepdim=True)


def show_mem(msg):
    print("{}: max_memory_allocated {:.2f}G, max_memory_reserved {:.2f}G".format(
        msg, torch.cuda.max_memory_allocated() / 1024 ** 3, torch.cuda.max_memory_reserved() / 1024 ** 3), flush=True)


def train():
    torch.cuda.manual_seed(h.seed)
    device = torch.device("cuda:0")

    with torch.device(device):
        generator = Generator(h)
        mpd = MultiPeriodDiscriminator()
        msd = MultiScaleDiscriminator()
    print("generator {:.2f}M, mpd {:.2f}M, msd {:.2f}M".format(
        *[sum(p.numel() for p in m.parameters()) / 1e6 for m in (generator, mpd, msd)]))
    show_mem("models")

    optim_g = torch.optim.AdamW(generator.parameters(), h.learning_rate, betas=(h.adam_b1, h.adam_b2))
    optim_d = torch.optim.AdamW(itertools.chain(msd.parameters(), mpd.parameters()), h.learning_rate,
                                betas=(h.adam_b1, h.adam_b2))
    scheduler_g = torch.optim.lr_scheduler.ExponentialLR(optim_g, gamma=h.lr_decay)
    scheduler_d = torch.optim.lr_scheduler.ExponentialLR(optim_d, gamma=h.lr_decay)

    corpus = synth_voices(64, 4 * h.segment_size, device)
    val_wav = synth_voices(4, 3 * h.sampling_rate // h.hop_size * h.hop_size, device)

    steps = 0
    for epoch in range(h.epochs):
        generator.train(); mpd.train(); msd.train()
        for _ in range(h.steps_per_epoch):
            start = time.time()
            rows = torch.randint(0, corpus.size(0), (h.batch_size,)).tolist()
            offs = torch.randint(0, corpus.size(1) - h.segment_size, (h.batch_size,)).tolist()
            y = torch.stack([corpus[r, o:o + h.segment_size] for r, o in zip(rows, offs)])
            x = mel_spectrogram(y)
            y_mel = x
            y = y.unsqueeze(1)

            y_g_hat = generator(x)
            y_g_hat_mel = mel_spectrogram(y_g_hat.squeeze(1))

            # Discriminator
            optim_d.zero_grad()
            r, g, _, _ = mpd(y, y_g_hat.detach())
            loss_disc_f = discriminator_loss(r, g)
            r, g, _, _ = msd(y, y_g_hat.detach())
            loss_disc_s = discriminator_loss(r, g)
            loss_disc_all = loss_disc_s + loss_disc_f
            loss_disc_all.backward()
            optim_d.step()

            # Generator
            optim_g.zero_grad()
            loss_mel = F.l1_loss(y_mel, y_g_hat_mel) * 45
            _, g_f, fmap_f_r, fmap_f_g = mpd(y, y_g_hat)
            _, g_s, fmap_s_r, fmap_s_g = msd(y, y_g_hat)
            loss_fm = feature_loss(fmap_f_r, fmap_f_g) + feature_loss(fmap_s_r, fmap_s_g)
            loss_gen_all = generator_loss(g_s) + generator_loss(g_f) + loss_fm + loss_mel
            loss_gen_all.backward()
            optim_g.step()

            steps += 1
            print("Steps : {:d}, Gen Loss Total : {:4.3f}, Disc Loss : {:4.3f}, FM : {:4.3f}, Mel-Error : {:4.3f}, s/b : {:4.3f}".format(
                steps, loss_gen_all.item(), loss_disc_all.item(), loss_fm.item(), loss_mel.item() / 45, time.time() - start))
            if steps in (1, 2):
                show_mem(f"step {steps}")

        generator.eval()
        with torch.no_grad():
            val_err = 0.0
            for w in val_wav.split(1):
                m = mel_spectrogram(w)
                val_err += F.l1_loss(m, mel_spectrogram(generator(m).squeeze(1))).item()
        print(f"epoch {epoch + 1}: validation mel error {val_err / len(val_wav):.3f}")
        show_mem(f"epoch {epoch + 1}")
        scheduler_g.step()
        scheduler_d.step()

    generator.eval()
    generator.remove_weight_norm()
    with torch.no_grad():
        wav = generator(mel_spectrogram(val_wav[:1]))
    print("final synthesis:", tuple(wav.shape), "rms", wav.pow(2).mean().sqrt().item())
    print("max_memory_allocated:", torch.cuda.max_memory_allocated())
    print("max_memory_reserved:", torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    train()
