#!/usr/bin/env python3
"""mini-dreamer (v2 flavoured): RSSM world model + actor/critic in imagination, pixels 64x64, everything on the GPU."""
import time
from types import SimpleNamespace

import torch
import torch.distributions as td
import torch.nn as nn
import torch.nn.functional as F

cfg = SimpleNamespace(
    capacity=60_000, batch=64, seq=50, horizon=15,
    deter=1024, stoch=32, classes=32, hidden=1024, embed=1536, depth=48,
    act_dim=6, gamma=0.99, lam=0.95, kl_balance=0.8, free_nats=1.0, kl_scale=1.0,
    wm_lr=3e-4, actor_lr=8e-5, critic_lr=8e-5, ent=3e-3, tau=0.02,
    prefill=2500, train_steps=8, envs=16, seed=3,
)
dev = "cuda:0"
torch.manual_seed(cfg.seed)
torch.set_default_device(dev)


# ---------------------------------------------------------------- toy env
class BatchedPointEnv:
    """N balls in a box, drawn as blobs into 64x64 RGB frames. Reward: closeness to the target."""

    def __init__(self, n):
        self.n = n
        g = torch.linspace(-1, 1, 64)
        self.yy, self.xx = torch.meshgrid(g, g, indexing="ij")
        self.reset()

    def reset(self):
        self.pos = torch.rand(self.n, 2) * 2 - 1
        self.vel = torch.zeros(self.n, 2)
        self.goal = torch.rand(self.n, 2) * 2 - 1
        self.t = 0
        return self.render()

    def render(self):
        def blob(p):
            d = (self.xx - p[:, 0, None, None]) ** 2 + (self.yy - p[:, 1, None, None]) ** 2
            return torch.exp(-d / 0.01)
        img = torch.stack([blob(self.pos), blob(self.goal), 0.2 * torch.ones(self.n, 64, 64)], 1)
        return (img * 255).to(torch.uint8)

    def step(self, a):
        self.vel = 0.9 * self.vel + 0.1 * a[:, :2].clamp(-1, 1)
        self.pos = (self.pos + 0.1 * self.vel).clamp(-1, 1)
        self.t += 1
        r = 1 - (self.pos - self.goal).norm(dim=-1)
        done = torch.full((self.n,), self.t >= 200)
        obs = self.reset() if self.t >= 200 else self.render()
        return obs, r, done


class Replay:
    """Per-env ring buffers: (T, N, ...) on the GPU, uint8 frames."""

    def __init__(self, capacity, n):
        self.T, self.n = capacity // n, n
        self.obs = torch.zeros(self.T, n, 3, 64, 64, dtype=torch.uint8)
        self.act = torch.zeros(self.T, n, cfg.act_dim)
        self.rew = torch.zeros(self.T, n)
        self.cont = torch.ones(self.T, n)
        self.first = torch.zeros(self.T, n)
        self.i, self.full = 0, False

    def add(self, obs, act, rew, done, first):
        i = self.i
        self.obs[i], self.act[i], self.rew[i] = obs, act, rew
        self.cont[i], self.first[i] = 1 - done.float(), first.float()
        self.i = (i + 1) % self.T
        self.full |= self.i == 0

    def __len__(self):
        return (self.T if self.full else self.i) * self.n

    def sample(self, b, l):
        hi = (self.T if self.full else self.i) - l
        t0 = torch.randint(0, hi, (b,))
        e = torch.randint(0, self.n, (b,))
        idx = t0[None] + torch.arange(l)[:, None]
        e = e[None].expand_as(idx)
        obs = self.obs[idx, e].float() / 255.0 - 0.5
        return obs, self.act[idx, e], self.rew[idx, e], self.cont[idx, e], self.first[idx, e]


# ---------------------------------------------------------------- networks
def mlp(i, o, h=cfg.hidden, n=3):
    layers = []
    for _ in range(n):
        layers += [nn.Linear(i, h), nn.LayerNorm(h), nn.SiLU()]
        i = h
    return nn.Sequential(*layers, nn.Linear(i, o))


class Encoder(nn.Module):
    def __init__(self, d=cfg.depth):
        super().__init__()
        c = [3, d, 2 * d, 4 * d, 8 * d]
        self.net = nn.Sequential(*[m for a, b in zip(c[:-1], c[1:]) for m in (nn.Conv2d(a, b, 4, 2), nn.ELU())])
        self.out = nn.Linear(8 * d * 4, cfg.embed)

    def forward(self, x):
        lead = x.shape[:-3]
        return self.out(self.net(x.reshape(-1, 3, 64, 64)).flatten(1)).reshape(*lead, -1)


