# SAC from pixels + proprioception (DrQ-style random shifts), vectorised point-mass reaching arm
# simulated and rendered on the GPU. Replay lives on the GPU too.
import copy
import math
import time

import torch
from torch import nn
from torch.distributions import Normal
from torch.nn import functional as F

DEVICE = torch.device("cuda")
NUM_ENVS, IMG, STACK = 64, 84, 3
CAPACITY = 24_000
INIT_STEPS, ENV_STEPS, UPDATES_PER_STEP = 30, 140, 2
BATCH_SIZE = 512
FEATURE_DIM, HIDDEN = 64, 1024
GAMMA, TAU, LR, ALPHA = 0.99, 0.01, 3e-4, 0.05
ACTOR_EVERY = 2
STATE_DIM, ACT_DIM = 4, 2

class ReacherVec:
    def __init__(self, n, horizon=50):
        self.n, self.horizon = n, horizon
        ax = torch.linspace(-1, 1, IMG, device=DEVICE)
        self.gy, self.gx = torch.meshgrid(ax, ax, indexing="ij")

    def _render(self):
        blobs = []
        for p, s in ((self.pos, 0.10), (self.goal, 0.15), (self.pos + 0.2 * self.vel, 0.06)):
            d2 = (self.gx - p[:, 0, None, None]) ** 2 + (self.gy - p[:, 1, None, None]) ** 2
            blobs.append(torch.exp(-d2 / (2 * s * s)))
        return (torch.stack(blobs, 1) * 255).to(torch.uint8)

    def reset(self):
        self.pos = torch.rand(self.n, 2, device=DEVICE) * 1.6 - 0.8
        self.goal = torch.rand(self.n, 2, device=DEVICE) * 1.6 - 0.8
        self.vel = torch.zeros(self.n, 2, device=DEVICE)
        self.t, self.frames = 0, self._render().repeat(1, STACK, 1, 1)
        return self.obs()

    def obs(self):
        return self.frames, torch.cat([self.pos, self.vel], -1)

    def step(self, a):
        self.vel = 0.9 * self.vel + 0.1 * a
        self.pos = (self.pos + 0.2 * self.vel).clamp(-1, 1)
        self.frames = torch.cat([self.frames[:, 3:], self._render()], 1)
        reward = torch.exp(-4 * (self.pos - self.goal).norm(dim=-1)) - 0.01 * a.pow(2).sum(-1)
        self.t += 1
        return self.obs(), reward, self.t >= self.horizon

class Replay:
    def __init__(self, cap):
        self.pix = torch.empty(cap, 3 * STACK, IMG, IMG, dtype=torch.uint8, device=DEVICE)
        self.state = torch.empty(cap, STATE_DIM, device=DEVICE)
        self.next_pix, self.next_state = torch.empty_like(self.pix), torch.empty_like(self.state)
        self.act = torch.empty(cap, ACT_DIM, device=DEVICE)
        self.rew = torch.empty(cap, 1, device=DEVICE)
        self.cap, self.ptr, self.size = cap, 0, 0

    def add(self, o, a, r, o2):
        idx = torch.arange(self.ptr, self.ptr + len(a), device=DEVICE) % self.cap
        self.pix[idx], self.state[idx] = o
        self.next_pix[idx], self.next_state[idx] = o2
        self.act[idx], self.rew[idx] = a, r.unsqueeze(1)
        self.ptr = (self.ptr + len(a)) % self.cap
        self.size = min(self.size + len(a), self.cap)

    def sample(self, n):
        i = torch.randint(0, self.size, (n,), device=DEVICE)
        return (self.pix[i].float(), self.state[i], self.act[i], self.rew[i],
                self.next_pix[i].float(), self.next_state[i])

def random_shift(x, pad=4):
    n, _, h, w = x.shape
    x = F.pad(x, (pad,) * 4, "replicate")
    eps = 1.0 / (h + 2 * pad)
    ar = torch.linspace(-1 + eps, 1 - eps, h + 2 * pad, device=x.device)[:h].unsqueeze(0).repeat(h, 1).unsqueeze(2)
    grid = torch.cat([ar, ar.transpose(1, 0)], dim=2).unsqueeze(0).repeat(n, 1, 1, 1)
    shift = torch.randint(0, 2 * pad + 1, (n, 1, 1, 2), device=x.device).float() * 2.0 / (h + 2 * pad)
    return F.grid_sample(x, grid + shift, padding_mode="zeros", align_corners=False)

