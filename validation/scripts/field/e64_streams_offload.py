# Overlap everything: H2D prefetch on one stream, activation offload on another.
#   python t02_streams_offload.py
import collections
import contextlib
import threading
import queue
import time

import numpy as np
import torch
from torch import nn
import torch.nn.functional as F

dev = torch.device("cuda", 0)
torch.cuda.set_device(dev)
torch.manual_seed(0)

BATCH = 192
IMG = 112
CLASSES = 200
STEPS = 12


# ----------------------------------------------------------------------------
# data
# ----------------------------------------------------------------------------
class HostImages:
    """uint8 images that live on the host; class id leaks into the colour."""

    def __init__(self, n, size, classes, seed=0):
        rng = np.random.default_rng(seed)
        self.base = rng.integers(0, 256, size=(64, 3, size, size), dtype=np.uint8)
        self.labels = rng.integers(0, classes, size=n)
        self.n = n
        self.classes = classes

    def batch(self, i, bs):
        lo = (i * bs) % (self.n - bs)
        lab = self.labels[lo:lo + bs]
        imgs = torch.from_numpy(self.base[lab % 64])
        return imgs, torch.from_numpy(lab)


class CudaPrefetcher:
    """loader thread -> pinned memory -> copy stream -> compute stream"""

    def __init__(self, source, bs, steps, depth=2):
        self.stream = torch.cuda.Stream()
        self.q = queue.Queue(maxsize=depth)
        self.source, self.bs, self.steps = source, bs, steps
        self.thread = threading.Thread(target=self._worker, daemon=True)
        self.thread.start()
        self.mean = torch.tensor([127.0] * 3, device=dev).view(1, 3, 1, 1)
        self.std = torch.tensor([64.0] * 3, device=dev).view(1, 3, 1, 1)
        torch.cuda.current_stream().synchronize()
        self._preload()

    def _worker(self):
        for i in range(self.steps):
            x, y = self.source.batch(i, self.bs)
            self.q.put((x.pin_memory(), y.pin_memory()))
        self.q.put(None)

    def _preload(self):
        item = self.q.get()
        if item is None:
            self.next = None
            return
        x, y = item
        with torch.cuda.stream(self.stream):
            gx = x.to(dev, non_blocking=True)
            gy = y.to(dev, non_blocking=True)
            # normalise on the copy stream as well
            gx = gx.float().sub_(self.mean).div_(self.std)
            gx = gx.to(memory_format=torch.channels_last)
        self.next = (gx, gy)

    def __iter__(self):
        while self.next is not None:
            cur = torch.cuda.current_stream()
            cur.wait_stream(self.stream)
            x, y = self.next
            x.record_stream(cur)
            y.record_stream(cur)
            self._preload()
            yield x, y


# ----------------------------------------------------------------------------
# activation offload
# ----------------------------------------------------------------------------
class OffloadActivations(torch.autograd.graph.saved_tensors_hooks):
    """Copy large saved tensors to pinned host buffers on a side stream.

    The GPU tensors are kept alive in a small window until their copy is done
    (no record_stream: we know exactly when the copy has finished).
    """

    def __init__(self, params, min_bytes=8 << 20, max_bytes=3 << 30, window=3):
        self.d2h = torch.cuda.Stream()
        self.h2d = torch.cuda.Stream()
        self.min_bytes = min_bytes
        self.max_bytes = max_bytes
        self.window = window
        self.param_ptrs = {p.data_ptr() for p in params}
        self.pool = collections.defaultdict(list)
        self.inflight = collections.deque()
        self._retire = []
        self.bytes_out = 0
        self.bytes_in = 0
        self.kept = 0
        self.cur_bytes = 0
        super().__init__(self._pack, self._unpack)

    def _host_buf(self, t):
        nbytes = t.numel() * t.element_size()
        free = self.pool[nbytes]
        if free:
            raw = free.pop()
        else:
            raw = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return raw

    def _pack(self, t):
        nbytes = t.numel() * t.element_size()
        dense = t.is_contiguous() or (t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last))
        if (not t.is_cuda or nbytes < self.min_bytes or t.data_ptr() in self.param_ptrs
                or not dense or self.cur_bytes + nbytes > self.max_bytes):
            self.kept += 1
            return t
        while len(self.inflight) >= self.window:
            ev, ref = self.inflight.popleft()
            torch.cuda.current_stream().wait_event(ev)
            del ref
        raw = self._host_buf(t)
        host = torch.as_strided(raw.view(t.dtype), t.size(), t.stride())
        self.d2h.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.d2h):
            host.copy_(t.detach(), non_blocking=True)
            ev = torch.cuda.Event()
            ev.record(self.d2h)
        self.inflight.append((ev, t.detach()))
        self.bytes_out += nbytes
        self.cur_bytes += nbytes
        return (raw, host, ev)

    def _unpack(self, packed):
        if isinstance(packed, torch.Tensor):
            return packed
        raw, host, ev = packed
        cur = torch.cuda.current_stream()
        while self.inflight:
            cur.wait_event(self.inflight.popleft()[0])
        self.h2d.wait_event(ev)
        with torch.cuda.stream(self.h2d):
            t = host.to(dev, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self.h2d)
        cur.wait_event(done)
        t.record_stream(cur)
        self.bytes_in += t.numel() * t.element_size()
        self._retire.append((done, raw))
        return t

    def step_done(self):
        torch.cuda.current_stream().synchronize()
        for done, raw in self._retire:
            done.synchronize()
            self.pool[raw.numel()].append(raw)
        self._retire.clear()
        self.inflight.clear()
        self.cur_bytes = 0