class Decoder(nn.Module):
    def __init__(self, feat, d=cfg.depth):
        super().__init__()
        self.fc = nn.Linear(feat, 32 * d)
        self.net = nn.Sequential(
            nn.ConvTranspose2d(32 * d, 4 * d, 5, 2), nn.ELU(),
            nn.ConvTranspose2d(4 * d, 2 * d, 5, 2), nn.ELU(),
            nn.ConvTranspose2d(2 * d, d, 6, 2), nn.ELU(),
            nn.ConvTranspose2d(d, 3, 6, 2))

    def forward(self, f):
        lead = f.shape[:-1]
        x = self.fc(f).reshape(-1, 32 * cfg.depth, 1, 1)
        return self.net(x).reshape(*lead, 3, 64, 64)


class RSSM(nn.Module):
    def __init__(self):
        super().__init__()
        z = cfg.stoch * cfg.classes
        self.inp = nn.Sequential(nn.Linear(z + cfg.act_dim, cfg.hidden), nn.LayerNorm(cfg.hidden), nn.SiLU())
        self.cell = nn.GRUCell(cfg.hidden, cfg.deter)
        self.prior_net = mlp(cfg.deter, z, n=1)
        self.post_net = mlp(cfg.deter + cfg.embed, z, n=1)

    def initial(self, b):
        return torch.zeros(b, cfg.deter), torch.zeros(b, cfg.stoch * cfg.classes)

    def dist(self, logits):
        logits = logits.unflatten(-1, (cfg.stoch, cfg.classes))
        probs = 0.99 * logits.softmax(-1) + 0.01 / cfg.classes
        return td.Independent(td.OneHotCategoricalStraightThrough(probs=probs, validate_args=False), 1, validate_args=False)

    def img_step(self, h, z, a):
        h = self.cell(self.inp(torch.cat([z, a], -1)), h)
        logits = self.prior_net(h)
        return h, self.dist(logits).rsample().flatten(-2), logits

    def obs_step(self, h, z, a, emb, first):
        keep = (1 - first)[:, None]
        h = self.cell(self.inp(torch.cat([z * keep, a * keep], -1)), h * keep)
        prior = self.prior_net(h)
        post = self.post_net(torch.cat([h, emb], -1))
        return h, self.dist(post).rsample().flatten(-2), prior, post

    def observe(self, emb, act, first):
        h, z = self.initial(emb.shape[1])
        out = []
        for t in range(emb.shape[0]):
            a = act[t - 1] if t else torch.zeros_like(act[0])
            h, z, prior, post = self.obs_step(h, z, a, emb[t], first[t])
            out.append((h, z, prior, post))
        return [torch.stack(x) for x in zip(*out)]


class Actor(nn.Module):
    def __init__(self, feat):
        super().__init__()
        self.net = mlp(feat, 2 * cfg.act_dim, n=4)

    def forward(self, f):
        mean, std = self.net(f).chunk(2, -1)
        return td.Independent(td.Normal(torch.tanh(mean), 2 * torch.sigmoid(std / 2) + 0.1), 1)


def lambda_return(rew, val, disc, boot):
    nxt = torch.cat([val[1:], boot[None]])
    inp = rew + disc * nxt * (1 - cfg.lam)
    last, out = boot, []
    for t in reversed(range(len(rew))):
        last = inp[t] + disc[t] * cfg.lam * last
        out.append(last)
    return torch.stack(out[::-1])


feat_dim = cfg.deter + cfg.stoch * cfg.classes
enc, dec, rssm = Encoder(), Decoder(feat_dim), RSSM()
rew_head, cont_head = mlp(feat_dim, 1), mlp(feat_dim, 1)
actor, critic, critic_tgt = Actor(feat_dim), mlp(feat_dim, 1), mlp(feat_dim, 1)
critic_tgt.load_state_dict(critic.state_dict())
critic_tgt.requires_grad_(False)
world = nn.ModuleList([enc, dec, rssm, rew_head, cont_head])

wm_opt = torch.optim.AdamW(world.parameters(), lr=cfg.wm_lr, eps=1e-5, weight_decay=1e-6)
actor_opt = torch.optim.AdamW(actor.parameters(), lr=cfg.actor_lr, eps=1e-5, weight_decay=1e-6)
critic_opt = torch.optim.AdamW(critic.parameters(), lr=cfg.critic_lr, eps=1e-5, weight_decay=1e-6)


def report(tag):
    print(f"{tag:<18s} max_alloc {torch.cuda.max_memory_allocated() / 1e9:6.2f} GB   "
          f"max_reserved {torch.cuda.max_memory_reserved() / 1e9:6.2f} GB", flush=True)


