import os, contextlib
import torch, torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from transformers import RobertaConfig, RobertaForMaskedLM

dist.init_process_group(backend="nccl")
rank, world = dist.get_rank(), dist.get_world_size()
dev = torch.device("cuda", rank % torch.cuda.device_count())
torch.cuda.set_device(dev)
torch.manual_seed(1234)
cfg = RobertaConfig(vocab_size=50265, hidden_size=768, num_hidden_layers=10, num_attention_heads=12, max_position_embeddings=514, pad_token_id=1)
net = DistributedDataParallel(RobertaForMaskedLM(cfg).to(dev), device_ids=[dev.index], find_unused_parameters=False, bucket_cap_mb=50)
opt = ZeroRedundancyOptimizer(net.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-4, weight_decay=0.01)
torch.manual_seed(rank)
ACC = 3
for step in range(4):
    for micro in range(ACC):
        ids = torch.randint(5, 50265, (12, 256), device=dev)
        labels = torch.where(torch.rand(ids.shape, device=dev) < 0.15, ids, -100)
        ids = torch.where(labels != -100, torch.full_like(ids, 50264), ids)
        ctx = net.no_sync() if micro < ACC - 1 else contextlib.nullcontext()
        with ctx:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = net(input_ids=ids, labels=labels).loss / ACC
            loss.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    opt.step()
    opt.zero_grad(set_to_none=True)
    if rank == 0:
        print(step, loss.item() * ACC, torch.cuda.max_memory_allocated() // 2**20, flush=True)
dist.destroy_process_group()
