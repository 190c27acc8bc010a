import argparse
import os
import torch
import torch.nn as nn
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook as powerSGD
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--hook", choices=["none", "bf16", "fp16", "powersgd"], default="bf16")
opts = parser.parse_args()


class LM(nn.Module):
    def __init__(self, v=33278, d=1024, h=1536):
        super().__init__()
        self.emb = nn.Embedding(v, d)
        self.rnn = nn.LSTM(d, h, 3, dropout=0.3, batch_first=True)
        self.proj = nn.Linear(h, d)
        self.out = nn.Linear(d, v)
        self.out.weight = self.emb.weight

    def forward(self, x, state=None):
        y, state = self.rnn(self.emb(x), state)
        return self.out(self.proj(y)), state


def main():
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    rank = dist.get_rank()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    net = DDP(LM().cuda(), device_ids=[int(os.environ["LOCAL_RANK"])], static_graph=False)
    if opts.hook == "powersgd":
        net.register_comm_hook(powerSGD.PowerSGDState(process_group=None, matrix_approximation_rank=4, start_powerSGD_iter=2), powerSGD.powerSGD_hook)
    elif opts.hook != "none":
        net.register_comm_hook(None, {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}[opts.hook])
    opt = torch.optim.SGD(net.parameters(), lr=5.0)
    state = None
    for i in range(6):
        batch = torch.randint(0, 33278, (48, 71)).cuda()
        logits, state = net(batch[:, :-1], state)
        state = tuple(s.detach() for s in state)
        loss = nn.functional.cross_entropy(logits.reshape(-1, logits.size(-1)), batch[:, 1:].reshape(-1))
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.25)
        opt.step()
        if rank == 0:
            print(i, float(loss))
    dist.destroy_process_group()


main()