def train_world(batch):
    obs, act, rew, cont, first = batch
    h, z, prior, post = rssm.observe(enc(obs), act, first)
    feat = torch.cat([h, z], -1)
    recon = 0.5 * (dec(feat) - obs).pow(2).sum((-3, -2, -1)).mean()
    rloss = 0.5 * (rew_head(feat).squeeze(-1) - rew).pow(2).mean()
    closs = F.binary_cross_entropy_with_logits(cont_head(feat).squeeze(-1), cont)
    kl_l = td.kl_divergence(rssm.dist(post.detach()), rssm.dist(prior)).mean()
    kl_r = td.kl_divergence(rssm.dist(post), rssm.dist(prior.detach())).mean()
    kl = cfg.kl_balance * kl_l.clamp(min=cfg.free_nats) + (1 - cfg.kl_balance) * kl_r.clamp(min=cfg.free_nats)
    loss = recon + rloss + closs + cfg.kl_scale * kl
    wm_opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(world.parameters(), 100.0)
    wm_opt.step()
    return h.detach(), z.detach(), dict(wm=loss.item(), recon=recon.item(), rew=rloss.item(), kl=kl.item())


def train_behaviour(h, z):
    h, z = h.flatten(0, 1), z.flatten(0, 1)
    world.requires_grad_(False)
    feats, ents = [torch.cat([h, z], -1)], []
    for _ in range(cfg.horizon):
        pi = actor(feats[-1].detach())
        a = pi.rsample()
        h, z, _ = rssm.img_step(h, z, a)
        feats.append(torch.cat([h, z], -1))
        ents.append(pi.entropy())
    feats = torch.stack(feats)
    rew = rew_head(feats[1:]).squeeze(-1)
    disc = cfg.gamma * cont_head(feats[1:]).squeeze(-1).sigmoid()
    critic.requires_grad_(False)
    val = critic_tgt(feats).squeeze(-1)
    ret = lambda_return(rew, val[1:], disc, val[-1])
    weight = torch.cumprod(torch.cat([torch.ones_like(disc[:1]), disc[:-1]]), 0).detach()
    actor_loss = -(weight * (ret + cfg.ent * torch.stack(ents))).mean()
    actor_opt.zero_grad()
    actor_loss.backward()
    nn.utils.clip_grad_norm_(actor.parameters(), 100.0)
    actor_opt.step()
    critic.requires_grad_(True)
    world.requires_grad_(True)

    v = critic(feats[:-1].detach()).squeeze(-1)
    critic_loss = 0.5 * (weight * (v - ret.detach()).pow(2)).mean()
    critic_opt.zero_grad()
    critic_loss.backward()
    nn.utils.clip_grad_norm_(critic.parameters(), 100.0)
    critic_opt.step()
    with torch.no_grad():
        for p, q in zip(critic.parameters(), critic_tgt.parameters()):
            q.lerp_(p, cfg.tau)
    return dict(actor=actor_loss.item(), critic=critic_loss.item(), ret=ret.mean().item())


@torch.no_grad()
def act_in_env(env, buf, obs, state, steps):
    total = 0.0
    h, z, a, first = state
    for _ in range(steps):
        emb = enc(obs.float() / 255.0 - 0.5)
        h, z, _, _ = rssm.obs_step(h, z, a, emb, first)
        a = actor(torch.cat([h, z], -1)).sample().clamp(-1, 1)
        nxt, r, done = env.step(a)
        buf.add(obs, a, r, done, first)
        obs, first = nxt, done.float()
        total += r.mean().item()
    return obs, (h, z, a, first), total / steps


def main():
    env, buf = BatchedPointEnv(cfg.envs), Replay(cfg.capacity, cfg.envs)
    report("replay + models")
    obs, first = env.reset(), torch.ones(cfg.envs)
    while len(buf) < cfg.prefill:
        a = torch.rand(cfg.envs, cfg.act_dim) * 2 - 1
        nxt, r, done = env.step(a)
        buf.add(obs, a, r, done, first)
        obs, first = nxt, done.float()
    state = (*rssm.initial(cfg.envs), torch.zeros(cfg.envs, cfg.act_dim), first)
    report("prefill done")
    for step in range(cfg.train_steps):
        t = time.time()
        obs, state, avg_r = act_in_env(env, buf, obs, state, 20)
        h, z, m = train_world(buf.sample(cfg.batch, cfg.seq))
        m |= train_behaviour(h, z)
        print(f"step {step} ({time.time() - t:.2f}s) env_r {avg_r:.3f} " + " ".join(f"{k} {v:.4f}" for k, v in m.items()))
        report(f"after step {step}")
    print("torch.cuda.max_memory_allocated()", torch.cuda.max_memory_allocated())
    print("torch.cuda.max_memory_reserved()", torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    main()
