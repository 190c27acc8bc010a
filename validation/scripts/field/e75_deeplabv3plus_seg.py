# DeepLabV3+ (ResNet-50, OS=16) on fake Cityscapes crops: CE + dice, aux FCN head, poly lr, bf16.
# Evaluation slides a 513 window (stride 2/3) over full images with horizontal flip.
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

NUM_CLASSES = 19
IGNORE = 255
CROP = 513
BATCH = 8
MAX_ITER = 40
EVAL_HW = (768, 1536)
EVAL_IMAGES = 2
BASE_LR = 0.01
device = torch.device("cuda")

class ConvBNReLU(nn.Sequential):
    def __init__(self, cin, cout, k=3, s=1, d=1, groups=1):
        super().__init__(nn.Conv2d(cin, cout, k, s, padding=d * (k // 2), dilation=d, groups=groups, bias=False),
                         nn.BatchNorm2d(cout), nn.ReLU(inplace=True))

class SepConv(nn.Sequential):
    def __init__(self, cin, cout, d=1):
        super().__init__(ConvBNReLU(cin, cin, 3, d=d, groups=cin), ConvBNReLU(cin, cout, 1))

class Bottleneck(nn.Module):
    def __init__(self, cin, planes, stride=1, dilation=1):
        super().__init__()
        cout = planes * 4
        self.body = nn.Sequential(
            ConvBNReLU(cin, planes, 1),
            ConvBNReLU(planes, planes, 3, stride, dilation),
            nn.Conv2d(planes, cout, 1, bias=False), nn.BatchNorm2d(cout))
        self.short = None
        if stride != 1 or cin != cout:
            self.short = nn.Sequential(nn.Conv2d(cin, cout, 1, stride, bias=False), nn.BatchNorm2d(cout))

    def forward(self, x):
        s = x if self.short is None else self.short(x)
        return F.relu(self.body(x) + s)

class DilatedResNet50(nn.Module):
    def __init__(self):
        super().__init__()
        # deep stem as in the "v1c" variants
        self.stem = nn.Sequential(ConvBNReLU(3, 32, s=2), ConvBNReLU(32, 32), ConvBNReLU(32, 64),
                                  nn.MaxPool2d(3, 2, 1))
        self.c = 64
        self.layer1 = self._stage(64, 3, 1, [1] * 3)
        self.layer2 = self._stage(128, 4, 2, [1] * 4)
        self.layer3 = self._stage(256, 6, 2, [1] * 6)
        self.layer4 = self._stage(512, 3, 1, [2, 4, 8])   # multi-grid

    def _stage(self, planes, n, stride, dilations):
        blocks = []
        for i in range(n):
            blocks.append(Bottleneck(self.c, planes, stride if i == 0 else 1, dilations[i]))
            self.c = planes * 4
        return nn.Sequential(*blocks)

    def forward(self, x):
        c2 = self.layer1(self.stem(x))
        c4 = self.layer3(self.layer2(c2))
        return c2, c4, self.layer4(c4)

class ASPP(nn.Module):
    def __init__(self, cin, cout=256, rates=(6, 12, 18)):
        super().__init__()
        self.branches = nn.ModuleList([ConvBNReLU(cin, cout, 1)] + [ConvBNReLU(cin, cout, 3, d=r) for r in rates])
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), ConvBNReLU(cin, cout, 1))
        self.project = nn.Sequential(ConvBNReLU(cout * 5, cout, 1), nn.Dropout(0.1))

    def forward(self, x):
        feats = [b(x) for b in self.branches]
        feats.append(F.interpolate(self.pool(x), size=x.shape[-2:], mode="bilinear", align_corners=False))
        return self.project(torch.cat(feats, 1))

