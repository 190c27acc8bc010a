"""Hand-made data parallelism (flattened all_reduce of gradients) or DDP + ZeroRedundancyOptimizer."""
import os
import sys
import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from transformers import BertConfig, BertForMaskedLM

mode = sys.argv[1] if len(sys.argv) > 1 else "manual"


def average_gradients(model, world):
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    flat = _flatten_dense_tensors(grads)
    dist.all_reduce(flat, op=dist.ReduceOp.SUM)
    flat /= world
    for g, new in zip(grads, _unflatten_dense_tensors(flat, grads)):
        g.copy_(new)


def main():
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", local)
    torch.manual_seed(rank)
    cfg = BertConfig(vocab_size=30522, hidden_size=1024, num_hidden_layers=12, num_attention_heads=16,
                     intermediate_size=4096)
    model = BertForMaskedLM(cfg).to(device)
    if mode == "manual":
        for p in model.parameters():
            dist.broadcast(p.data, src=0)
        for b in model.buffers():
            dist.broadcast(b, src=0)
        opt = torch.optim.Adam(model.parameters(), lr=1e-4)
    else:
        model = DDP(model, device_ids=[local])
        opt = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=1e-4,
                                      parameters_as_bucket_view=(mode == "zero_view"))
    print(f"rank {rank} setup {torch.cuda.memory_allocated()}")
    g = torch.Generator().manual_seed(rank)
    model.train()
    for step in range(6):
        n = 256 if rank == 0 else 224  # ranks see different lengths
        ids = torch.randint(5, 30000, (8, n), generator=g)
        labels = torch.where(torch.rand(ids.shape, generator=g) < 0.15, ids, torch.tensor(-100))
        ids = torch.where(labels != -100, torch.tensor(103), ids)
        ids, labels = ids.to(device), labels.to(device)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        if mode == "manual":
            average_gradients(model, world)
        opt.step()
        opt.zero_grad(set_to_none=(mode != "manual"))
        metrics = [None] * world
        dist.all_gather_object(metrics, {"rank": rank, "loss": loss.item(), "tokens": ids.numel()})
        if rank == 0:
            print(f"step {step}", metrics)
    print(f"rank {rank} {mode} max_memory_allocated {torch.cuda.max_memory_allocated()} "
          f"max_memory_reserved {torch.cuda.max_memory_reserved()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
