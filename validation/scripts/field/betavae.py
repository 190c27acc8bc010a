import torch, torch.nn as nn, torch.nn.functional as F
torch.set_float32_matmul_precision("high")

def down(i, o): return nn.Sequential(nn.Conv2d(i, o, 4, 2, 1), nn.BatchNorm2d(o), nn.GELU())
def up(i, o): return nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False),
                                   nn.Conv2d(i, o, 3, 1, 1), nn.BatchNorm2d(o), nn.GELU())

class VAE(nn.Module):
    def __init__(self, z=512, w=64):
        super().__init__()
        self.enc = nn.Sequential(down(3, w), down(w, 2*w), down(2*w, 4*w), down(4*w, 8*w), nn.Flatten())
        self.mu, self.lv = nn.Linear(8*w*64, z), nn.Linear(8*w*64, z)
        self.fc = nn.Linear(z, 8*w*64)
        self.dec = nn.Sequential(nn.Unflatten(1, (8*w, 8, 8)), up(8*w, 4*w), up(4*w, 2*w), up(2*w, w), up(w, w), nn.Conv2d(w, 3, 1))
    def forward(self, x):
        h = self.enc(x)
        mu, lv = self.mu(h), self.lv(h).clamp(-10, 10)
        z = mu + torch.randn_like(mu) * (0.5 * lv).exp()
        return self.dec(self.fc(z)), mu, lv

m = VAE().cuda().to(memory_format=torch.channels_last)
opt = torch.optim.NAdam(m.parameters(), 1e-3, foreach=False)
N = 256
for beta in [0.0, 0.5, 1.0, 4.0, 4.0, 4.0]:
    x = torch.randn(N, 3, 128, 128, device="cuda").sigmoid().contiguous(memory_format=torch.channels_last)
    r, mu, lv = m(x)
    rec = F.binary_cross_entropy_with_logits(r, x, reduction="none").sum((1, 2, 3)).mean()
    kl = -0.5 * (1 + lv - mu.pow(2) - lv.exp()).sum(1).mean()
    loss = rec + beta * kl
    opt.zero_grad(set_to_none=False)
    loss.backward()
    opt.step()
    print(f"{rec=:.1f} {kl=:.3f}")
m.eval()
with torch.inference_mode():
    z = torch.randn(100, 512, device="cuda")
    out = m.dec(m.fc(z)).sigmoid().mul(255).byte().cpu().numpy()
print(out.shape, torch.cuda.memory_allocated() >> 20, "MiB")
