"""Whole-step CUDA graph, as in the PyTorch docs (side-stream warm-up, static inputs), CUDA events for timing."""
import torch

N, D_in, H, D_out = 2048, 2048, 4096, 512
model = torch.nn.Sequential(torch.nn.Linear(D_in, H), torch.nn.Dropout(p=0.2), torch.nn.GELU(), torch.nn.Linear(H, H), torch.nn.GELU(),
                            torch.nn.Linear(H, D_out), torch.nn.Dropout(p=0.1)).cuda()
loss_fn = torch.nn.MSELoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
static_input = torch.randn(N, D_in, device="cuda")
static_target = torch.randn(N, D_out, device="cuda")
s = torch.cuda.Stream()
s.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(s):
    for i in range(3):
        optimizer.zero_grad(set_to_none=True)
        y_pred = model(static_input)
        loss = loss_fn(y_pred, static_target)
        loss.backward()
        optimizer.step()
torch.cuda.current_stream().wait_stream(s)
g = torch.cuda.CUDAGraph()
optimizer.zero_grad(set_to_none=True)
with torch.cuda.graph(g):
    static_y_pred = model(static_input)
    static_loss = loss_fn(static_y_pred, static_target)
    static_loss.backward()
    optimizer.step()
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
start.record()
for data, target in zip([torch.rand_like(static_input) for _ in range(5)], [torch.randn_like(static_target) for _ in range(5)]):
    static_input.copy_(data)
    static_target.copy_(target)
    g.replay()
end.record()
torch.cuda.synchronize()
print(static_loss.item(), "ms per step", start.elapsed_time(end) / 5, torch.cuda.max_memory_reserved() // 2**20)
