"""Compression pipeline on synthetic sequence classification / tagging data.

teacher (fp) -> short training -> student by distillation with fake-quantised
linears (STE) -> structured pruning -> finetune -> SWA/EMA averages ->
checkpoint through a BytesIO, reload, resume.
"""
import copy
import io
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.nn.utils.prune as prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

DEVICE = "cuda"
SEQ, FEAT, N_TAGS = 256, 128, 512


def mem(tag):
    print(f"[mem] {tag:<28} cur {torch.cuda.memory_allocated() / 2**20:8.0f}  "
          f"max_memory_allocated {torch.cuda.max_memory_allocated() / 2**20:8.0f}  "
          f"max_memory_reserved {torch.cuda.max_memory_reserved() / 2**20:8.0f} MiB", flush=True)


# ---------------------------------------------------------------- quantisation
class RoundSTE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, g):
        return g


class FakeQuantLSQ(torch.autograd.Function):
    """Learned step size quantiser (per tensor), gradients for x and the step."""

    @staticmethod
    def forward(ctx, x, step, qmin, qmax):
        s = step.abs().clamp_min(1e-8)
        v = x / s
        ctx.save_for_backward(v, s)
        ctx.q = (qmin, qmax)
        ctx.gscale = (x.numel() * qmax) ** -0.5
        return v.round().clamp_(qmin, qmax).mul_(s)

    @staticmethod
    def backward(ctx, g):
        v, s = ctx.saved_tensors
        qmin, qmax = ctx.q
        low, high = v < qmin, v > qmax
        mid = ~(low | high)
        gx = g * mid
        gs = None
        if ctx.needs_input_grad[1]:
            ds = torch.where(mid, v.round() - v, v.clamp(qmin, qmax))
            gs = (g * ds).sum().mul_(ctx.gscale).reshape(s.shape)
        return gx, gs, None, None


class QLinear(nn.Linear):
    def __init__(self, *a, bits=8, **k):
        super().__init__(*a, **k)
        self.qmin, self.qmax = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
        self.act_step = nn.Parameter(torch.tensor(0.05))
        self.register_buffer("ready", torch.tensor(False))
        self._calibrated = False

    def forward(self, x):
        if not self._calibrated:
            if not bool(self.ready):
                with torch.no_grad():
                    self.act_step.fill_(2 * x.detach().abs().mean() / self.qmax ** 0.5)
                    self.ready.fill_(True)
            self._calibrated = True
        xq = FakeQuantLSQ.apply(x, self.act_step, self.qmin, self.qmax)
        # per output channel weights, plain STE
        scale = self.weight.detach().abs().amax(1, keepdim=True).clamp_min(1e-8) / self.qmax
        wq = RoundSTE.apply(self.weight / scale).clamp(self.qmin, self.qmax) * scale
        return F.linear(xq, wq, self.bias)


