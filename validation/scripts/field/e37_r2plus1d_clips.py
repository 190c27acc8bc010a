# Action recognition homework: R(2+1)D network on 16-frame clips
import torch
import torch.nn as nn

torch.manual_seed(99)


class Conv2Plus1D(nn.Sequential):
    def __init__(self, in_planes, out_planes, midplanes, stride=1):
        super().__init__(
            nn.Conv3d(in_planes, midplanes, kernel_size=(1, 3, 3), stride=(1, stride, stride),
                      padding=(0, 1, 1), bias=False),
            nn.BatchNorm3d(midplanes),
            nn.ReLU(inplace=True),
            nn.Conv3d(midplanes, out_planes, kernel_size=(3, 1, 1), stride=(stride, 1, 1),
                      padding=(1, 0, 0), bias=False),
        )


class BasicBlock(nn.Module):
    def __init__(self, inplanes, planes, stride=1, downsample=None):
        super().__init__()
        midplanes = (inplanes * planes * 3 * 3 * 3) // (inplanes * 3 * 3 + 3 * planes)
        self.conv1 = nn.Sequential(Conv2Plus1D(inplanes, planes, midplanes, stride),
                                   nn.BatchNorm3d(planes), nn.ReLU(inplace=True))
        self.conv2 = nn.Sequential(Conv2Plus1D(planes, planes, midplanes), nn.BatchNorm3d(planes))
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x):
        residual = x
        out = self.conv2(self.conv1(x))
        if self.downsample is not None:
            residual = self.downsample(x)
        out += residual
        return self.relu(out)


class VideoResNet(nn.Module):
    def __init__(self, layers=(2, 2, 2, 2), num_classes=400):
        super().__init__()
        self.inplanes = 64
        self.stem = nn.Sequential(
            nn.Conv3d(3, 45, kernel_size=(1, 7, 7), stride=(1, 2, 2), padding=(0, 3, 3), bias=False),
            nn.BatchNorm3d(45), nn.ReLU(inplace=True),
            nn.Conv3d(45, 64, kernel_size=(3, 1, 1), padding=(1, 0, 0), bias=False),
            nn.BatchNorm3d(64), nn.ReLU(inplace=True))
        self.layer1 = self._make_layer(64, layers[0], 1)
        self.layer2 = self._make_layer(128, layers[1], 2)
        self.layer3 = self._make_layer(256, layers[2], 2)
        self.layer4 = self._make_layer(512, layers[3], 2)
        self.avgpool = nn.AdaptiveAvgPool3d((1, 1, 1))
        self.dropout = nn.Dropout(0.5)
        self.fc = nn.Linear(512, num_classes)
        for m in self.modules():
            if isinstance(m, nn.Conv3d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")

    def _make_layer(self, planes, blocks, stride):
        downsample = None
        if stride != 1 or self.inplanes != planes:
            downsample = nn.Sequential(
                nn.Conv3d(self.inplanes, planes, kernel_size=1, stride=stride, bias=False),
                nn.BatchNorm3d(planes))
        layers = [BasicBlock(self.inplanes, planes, stride, downsample)]
        self.inplanes = planes
        for _ in range(1, blocks):
            layers.append(BasicBlock(self.inplanes, planes))
        return nn.Sequential(*layers)

    def forward(self, x):
        x = self.stem(x)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        x = self.avgpool(x).flatten(1)
        return self.fc(self.dropout(x))


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = VideoResNet().to(device)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.1)

batch_size = 20
n_batches = 6
videos = torch.randint(0, 256, (batch_size * 2, 3, 16, 112, 112), dtype=torch.uint8)
labels = torch.randint(0, 400, (batch_size * 2,))
mean = torch.tensor([0.432, 0.395, 0.377]).view(1, 3, 1, 1, 1).to(device)
std = torch.tensor([0.228, 0.221, 0.217]).view(1, 3, 1, 1, 1).to(device)

running_loss, correct, seen = 0.0, 0, 0
for i in range(n_batches):
    lo = (i % 2) * batch_size
    clip = videos[lo:lo + batch_size].to(device).float() / 255.0
    clip = (clip - mean) / std
    if i % 2 == 1:
        clip = torch.flip(clip, dims=[4])
    label = labels[lo:lo + batch_size].to(device)

    optimizer.zero_grad()
    outputs = model(clip)
    loss = criterion(outputs, label)
    loss.backward()
    optimizer.step()
    scheduler.step()

    running_loss += loss.item()
    correct += (outputs.argmax(1) == label).sum().item()
    seen += batch_size
    print("batch", i, "loss", running_loss / (i + 1), "acc", correct / seen)
    print("  max allocated:", torch.cuda.max_memory_allocated(), "max reserved:", torch.cuda.max_memory_reserved())

model.eval()
with torch.no_grad():
    # ten-clip style testing: average of several temporal crops
    views = torch.cat([clip, clip.roll(4, dims=2)], dim=0)
    probs = model(views).softmax(-1).view(2, batch_size, -1).mean(0)
print("test acc", (probs.argmax(1) == label).float().mean().item())
print("max_memory_allocated", torch.cuda.max_memory_allocated())
print("max_memory_reserved", torch.cuda.max_memory_reserved())
