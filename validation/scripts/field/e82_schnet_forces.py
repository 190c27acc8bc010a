"""
SchNet-type potential trained on energies and forces of small organic molecules
(synthetic MD snapshots labelled with a Morse pair potential).
Forces are -dE/dR with create_graph=True so that the force loss can be backpropagated.
"""
import copy
import logging
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
log = logging.getLogger("schnet")

@dataclass
class Config:
    n_molecules: int = 40
    confs_per_mol: int = 120
    n_train: int = 4096
    n_val: int = 512
    batch_size: int = 128
    n_features: int = 128
    n_rbf: int = 50
    n_interactions: int = 6
    cutoff: float = 5.0
    lr: float = 5e-4
    rho: float = 0.01       # energy weight, force weight is 1 - rho
    epochs: int = 3
    seed: int = 0

def build_dataset(cfg):
    rng = np.random.default_rng(cfg.seed)
    data = []
    for _ in range(cfg.n_molecules):
        n = int(rng.integers(12, 26))
        z = rng.choice([1, 6, 7, 8], size=n, p=[0.5, 0.35, 0.07, 0.08])
        pos = np.zeros((1, 3))
        while len(pos) < n:                      # grow a random tree, min distance 1.0 A
            d = rng.standard_normal(3)
            cand = pos[rng.integers(len(pos))] + 1.35 * d / np.linalg.norm(d)
            if np.linalg.norm(pos - cand, axis=1).min() > 1.0:
                pos = np.vstack([pos, cand])
        for _ in range(cfg.confs_per_mol):
            data.append((torch.as_tensor(z), torch.as_tensor(pos + 0.07 * rng.standard_normal(pos.shape))))
    perm = rng.permutation(len(data))
    return [data[i] for i in perm]

def morse(pos: Tensor, z: Tensor):
    """labels in float64"""
    pos = pos.double().requires_grad_(True)
    i, j = torch.triu_indices(len(z), len(z), 1)
    r = (pos[i] - pos[j]).norm(dim=-1)
    depth = 0.05 * torch.sqrt(z[i].double() * z[j].double())
    e = (depth * ((1 - torch.exp(-1.2 * (r - 1.6))) ** 2 - 1)).sum()
    return e.detach(), -torch.autograd.grad(e, pos)[0]

class Batch:
    def __init__(self, items, cutoff, device):
        zs, ps, es, fs, ii, jj, mol, off = [], [], [], [], [], [], [], 0
        for m, (z, p, e, f) in enumerate(items):
            d = torch.cdist(p, p)
            i, j = torch.where((d < cutoff) & ~torch.eye(len(z), dtype=torch.bool))
            ii.append(i + off); jj.append(j + off)
            zs.append(z); ps.append(p); es.append(e); fs.append(f)
            mol.append(torch.full((len(z),), m))
            off += len(z)
        to = lambda t, dt=None: t.to(device=device, dtype=dt)
        self.z, self.mol = to(torch.cat(zs)), to(torch.cat(mol))
        self.pos = to(torch.cat(ps), torch.float32)
        self.idx_i, self.idx_j = to(torch.cat(ii)), to(torch.cat(jj))
        self.energy, self.forces = to(torch.stack(es)), to(torch.cat(fs), torch.float32)
        self.n_mol = len(items)

class ShiftedSoftplus(nn.Module):
    def forward(self, x):
        return F.softplus(x) - 0.6931471805599453

class Interaction(nn.Module):
    def __init__(self, nf, n_rbf):
        super().__init__()
        self.filter = nn.Sequential(nn.Linear(n_rbf, nf), ShiftedSoftplus(), nn.Linear(nf, nf))
        self.in2f = nn.Linear(nf, nf, bias=False)
        self.f2out = nn.Sequential(nn.Linear(nf, nf), ShiftedSoftplus(), nn.Linear(nf, nf))

    def forward(self, x, rbf, fcut, i, j):
        w = self.filter(rbf) * fcut[:, None]
        msg = self.in2f(x)[j] * w
        agg = torch.zeros_like(x).index_add(0, i, msg)
        return self.f2out(agg)

