# Soft actor-critic from pixels (DrQ style augmentation). The replay memory sits on the GPU as uint8.
import copy
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(123)
DEVICE = torch.device("cuda:0")
CAPACITY = 100_000
ENVS = 512
OBS = (3, 84, 84)
STACK = 3
ACT = 6
BATCH = 512
UPDATES = 8
FILTERS, HIDDEN, FEAT = 64, 1024, 100
GAMMA, TAU = 0.99, 0.01


class FakeEnv:
    """vectorised: a bright square is pushed around by the actions"""

    def __init__(self, n):
        self.n = n
        self.pos = torch.rand(n, 2, device=DEVICE)

    def render(self):
        grid = torch.linspace(0, 1, OBS[1], device=DEVICE)
        dy = (grid[None] - self.pos[:, :1]).abs() < 0.1
        dx = (grid[None] - self.pos[:, 1:]).abs() < 0.1
        img = (dy[:, :, None] & dx[:, None, :]).to(torch.uint8) * 255
        return img[:, None].expand(-1, *OBS).contiguous()

    def step(self, action):
        self.pos = (self.pos + 0.1 * action[:, :2]).clamp(0, 1)
        reward = -(self.pos - 0.5).norm(dim=1)
        return self.render(), reward


class Replay:
    def __init__(self):
        self.frames = torch.zeros((CAPACITY, *OBS), dtype=torch.uint8, device=DEVICE)
        self.act = torch.zeros(CAPACITY, ACT, device=DEVICE)
        self.rew = torch.zeros(CAPACITY, device=DEVICE)
        self.done = torch.zeros(CAPACITY, dtype=torch.bool, device=DEVICE)
        self.t, self.size = 0, 0

    def add(self, frame, act, rew):
        i = (self.t + torch.arange(ENVS, device=DEVICE)) % CAPACITY
        self.frames[i], self.act[i], self.rew[i] = frame, act, rew
        self.t = (self.t + ENVS) % CAPACITY
        self.size = min(self.size + ENVS, CAPACITY)

    def sample(self, n):
        i = torch.randint(ENVS * STACK, self.size - ENVS, (n,), device=DEVICE)
        idx = torch.stack([i - k * ENVS for k in range(STACK)], 1)
        obs = self.frames[idx].flatten(1, 2)
        nxt = self.frames[idx + ENVS].flatten(1, 2)
        return obs, self.act[i], self.rew[i], nxt, (~self.done[i]).float()


def random_shift(x, pad=4):
    n, c, h, w = x.shape
    x = F.pad(x.float(), (pad,) * 4, mode="replicate")
    eps = 1.0 / (h + 2 * pad)
    ar = torch.linspace(-1 + eps, 1 - eps, h + 2 * pad, device=x.device)[:h]
    grid = torch.stack([ar[None, :].expand(h, h), ar[:, None].expand(h, h)], -1)[None].repeat(n, 1, 1, 1)
    shift = torch.randint(0, 2 * pad + 1, (n, 1, 1, 2), device=x.device).float() * 2 / (h + 2 * pad)
    return F.grid_sample(x, grid + shift, padding_mode="zeros", align_corners=False)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        f = FILTERS
        self.net = nn.Sequential(nn.Conv2d(3 * STACK, f, 3, 2), nn.ReLU(), nn.Conv2d(f, f, 3), nn.ReLU(),
                                 nn.Conv2d(f, f, 3), nn.ReLU(), nn.Conv2d(f, f, 3), nn.ReLU())
        self.dim = f * 35 * 35

    def forward(self, x):
        return self.net(x / 255.0 - 0.5).flatten(1)


def mlp(i, o):
    return nn.Sequential(nn.Linear(i, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, o))


class Actor(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(dim, FEAT), nn.LayerNorm(FEAT), nn.Tanh())
        self.net = mlp(FEAT, 2 * ACT)

    def forward(self, h):
        mu, ls = self.net(self.trunk(h)).chunk(2, -1)
        std = (-5 + 3.5 * (torch.tanh(ls) + 1)).exp()
        dist = torch.distributions.Normal(mu, std)
        u = dist.rsample()
        a = torch.tanh(u)
        logp = (dist.log_prob(u) - torch.log(1 - a.pow(2) + 1e-6)).sum(-1)
        return a, logp


class Critic(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(dim, FEAT), nn.LayerNorm(FEAT), nn.Tanh())
        self.q1, self.q2 = mlp(FEAT + ACT, 1), mlp(FEAT + ACT, 1)

    def forward(self, h, a):
        x = torch.cat([self.trunk(h), a], -1)
        return self.q1(x).squeeze(-1), self.q2(x).squeeze(-1)


enc = Encoder().to(DEVICE)
actor, critic = Actor(enc.dim).to(DEVICE), Critic(enc.dim).to(DEVICE)
enc_t, critic_t = copy.deepcopy(enc), copy.deepcopy(critic)
log_alpha = torch.tensor(-2.3, device=DEVICE, requires_grad=True)
opt_actor = torch.optim.Adam(actor.parameters(), lr=1e-4)
opt_critic = torch.optim.Adam([*enc.parameters(), *critic.parameters()], lr=1e-4)
opt_alpha = torch.optim.Adam([log_alpha], lr=1e-4, betas=(0.5, 0.999))

env, memory = FakeEnv(ENVS), Replay()
frame = env.render()
for _ in range(12):  # random warm-up
    a = torch.rand(ENVS, ACT, device=DEVICE) * 2 - 1
    new, r = env.step(a)
    memory.add(frame, a, r)
    frame = new
print("replay ready", torch.cuda.memory_allocated())

for it in range(UPDATES):
    with torch.no_grad():
        stack = frame.repeat(1, STACK, 1, 1).float()
        a, _ = actor(enc(stack))
        new, r = env.step(a)
        memory.add(frame, a, r)
        frame = new
    obs, act, rew, nxt, mask = memory.sample(BATCH)
    with torch.no_grad():
        target = 0
        for _ in range(2):  # average over two augmentations
            hn = enc(random_shift(nxt))
            an, lp = actor(hn)
            q1, q2 = critic_t(enc_t(random_shift(nxt)), an)
            target = target + 0.5 * (rew + GAMMA * mask * (torch.min(q1, q2) - log_alpha.exp() * lp))
    lc = 0
    for _ in range(2):
        h = enc(random_shift(obs))
        q1, q2 = critic(h, act)
        lc = lc + F.mse_loss(q1, target) + F.mse_loss(q2, target)
    opt_critic.zero_grad(set_to_none=True)
    lc.backward()
    opt_critic.step()

    h = h.detach()
    pi, lp = actor(h)
    la = (log_alpha.exp().detach() * lp - torch.min(*critic(h, pi))).mean()
    opt_actor.zero_grad(set_to_none=True)
    la.backward()
    opt_actor.step()
    l_alpha = (log_alpha.exp() * (-lp.detach() + ACT)).mean()
    opt_alpha.zero_grad()
    l_alpha.backward()
    opt_alpha.step()
    with torch.no_grad():
        for net, tgt in ((enc, enc_t), (critic, critic_t)):
            for p, q in zip(net.parameters(), tgt.parameters()):
                q.lerp_(p, TAU)
    print(f"update {it} critic {lc.item():.4f} actor {la.item():.4f} alpha {log_alpha.exp().item():.4f} R {r.mean().item():.3f}")

print("max_memory_allocated", torch.cuda.max_memory_allocated())
print("max_memory_reserved", torch.cuda.max_memory_reserved())
