# CleanRL-like DQN on fake 84x84x4 Atari frames; the replay buffer lives on the GPU.
import copy
import random
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim


@dataclass
class Args:
    seed: int = 1
    num_envs: int = 64
    buffer_size: int = 150_000
    batch_size: int = 2048
    gamma: float = 0.99
    n_actions: int = 18
    learning_rate: float = 1e-4
    updates: int = 8
    warmup_iters: int = 60
    train_frequency: int = 4
    tau: float = 0.005
    noise_eps: float = 0.05


class FakeAtari:
    """Vectorised environment that only returns random frames on the device."""

    def __init__(self, n, device):
        self.n, self.device = n, device
        self.stack = torch.zeros(n, 4, 84, 84, dtype=torch.uint8, device=device)

    def step(self, actions):
        frame = torch.randint(0, 256, (self.n, 1, 84, 84), dtype=torch.uint8, device=self.device)
        self.stack = torch.cat([self.stack[:, 1:], frame], dim=1)
        reward = torch.sign(torch.randn(self.n, device=self.device))
        done = torch.rand(self.n, device=self.device) < 0.01
        return self.stack, reward, done


class ReplayBuffer:
    def __init__(self, size, device):
        self.obs = torch.zeros((size, 4, 84, 84), dtype=torch.uint8, device=device)
        self.next_obs = torch.zeros((size, 4, 84, 84), dtype=torch.uint8, device=device)
        self.actions = torch.zeros((size,), dtype=torch.int64, device=device)
        self.rewards = torch.zeros((size,), device=device)
        self.dones = torch.zeros((size,), device=device)
        self.size, self.pos, self.full, self.device = size, 0, False, device

    def add(self, obs, next_obs, actions, rewards, dones):
        n = obs.shape[0]
        idx = (torch.arange(n, device=self.device) + self.pos) % self.size
        self.obs[idx] = obs
        self.next_obs[idx] = next_obs
        self.actions[idx] = actions
        self.rewards[idx] = rewards
        self.dones[idx] = dones.float()
        self.full = self.full or self.pos + n >= self.size
        self.pos = (self.pos + n) % self.size

    def sample(self, batch_size):
        high = self.size if self.full else self.pos
        idx = torch.randint(0, high, (batch_size,), device=self.device)
        return self.obs[idx], self.next_obs[idx], self.actions[idx], self.rewards[idx], self.dones[idx]


class DuelingQNetwork(nn.Module):
    def __init__(self, n_actions):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(4, 32, 8, stride=4), nn.ReLU(),
            nn.Conv2d(32, 64, 4, stride=2), nn.ReLU(),
            nn.Conv2d(64, 64, 3, stride=1), nn.ReLU(), nn.Flatten())
        self.value = nn.Sequential(nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 1))
        self.adv = nn.Sequential(nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, n_actions))

    def forward(self, x):
        h = self.encoder(x / 255.0)
        a = self.adv(h)
        return self.value(h) + a - a.mean(1, keepdim=True)


if __name__ == "__main__":
    args = Args()
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = True
    device = torch.device("cuda")

    env = FakeAtari(args.num_envs, device)
    q_network = DuelingQNetwork(args.n_actions).to(device)
    target_network = copy.deepcopy(q_network)
    for p in target_network.parameters():
        p.requires_grad = False
    optimizer = optim.Adam(q_network.parameters(), lr=args.learning_rate)
    rb = ReplayBuffer(args.buffer_size, device)

    obs = env.stack
    updates = 0
    it = 0
    while updates < args.updates:
        eps = max(args.noise_eps, 1.0 - it / 80)
        if random.random() < eps:
            actions = torch.randint(0, args.n_actions, (args.num_envs,), device=device)
        else:
            with torch.no_grad():
                actions = q_network(obs).argmax(dim=1)
        next_obs, rewards, dones = env.step(actions)
        rb.add(obs, next_obs, actions, rewards, dones)
        obs = next_obs
        it += 1

        if it > args.warmup_iters and it % args.train_frequency == 0:
            o, no, a, r, d = rb.sample(args.batch_size)
            with torch.no_grad():
                best = q_network(no).argmax(1, keepdim=True)           # double DQN
                target_max = target_network(no).gather(1, best).squeeze(1)
                td_target = r + args.gamma * target_max * (1 - d)
            old_val = q_network(o).gather(1, a[:, None]).squeeze(1)
            loss = F.smooth_l1_loss(old_val, td_target)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(q_network.parameters(), 10.0)
            optimizer.step()
            for tp, p in zip(target_network.parameters(), q_network.parameters()):
                tp.data.copy_(args.tau * p.data + (1.0 - args.tau) * tp.data)
            updates += 1
            print(f"iter {it} update {updates} loss {loss.item():.4f} q {old_val.mean().item():.3f} "
                  f"alloc {torch.cuda.max_memory_allocated()} reserved {torch.cuda.max_memory_reserved()}")

    print("max_memory_allocated", torch.cuda.max_memory_allocated())
    print("max_memory_reserved", torch.cuda.max_memory_reserved())
