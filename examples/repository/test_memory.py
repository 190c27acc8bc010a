"""Memory of a step of training, on a virtual GPU."""

import pytest
import torch
from model import Model
from train import step


@pytest.mark.gpu_memory("1GiB")
def test_two_steps_of_training() -> None:
    """Fails if two steps need more than 1 GiB of a T4."""
    model = Model().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    step(model, optimizer)
