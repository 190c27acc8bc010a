import random
from collections import deque, namedtuple
from itertools import count
import math
import torch
import torch.nn as nn
import torch.optim as optim
import torch.nn.functional as F

random.seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu")
Transition = namedtuple('Transition', ('state', 'action', 'next_state', 'reward'))
STATE, N_ACTIONS, BATCH_SIZE, GAMMA, TAU = 8192, 64, 2048, 0.99, 0.005


class ReplayMemory(object):
    def __init__(self, capacity):
        self.memory = deque([], maxlen=capacity)

    def push(self, *args):
        self.memory.append(Transition(*args))

    def sample(self, batch_size):
        return random.sample(self.memory, batch_size)

    def __len__(self):
        return len(self.memory)


class Dueling(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1 = nn.Linear(STATE, 4096)
        self.l2 = nn.Linear(4096, 4096)
        self.a, self.v = nn.Linear(4096, N_ACTIONS), nn.Linear(4096, 1)

    def forward(self, x):
        x = F.relu(self.l2(F.relu(self.l1(x))))
        a = self.a(x)
        return self.v(x) + a - a.mean(1, keepdim=True)


policy_net, target_net = Dueling().to(device), Dueling().to(device)
target_net.load_state_dict(policy_net.state_dict())
optimizer = optim.AdamW(policy_net.parameters(), lr=1e-4, amsgrad=True)
memory = ReplayMemory(10000)

for _ in range(2200):       # the states stay on the GPU, one by one
    s = torch.randn(1, STATE, device=device)
    nxt = None if random.random() < 0.02 else torch.randn(1, STATE, device=device)
    memory.push(s, torch.tensor([[random.randrange(N_ACTIONS)]], device=device), nxt, torch.tensor([random.random()], device=device))


def optimize_model():
    transitions = memory.sample(BATCH_SIZE)
    batch = Transition(*zip(*transitions))
    non_final_mask = torch.tensor(tuple(map(lambda s: s is not None, batch.next_state)), device=device, dtype=torch.bool)
    non_final_next_states = torch.cat([s for s in batch.next_state if s is not None])
    state_batch, action_batch, reward_batch = torch.cat(batch.state), torch.cat(batch.action), torch.cat(batch.reward)
    q = policy_net(state_batch).gather(1, action_batch)
    nv = torch.zeros(BATCH_SIZE, device=device)
    with torch.no_grad():
        best = policy_net(non_final_next_states).argmax(1, keepdim=True)
        nv[non_final_mask] = target_net(non_final_next_states).gather(1, best).squeeze(1)
    expected = (nv * GAMMA) + reward_batch
    loss = nn.SmoothL1Loss()(q, expected.unsqueeze(1))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_value_(policy_net.parameters(), 100)
    optimizer.step()
    return loss.item()


state = torch.randn(1, STATE, device=device)
for t in count():
    eps = 0.05 + 0.85 * math.exp(-t / 10)
    if random.random() > eps:
        with torch.no_grad():
            action = policy_net(state).max(1).indices.view(1, 1)
    else:
        action = torch.tensor([[random.randrange(N_ACTIONS)]], device=device, dtype=torch.long)
    reward = float(action.item() % 3)
    nxt = torch.randn(1, STATE, device=device)
    memory.push(state, action, nxt, torch.tensor([reward], device=device))
    state = nxt
    print(t, optimize_model())
    td, pd = target_net.state_dict(), policy_net.state_dict()
    for key in pd:
        td[key] = pd[key] * TAU + td[key] * (1 - TAU)
    target_net.load_state_dict(td)
    if t >= 6:
        break
