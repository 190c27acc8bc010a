"""Linearised (tangent-space) fine-tuning of a ViT: train delta in f(w0) + J(w0) delta.

The "pretrained" checkpoint comes from a smaller resolution, so its position
embeddings are resized and its head thrown away before loading.
"""
import io

import torch
import torch.nn.functional as F
from torch.func import functional_call, grad, jvp, vmap
from transformers import ViTConfig, ViTForImageClassification

DEVICE = "cuda"
BASE = dict(hidden_size=384, num_hidden_layers=10, num_attention_heads=6, intermediate_size=1536,
            patch_size=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
OLD_RES, NEW_RES, CLASSES = 160, 256, 37
BATCH, STEPS = 24, 5


def old_checkpoint():
    """stands for a file from the hub"""
    m = ViTForImageClassification(ViTConfig(image_size=OLD_RES, num_labels=1000, **BASE))
    buf = io.BytesIO()
    torch.save({"model": m.state_dict(), "epoch": 300}, buf)
    buf.seek(0)
    return buf


def load_into(model, buf):
    sd = torch.load(buf, map_location=DEVICE, weights_only=True)["model"]
    sd = {k: v for k, v in sd.items() if not k.startswith("classifier.")}
    key = next(k for k in sd if k.endswith("position_embeddings"))
    pos = sd[key]
    cls, grid = pos[:, :1], pos[:, 1:]
    s, t = OLD_RES // 16, NEW_RES // 16
    grid = grid.reshape(1, s, s, -1).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, size=(t, t), mode="bicubic", align_corners=False)
    sd[key] = torch.cat([cls, grid.flatten(2).transpose(1, 2)], 1)
    missing, unexpected = model.load_state_dict(sd, strict=False)
    print("missing:", missing, "unexpected:", unexpected)


def batch(gen):
    y = torch.randint(CLASSES, (BATCH,), generator=gen, device=DEVICE)
    x = torch.randn(BATCH, 3, NEW_RES, NEW_RES, generator=gen, device=DEVICE)
    return x + (y.view(-1, 1, 1, 1) / CLASSES - 0.5), y


def mem(tag):
    torch.cuda.synchronize()
    print(f"  [{tag}] allocated {torch.cuda.memory_allocated() / 2**20:.0f} MiB, "
          f"peak {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB")


def main():
    torch.manual_seed(0)
    cfg = ViTConfig(image_size=NEW_RES, num_labels=CLASSES, **BASE)
    # forward-mode AD: no fused attention
    model = ViTForImageClassification._from_config(cfg, attn_implementation="eager").to(DEVICE).eval().requires_grad_(False)
    load_into(model, old_checkpoint())
    w0 = dict(model.named_parameters())
    delta = {k: torch.zeros_like(v).requires_grad_() for k, v in w0.items() if "layernorm" not in k}
    mem("loaded")

    def logits(params, x):
        return functional_call(model, params, (x,)).logits

    def tangent(d, x):
        fixed = {k: v for k, v in w0.items() if k not in d}
        point = {k: w0[k] for k in d}
        f0, df = jvp(lambda p: logits({**p, **fixed}, x), (point,), (d,))
        return f0 + df

    head = [v for k, v in delta.items() if k.startswith("classifier")]
    body = [v for k, v in delta.items() if not k.startswith("classifier")]
    opt = torch.optim.Adafactor([{"params": body, "lr": 5e-3}, {"params": head, "lr": 2e-2}], d=1.0)
    gen = torch.Generator(device=DEVICE).manual_seed(42)

    for step in range(STEPS):
        x, y = batch(gen)
        out = tangent(delta, x)
        # the linear model is convex in delta: label-smoothed CE + ridge
        ridge = sum(v.pow(2).sum() for v in delta.values())
        loss = F.cross_entropy(out, y, label_smoothing=0.1) + 1e-4 * ridge
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f} |delta|^2 {ridge.item():.4f}")
        mem(f"step {step}")

    # per-sample gradient norms of the original network's head, on its features
    feats = {}
    h = model.classifier.register_forward_pre_hook(lambda m, a: feats.__setitem__("z", a[0].detach()))
    x, y = batch(gen)
    with torch.no_grad():
        model(x)
    h.remove()

    def one(w, b, z, t):
        return F.cross_entropy(F.linear(z, w, b).unsqueeze(0), t.unsqueeze(0))

    gw, gb = vmap(grad(one, argnums=(0, 1)), in_dims=(None, None, 0, 0))(
        model.classifier.weight, model.classifier.bias, feats["z"], y)
    norms = (gw.flatten(1).pow(2).sum(1) + gb.pow(2).sum(1)).sqrt()
    print("per-sample head gradient norm: mean %.4f max %.4f" % (norms.mean(), norms.max()))

    # merge the linear solution into real weights and compare
    with torch.no_grad():
        merged = {k: v + delta[k] if k in delta else v for k, v in w0.items()}
        print("agreement merged/linear: %.3f" % (
            logits(merged, x).argmax(1) == tangent(delta, x).argmax(1)).float().mean().item())
    mem("end")


if __name__ == "__main__":
    main()