class DeepLabV3Plus(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = DilatedResNet50()
        self.aspp = ASPP(2048)
        self.low = ConvBNReLU(256, 48, 1)
        self.decoder = nn.Sequential(SepConv(304, 256), SepConv(256, 256), nn.Conv2d(256, NUM_CLASSES, 1))
        self.aux = nn.Sequential(ConvBNReLU(1024, 256), nn.Dropout(0.1), nn.Conv2d(256, NUM_CLASSES, 1))

    def forward(self, x):
        size = x.shape[-2:]
        c2, c4, c5 = self.backbone(x)
        y = self.aspp(c5)
        y = F.interpolate(y, size=c2.shape[-2:], mode="bilinear", align_corners=False)
        y = self.decoder(torch.cat([y, self.low(c2)], 1))
        y = F.interpolate(y, size=size, mode="bilinear", align_corners=False)
        if not self.training:
            return y
        a = F.interpolate(self.aux(c4), size=size, mode="bilinear", align_corners=False)
        return y, a

def dice_loss(logits, target, eps=1.0):
    probs = logits.float().softmax(1)
    valid = (target != IGNORE).unsqueeze(1)
    onehot = F.one_hot(target.masked_fill(target == IGNORE, 0), NUM_CLASSES).permute(0, 3, 1, 2).float()
    probs, onehot = probs * valid, onehot * valid
    inter = (probs * onehot).sum((0, 2, 3))
    card = (probs + onehot).sum((0, 2, 3))
    return (1 - (2 * inter + eps) / (card + eps)).mean()

def criterion(out, aux, target):
    ce = F.cross_entropy(out, target, ignore_index=IGNORE)
    ce_aux = F.cross_entropy(aux, target, ignore_index=IGNORE)
    return ce + 0.4 * ce_aux + 0.5 * dice_loss(out, target)

@torch.no_grad()
def slide_inference(model, img):
    b, _, H, W = img.shape
    stride = math.ceil(CROP * 2 / 3)
    rows = max(math.ceil((H - CROP) / stride), 0) + 1
    cols = max(math.ceil((W - CROP) / stride), 0) + 1
    preds = img.new_zeros(b, NUM_CLASSES, H, W)
    count = img.new_zeros(b, 1, H, W)
    for r in range(rows):
        for c in range(cols):
            y2, x2 = min(r * stride + CROP, H), min(c * stride + CROP, W)
            y1, x1 = max(y2 - CROP, 0), max(x2 - CROP, 0)
            crop = img[:, :, y1:y2, x1:x2]
            with torch.autocast("cuda", dtype=torch.bfloat16):
                logits = model(crop) + model(crop.flip(-1)).flip(-1)
            preds[:, :, y1:y2, x1:x2] += logits.float().softmax(1)
            count[:, :, y1:y2, x1:x2] += 1
    return preds / count

@torch.no_grad()
def evaluate(model, gen):
    model.eval()
    hist = torch.zeros(NUM_CLASSES, NUM_CLASSES, device=device)
    for _ in range(EVAL_IMAGES):
        img = torch.randn(1, 3, *EVAL_HW, generator=gen).to(device)
        gt = torch.randint(0, NUM_CLASSES, (1, *EVAL_HW), generator=gen).to(device)
        pred = slide_inference(model, img).argmax(1)
        hist += torch.bincount(gt.flatten() * NUM_CLASSES + pred.flatten(),
                               minlength=NUM_CLASSES ** 2).view(NUM_CLASSES, NUM_CLASSES)
    iou = hist.diag() / (hist.sum(0) + hist.sum(1) - hist.diag()).clamp(min=1)
    model.train()
    return iou.mean().item()

def main():
    torch.manual_seed(1)
    gen = torch.Generator().manual_seed(1)
    model = DeepLabV3Plus().to(device)
    head = [p for n, p in model.named_parameters() if not n.startswith("backbone")]
    optimizer = torch.optim.SGD([{"params": model.backbone.parameters(), "lr": BASE_LR},
                                 {"params": head, "lr": BASE_LR * 10}],
                                lr=BASE_LR, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=MAX_ITER, power=0.9)
    model.train()
    for it in range(1, MAX_ITER + 1):
        images = torch.randn(BATCH, 3, CROP, CROP, generator=gen).to(device)
        labels = torch.randint(0, NUM_CLASSES, (BATCH, CROP, CROP), generator=gen)
        labels[:, :8, :] = IGNORE      # padded border
        labels = labels.to(device)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out, aux = model(images)
            loss = criterion(out, aux, labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        scheduler.step()
        if it % 10 == 0:
            print(f"iter {it}/{MAX_ITER} lr {scheduler.get_last_lr()[0]:.5f} loss {loss.item():.4f} "
                  f"mem {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB")
        if it % 20 == 0:
            print(f"mIoU {evaluate(model, gen):.4f}")
    print("peak allocated", torch.cuda.max_memory_allocated())
    print("peak reserved", torch.cuda.max_memory_reserved())

if __name__ == "__main__":
    main()
