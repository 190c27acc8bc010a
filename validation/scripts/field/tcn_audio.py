import torch
import torch.nn as nn
from torch.nn.utils.parametrizations import weight_norm, spectral_norm

# WaveNet-ish mu-law vocoder + a spectral-norm critic on mel frames

SR, HOP, MU = 16000, 256, 256


class Gated(nn.Module):
    def __init__(self, ch, skip, dil, cond):
        super().__init__()
        self.pad = (2 - 1) * dil
        self.conv = weight_norm(nn.Conv1d(ch, 2 * ch, 2, dilation=dil, padding=self.pad))
        self.cond = weight_norm(nn.Conv1d(cond, 2 * ch, 1, bias=False))
        self.res, self.skip = weight_norm(nn.Conv1d(ch, ch, 1)), weight_norm(nn.Conv1d(ch, skip, 1))

    def forward(self, x, c):
        h = self.conv(x)[..., :x.size(-1)] + self.cond(c)
        a, b = h.chunk(2, 1)
        h = torch.tanh(a) * torch.sigmoid(b)
        return (x + self.res(h)) * 0.5 ** 0.5, self.skip(h)


class Vocoder(nn.Module):
    def __init__(self, ch=128, skip=256, layers=18, mel=80):
        super().__init__()
        self.embed = nn.Embedding(MU, ch)
        self.up = nn.Sequential(nn.ConvTranspose1d(mel, mel, 32, 16, 8), nn.LeakyReLU(.4), nn.ConvTranspose1d(mel, mel, 32, 16, 8))
        self.blocks = nn.ModuleList(Gated(ch, skip, 2 ** (i % 9), mel) for i in range(layers))
        self.post = nn.Sequential(nn.ReLU(), nn.Conv1d(skip, skip, 1), nn.ReLU(), nn.Conv1d(skip, MU, 1))

    def forward(self, audio, mel):
        x = self.embed(audio).transpose(1, 2)
        c = self.up(mel)
        total = 0
        for b in self.blocks:
            x, s = b(x, c)
            total = total + s
        return self.post(total)


critic = nn.Sequential(spectral_norm(nn.Conv1d(80, 512, 5, padding=2)), nn.LeakyReLU(0.1),
                       spectral_norm(nn.Conv1d(512, 512, 5, groups=8, padding=2)), nn.LeakyReLU(0.1),
                       spectral_norm(nn.Conv1d(512, 1, 3, padding=1))).cuda()
model = Vocoder().cuda()
opt = torch.optim.RAdam([*model.parameters(), *critic.parameters()], lr=1e-3)
window = torch.hann_window(1024, device="cuda")
fb = torch.rand(80, 513, device="cuda")

for step in range(5):
    wav = torch.randn(8, SR, device="cuda").clamp(-3, 3) / 3
    spec = torch.stft(wav, 1024, HOP, window=window, return_complex=True).abs()
    mel = torch.log(fb @ spec + 1e-5)[..., :SR // HOP]
    wav = wav[:, :mel.size(-1) * HOP]
    mu = torch.sign(wav) * torch.log1p((MU - 1) * wav.abs()) / torch.log(torch.tensor(float(MU)))
    q = torch.bucketize(mu, torch.linspace(-1, 1, MU - 1, device="cuda"))
    logits = model(q, mel)
    loss = nn.functional.cross_entropy(logits[..., :-1], q[..., 1:])
    loss = loss + 0.1 * critic(mel).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"step={step} loss={float(loss):.3f}")
