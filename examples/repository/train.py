"""Train a small language model. Nothing in this script is for memest."""

import torch
from model import VOCABULARY, Model

BATCH = 16
LENGTH = 128


def step(model: Model, optimizer: torch.optim.Optimizer) -> None:
    """Take one step of training on random tokens."""
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), device="cuda")
    logits = model(tokens)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    """Train for 1000 steps."""
    model = Model().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(1000):
        step(model, optimizer)


if __name__ == "__main__":
    main()
