import sys, torch, torch.nn as nn
torch.backends.cudnn.benchmark = False
MODE = sys.argv[1] if len(sys.argv) > 1 else "lstm"     # lstm | conv3d
B, T, H, W, NCLS = 8, 16, 112, 112, 51


def conv_bn(i, o, s=1):
    return nn.Sequential(nn.Conv2d(i, o, 3, s, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True))


class FrameEncoder(nn.Module):
    def __init__(self, out=256):
        super().__init__()
        self.f = nn.Sequential(conv_bn(3, 32, 2), conv_bn(32, 64), nn.MaxPool2d(2), conv_bn(64, 128), conv_bn(128, 128),
                               nn.MaxPool2d(2), conv_bn(128, 256), nn.AdaptiveAvgPool2d(1))
        self.fc = nn.Linear(256, out)

    def forward(self, x):
        return self.fc(self.f(x).flatten(1))


class CNNLSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = FrameEncoder()
        self.rnn = nn.LSTM(256, 512, num_layers=2, batch_first=True, dropout=0.3, bidirectional=True)
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(1024, NCLS))

    def forward(self, v):               # B T C H W
        b, t = v.shape[:2]
        f = self.enc(v.flatten(0, 1)).view(b, t, -1)
        self.rnn.flatten_parameters()
        o, (h, c) = self.rnn(f)
        return self.head(o.mean(1))


class C3D(nn.Module):
    def __init__(self):
        super().__init__()
        def blk(i, o, pool):
            return nn.Sequential(nn.Conv3d(i, o, 3, padding=1), nn.BatchNorm3d(o), nn.ReLU(), nn.MaxPool3d(pool, pool))
        self.f = nn.Sequential(blk(3, 64, (1, 2, 2)), blk(64, 128, 2), blk(128, 256, 2), blk(256, 256, 2), blk(256, 512, 2))
        self.fc = nn.Sequential(nn.Flatten(), nn.Linear(512 * 1 * 3 * 3, 2048), nn.ReLU(), nn.Dropout(), nn.Linear(2048, NCLS))

    def forward(self, v):
        return self.fc(self.f(v.permute(0, 2, 1, 3, 4)))


torch.manual_seed(0)
net = (CNNLSTM() if MODE == "lstm" else C3D()).cuda()
opt = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=5e-4)
crit = nn.CrossEntropyLoss(label_smoothing=0.1)
history = []
for epoch in range(2):
    net.train()
    for it in range(4):
        clip = torch.randint(0, 256, (B, T, 3, H, W), dtype=torch.uint8)
        y = torch.randint(0, NCLS, (B,))
        clip = clip.cuda().float().div_(255).sub_(0.45).div_(0.225)
        y = y.cuda()
        out = net(clip)
        loss = crit(out, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        history.append(loss.item())
        print("epoch", epoch, "iter", it, "loss", round(history[-1], 4))
    net.eval()
    with torch.no_grad():
        correct = 0
        for _ in range(2):
            v = torch.randn(B * 2, T, 3, H, W, device="cuda")
            correct += (net(v).argmax(1) == torch.randint(0, NCLS, (B * 2,), device="cuda")).sum().item()
    print("val acc", correct / (4 * B))