# ---------------------------------------------------------------- models
class ConvStem(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.conv = nn.Conv1d(FEAT, dim, 3, padding=1)
        self.bn = nn.BatchNorm1d(dim)

    def forward(self, x):
        return F.gelu(self.bn(self.conv(x.transpose(1, 2)))).transpose(1, 2)


class Layer(nn.Module):
    def __init__(self, dim, heads, lin):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = lin(dim, 3 * dim)
        self.o = lin(dim, dim)
        self.up = lin(dim, 4 * dim)
        self.down = lin(4 * dim, dim)

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = self.qkv(self.ln1(x)).reshape(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v)
        x = x + self.o(a.transpose(1, 2).reshape(B, T, D))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class Tagger(nn.Module):
    def __init__(self, dim, depth, heads, lin=nn.Linear):
        super().__init__()
        self.stem = ConvStem(dim)
        self.layers = nn.ModuleList([Layer(dim, heads, lin) for _ in range(depth)])
        self.head = nn.Linear(dim, N_TAGS)

    def forward(self, x, return_hidden=False):
        h = self.stem(x)
        hidden = []
        for l in self.layers:
            h = l(h)
            hidden.append(h)
        logits = self.head(h)
        return (logits, hidden) if return_hidden else logits


# ---------------------------------------------------------------- data
class Synthetic:
    def __init__(self, seed):
        self.g = torch.Generator(DEVICE).manual_seed(seed)
        self.proj = torch.randn(FEAT, N_TAGS, device=DEVICE, generator=self.g)

    def __call__(self, bs):
        x = torch.randn(bs, SEQ, FEAT, device=DEVICE, generator=self.g)
        # the tag depends on the neighbour as well
        y = ((x + 0.5 * x.roll(1, dims=1)) @ self.proj).argmax(-1)
        return x, y


def accuracy(model, data, n=3, bs=64):
    was = model.training
    model.eval()
    hit = tot = 0
    with torch.inference_mode(), torch.autocast(DEVICE, torch.bfloat16):
        for _ in range(n):
            x, y = data(bs)
            hit += (model(x).argmax(-1) == y).sum().item()
            tot += y.numel()
    model.train(was)
    return hit / tot


def train_teacher(data, steps=12, bs=64):
    with torch.device(DEVICE):
        teacher = Tagger(1280, 12, 20)
    opt = torch.optim.AdamW(teacher.parameters(), lr=2e-4, weight_decay=0.05)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 4e-4, total_steps=steps)
    for i in range(steps):
        x, y = data(bs)
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = F.cross_entropy(teacher(x).flatten(0, 1), y.flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        if i % 4 == 0 or i == steps - 1:
            print(f"teacher {i:3d} loss {loss.item():.4f}")
    mem("teacher trained")
    return teacher.eval().requires_grad_(False)


def kd_loss(s_logits, t_logits, y, s_hid, t_hid, adapters, T=2.0, alpha=0.7):
    kl = F.kl_div(F.log_softmax(s_logits.float() / T, -1), F.log_softmax(t_logits.float() / T, -1),
                  reduction="batchmean", log_target=True) * T * T / s_logits.size(1)
    ce = F.cross_entropy(s_logits.flatten(0, 1).float(), y.flatten())
    feat = sum(F.mse_loss(a(s), t.detach()) for a, s, t in zip(adapters, s_hid, t_hid)) / len(adapters)
    return alpha * kl + (1 - alpha) * ce + 0.1 * feat, kl.detach(), ce.detach()


def distill(student, teacher, adapters, opt, data, ema, steps, bs=64, tag="kd"):
    every = len(teacher.layers) // len(student.layers)
    hist = []
    for i in range(steps):
        x, y = data(bs)
        with torch.autocast(DEVICE, torch.bfloat16):
            with torch.no_grad():
                t_logits, t_hid = teacher(x, return_hidden=True)
            s_logits, s_hid = student(x, return_hidden=True)
            loss, kl, ce = kd_loss(s_logits, t_logits, y, s_hid, t_hid[every - 1::every], adapters)
        loss.backward()
        nn.utils.clip_grad_norm_(student.parameters(), 5.0)
        opt.step()
        opt.zero_grad()
        if ema is not None:
            ema.update_parameters(student)
        hist.append(loss.item())
        if i % 5 == 0 or i == steps - 1:
            print(f"{tag} {i:3d} loss {hist[-1]:.4f} kl {kl.item():.4f} ce {ce.item():.4f}")
    return hist


def prune_student(student, amount):
    targets = [(l.up, "weight") for l in student.layers] + [(l.qkv, "weight") for l in student.layers]
    for m, name in targets:
        prune.ln_structured(m, name, amount=amount, n=2, dim=0)
    zeros = sum((getattr(m, n) == 0).sum().item() for m, n in targets)
    total = sum(getattr(m, n).numel() for m, n in targets)
    print(f"structured pruning: {zeros}/{total} weights zero ({100 * zeros / total:.1f}%)")
    return targets


def main():
    t0 = time.time()
    torch.manual_seed(3)
    torch.backends.cuda.matmul.allow_tf32 = True
    data = Synthetic(11)

    teacher = train_teacher(data)
    print(f"teacher accuracy {accuracy(teacher, data):.4f}")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()

    with torch.device(DEVICE):
        student = Tagger(640, 6, 10, lin=QLinear)
        adapters = nn.ModuleList([nn.Linear(640, 1280) for _ in range(6)])
    params = [
        {"params": [p for n, p in student.named_parameters() if "act_step" not in n], "weight_decay": 0.01},
        {"params": [p for n, p in student.named_parameters() if "act_step" in n], "weight_decay": 0.0, "lr": 1e-4},
        {"params": adapters.parameters(), "lr": 1e-3},
    ]
    opt = torch.optim.AdamW(params, lr=5e-4)
    ema = AveragedModel(student, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    mem("student built")
    distill(student, teacher, adapters, opt, data, ema, 16)
    mem("distilled (QAT)")
    print(f"student accuracy {accuracy(student, data):.4f}  ema {accuracy(ema, data):.4f}")

    # ---- checkpoint into memory
    buf = io.BytesIO()
    torch.save({"student": student.state_dict(), "ema": ema.state_dict(), "adapters": adapters.state_dict(),
                "opt": opt.state_dict(), "step": 16, "rng": torch.cuda.get_rng_state()}, buf)
    print(f"checkpoint {buf.tell() / 2**20:.1f} MiB")
    del opt, ema, student, params
    torch.cuda.empty_cache()
    mem("dropped student")

    # ---- resume
    buf.seek(0)
    ck = torch.load(buf, map_location="cuda", weights_only=True)
    with torch.device(DEVICE):
        student = Tagger(640, 6, 10, lin=QLinear)
    student.load_state_dict(ck["student"])
    adapters.load_state_dict(ck["adapters"])
    opt = torch.optim.AdamW([
        {"params": [p for n, p in student.named_parameters() if "act_step" not in n]},
        {"params": [p for n, p in student.named_parameters() if "act_step" in n]},
        {"params": adapters.parameters()},
    ], lr=5e-4)
    opt.load_state_dict(ck["opt"])
    ema = AveragedModel(student, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    ema.load_state_dict(ck["ema"])
    torch.cuda.set_rng_state(ck["rng"].cpu())
    print("resumed at step", ck["step"], "lrs", [g["lr"] for g in opt.param_groups])
    mem("resumed, checkpoint alive")
    del ck
    buf.close()
    distill(student, teacher, adapters, opt, data, ema, 8, tag="resume")
    mem("resumed training")

    # ---- prune; parameters are renamed to weight_orig so a new optimizer is needed
    dense = copy.deepcopy(student).eval()
    targets = prune_student(student, 0.3)
    print(f"accuracy right after pruning {accuracy(student, data):.4f} (dense {accuracy(dense, data):.4f})")
    opt = torch.optim.AdamW(list(student.parameters()) + list(adapters.parameters()), lr=2e-4)
    swa = None
    for rnd in range(3):
        distill(student, teacher, adapters, opt, data, None, 5, tag=f"finetune{rnd}")
    for m, name in targets:
        prune.remove(m, name)
    opt = torch.optim.SGD(student.parameters(), lr=0.01, momentum=0.9)
    swa = AveragedModel(student)
    distill(student, teacher, adapters, opt, data, swa, 5, tag="swa")
    update_bn((data(64)[0] for _ in range(3)), swa, device=DEVICE)
    mem("pruned + averaged")
    print(f"pruned {accuracy(student, data):.4f}  swa {accuracy(swa, data):.4f}")

    print(f"done in {time.time() - t0:.1f}s")
    print("max_memory_allocated", torch.cuda.max_memory_allocated(),
          "max_memory_reserved", torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    main()
