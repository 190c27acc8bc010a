"""CUDA graphs as PyTorch's documentation writes them.

graphs.py step|callables|amp|inference|shared|deleted
"""

import sys

import torch
from torch import nn
from torch.nn import functional

NAME = sys.argv[1]
WIDTH = 1024


def block():
    """A feed-forward network."""
    return nn.Sequential(
        nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH)
    )


def warmed(run, times=3):
    """Run on a side stream first, as a capture asks for."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(times):
            run()
    torch.cuda.current_stream().wait_stream(side)


def captured(run, **kwargs):
    """A graph of what `run` does, and its result."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **kwargs):
        result = run()
    return graph, result


def step():
    """Forward and backward captured, the optimizer's step beside it."""
    model = nn.Sequential(*(block() for _ in range(4))).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    inputs, labels = torch.randn(4096, WIDTH).cuda(), torch.randn(4096, WIDTH).cuda()

    def run():
        optimizer.zero_grad(set_to_none=True)
        loss = functional.mse_loss(model(inputs), labels)
        loss.backward()
        return loss

    warmed(run)
    optimizer.zero_grad(set_to_none=True)
    graph, loss = captured(run)
    for _ in range(4):
        inputs.copy_(torch.randn(4096, WIDTH))
        graph.replay()
        optimizer.step()
    print(loss.item())


def callables():
    """Two networks as graphed callables, what lies between them as it is."""
    first, last = block().cuda(), block().cuda()
    given = torch.randn(2048, WIDTH, device="cuda")
    hidden = torch.randn(2048, WIDTH, device="cuda", requires_grad=True)
    first, last = torch.cuda.make_graphed_callables((first, last), ((given,), (hidden,)))
    params = [*first.parameters(), *last.parameters()]
    optimizer = torch.optim.SGD(params, 0.1, momentum=0.9)
    for _ in range(4):
        x = torch.randn(2048, WIDTH, device="cuda")
        y = last(first(x).relu())
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def amp():
    """A whole step under autocast, with an optimizer that can be captured."""
    model = nn.Sequential(*(block() for _ in range(4))).cuda()
    optimizer = torch.optim.Adam(model.parameters(), capturable=True)
    inputs = torch.randn(8192, WIDTH, device="cuda")

    def run():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            loss = model(inputs).float().square().mean()
        loss.backward()
        optimizer.step()

    warmed(run)
    graph, _ = captured(run)
    for _ in range(4):
        graph.replay()


def inference():
    """A graph for each batch size, without gradients."""
    model = nn.Sequential(*(block() for _ in range(4))).cuda().half().eval()
    graphs = {}
    with torch.no_grad():
        for batch in (4096, 1024, 64):
            inputs = torch.randn(batch, WIDTH, device="cuda", dtype=torch.half)
            warmed(lambda inputs=inputs: model(inputs), 2)
            graphs[batch] = (inputs, *captured(lambda inputs=inputs: model(inputs)))
        for batch in (64, 4096):
            inputs, graph, outputs = graphs[batch]
            inputs.fill_(1)
            graph.replay()
            print(outputs.shape)


def shared():
    """Two graphs of one pool."""
    model = nn.Sequential(*(block() for _ in range(4))).cuda()
    inputs = torch.randn(4096, WIDTH, device="cuda")
    with torch.no_grad():
        warmed(lambda: model(inputs))
        pool = torch.cuda.graph_pool_handle()
        first, hidden = captured(lambda: model[:2](inputs), pool=pool)
        last, outputs = captured(lambda: model[2:](hidden), pool=first.pool())
        for _ in range(3):
            first.replay()
            last.replay()
        print(outputs.shape)


def deleted():
    """A graph that is given up, and training without it."""
    model = nn.Sequential(*(block() for _ in range(4))).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    inputs = torch.randn(4096, WIDTH, device="cuda")

    def run():
        optimizer.zero_grad(set_to_none=True)
        model(inputs).square().mean().backward()

    warmed(run)
    graph, _ = captured(run)
    graph.replay()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(torch.cuda.memory_reserved())
    del graph
    print(torch.cuda.memory_reserved())
    torch.cuda.empty_cache()
    print(torch.cuda.memory_reserved())
    for _ in range(3):
        run()
        optimizer.step()


torch.manual_seed(0)
{f.__name__: f for f in (step, callables, amp, inference, shared, deleted)}[NAME]()
torch.cuda.synchronize()
print(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
