"""Neural style transfer: VGG-19-like features with hooks, Gram matrices, optimise the image by L-BFGS."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
cfg = [64, 64, "M", 128, 128, "M", 256, 256, 256, 256, "M", 512, 512, 512, 512, "M", 512]
layers, c = [], 3
for v in cfg:
    if v == "M":
        layers.append(nn.AvgPool2d(2))
    else:
        layers += [nn.Conv2d(c, v, 3, padding=1), nn.ReLU()]
        c = v
vgg = nn.Sequential(*layers).cuda().eval().requires_grad_(False)
feats = {}
handles = [m.register_forward_hook(lambda mod, inp, out, i=i: feats.__setitem__(i, out)) for i, m in enumerate(vgg) if isinstance(m, nn.Conv2d)]
ids = sorted(i for i, m in enumerate(vgg) if isinstance(m, nn.Conv2d))
style_ids, content_id = [ids[k] for k in (0, 2, 4, 8, 12)], ids[9]


def gram(x):
    b, ch, h, w = x.shape
    f = x.view(b, ch, h * w)
    return f.bmm(f.transpose(1, 2)).div(ch * h * w)


content, style = torch.rand(1, 3, 768, 768).cuda(), torch.rand(1, 3, 640, 640).cuda()
with torch.no_grad():
    vgg(style)
    grams = {i: gram(feats[i]) for i in style_ids}
    vgg(content)
    target = feats[content_id].clone()
feats.clear()
img = content.clone().requires_grad_(True)
opt = torch.optim.LBFGS([img], max_iter=5, history_size=8)
n = [0]
for outer in range(3):
    def closure():
        opt.zero_grad()
        vgg(img)
        s = sum(F.mse_loss(gram(feats[i]), grams[i]) for i in style_ids)
        tv = (img[..., 1:] - img[..., :-1]).abs().mean() + (img[..., 1:, :] - img[..., :-1, :]).abs().mean()
        loss = 1e6 * s + F.mse_loss(feats[content_id], target) + 1e-2 * tv
        loss.backward()
        n[0] += 1
        return loss
    opt.step(closure)
    with torch.no_grad():
        img.clamp_(0, 1)
    print(outer, torch.cuda.max_memory_allocated() // 2**20)
for h in handles:
    h.remove()
