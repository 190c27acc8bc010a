"""Recurrent PPO with everything on the GPU.

The vectorised environment is a toy "catch" game rendered to 1x64x64 uint8 frames with
torch ops, so that rollouts never leave the device (in the spirit of CleanRL's ppo_atari_lstm).
"""
import random
import numpy as np
import torch
import torch.nn as nn
from torch.distributions.categorical import Categorical

seed = 1
num_envs = 256
num_steps = 64
num_minibatches = 4
update_epochs = 2
total_updates = 2
gamma, lam, clip, ent_coef, vf_coef = 0.99, 0.95, 0.1, 0.01, 0.5
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

random.seed(seed)
np.random.seed(seed)
torch.manual_seed(seed)


class Catch:
    def __init__(self, n, size=64):
        self.n, self.s = n, size
        self.row = torch.zeros(n, dtype=torch.long, device=device)
        self.col = torch.randint(0, size, (n,), device=device)
        self.pad = torch.full((n,), size // 2, device=device)
        self.arange = torch.arange(n, device=device)

    def render(self):
        f = torch.zeros(self.n, 1, self.s, self.s, dtype=torch.uint8, device=device)
        f[self.arange, 0, self.row, self.col] = 255
        for o in (-2, -1, 0, 1, 2):
            f[self.arange, 0, -1, (self.pad + o).clamp(0, self.s - 1)] = 128
        return f

    def step(self, a):
        self.pad = (self.pad + (a - 1) * 3).clamp(0, self.s - 1)
        self.row = self.row + 2
        done = self.row >= self.s - 1
        hit = (self.col - self.pad).abs() <= 2
        reward = done.float() * (hit.float() * 2 - 1)
        self.row = torch.where(done, torch.zeros_like(self.row), self.row)
        self.col = torch.where(done, torch.randint_like(self.col, self.s), self.col)
        return self.render(), reward, done.float()


def layer_init(layer, std=np.sqrt(2), bias=0.0):
    torch.nn.init.orthogonal_(layer.weight, std)
    torch.nn.init.constant_(layer.bias, bias)
    return layer


class Agent(nn.Module):
    def __init__(self, n_actions=3, hidden=256):
        super().__init__()
        self.network = nn.Sequential(
            layer_init(nn.Conv2d(1, 32, 8, stride=4)), nn.ReLU(),
            layer_init(nn.Conv2d(32, 64, 4, stride=2)), nn.ReLU(),
            layer_init(nn.Conv2d(64, 64, 3, stride=1)), nn.ReLU(),
            nn.Flatten(),
            layer_init(nn.Linear(64 * 4 * 4, 512)), nn.ReLU(),
        )
        self.lstm = nn.LSTM(512, hidden)
        for name, param in self.lstm.named_parameters():
            if "bias" in name:
                nn.init.constant_(param, 0)
            elif "weight" in name:
                nn.init.orthogonal_(param, 1.0)
        self.actor = layer_init(nn.Linear(hidden, n_actions), std=0.01)
        self.critic = layer_init(nn.Linear(hidden, 1), std=1)

    def get_states(self, x, lstm_state, done):
        hidden = self.network(x / 255.0)
        batch_size = lstm_state[0].shape[1]
        hidden = hidden.reshape((-1, batch_size, self.lstm.input_size))
        done = done.reshape((-1, batch_size))
        new_hidden = []
        for h, d in zip(hidden, done):
            h, lstm_state = self.lstm(
                h.unsqueeze(0),
                ((1.0 - d).view(1, -1, 1) * lstm_state[0], (1.0 - d).view(1, -1, 1) * lstm_state[1]),
            )
            new_hidden += [h]
        return torch.flatten(torch.cat(new_hidden), 0, 1), lstm_state

    def get_value(self, x, lstm_state, done):
        hidden, _ = self.get_states(x, lstm_state, done)
        return self.critic(hidden)

    def get_action_and_value(self, x, lstm_state, done, action=None):
        hidden, lstm_state = self.get_states(x, lstm_state, done)
        probs = Categorical(logits=self.actor(hidden))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(hidden), lstm_state


envs = Catch(num_envs)
agent = Agent().to(device)
optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)

