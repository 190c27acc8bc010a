import argparse, time
import torch
from torch import nn, optim
import torch.nn.functional as F
from torch.utils.data import Dataset, DataLoader

parser = argparse.ArgumentParser(description="VQ-VAE with EMA codebook")
parser.add_argument('--batch_size', type=int, default=128)
parser.add_argument('--n_updates', type=int, default=10)
parser.add_argument('--n_hiddens', type=int, default=256)
parser.add_argument('--n_residual_hiddens', type=int, default=64)
parser.add_argument('--n_residual_layers', type=int, default=3)
parser.add_argument('--embedding_dim', type=int, default=64)
parser.add_argument('--n_embeddings', type=int, default=1024)
parser.add_argument('--beta', type=float, default=.25)
parser.add_argument('--learning_rate', type=float, default=3e-4)
parser.add_argument('--channels_last', action='store_true')
args = parser.parse_args()
device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')


class ResLayer(nn.Module):
    def __init__(self, dim, res_dim):
        super().__init__()
        self.res_block = nn.Sequential(
            nn.ReLU(True),
            nn.Conv2d(dim, res_dim, 3, 1, 1, bias=False),
            nn.ReLU(True),
            nn.Conv2d(res_dim, dim, 1, bias=False))

    def forward(self, x):
        return x + self.res_block(x.clone())


class ResStack(nn.Module):
    def __init__(self, dim, res_dim, n):
        super().__init__()
        self.stack = nn.ModuleList([ResLayer(dim, res_dim) for _ in range(n)])

    def forward(self, x):
        for l in self.stack:
            x = l(x)
        return F.relu(x)


class EMAQuantizer(nn.Module):
    def __init__(self, n_e, e_dim, beta, decay=0.99, eps=1e-5):
        super().__init__()
        self.n_e, self.e_dim, self.beta, self.decay, self.eps = n_e, e_dim, beta, decay, eps
        embed = torch.randn(n_e, e_dim)
        self.register_buffer('embedding', embed)
        self.register_buffer('cluster_size', torch.zeros(n_e))
        self.register_buffer('embed_avg', embed.clone())

    def forward(self, z):
        z = z.permute(0, 2, 3, 1).contiguous()
        flat = z.view(-1, self.e_dim)
        d = (flat.pow(2).sum(1, keepdim=True) + self.embedding.pow(2).sum(1)
             - 2 * flat @ self.embedding.t())
        idx = d.argmin(1)
        onehot = F.one_hot(idx, self.n_e).type(flat.dtype)
        zq = F.embedding(idx, self.embedding).view_as(z)
        if self.training:
            with torch.no_grad():
                n = onehot.sum(0)
                dw = onehot.t() @ flat
                self.cluster_size.mul_(self.decay).add_(n, alpha=1 - self.decay)
                self.embed_avg.mul_(self.decay).add_(dw, alpha=1 - self.decay)
                tot = self.cluster_size.sum()
                cs = (self.cluster_size + self.eps) / (tot + self.n_e * self.eps) * tot
                self.embedding.copy_(self.embed_avg / cs.unsqueeze(1))
        loss = self.beta * F.mse_loss(zq.detach(), z)
        zq = z + (zq - z).detach()
        e_mean = onehot.mean(0)
        perplexity = torch.exp(-torch.sum(e_mean * torch.log(e_mean + 1e-10)))
        return loss, zq.permute(0, 3, 1, 2).contiguous(), perplexity


class VQVAE(nn.Module):
    def __init__(self, h, rh, rl, n_e, e_dim, beta):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, h // 2, 4, 2, 1), nn.ReLU(),
            nn.Conv2d(h // 2, h, 4, 2, 1), nn.ReLU(),
            nn.Conv2d(h, h, 3, 1, 1), ResStack(h, rh, rl))
        self.pre = nn.Conv2d(h, e_dim, 1)
        self.vq = EMAQuantizer(n_e, e_dim, beta)
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(e_dim, h, 3, 1, 1), ResStack(h, rh, rl),
            nn.ConvTranspose2d(h, h // 2, 4, 2, 1), nn.ReLU(),
            nn.ConvTranspose2d(h // 2, 3, 4, 2, 1))

    def forward(self, x):
        l, zq, perp = self.vq(self.pre(self.encoder(x)))
        return l, self.decoder(zq), perp


class Blobs(Dataset):
    """colourful gaussian blobs, 64x64"""
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        c = torch.rand(2, generator=g) * 64
        yy, xx = torch.meshgrid(torch.arange(64.), torch.arange(64.), indexing='ij')
        b = torch.exp(-((yy - c[0]) ** 2 + (xx - c[1]) ** 2) / 200)
        return b[None] * torch.rand(3, 1, 1, generator=g) - 0.5


torch.manual_seed(0)
loader = DataLoader(Blobs(args.batch_size * args.n_updates), args.batch_size, shuffle=True, pin_memory=True)
model = VQVAE(args.n_hiddens, args.n_residual_hiddens, args.n_residual_layers,
              args.n_embeddings, args.embedding_dim, args.beta).to(device)
if args.channels_last:
    model = model.to(memory_format=torch.channels_last)
opt = optim.Adam(model.parameters(), lr=args.learning_rate, amsgrad=True)
x_var = 0.06
model.train()
for i, x in enumerate(loader):
    x = x.to(device, non_blocking=True)
    if args.channels_last:
        x = x.to(memory_format=torch.channels_last)
    opt.zero_grad()
    emb_loss, x_hat, perp = model(x)
    recon = torch.mean((x_hat - x) ** 2) / x_var
    loss = recon + emb_loss
    loss.backward()
    opt.step()
    print('update #', i, 'recon', recon.item(), 'loss', loss.item(), 'perplexity', perp.item())

model.eval()
with torch.no_grad():
    _, rec, _ = model(x)
print('final recon mse', F.mse_loss(rec, x).item())
