# -*- coding: utf-8 -*-
"""
DL lab 4 -- "How much memory does my ResNet need?"
(exported from lab4.ipynb, cells marked by In[n])
"""
# In[1]:
import gc
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

print("torch", torch.__version__)
print(torch.cuda.get_device_name(0))
device = torch.device("cuda")
torch.manual_seed(42)

# In[2]:  hyperparameters
IMG = 96          # STL-10 size
NUM_CLASSES = 10
WIDTH = 64
STEPS = 8
LAYERS = [3, 4, 6, 3]   # resnet34


# In[3]:  the model
class BasicBlock(nn.Module):
    def __init__(self, cin, cout, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(cout)
        self.conv2 = nn.Conv2d(cout, cout, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(cout)
        self.relu = nn.ReLU(inplace=True)
        if stride != 1 or cin != cout:
            self.shortcut = nn.Sequential(
                nn.Conv2d(cin, cout, 1, stride=stride, bias=False),
                nn.BatchNorm2d(cout),
            )
        else:
            self.shortcut = nn.Identity()

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, layers, width=64, num_classes=10):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
        )
        blocks = []
        cin = width
        for i, n in enumerate(layers):
            cout = width * 2 ** i
            for j in range(n):
                blocks.append(BasicBlock(cin, cout, stride=2 if (i > 0 and j == 0) else 1))
                cin = cout
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(cin, num_classes)

    def forward(self, x):
        x = self.blocks(self.stem(x))
        x = F.adaptive_avg_pool2d(x, 1).flatten(1)
        return self.fc(x)


# In[4]:  fake STL-10 in RAM, as uint8 so it stays small
images = torch.randint(0, 256, (1024, 3, IMG, IMG), dtype=torch.uint8)
labels = torch.randint(0, NUM_CLASSES, (1024,))


def get_batch(bs):
    idx = torch.randint(0, len(images), (bs,))
    x = images[idx].to(device).float() / 255.0
    x = (x - 0.5) / 0.5
    return x, labels[idx].to(device)


def make_optimizer(name, model):
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.01)
    if name == "sgd_mom":
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=5e-4)
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-3)
    if name == "adam_ams":
        return torch.optim.Adam(model.parameters(), lr=1e-3, amsgrad=True)
    if name == "rmsprop":
        return torch.optim.RMSprop(model.parameters(), lr=1e-4, momentum=0.9, centered=True)
    raise ValueError(name)


# In[5]:
def train(bs, precision, opt_name, channels_last=False, steps=STEPS):
    model = ResNet(LAYERS, WIDTH, NUM_CLASSES).to(device)
    if precision == "pure_bf16":
        model = model.bfloat16()
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    optimizer = make_optimizer(opt_name, model)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    scaler = torch.amp.GradScaler("cuda", enabled=(precision == "amp_fp16"))
    amp_dtype = torch.float16 if precision == "amp_fp16" else torch.bfloat16
    use_amp = precision.startswith("amp")

    model.train()
    running = 0.0
    for step in range(steps):
        x, y = get_batch(bs)
        if precision == "pure_bf16":
            x = x.bfloat16()
        if channels_last:
            x = x.to(memory_format=torch.channels_last)
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=amp_dtype, enabled=use_amp):
            out = model(x)
            loss = criterion(out, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        running += loss.item()
    del model, optimizer
    return running / steps


# In[6]:  the experiments
experiments = [
    # name               bs   precision     optimizer   channels_last
    ("baseline",          64, "fp32",       "sgd",      False),
    ("bigger batch",     128, "fp32",       "adamw",    False),
    ("amp bf16",         128, "amp_bf16",   "adamw",    False),
    ("amp fp16",         256, "amp_fp16",   "sgd_mom",  False),
    ("channels last",    256, "amp_bf16",   "rmsprop",  True),
    ("how far can I go", 3072, "fp32",      "adamw",    False),   # <- this one will crash
    ("does it recover?",  96, "pure_bf16",  "adam_ams", False),
]
GB = 1024 ** 3
results = []

for name, bs, precision, opt_name, cl in experiments:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    t0 = time.time()
    status = "ok"
    avg_loss = float("nan")
    try:
        avg_loss = train(bs, precision, opt_name, channels_last=cl)
    except torch.OutOfMemoryError as e:
        status = "OOM"
        print("!!", str(e).split(".")[0])
    torch.cuda.synchronize()
    alloc = torch.cuda.max_memory_allocated()
    reserved = torch.cuda.max_memory_reserved()
    results.append((name, bs, precision, opt_name, status, avg_loss, alloc, reserved, time.time() - t0))
    print(f"{name}: max_memory_allocated={alloc} max_memory_reserved={reserved}")

# In[7]:  table for the report
print()
print(f"{'experiment':<18}{'bs':>6}{'precision':>11}{'opt':>10}{'status':>8}{'loss':>8}{'alloc':>9}{'resv':>9}{'sec':>7}")
for name, bs, precision, opt_name, status, l, a, r, t in results:
    print(f"{name:<18}{bs:>6}{precision:>11}{opt_name:>10}{status:>8}{l:>8.3f}{a / GB:>9.2f}{r / GB:>9.2f}{t:>7.1f}")

ok = [r for r in results if r[4] == "ok"]
print("largest run that fits:", max(ok, key=lambda r: r[6])[0])
print("last experiment, allocated:", torch.cuda.max_memory_allocated(), "reserved:", torch.cuda.max_memory_reserved())