obs = torch.zeros((num_steps, num_envs, 1, 64, 64), device=device)      # float storage like the reference
actions = torch.zeros((num_steps, num_envs), device=device)
logprobs = torch.zeros((num_steps, num_envs), device=device)
rewards = torch.zeros((num_steps, num_envs), device=device)
dones = torch.zeros((num_steps, num_envs), device=device)
values = torch.zeros((num_steps, num_envs), device=device)

next_obs = envs.render()
next_done = torch.zeros(num_envs, device=device)
next_lstm_state = (torch.zeros(1, num_envs, 256, device=device), torch.zeros(1, num_envs, 256, device=device))

for update in range(1, total_updates + 1):
    initial_lstm_state = (next_lstm_state[0].clone(), next_lstm_state[1].clone())
    for step in range(num_steps):
        obs[step] = next_obs
        dones[step] = next_done
        with torch.no_grad():
            action, logprob, _, value, next_lstm_state = agent.get_action_and_value(next_obs, next_lstm_state, next_done)
            values[step] = value.flatten()
        actions[step] = action
        logprobs[step] = logprob
        next_obs, rewards[step], next_done = envs.step(action)

    with torch.no_grad():
        next_value = agent.get_value(next_obs, next_lstm_state, next_done).reshape(1, -1)
        advantages = torch.zeros_like(rewards)
        lastgaelam = 0
        for t in reversed(range(num_steps)):
            nonterminal = 1.0 - (next_done if t == num_steps - 1 else dones[t + 1])
            nextvalues = next_value if t == num_steps - 1 else values[t + 1]
            delta = rewards[t] + gamma * nextvalues * nonterminal - values[t]
            advantages[t] = lastgaelam = delta + gamma * lam * nonterminal * lastgaelam
        returns = advantages + values

    b_obs = obs.reshape((-1, 1, 64, 64))
    b_logprobs, b_actions, b_dones = logprobs.reshape(-1), actions.reshape(-1), dones.reshape(-1)
    b_adv, b_ret, b_val = advantages.reshape(-1), returns.reshape(-1), values.reshape(-1)

    envsperbatch = num_envs // num_minibatches
    envinds = np.arange(num_envs)
    flatinds = np.arange(num_envs * num_steps).reshape(num_steps, num_envs)
    for epoch in range(update_epochs):
        np.random.shuffle(envinds)
        for start in range(0, num_envs, envsperbatch):
            mbenv = envinds[start:start + envsperbatch]
            mb = flatinds[:, mbenv].ravel()
            _, newlogprob, entropy, newvalue, _ = agent.get_action_and_value(
                b_obs[mb], (initial_lstm_state[0][:, mbenv], initial_lstm_state[1][:, mbenv]),
                b_dones[mb], b_actions.long()[mb])
            ratio = (newlogprob - b_logprobs[mb]).exp()
            adv = b_adv[mb]
            adv = (adv - adv.mean()) / (adv.std() + 1e-8)
            pg_loss = torch.max(-adv * ratio, -adv * torch.clamp(ratio, 1 - clip, 1 + clip)).mean()
            v = newvalue.view(-1)
            v_clipped = b_val[mb] + torch.clamp(v - b_val[mb], -clip, clip)
            v_loss = 0.5 * torch.max((v - b_ret[mb]) ** 2, (v_clipped - b_ret[mb]) ** 2).mean()
            loss = pg_loss - ent_coef * entropy.mean() + vf_coef * v_loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
        print(f"update {update} epoch {epoch} loss {loss.item():.4f} reward {rewards.mean().item():.4f}")
    print("peak", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
