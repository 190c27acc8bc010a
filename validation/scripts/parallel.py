"""Training under torch's own parallelisms on a device mesh; one rank of any world.

torchrun --nproc-per-node 8 parallel.py CASE
memest run --nproc-per-node 8 --nnodes 8 parallel.py CASE
python fake_rank.py --rank 0 --world 64 parallel.py CASE       # one real GPU

A case names the mesh and the schedule, as in `fsdp8`, `fsdp8.tp8`, `hsdp8x8`, `pp4.1f1b`,
`cp4`, `ep8`, joined by dots; `ckpt` adds activation checkpointing, `bf16` a cast of the model.
"""

from __future__ import annotations

import os
import re
import sys

import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.optim.optimizer import register_optimizer_step_post_hook

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH, BATCH = 32000, 2048, 16, 8, 1024, 4
STEPS = int(os.environ.get("STEPS", "4"))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (
            f(x).view(batch, length, -1, WIDTH // HEADS).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(out.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self, hidden: int = 4 * WIDTH) -> None:
        super().__init__()
        self.up, self.gate = (
            nn.Linear(WIDTH, hidden, bias=False),
            nn.Linear(WIDTH, hidden, bias=False),
        )
        self.down = nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Experts of which each rank of a group has a part; every token goes to one of them."""

    def __init__(self, group, num_experts: int = 16) -> None:
        super().__init__()
        self.group, self.num_experts = group, num_experts
        self.num_local = num_experts // dist.get_world_size(group)
        self.router = nn.Linear(WIDTH, num_experts, bias=False)
        self.local = nn.ModuleList(FeedForward(WIDTH) for _ in range(self.num_local))

    def forward(self, x):
        from torch.distributed._functional_collectives import all_to_all_single_autograd

        tokens = x.reshape(-1, WIDTH)
        weight = self.router(tokens).softmax(-1)[:, :1]
        size = dist.get_world_size(self.group)
        even = [len(tokens) // size] * size  # a balanced router
        sent = all_to_all_single_autograd(tokens, even, even, self.group)
        parts = sent.view(self.num_local, -1, WIDTH)
        out = torch.cat([f(part) for f, part in zip(self.local, parts, strict=True)])
        back = all_to_all_single_autograd(out, even, even, self.group)
        return (back * weight).view(x.shape)


class Block(nn.Module):
    def __init__(self, group=None) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention()
        self.mlp = Experts(group) if group else FeedForward()

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    """All layers, or those of one pipeline stage."""

    def __init__(self, layers=range(LAYERS), is_first=True, is_last=True, group=None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if is_first else None
        self.layers = nn.ModuleDict({str(n): Block(group) for n in layers})
        self.norm = nn.RMSNorm(WIDTH) if is_last else None
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False) if is_last else None

    def forward(self, x):
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        if self.head is not None:
            x = self.head(self.norm(x))
        return x


def sizes(case: str) -> dict[str, int]:
    """`hsdp8x4.tp2` -> replicate 8, shard 4, tp 2, in the order of a mesh."""
    found = {}
    for part in case.split("."):
        match = re.fullmatch(r"(hsdp|fsdp|tp|pp|cp|ep)(\d+)(?:x(\d+))?", part)
        if match and match[1] == "hsdp":
            found |= {"replicate": int(match[2]), "shard": int(match[3])}
        elif match:
            found[{"fsdp": "shard"}.get(match[1], match[1])] = int(match[2])
    order = ("pp", "replicate", "shard", "ep", "cp", "tp")
    return {name: found[name] for name in order if name in found}


def tensor_parallel(model: nn.Module, mesh) -> None:
    """Megatron's cut with sequence parallel and a sharded vocabulary."""
    if model.embedding is not None:
        parallelize_module(
            model.embedding,
            mesh,
            RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        )
    for layer in model.layers.values():
        parallelize_module(
            layer,
            mesh,
            {
                "attention_norm": SequenceParallel(),
                "attention": PrepareModuleInput(
                    input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
                ),
                "attention.q": ColwiseParallel(),
                "attention.k": ColwiseParallel(),
                "attention.v": ColwiseParallel(),
                "attention.o": RowwiseParallel(output_layouts=Shard(1)),
                "norm": SequenceParallel(),
                "mlp": PrepareModuleInput(
                    input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
                ),
                "mlp.up": ColwiseParallel(),
                "mlp.gate": ColwiseParallel(),
                "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
    if model.head is not None:
        parallelize_module(
            model,
            mesh,
            {
                "norm": SequenceParallel(),
                "head": ColwiseParallel(
                    input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
                ),
            },
        )


def start(model: nn.Module, case: list[str]) -> None:
    """Allocate what is left after sharding, and draw the weights."""
    model.to_empty(device="cuda")
    if "bf16" in case:
        model.to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02) if parameter.dim() > 1 else parameter.fill_(1)


def prepare(model: nn.Module, mesh, case: list[str]) -> nn.Module:
    names = mesh.mesh_dim_names
    if "tp" in names:
        tensor_parallel(model, mesh["tp"])
    if "ckpt" in case:
        for name, layer in model.layers.items():
            model.layers[name] = checkpoint_wrapper(layer)
    shards = tuple(name for name in ("replicate", "shard") if name in names)
    if shards:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.layers.values():
            fully_shard(layer, mesh=mesh[shards], mp_policy=policy)
        fully_shard(model, mesh=mesh[shards], mp_policy=policy)
    return model


def loss_of(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))


def main() -> None:
    torch.manual_seed(0)
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("nccl")
    case, dims = sys.argv[1].split("."), sizes(sys.argv[1])
    mesh = init_device_mesh("cuda", tuple(dims.values()), mesh_dim_names=tuple(dims))
    if "pp" in dims:
        pipeline(mesh, case)
    else:
        plain(mesh, case, dims)
    dist.destroy_process_group()


def plain(mesh, case: list[str], dims: dict[str, int]) -> None:
    group = mesh["ep"].get_group() if "ep" in dims else None
    with torch.device("meta"):
        model = Model(group=group)
    start(prepare(model, mesh, case), case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(STEPS):
        ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH), device="cuda")
        labels = ids.clone()
        if "cp" in dims:
            from torch.distributed.tensor.experimental import context_parallel

            buffers = [ids, labels]
            with context_parallel(mesh["cp"], buffers=buffers, buffer_seq_dims=[1, 1]):
                loss_of(model(ids), labels).backward()
        elif "tp" in dims:
            with loss_parallel():
                loss_of(model(ids), labels).backward()
        else:
            loss_of(model(ids), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


def pipeline(mesh, case: list[str]) -> None:
    from torch.distributed import pipelining

    name = next((part for part in case if part in SCHEDULES), "1f1b")
    stages_per_rank, num_micro_batches = (2 if name in LOOPED else 1), 8
    pp = mesh["pp"]
    size, rank = pp.size(), pp.get_local_rank()
    num_stages = size * stages_per_rank
    stages = []
    for n in range(stages_per_rank):
        index = rank + n * size
        if name == "zbv" and n:
            index = num_stages - 1 - rank
        layers = range(LAYERS)[index * LAYERS // num_stages : (index + 1) * LAYERS // num_stages]
        with torch.device("meta"):
            part = Model(layers, index == 0, index == num_stages - 1)
        start(prepare(part, mesh, case), case)
        dtype = (
            torch.bfloat16 if "bf16" in case or "shard" in mesh.mesh_dim_names else torch.float32
        )
        micro = 8 // num_micro_batches
        hidden = torch.empty(micro, LENGTH, WIDTH, device="meta", dtype=dtype)
        given = (
            torch.empty(micro, LENGTH, device="meta", dtype=torch.long) if index == 0 else hidden
        )
        last = torch.empty(micro, LENGTH, VOCABULARY, device="meta", dtype=dtype)
        out = last if index == num_stages - 1 else hidden
        for meta in (hidden, last):
            meta.requires_grad_()
        shapes = {} if "infer" in case else {"input_args": (given,), "output_args": (out,)}
        stages.append(
            pipelining.PipelineStage(
                part, index, num_stages, torch.device("cuda"), group=pp.get_group(), **shapes
            )
        )
    make = getattr(pipelining, SCHEDULES[name])
    schedule = make(
        stages if stages_per_rank > 1 else stages[0],
        n_microbatches=num_micro_batches,
        loss_fn=loss_of,
    )
    optimizer = torch.optim.AdamW([p for s in stages for p in s.submod.parameters()], lr=1e-4)
    is_last = any(stage.is_last for stage in stages)
    for _ in range(STEPS):
        ids = torch.randint(0, VOCABULARY, (8, LENGTH), device="cuda")
        given = (ids,) if any(stage.is_first for stage in stages) else ()
        losses: list = []
        schedule.step(*given, target=ids if is_last else None, losses=losses if is_last else None)
        optimizer.step()
        optimizer.zero_grad()


LOOPED = ("interleaved", "zb", "zbv")
SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zb": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
}

if __name__ == "__main__":
    register_optimizer_step_post_hook(lambda *_: torch.cuda.synchronize())  # as fake_rank.py does
    main()
