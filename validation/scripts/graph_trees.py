"""Trainings with `torch.compile(mode="reduce-overhead")`: warm-up, captures and replays.

    python graph_trees.py KIND

After each step it prints the bytes allocated, at the peak, and reserved. graph_trees.json has them
of an H200 with torch 2.11.0 and transformers 5.17.0, and the same simulated.
"""

import sys
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

compiled = partial(torch.compile, mode="reduce-overhead")
normal = partial(torch.randn, device="cuda")


def show(what):
    cuda = torch.cuda
    print(what, cuda.memory_allocated(), cuda.max_memory_allocated(), cuda.memory_reserved())


def mlp(*widths):
    layers = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.GELU()]
    return nn.Sequential(*layers[:-1]).cuda()


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        rows, length, width = x.shape
        parts = self.qkv(self.norms[0](x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8192, 512)
        self.blocks = nn.ModuleList(Block(512, 8) for _ in range(4))
        self.head = nn.Linear(512, 8192, bias=False)

    def forward(self, ids, labels):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), labels.flatten())


def gpt(evaluates=False, by_block=False):
    """Train; `evaluates` every second step, or compiles each block (`by_block`)."""
    model = Gpt().cuda()
    net = model if by_block else compiled(model)
    if by_block:
        for i, block in enumerate(model.blocks):
            model.blocks[i] = compiled(block)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def batch():
        ids = torch.randint(8192, (8, 513), device="cuda")
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def loss_of(ids, labels):
        with torch.autocast("cuda", torch.bfloat16):
            return net(ids, labels)

    for step in range(6):
        if by_block:
            torch.compiler.cudagraph_mark_step_begin()
        ids, labels = batch()  # kept until the next step
        loss_of(ids, labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        show(step)
        if evaluates and step % 2:
            model.eval()
            with torch.no_grad():
                for _ in range(3):
                    ids, labels = batch()
                    loss = loss_of(ids, labels).clone()
            model.train()
            del loss
            show("eval")


def resnet():
    import torchvision

    model = torchvision.models.resnet18().cuda().to(memory_format=torch.channels_last)
    net = compiled(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        x = normal(32, 3, 224, 224).to(memory_format=torch.channels_last)
        labels = torch.randint(1000, (32,), device="cuda")
        loss = F.cross_entropy(net(x), labels)  # kept until the next step
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        show(step)


def llama(checkpoints=False):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=8,
        vocab_size=8192,
    )  # fmt: skip
    model = LlamaForCausalLM(config).cuda()
    if checkpoints:
        model.bfloat16().gradient_checkpointing_enable()
    net = compiled(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(5):
        ids = torch.randint(8192, (8, 256), device="cuda")
        with torch.autocast("cuda", torch.bfloat16, enabled=not checkpoints):
            loss = net(input_ids=ids, labels=ids).loss
        loss.backward()
        if checkpoints:
            del loss
        optimizer.step()
        optimizer.zero_grad()
        show(step)


def late(every=1):
    """Call a second function, from step 3 on, between a forward and its backward."""
    model, other = mlp(1024, 4096, 1024), mlp(1024, 2048, 256)
    net, late_net = compiled(model), compiled(other)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(7):
        out = net(normal(4096, 1024))
        if step >= 3 and step % every == every - 1:
            with torch.no_grad():
                made = late_net(out.detach()).sum()
                show("other")
                del made
        out.pow(2).mean().backward()
        del out
        optimizer.step()
        optimizer.zero_grad()
        show(step)


def lengths():
    model = mlp(512, 2048, 512)
    net, optimizer = compiled(model), torch.optim.AdamW(model.parameters())
    for step in range(9):
        x = normal(16, (128, 256, 384)[step % 3], 512)  # kept until the next step
        net(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        show(step)


def dropout():
    up, down = nn.Linear(1024, 4096), nn.Linear(4096, 1024)
    model = nn.Sequential(up, nn.GELU(), nn.Dropout(0.1), down, nn.Dropout(0.1)).cuda()
    net, optimizer = compiled(model), torch.optim.AdamW(model.parameters())
    for step in range(5):
        with torch.autocast("cuda", torch.bfloat16):
            loss = net(normal(4096, 1024)).float().pow(2).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        show(step)


KINDS = {
    "gpt": gpt,
    "gpt-evaluated": partial(gpt, evaluates=True),
    "gpt-by-block": partial(gpt, by_block=True),
    "resnet": resnet,
    "llama": llama,
    "llama-checkpoints": partial(llama, checkpoints=True),
    "late": late,
    "late-every-second": partial(late, every=2),
    "lengths": lengths,
    "dropout": dropout,
}

if __name__ == "__main__":
    torch.manual_seed(0)
    KINDS[sys.argv[1]]()
