"""CleanRL-flavoured PPO with a made-up vectorised env living on the CPU."""
import numpy as np
import torch
import torch.nn as nn
from torch.distributions.categorical import Categorical


class Env:
    def __init__(self, n):
        self.n, self.rng = n, np.random.default_rng(1)

    def reset(self):
        return self.rng.integers(0, 255, (self.n, 4, 84, 84), dtype=np.uint8)

    def step(self, action):
        return self.reset(), self.rng.normal(size=self.n).astype(np.float32), self.rng.random(self.n) < 0.01


def layer_init(layer, std=np.sqrt(2), bias_const=0.0):
    torch.nn.init.orthogonal_(layer.weight, std)
    torch.nn.init.constant_(layer.bias, bias_const)
    return layer


class Agent(nn.Module):
    def __init__(self, n_act=18):
        super().__init__()
        self.network = nn.Sequential(
            layer_init(nn.Conv2d(4, 64, 8, stride=4)), nn.ReLU(),
            layer_init(nn.Conv2d(64, 128, 4, stride=2)), nn.ReLU(),
            layer_init(nn.Conv2d(128, 128, 3, stride=1)), nn.ReLU(), nn.Flatten(),
            layer_init(nn.Linear(128 * 7 * 7, 1024)), nn.ReLU())
        self.actor = layer_init(nn.Linear(1024, n_act), std=0.01)
        self.critic = layer_init(nn.Linear(1024, 1), std=1)

    def get_value(self, x):
        return self.critic(self.network(x / 255.0))

    def get_action_and_value(self, x, action=None):
        hidden = self.network(x / 255.0)
        probs = Categorical(logits=self.actor(hidden))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(hidden)


num_envs, num_steps, n_mb, epochs = 64, 32, 4, 2
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
envs = Env(num_envs)
agent = Agent().to(device)
optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
obs = torch.zeros((num_steps, num_envs, 4, 84, 84)).to(device)
actions = torch.zeros((num_steps, num_envs)).to(device)
logprobs = torch.zeros((num_steps, num_envs)).to(device)
rewards = torch.zeros((num_steps, num_envs)).to(device)
dones = torch.zeros((num_steps, num_envs)).to(device)
values = torch.zeros((num_steps, num_envs)).to(device)
next_obs = torch.Tensor(envs.reset()).to(device)
next_done = torch.zeros(num_envs).to(device)

for update in range(1):
    optimizer.param_groups[0]["lr"] = (1.0 - update / 10) * 2.5e-4
    for step in range(num_steps):
        obs[step] = next_obs
        dones[step] = next_done
        with torch.no_grad():
            action, logprob, _, value = agent.get_action_and_value(next_obs)
            values[step] = value.flatten()
        actions[step] = action
        logprobs[step] = logprob
        o, r, d = envs.step(action.cpu().numpy())
        rewards[step] = torch.tensor(r).to(device).view(-1)
        next_obs, next_done = torch.Tensor(o).to(device), torch.Tensor(d).to(device)
    with torch.no_grad():
        next_value = agent.get_value(next_obs).reshape(1, -1)
        advantages = torch.zeros_like(rewards).to(device)
        lastgaelam = 0
        for t in reversed(range(num_steps)):
            if t == num_steps - 1:
                nextnonterminal, nextvalues = 1.0 - next_done, next_value
            else:
                nextnonterminal, nextvalues = 1.0 - dones[t + 1], values[t + 1]
            delta = rewards[t] + 0.99 * nextvalues * nextnonterminal - values[t]
            advantages[t] = lastgaelam = delta + 0.99 * 0.95 * nextnonterminal * lastgaelam
        returns = advantages + values
    b_obs = obs.reshape((-1, 4, 84, 84))
    b_logprobs, b_actions = logprobs.reshape(-1), actions.reshape(-1)
    b_adv, b_ret, b_val = advantages.reshape(-1), returns.reshape(-1), values.reshape(-1)
    b_inds = np.arange(num_envs * num_steps)
    mb = len(b_inds) // n_mb
    for epoch in range(epochs):
        np.random.shuffle(b_inds)
        for start in range(0, len(b_inds), mb):
            idx = b_inds[start:start + mb]
            _, newlogprob, entropy, newvalue = agent.get_action_and_value(b_obs[idx], b_actions.long()[idx])
            logratio = newlogprob - b_logprobs[idx]
            ratio = logratio.exp()
            with torch.no_grad():
                approx_kl = ((ratio - 1) - logratio).mean()
                clipfrac = ((ratio - 1.0).abs() > 0.2).float().mean().item()
            adv = b_adv[idx]
            adv = (adv - adv.mean()) / (adv.std() + 1e-8)
            pg_loss = torch.max(-adv * ratio, -adv * torch.clamp(ratio, 0.8, 1.2)).mean()
            newvalue = newvalue.view(-1)
            v_clipped = b_val[idx] + torch.clamp(newvalue - b_val[idx], -0.2, 0.2)
            v_loss = 0.5 * torch.max((newvalue - b_ret[idx]) ** 2, (v_clipped - b_ret[idx]) ** 2).mean()
            loss = pg_loss - 0.01 * entropy.mean() + v_loss * 0.5
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
    y_pred, y_true = b_val.cpu().numpy(), b_ret.cpu().numpy()
    var_y = np.var(y_true)
    print("update", update, "ev", np.nan if var_y == 0 else 1 - np.var(y_true - y_pred) / var_y, "kl", approx_kl.item())
