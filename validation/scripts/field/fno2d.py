import torch, torch.nn as nn, torch.nn.functional as F

class SpectralConv2d(nn.Module):
    def __init__(self, cin, cout, m1, m2):
        super().__init__()
        self.m1, self.m2, self.cout = m1, m2, cout
        s = 1 / (cin * cout)
        self.w1 = nn.Parameter(s * torch.rand(cin, cout, m1, m2, dtype=torch.cfloat))
        self.w2 = nn.Parameter(s * torch.rand(cin, cout, m1, m2, dtype=torch.cfloat))
    def forward(self, x):
        b = x.shape[0]
        xf = torch.fft.rfft2(x)
        out = torch.zeros(b, self.cout, x.size(-2), x.size(-1) // 2 + 1, dtype=torch.cfloat, device=x.device)
        out[:, :, :self.m1, :self.m2] = torch.einsum("bixy,ioxy->boxy", xf[:, :, :self.m1, :self.m2], self.w1)
        out[:, :, -self.m1:, :self.m2] = torch.einsum("bixy,ioxy->boxy", xf[:, :, -self.m1:, :self.m2], self.w2)
        return torch.fft.irfft2(out, s=(x.size(-2), x.size(-1)))

class FNO(nn.Module):
    def __init__(self, w=96, modes=20, n=4):
        super().__init__()
        self.p = nn.Linear(12, w)
        self.spec = nn.ModuleList([SpectralConv2d(w, w, modes, modes) for _ in range(n)])
        self.loc = nn.ModuleList([nn.Conv2d(w, w, 1) for _ in range(n)])
        self.q = nn.Sequential(nn.Conv2d(w, 4 * w, 1), nn.GELU(), nn.Conv2d(4 * w, 1, 1))
    def forward(self, x):
        b, h, w, _ = x.shape
        gy = torch.linspace(0, 1, h, device=x.device).view(1, h, 1, 1).expand(b, h, w, 1)
        gx = torch.linspace(0, 1, w, device=x.device).view(1, 1, w, 1).expand(b, h, w, 1)
        x = self.p(torch.cat((x, gy, gx), -1)).permute(0, 3, 1, 2)
        x = F.pad(x, [0, 9, 0, 9])
        for i, (s, l) in enumerate(zip(self.spec, self.loc)):
            x = s(x) + l(x)
            if i < len(self.spec) - 1:
                x = F.gelu(x)
        return self.q(x[..., :-9, :-9]).permute(0, 2, 3, 1)

def lploss(a, b):
    n = a.size(0)
    return (torch.norm(a.reshape(n, -1) - b.reshape(n, -1), 2, 1) / torch.norm(b.reshape(n, -1), 2, 1)).sum()

net = FNO().cuda()
print(sum(p.numel() * (2 if p.is_complex() else 1) for p in net.parameters()))
opt = torch.optim.Adam(net.parameters(), lr=1e-3, weight_decay=1e-4)
for ep in range(2):
    for it in range(2):
        xx, yy = torch.randn(16, 96, 96, 10).cuda(), torch.randn(16, 96, 96, 4).cuda()
        loss = 0
        for t in range(4):
            im = net(xx)
            loss += lploss(im, yy[..., t:t + 1])
            pred = im if t == 0 else torch.cat((pred, im), -1)
            xx = torch.cat((xx[..., 1:], im), dim=-1)
        l2_full = lploss(pred, yy)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(ep, it, loss.item(), l2_full.item())