class SchNet(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cutoff = cfg.cutoff
        self.embedding = nn.Embedding(20, cfg.n_features)
        centers = torch.linspace(0, cfg.cutoff, cfg.n_rbf)
        self.register_buffer("centers", centers)
        self.register_buffer("gamma", 0.5 / (centers[1] - centers[0]) ** 2)
        self.interactions = nn.ModuleList(Interaction(cfg.n_features, cfg.n_rbf) for _ in range(cfg.n_interactions))
        self.readout = nn.Sequential(nn.Linear(cfg.n_features, cfg.n_features // 2), ShiftedSoftplus(),
                                     nn.Linear(cfg.n_features // 2, 1))

    def forward(self, z, pos, i, j, mol, n_mol):
        r = (pos[j] - pos[i]).norm(dim=-1)
        rbf = torch.exp(-self.gamma * (r[:, None] - self.centers) ** 2)
        fcut = 0.5 * (torch.cos(r * torch.pi / self.cutoff) + 1) * (r < self.cutoff)
        x = self.embedding(z)
        for block in self.interactions:
            x = x + block(x, rbf, fcut, i, j)
        e_atom = self.readout(x).squeeze(-1)
        return torch.zeros(n_mol, device=pos.device, dtype=pos.dtype).index_add(0, mol, e_atom)

def energy_and_forces(model, b, train):
    pos = b.pos.requires_grad_(True)
    e = model(b.z, pos, b.idx_i, b.idx_j, b.mol, b.n_mol)
    f = -torch.autograd.grad(e.sum(), pos, create_graph=train)[0]
    return e, f

def main():
    cfg = Config()
    torch.manual_seed(cfg.seed)
    device = torch.device("cuda")
    data = [(z, p, *morse(p, z)) for z, p in build_dataset(cfg)]
    train, val = data[:cfg.n_train], data[cfg.n_train:cfg.n_train + cfg.n_val]

    # per-element reference energies by least squares, float64
    A = torch.stack([torch.bincount(z, minlength=10).double() for z, *_ in train]).to(device)
    E = torch.stack([e for _, _, e, _ in train]).to(device)
    atomref = torch.linalg.solve(A.T @ A + 1e-6 * torch.eye(10, device=device, dtype=A.dtype), A.T @ E)

    model = SchNet(cfg).to(device)
    ema = copy.deepcopy(model).requires_grad_(False)
    opt = torch.optim.Adam(model.parameters(), lr=cfg.lr, amsgrad=True)
    gen = torch.Generator().manual_seed(cfg.seed)
    log.info("%d parameters", sum(p.numel() for p in model.parameters()))

    for epoch in range(cfg.epochs):
        model.train()
        order = torch.randperm(len(train), generator=gen).tolist()
        tot = 0.0
        for k in range(0, len(order), cfg.batch_size):
            b = Batch([train[q] for q in order[k:k + cfg.batch_size]], cfg.cutoff, device)
            ref = torch.zeros(b.n_mol, device=device, dtype=torch.float64).index_add(0, b.mol, atomref[b.z])
            e, f = energy_and_forces(model, b, train=True)
            loss = cfg.rho * F.mse_loss(e, (b.energy - ref).float()) + (1 - cfg.rho) * F.mse_loss(f, b.forces)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            opt.step()
            with torch.no_grad():
                for pe, p in zip(ema.parameters(), model.parameters()):
                    pe.lerp_(p, 0.01)
            tot += loss.item()
        maes = []
        for k in range(0, len(val), 2 * cfg.batch_size):
            b = Batch(val[k:k + 2 * cfg.batch_size], cfg.cutoff, device)
            _, f = energy_and_forces(ema, b, train=False)
            maes.append((f - b.forces).abs().mean().item())
        log.info("epoch %d loss %.5f val force MAE %.5f edges %d mem %.2f GiB", epoch, tot, np.mean(maes),
                 b.idx_i.numel(), torch.cuda.max_memory_allocated() / 1024 ** 3)

    # sanity check of the forces by central differences in double precision
    m64, b = copy.deepcopy(ema).double(), Batch(val[:4], cfg.cutoff, device)
    b.pos = b.pos.detach().double()
    _, f = energy_and_forces(m64, b, train=False)
    with torch.no_grad():
        d = torch.zeros_like(b.pos); d[0, 0] = 1e-4
        ep = m64(b.z, b.pos + d, b.idx_i, b.idx_j, b.mol, b.n_mol).sum()
        em = m64(b.z, b.pos - d, b.idx_i, b.idx_j, b.mol, b.n_mol).sum()
    log.info("finite difference error %.2e", (f[0, 0] + (ep - em) / 2e-4).abs().item())
    print("torch.cuda.max_memory_allocated", torch.cuda.max_memory_allocated())
    print("torch.cuda.max_memory_reserved", torch.cuda.max_memory_reserved())

if __name__ == "__main__":
    main()
