"""torchvision's ResNet-50 on images that two workers transform, under autocast."""

import torch
import torchvision
from torch import nn
from torch.utils.data import DataLoader
from torchvision.transforms import v2


def main() -> None:
    """Train three steps; Python 3.14 imports this file again in each worker."""
    transform = v2.Compose(
        [
            v2.RandomResizedCrop(224),
            v2.RandomHorizontalFlip(),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        ]
    )
    images = torchvision.datasets.FakeData(96, (3, 256, 256), 1000, transform)
    loader = DataLoader(images, batch_size=32, shuffle=True, num_workers=2, pin_memory=True)
    model = torchvision.models.resnet50().cuda().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler()
    for x, y in loader:
        x = x.cuda(non_blocking=True).to(memory_format=torch.channels_last)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(x), y.cuda(non_blocking=True))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    boxes = torch.rand(64, 4).cumsum(1).cuda()
    torchvision.ops.nms(boxes, torch.rand(64).cuda(), 0.5)


if __name__ == "__main__":
    main()
