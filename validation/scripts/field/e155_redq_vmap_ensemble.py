# REDQ (randomised ensembled double Q-learning) with the critic ensemble as one stacked set of
# parameters, evaluated by torch.func.vmap. The replay buffer lives on the card. The "environment"
# is a vectorised random linear system with a quadratic cost, also on the card.
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call, stack_module_state, vmap

OBS, ACT = 376, 17
ENVS = 4096
CAPACITY = 1_000_000
BATCH = 8192
HIDDEN = 1024
ENSEMBLE, SUBSET = 10, 2
WARMUP_STEPS, ITERS, UTD = 8, 5, 4
GAMMA, TAU = 0.99, 0.005
LR = 3e-4
dev = "cuda"
torch.manual_seed(3)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(OBS + ACT, HIDDEN), nn.LayerNorm(HIDDEN), nn.ReLU(),
            nn.Linear(HIDDEN, HIDDEN), nn.LayerNorm(HIDDEN), nn.ReLU(),
            nn.Linear(HIDDEN, 1))

    def forward(self, o, a):
        return self.net(torch.cat([o, a], -1)).squeeze(-1)


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(OBS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU())
        self.mu, self.log_std = nn.Linear(HIDDEN, ACT), nn.Linear(HIDDEN, ACT)

    def forward(self, o, deterministic=False):
        h = self.body(o)
        mu, log_std = self.mu(h), self.log_std(h).clamp(-20, 2)
        if deterministic:
            return torch.tanh(mu), None
        dist = torch.distributions.Normal(mu, log_std.exp())
        u = dist.rsample()
        a = torch.tanh(u)
        logp = dist.log_prob(u) - 2 * (0.6931472 - u - F.softplus(-2 * u))
        return a, logp.sum(-1)


class Replay:
    def __init__(self, capacity):
        self.obs = torch.zeros(capacity, OBS, device=dev)
        self.nxt = torch.zeros(capacity, OBS, device=dev)
        self.act = torch.zeros(capacity, ACT, device=dev)
        self.rew = torch.zeros(capacity, device=dev)
        self.done = torch.zeros(capacity, dtype=torch.bool, device=dev)
        self.capacity, self.ptr, self.size = capacity, 0, 0

    def add(self, o, a, r, n, d):
        k = o.shape[0]
        idx = (torch.arange(k, device=dev) + self.ptr) % self.capacity
        self.obs[idx], self.act[idx], self.rew[idx], self.nxt[idx], self.done[idx] = o, a, r, n, d
        self.ptr = (self.ptr + k) % self.capacity
        self.size = min(self.size + k, self.capacity)

    def sample(self, n):
        i = torch.randint(self.size, (n,), device=dev)
        return self.obs[i], self.act[i], self.rew[i], self.nxt[i], self.done[i].float()


class LinearEnv:
    def __init__(self):
        self.A = 0.98 * torch.linalg.qr(torch.randn(OBS, OBS, device=dev))[0]
        self.B = torch.randn(ACT, OBS, device=dev) * 0.1
        self.state = torch.randn(ENVS, OBS, device=dev)

    def step(self, action):
        nxt = self.state @ self.A + action @ self.B + 0.01 * torch.randn_like(self.state)
        rew = -nxt.pow(2).mean(-1) - 0.01 * action.pow(2).sum(-1)
        done = nxt.abs().amax(-1) > 6
        obs_next = nxt.clone()
        nxt[done] = torch.randn(int(done.sum()), OBS, device=dev)
        self.state = nxt
        return obs_next, rew, done


critics = [Critic().to(dev) for _ in range(ENSEMBLE)]
q_params, q_buffers = stack_module_state(critics)
skeleton = copy.deepcopy(critics[0]).to("meta")
target = {k: v.detach().clone() for k, v in q_params.items()}


def one_q(params, buffers, o, a):
    return functional_call(skeleton, (params, buffers), (o, a))


ensemble_q = vmap(one_q, in_dims=(0, 0, None, None))

actor = Actor().to(dev)
log_alpha = torch.zeros((), device=dev, requires_grad=True)
opt_q = torch.optim.Adam(q_params.values(), lr=LR)
opt_pi = torch.optim.Adam(actor.parameters(), lr=LR)
opt_alpha = torch.optim.Adam([log_alpha], lr=LR)
buffer, env = Replay(CAPACITY), LinearEnv()
print(f"buffer and networks: {torch.cuda.memory_allocated() / 1e9:.2f} GB")


def interact(random=False):
    o = env.state.clone()
    with torch.no_grad():
        a = torch.rand(ENVS, ACT, device=dev) * 2 - 1 if random else actor(o)[0]
    n, r, d = env.step(a)
    buffer.add(o, a, r, n, d)
    return r.mean().item()


for _ in range(WARMUP_STEPS):
    interact(random=True)

for it in range(ITERS):
    reward = interact()
    for _ in range(UTD):
        o, a, r, n, d = buffer.sample(BATCH)
        with torch.no_grad():
            na, nlogp = actor(n)
            pick = torch.randperm(ENSEMBLE)[:SUBSET].to(dev)
            sub = {k: v[pick] for k, v in target.items()}
            tq = ensemble_q(sub, q_buffers, n, na).amin(0)
            backup = r + GAMMA * (1 - d) * (tq - log_alpha.exp() * nlogp)
        q = ensemble_q(q_params, q_buffers, o, a)
        q_loss = (q - backup).pow(2).mean(1).sum()
        opt_q.zero_grad()
        q_loss.backward()
        opt_q.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(target.values()), list(q_params.values()), TAU)

    pa, logp = actor(o)
    frozen = {k: v.detach() for k, v in q_params.items()}
    pi_loss = (log_alpha.exp().detach() * logp - ensemble_q(frozen, q_buffers, o, pa).mean(0)).mean()
    opt_pi.zero_grad()
    pi_loss.backward()
    opt_pi.step()
    alpha_loss = -(log_alpha * (logp.detach() - ACT)).mean()
    opt_alpha.zero_grad()
    alpha_loss.backward()
    opt_alpha.step()
    print(f"iter {it} reward {reward:.3f} q {q_loss.item():.3f} pi {pi_loss.item():.3f} "
          f"alpha {log_alpha.exp().item():.4f} size {buffer.size} max {torch.cuda.max_memory_allocated() / 1e9:.2f} GB")

with torch.no_grad():
    total = torch.zeros(ENVS, device=dev)
    for _ in range(10):
        act, _ = actor(env.state, deterministic=True)
        total += env.step(act)[1]
print(f"evaluation return {total.mean().item():.3f}")
