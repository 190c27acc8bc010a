"""A GPT from scratch under DeepSpeed's own engine: z01_deepspeed.py STAGE [bf16|fp16|fp32] [--offload] [--accumulate N] [--clip]"""
import argparse

import deepspeed
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("stage", type=int)
parser.add_argument("dtype", nargs="?", default="bf16")
parser.add_argument("--offload", action="store_true")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--clip", type=float, default=0.0)
parser.add_argument("--no-overlap", action="store_true")
parser.add_argument("--bucket", type=float, default=5e8)
parser.add_argument("--torch-adam", action="store_true")
args = parser.parse_args()


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.heads = heads

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocab=32000, width=1024, depth=10, heads=16, length=512):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, ids, labels):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


adam = {"lr": 3e-4, "weight_decay": 0.1}
if args.torch_adam:
    adam["torch_adam"] = True
config = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": args.accumulate,
    "optimizer": {"type": "AdamW", "params": adam},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    "zero_optimization": {
        "stage": args.stage,
        "overlap_comm": not args.no_overlap,
        "reduce_bucket_size": int(args.bucket),
        "allgather_bucket_size": int(args.bucket),
    },
    "gradient_clipping": args.clip,
    "zero_allow_untested_optimizer": True,
}
if args.dtype != "fp32":
    config[args.dtype] = {"enabled": True}
if args.offload:
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
torch.manual_seed(0)
model = GPT()
engine, optimizer, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for step in range(4 * args.accumulate):
    ids = torch.randint(0, 32000, (4, 513))
    ids = ids.to(engine.device)
    loss = engine(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    engine.backward(loss)
    engine.step()
    if engine.local_rank == 0:
        print(step, loss.item(), torch.cuda.max_memory_allocated() >> 20)
