"""Compiled functions, MLPs and convolutions."""
import sys
import torch, torch.nn as nn, torch.nn.functional as F
kind = sys.argv[1]
torch.manual_seed(0)
if kind == "mlp":
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.LayerNorm(4096), nn.Linear(4096, 4096), nn.SiLU(), nn.Dropout(0.1), nn.Linear(4096, 10)).cuda(); x = torch.randn(4096, 1024, device="cuda"); y = torch.randint(10, (4096,), device="cuda"); run = torch.compile(model); loss_fn = F.cross_entropy
if kind == "conv":
    def block(i, o, s): return nn.Sequential(nn.Conv2d(i, o, 3, s, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU())
    model = nn.Sequential(block(3, 64, 2), block(64, 64, 1), block(64, 128, 2), block(128, 128, 1), block(128, 256, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10)).cuda(); x = torch.randn(64, 3, 128, 128, device="cuda"); y = torch.randint(10, (64,), device="cuda"); run = torch.compile(model); loss_fn = F.cross_entropy
if kind == "lossfn":
    model = nn.Sequential(nn.Embedding(32000, 1024), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 32000)).cuda(); x = torch.randint(32000, (4, 1024), device="cuda"); y = torch.randint(32000, (4096,), device="cuda"); run = model
    loss_fn = torch.compile(lambda logits, y: F.cross_entropy(logits.view(-1, 32000).float(), y, label_smoothing=0.1))
if kind == "step":
    @torch.compile
    def rms(x, w): return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w
    class M(nn.Module):
        def __init__(self):
            super().__init__(); self.w = nn.Parameter(torch.ones(2048)); self.a = nn.Linear(2048, 8192); self.b = nn.Linear(8192, 2048); self.c = nn.Linear(2048, 10)
        def forward(self, x): return self.c(rms(x + self.b(F.silu(self.a(rms(x, self.w)))), self.w))
    model = M().cuda(); x = torch.randn(4096, 2048, device="cuda"); y = torch.randint(10, (4096,), device="cuda"); run = model; loss_fn = F.cross_entropy
opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
for step in range(4):
    loss = loss_fn(run(x), y)
    opt.zero_grad(); loss.backward(); opt.step()
    print(step, loss.item(), torch.cuda.max_memory_allocated() >> 20)
