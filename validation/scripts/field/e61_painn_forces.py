# PaiNN-type equivariant message passing, energies + forces, synthetic clusters under a Morse potential.
# Atoms per batch vary: batches are packed until an edge budget is reached.
from __future__ import annotations

import math
import time
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

DEVICE = torch.device("cuda")
CUTOFF = 5.0
N_TYPES = 10
N_FEATURES = 256
N_LAYERS = 5
N_RBF = 32
EDGE_BUDGET = 80_000
MAX_STEPS = 14
VAL_EVERY = 7
RHO = 100.0  # force weight


class Graphs(NamedTuple):
    z: Tensor
    pos: Tensor
    batch: Tensor
    src: Tensor
    dst: Tensor
    energy: Tensor
    forces: Tensor

    @property
    def n_graphs(self):
        return self.energy.shape[0]

    def to(self, device):
        return Graphs(*(x.to(device, non_blocking=True) for x in self))


# ------------------------------------------------------------------ data
def morse(pos, z, De=0.3, a=1.2):
    """numpy reference: energy, forces, and neighbour pairs within the cutoff."""
    d = pos[:, None] - pos[None]
    r = np.sqrt((d ** 2).sum(-1) + 1e-12)
    np.fill_diagonal(r, np.inf)
    r0 = 1.4 + 0.05 * (z[:, None] + z[None])
    x = np.exp(-a * (np.minimum(r, 1e3) - r0))
    e = 0.5 * (De * (x ** 2 - 2 * x)).sum()
    dedr = De * (-2 * a * x ** 2 + 2 * a * x)
    f = -(dedr[..., None] * d / r[..., None]).sum(1)
    i, j = np.nonzero(r < CUTOFF)
    return e, f, i, j


def make_molecule(rng):
    n = int(rng.integers(12, 90))
    # jittered lattice so that atoms never overlap
    side = math.ceil(n ** (1 / 3))
    grid = np.stack(np.meshgrid(*[np.arange(side)] * 3, indexing="ij"), -1).reshape(-1, 3)
    pos = grid[rng.permutation(len(grid))[:n]] * 1.9 + rng.normal(0, 0.15, (n, 3))
    z = rng.integers(0, N_TYPES, n)
    e, f, i, j = morse(pos, z)
    return z, pos, e, f, i, j


def collate(mols) -> Graphs:
    offset, zs, ps, bs, ss, ds, es, fs = 0, [], [], [], [], [], [], []
    for g, (z, pos, e, f, i, j) in enumerate(mols):
        zs.append(z); ps.append(pos); es.append(e); fs.append(f)
        bs.append(np.full(len(z), g))
        ss.append(j + offset); ds.append(i + offset)
        offset += len(z)
    as_f = lambda x: torch.from_numpy(np.concatenate(x)).float()
    as_i = lambda x: torch.from_numpy(np.concatenate(x)).long()
    return Graphs(as_i(zs), as_f(ps), as_i(bs), as_i(ss), as_i(ds), torch.tensor(es, dtype=torch.float32), as_f(fs))


def edge_budget_batches(mols, budget, rng):
    cur, edges = [], 0
    for k in rng.permutation(len(mols)):
        m = mols[k]
        if cur and edges + len(m[4]) > budget:
            yield collate(cur)
            cur, edges = [], 0
        cur.append(m)
        edges += len(m[4])
    if cur:
        yield collate(cur)


# ------------------------------------------------------------------ model
class RadialBasis(nn.Module):
    def __init__(self, n_rbf, cutoff):
        super().__init__()
        self.cutoff = cutoff
        self.register_buffer("n", torch.arange(1, n_rbf + 1) * math.pi / cutoff)

    def forward(self, r):
        rbf = torch.sin(r[:, None] * self.n) / r[:, None]
        fcut = 0.5 * (torch.cos(math.pi * r / self.cutoff) + 1.0) * (r < self.cutoff)
        return rbf, fcut[:, None]


class Message(nn.Module):
    def __init__(self, f, n_rbf):
        super().__init__()
        self.phi = nn.Sequential(nn.Linear(f, f), nn.SiLU(), nn.Linear(f, 3 * f))
        self.filter = nn.Linear(n_rbf, 3 * f)
        self.norm = nn.LayerNorm(f)

    def forward(self, s, v, src, dst, rbf, fcut, unit):
        w = self.filter(rbf) * fcut
        x = self.phi(self.norm(s))[src] * w
        ds, dv_v, dv_r = x.chunk(3, dim=-1)
        dv = v[src] * dv_v.unsqueeze(1) + dv_r.unsqueeze(1) * unit.unsqueeze(-1)
        s = s + torch.zeros_like(s).index_add(0, dst, ds)
        v = v + torch.zeros_like(v).index_add(0, dst, dv)
        return s, v