# ----------------------------------------------------------------------------
# model: a plain wide ResNet
# ----------------------------------------------------------------------------
class Bottleneck(nn.Module):
    def __init__(self, cin, width, stride=1):
        super().__init__()
        cout = width * 4
        self.c1 = nn.Conv2d(cin, width, 1, bias=False)
        self.b1 = nn.BatchNorm2d(width)
        self.c2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.b2 = nn.BatchNorm2d(width)
        self.c3 = nn.Conv2d(width, cout, 1, bias=False)
        self.b3 = nn.BatchNorm2d(cout)
        self.short = None
        if stride != 1 or cin != cout:
            self.short = nn.Sequential(nn.Conv2d(cin, cout, 1, stride, bias=False), nn.BatchNorm2d(cout))

    def forward(self, x):
        idn = x if self.short is None else self.short(x)
        x = F.relu(self.b1(self.c1(x)), inplace=True)
        x = F.relu(self.b2(self.c2(x)), inplace=True)
        x = self.b3(self.c3(x))
        return F.relu(x + idn, inplace=True)


def make_net():
    layers = [nn.Conv2d(3, 64, 5, 2, 2, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    cin = 64
    for width, n, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for i in range(n):
            layers.append(Bottleneck(cin, width, stride if i == 0 else 1))
            cin = width * 4
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(cin, CLASSES)]
    return nn.Sequential(*layers)


def run(name, offload, steps):
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(1)
    with dev:
        net = make_net()
    net = net.to(memory_format=torch.channels_last)
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-5)
    hook = OffloadActivations(list(net.parameters())) if offload else None
    data = CudaPrefetcher(HostImages(8192, IMG, CLASSES), BATCH, steps)

    evs = []
    losses = []
    t0 = time.time()
    for x, y in data:
        e = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        e[0].record()
        with hook if hook is not None else contextlib.nullcontext():
            with torch.autocast("cuda", torch.bfloat16):
                out = net(x)
                loss = F.cross_entropy(out, y, label_smoothing=0.1)
        e[1].record()
        loss.backward()
        e[2].record()
        opt.step()
        opt.zero_grad()
        e[3].record()
        if hook is not None:
            hook.step_done()
        evs.append(e)
        losses.append(loss.detach())
    torch.cuda.synchronize()
    wall = time.time() - t0

    f = np.mean([e[0].elapsed_time(e[1]) for e in evs[2:]])
    b = np.mean([e[1].elapsed_time(e[2]) for e in evs[2:]])
    o = np.mean([e[2].elapsed_time(e[3]) for e in evs[2:]])
    print(f"[{name}] {steps} steps {wall:.2f}s | fwd {f:.1f} ms bwd {b:.1f} ms opt {o:.1f} ms")
    print(f"[{name}] losses", " ".join(f"{l.item():.3f}" for l in losses))
    if hook is not None:
        print(f"[{name}] offloaded {hook.bytes_out / 2**30:.2f} GiB out / {hook.bytes_in / 2**30:.2f} GiB in, "
              f"{hook.kept} saved tensors left alone, "
              f"{sum(k * len(v) for k, v in hook.pool.items()) / 2**20:.0f} MiB pinned pool")
    a, r = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    print(f"[{name}] max_memory_allocated {a / 2**20:.1f} MiB max_memory_reserved {r / 2**20:.1f} MiB")
    return a, r


if __name__ == "__main__":
    torch.backends.cudnn.benchmark = False
    res = {}
    res["plain"] = run("plain", False, STEPS)
    res["offload"] = run("offload", True, STEPS // 2)
    saved = res["plain"][0] - res["offload"][0]
    print(f"offload saves {saved / 2**20:.1f} MiB of {res['plain'][0] / 2**20:.1f} MiB")
    print("overall max allocated", max(v[0] for v in res.values()), "max reserved", max(v[1] for v in res.values()))
    print("end: max_memory_allocated", torch.cuda.max_memory_allocated(),
          "max_memory_reserved", torch.cuda.max_memory_reserved())