class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.convnet = nn.Sequential(nn.Conv2d(3 * STACK, 32, 3, stride=2), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(),
                                     nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU())
        self.repr_dim = 32 * 35 * 35

    def forward(self, pix):
        return self.convnet(pix / 255.0 - 0.5).flatten(1)

def trunk(repr_dim):
    return nn.Sequential(nn.Linear(repr_dim, FEATURE_DIM), nn.LayerNorm(FEATURE_DIM), nn.Tanh())

def mlp(i, o):
    return nn.Sequential(nn.Linear(i, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, o))

class Actor(nn.Module):
    def __init__(self, repr_dim):
        super().__init__()
        self.trunk, self.net = trunk(repr_dim), mlp(FEATURE_DIM + STATE_DIM, 2 * ACT_DIM)

    def forward(self, h, s):
        mu, log_std = self.net(torch.cat([self.trunk(h), s], -1)).chunk(2, -1)
        dist = Normal(mu, (-5 + 3.5 * (torch.tanh(log_std) + 1)).exp())
        u = dist.rsample()
        a = torch.tanh(u)
        logp = dist.log_prob(u) - 2 * (math.log(2) - u - F.softplus(-2 * u))
        return a, logp.sum(-1, keepdim=True)

class Critic(nn.Module):
    def __init__(self, repr_dim):
        super().__init__()
        self.trunk = trunk(repr_dim)
        d = FEATURE_DIM + STATE_DIM + ACT_DIM
        self.q1, self.q2 = mlp(d, 1), mlp(d, 1)

    def forward(self, h, s, a):
        x = torch.cat([self.trunk(h), s, a], -1)
        return self.q1(x), self.q2(x)

torch.manual_seed(3)
env, buf = ReacherVec(NUM_ENVS), Replay(CAPACITY)
enc = Encoder().to(DEVICE)
actor, critic = Actor(enc.repr_dim).to(DEVICE), Critic(enc.repr_dim).to(DEVICE)
critic_target = copy.deepcopy(critic).requires_grad_(False)
critic_opt = torch.optim.Adam(list(enc.parameters()) + list(critic.parameters()), lr=LR)
actor_opt = torch.optim.Adam(actor.parameters(), lr=LR)
print(f"replay {2 * buf.pix.nbytes / 1e9:.2f} GB")

def update(n):
    pix, s, a, r, pix2, s2 = buf.sample(BATCH_SIZE)
    h = enc(random_shift(pix))
    with torch.no_grad():
        h2 = enc(random_shift(pix2))
        a2, logp2 = actor(h2, s2)
        tq1, tq2 = critic_target(h2, s2, a2)
        y = r + GAMMA * (torch.min(tq1, tq2) - ALPHA * logp2)
    q1, q2 = critic(h, s, a)
    critic_loss = F.mse_loss(q1, y) + F.mse_loss(q2, y)
    critic_opt.zero_grad(set_to_none=True)
    critic_loss.backward()
    critic_opt.step()

    if n % ACTOR_EVERY == 0:
        h = h.detach()
        pi, logp = actor(h, s)
        actor_loss = (ALPHA * logp - torch.min(*critic(h, s, pi))).mean()
        actor_opt.zero_grad(set_to_none=True)
        actor_loss.backward()
        actor_opt.step()
    with torch.no_grad():
        for p, pt in zip(critic.parameters(), critic_target.parameters()):
            pt.lerp_(p, TAU)
    return critic_loss.detach()

obs, ret, n_upd, t0 = env.reset(), torch.zeros(NUM_ENVS, device=DEVICE), 0, time.time()
for step in range(ENV_STEPS):
    if step < INIT_STEPS:
        act = torch.rand(NUM_ENVS, ACT_DIM, device=DEVICE) * 2 - 1
    else:
        with torch.no_grad():
            act, _ = actor(enc(obs[0].float()), obs[1])
    nobs, rew, done = env.step(act)
    buf.add(obs, act, rew, nobs)
    obs, ret = nobs, ret + rew
    if done:
        print(f"step {step} return {ret.mean().item():.3f} fps {(step + 1) * NUM_ENVS / (time.time() - t0):.0f}")
        obs, ret = env.reset(), torch.zeros_like(ret)
    if step >= INIT_STEPS:
        for _ in range(UPDATES_PER_STEP):
            cl, n_upd = update(n_upd), n_upd + 1
        if step % 20 == 0:
            print(f"step {step} critic {cl.item():.4f} buffer {buf.size} "
                  f"mem {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")

print("max allocated", torch.cuda.max_memory_allocated())
print("max reserved", torch.cuda.max_memory_reserved())