class Update(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.uv = nn.Linear(f, 2 * f, bias=False)
        self.a = nn.Sequential(nn.Linear(2 * f, f), nn.SiLU(), nn.Linear(f, 3 * f))

    def forward(self, s, v):
        u, w = self.uv(v).chunk(2, dim=-1)
        norm = torch.sqrt((w ** 2).sum(1) + 1e-8)
        a_vv, a_sv, a_ss = self.a(torch.cat([s, norm], -1)).chunk(3, dim=-1)
        s = s + a_ss + a_sv * (u * w).sum(1)
        v = v + a_vv.unsqueeze(1) * u
        return s, v


class PaiNN(nn.Module):
    def __init__(self, f=N_FEATURES, layers=N_LAYERS, n_rbf=N_RBF, cutoff=CUTOFF):
        super().__init__()
        self.embed = nn.Embedding(N_TYPES, f)
        self.rbf = RadialBasis(n_rbf, cutoff)
        self.messages = nn.ModuleList(Message(f, n_rbf) for _ in range(layers))
        self.updates = nn.ModuleList(Update(f) for _ in range(layers))
        self.readout = nn.Sequential(nn.Linear(f, f // 2), nn.SiLU(), nn.Linear(f // 2, 1))
        self.register_buffer("scale", torch.tensor(1.0))
        self.register_buffer("shift", torch.tensor(0.0))

    def forward(self, g: Graphs, create_graph: bool):
        pos = g.pos.detach().requires_grad_(True)
        vec = pos[g.dst] - pos[g.src]
        r = vec.norm(dim=-1)
        unit = vec / r[:, None]
        rbf, fcut = self.rbf(r)
        s = self.embed(g.z)
        v = s.new_zeros(s.shape[0], 3, s.shape[1])
        for msg, upd in zip(self.messages, self.updates):
            s, v = msg(s, v, g.src, g.dst, rbf, fcut, unit)
            s, v = upd(s, v)
        e_atom = self.readout(s).squeeze(-1) * self.scale + self.shift
        energy = torch.zeros(g.n_graphs, device=pos.device).index_add_(0, g.batch, e_atom)
        (grad,) = torch.autograd.grad(energy.sum(), pos, create_graph=create_graph)
        return energy, -grad


def losses(e, f, g):
    n_atoms = torch.bincount(g.batch, minlength=g.n_graphs).float()
    le = ((e - g.energy) / n_atoms).pow(2).mean()
    lf = (f - g.forces).pow(2).mean()
    return le, lf


def validate(model, loader):
    model.eval()
    e_abs = f_abs = 0.0
    n_e = n_f = 0
    for g in loader:
        g = g.to(DEVICE)
        e, f = model(g, create_graph=False)   # still needs grad mode for the forces
        e_abs += (e.detach() - g.energy).abs().sum().item(); n_e += e.numel()
        f_abs += (f - g.forces).abs().sum().item(); n_f += f.numel()
    model.train()
    return e_abs / n_e, f_abs / n_f


def print_memory(where):
    print(f"    {where}: max_memory_allocated={torch.cuda.max_memory_allocated() >> 20} MiB "
          f"max_memory_reserved={torch.cuda.max_memory_reserved() >> 20} MiB")


def main():
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    t0 = time.perf_counter()
    train = [make_molecule(rng) for _ in range(900)]
    val = [make_molecule(rng) for _ in range(120)]
    print(f"made {len(train)}+{len(val)} molecules in {time.perf_counter() - t0:.1f}s, "
          f"{sum(len(m[4]) for m in train) / len(train):.0f} edges on average")

    model = PaiNN().to(DEVICE)
    per_atom = np.array([m[2] / len(m[0]) for m in train])
    model.shift.fill_(float(per_atom.mean()))
    model.scale.fill_(float(per_atom.std()))
    opt = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=1e-2, amsgrad=True)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, MAX_STEPS)
    ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    print_memory("setup")

    step = 0
    while step < MAX_STEPS:
        for g in edge_budget_batches(train, EDGE_BUDGET, rng):
            g = g.to(DEVICE)
            e, f = model(g, create_graph=True)
            le, lf = losses(e, f, g)
            loss = le + RHO * lf
            opt.zero_grad()
            loss.backward()
            gn = nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            opt.step()
            sched.step()
            ema.update_parameters(model)
            step += 1
            print(f"{step:3d}  graphs {g.n_graphs:4d} atoms {len(g.z):6d} edges {len(g.src):7d}  "
                  f"loss {loss.item():.4f}  e {le.item():.5f}  f {lf.item():.5f}  |g| {gn.item():.2f}")
            if step == 1 or step % VAL_EVERY == 0:
                print_memory(f"step {step}")
            if step % VAL_EVERY == 0:
                mae_e, mae_f = validate(ema.module, edge_budget_batches(val, EDGE_BUDGET // 2, rng))
                print(f"     val  MAE(E) {mae_e:.4f}  MAE(F) {mae_f:.4f}")
            if step >= MAX_STEPS:
                break

    print_memory("end")
    print("allocated peak bytes", torch.cuda.max_memory_allocated())
    print("reserved peak bytes", torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    main()
