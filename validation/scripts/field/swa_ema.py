import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, SWALR, get_ema_multi_avg_fn, update_bn
from torch.utils.data import DataLoader, TensorDataset

# tabular FT-transformer with per-column embeddings; EMA + SWA + update_bn
COLS, D = 96, 256
class FT(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(COLS, D) * 0.02), nn.Parameter(torch.zeros(COLS, D))
        self.bn = nn.BatchNorm1d(COLS)
        self.enc = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 8, 512, 0.1, batch_first=True, norm_first=True), 4, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 1))
    def forward(self, x):
        return self.head(self.enc(self.bn(x).unsqueeze(-1) * self.w + self.b).mean(1)).squeeze(-1)

net = FT().cuda()
ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.999))
swa = AveragedModel(net, use_buffers=False)
opt = torch.optim.Adadelta(net.parameters(), lr=1.0)
swa_sched = SWALR(opt, swa_lr=0.5, anneal_epochs=1)
dl = DataLoader(TensorDataset(torch.randn(2600, COLS), torch.randn(2600)), 512, shuffle=True, pin_memory=True)
for ep in range(1):
    for x, y in dl:
        x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
        loss = nn.functional.smooth_l1_loss(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        ema.update_parameters(net)
        print(loss.item())
    swa.update_parameters(net)
    swa_sched.step()
update_bn(dl, swa, device="cuda")
with torch.inference_mode():
    for m in (net, ema, swa):
        m.eval()
        print(type(m).__name__, nn.functional.mse_loss(m(torch.randn(2048, COLS, device="cuda")), torch.zeros(2048, device="cuda")).item())
