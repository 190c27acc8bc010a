import numpy as np
import torch
from torch.autograd import grad

# Physics-informed network for the 2D+time Navier-Stokes "Taylor-Green" problem,
# Adam warm-up followed by L-BFGS with strong Wolfe line search.
np.random.seed(0)
torch.manual_seed(0)
torch.set_default_dtype(torch.float32)
torch.set_default_device("cuda")

NU = 0.01
N_F, N_B, N_0 = 60000, 8000, 8000


class PINN(torch.nn.Module):
    def __init__(self, width=256, depth=6):
        super().__init__()
        sizes = [3] + [width] * depth + [3]
        self.linears = torch.nn.ModuleList([torch.nn.Linear(a, b) for a, b in zip(sizes[:-1], sizes[1:])])
        self.scale = torch.nn.Parameter(torch.ones(depth))
        for l in self.linears:
            torch.nn.init.xavier_normal_(l.weight)
            torch.nn.init.zeros_(l.bias)

    def forward(self, x, y, t):
        h = torch.cat([x, y, t], 1)
        for i, l in enumerate(self.linears[:-1]):
            h = torch.tanh(self.scale[i] * l(h))
        return self.linears[-1](h)


def d(f, x):
    return grad(f, x, grad_outputs=torch.ones_like(f), create_graph=True)[0]


def exact(x, y, t):
    e = torch.exp(-2 * NU * t)
    u = -torch.cos(x) * torch.sin(y) * e
    v = torch.sin(x) * torch.cos(y) * e
    return u, v


def sample(n):
    lo, hi = np.array([0, 0, 0.0]), np.array([2 * np.pi, 2 * np.pi, 1.0])
    pts = lo + (hi - lo) * np.random.rand(n, 3)
    pts = torch.tensor(pts, dtype=torch.float32)
    return [pts[:, i:i + 1].clone().requires_grad_(True) for i in range(3)]


net = PINN()
xf, yf, tf = sample(N_F)
x0, y0, _ = sample(N_0)
t0 = torch.zeros_like(x0)
xb, yb, tb = sample(N_B)
with torch.no_grad():
    xb[: N_B // 2] = 0.0
    u0, v0 = exact(x0, y0, t0)
    ub, vb = exact(xb, yb, tb)


def residual():
    out = net(xf, yf, tf)
    u, v, p = out[:, 0:1], out[:, 1:2], out[:, 2:3]
    u_x, u_y, u_t = d(u, xf), d(u, yf), d(u, tf)
    v_x, v_y, v_t = d(v, xf), d(v, yf), d(v, tf)
    p_x, p_y = d(p, xf), d(p, yf)
    u_xx, u_yy = d(u_x, xf), d(u_y, yf)
    v_xx, v_yy = d(v_x, xf), d(v_y, yf)
    f1 = u_t + u * u_x + v * u_y + p_x - NU * (u_xx + u_yy)
    f2 = v_t + u * v_x + v * v_y + p_y - NU * (v_xx + v_yy)
    f3 = u_x + v_y
    return (f1 ** 2).mean() + (f2 ** 2).mean() + (f3 ** 2).mean()


def total_loss():
    o0 = net(x0, y0, t0)
    ob = net(xb, yb, tb)
    data = ((o0[:, :1] - u0) ** 2 + (o0[:, 1:2] - v0) ** 2).mean()
    bc = ((ob[:, :1] - ub) ** 2 + (ob[:, 1:2] - vb) ** 2).mean()
    return residual() + 10 * data + 10 * bc


adam = torch.optim.Adam(net.parameters(), lr=1e-3)
for k in range(4):
    adam.zero_grad()
    loss = total_loss()
    loss.backward()
    adam.step()
    print("adam", k, loss.item(), torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())

lbfgs = torch.optim.LBFGS(net.parameters(), lr=1.0, max_iter=5, max_eval=8, history_size=20,
                          line_search_fn="strong_wolfe")
calls = 0


def closure():
    global calls
    calls += 1
    lbfgs.zero_grad()
    l = total_loss()
    l.backward()
    return l


for k in range(2):
    l = lbfgs.step(closure)
    print("lbfgs", k, "evals", calls, float(l), torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
