# apex-style data_prefetcher with a side stream, channels_last, fp16 amp, DenseNet by hand
import torch, torch.nn as nn, torch.nn.functional as F
import torch.utils.checkpoint as cp
import numpy as np
torch.backends.cuda.matmul.allow_tf32 = True

def fast_collate(batch):
    imgs = [b[0] for b in batch]
    t = torch.zeros((len(imgs), 3, 160, 160), dtype=torch.uint8).contiguous(memory_format=torch.channels_last)
    for i, im in enumerate(imgs):
        t[i] += torch.from_numpy(np.rollaxis(im, 2).copy())
    return t, torch.tensor([b[1] for b in batch], dtype=torch.int64)

class data_prefetcher():
    def __init__(self, loader):
        self.loader = iter(loader)
        self.stream = torch.cuda.Stream()
        self.mean = torch.tensor([0.485 * 255, 0.456 * 255, 0.406 * 255]).cuda().view(1, 3, 1, 1)
        self.std = torch.tensor([0.229 * 255, 0.224 * 255, 0.225 * 255]).cuda().view(1, 3, 1, 1)
        self.preload()
    def preload(self):
        try:
            self.next_input, self.next_target = next(self.loader)
        except StopIteration:
            self.next_input = self.next_target = None
            return
        with torch.cuda.stream(self.stream):
            self.next_input = self.next_input.cuda(non_blocking=True)
            self.next_target = self.next_target.cuda(non_blocking=True)
            self.next_input = self.next_input.float()
            self.next_input = self.next_input.sub_(self.mean).div_(self.std)
    def next(self):
        torch.cuda.current_stream().wait_stream(self.stream)
        input, target = self.next_input, self.next_target
        if input is not None: input.record_stream(torch.cuda.current_stream())
        if target is not None: target.record_stream(torch.cuda.current_stream())
        self.preload()
        return input, target

class Dense(nn.Module):
    def __init__(s, i, k):
        super().__init__()
        s.n1, s.c1, s.n2, s.c2 = nn.BatchNorm2d(i), nn.Conv2d(i, 4 * k, 1, bias=False), nn.BatchNorm2d(4 * k), nn.Conv2d(4 * k, k, 3, padding=1, bias=False)
    def bottleneck(s, *xs): return s.c1(F.relu(s.n1(torch.cat(xs, 1)), inplace=True))
    def forward(s, xs): return s.c2(F.relu(s.n2(s.bottleneck(*xs)), inplace=True))

class Net(nn.Module):
    def __init__(s, k=32, blocks=(6, 8, 8)):
        super().__init__()
        s.stem = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(True), nn.MaxPool2d(3, 2, 1))
        ch, s.blocks, s.trans = 64, nn.ModuleList(), nn.ModuleList()
        for n in blocks:
            s.blocks.append(nn.ModuleList([Dense(ch + i * k, k) for i in range(n)])); ch += n * k
            s.trans.append(nn.Sequential(nn.BatchNorm2d(ch), nn.ReLU(True), nn.Conv2d(ch, ch // 2, 1, bias=False), nn.AvgPool2d(2))); ch //= 2
        s.fc = nn.Linear(ch, 1000)
    def forward(s, x):
        x = s.stem(x)
        for b, t in zip(s.blocks, s.trans):
            feats = [x]
            for layer in b: feats.append(layer(feats))
            x = t(torch.cat(feats, 1))
        return s.fc(x.mean((2, 3)))

class DS(torch.utils.data.Dataset):
    def __len__(self): return 96 * 6
    def __getitem__(self, i): return np.random.randint(0, 255, (160, 160, 3), dtype=np.uint8), i % 1000

if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(DS(), 96, num_workers=3, pin_memory=True, collate_fn=fast_collate, drop_last=True)
    model = Net().cuda().to(memory_format=torch.channels_last)
    opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scaler = torch.amp.GradScaler(init_scale=128.0)
    pre = data_prefetcher(loader)
    x, y = pre.next()
    i = 0
    while x is not None:
        i += 1
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if i % 2 == 0:
            torch.cuda.synchronize()
            print(i, loss.item())
        x, y = pre.next()
