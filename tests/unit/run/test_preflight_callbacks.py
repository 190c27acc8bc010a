"""The preflight as a callback: called once, before anything is on the GPU."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

import memest.lightning
import memest.transformers


class Calls:
    """Stands for `memest.preflight`."""

    def __init__(self) -> None:
        self.options: list[dict[str, Any]] = []

    def __call__(self, **options: Any) -> None:
        self.options.append(options)


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layer(batch).sum()

    def predict_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layer(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(callback: Any, accelerator: str) -> L.Trainer:
    return L.Trainer(
        accelerator=accelerator,
        devices=1,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
    )


@pytest.mark.filterwarnings("ignore")
def test_lightning_checks_when_fit_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()
    monkeypatch.setattr(memest.lightning, "preflight", calls)
    callback = memest.lightning.PreflightCallback(max_steps=2, margin="1GiB")
    loader = DataLoader(torch.ones(8, 4), batch_size=4)

    trainer(callback, "cpu").fit(Net(), loader)
    trainer(callback, "cpu").predict(Net(), loader)

    assert calls.options == [{"max_steps": 2, "time_limit": 120.0, "margin": "1GiB"}]


@pytest.mark.filterwarnings("ignore")
def test_on_a_virtual_gpu_the_callback_of_lightning_does_nothing() -> None:
    callback = memest.lightning.PreflightCallback()

    with memest.virtual_gpu("a100-40gb") as gpu:
        trainer(callback, "gpu").fit(Net(), DataLoader(torch.ones(8, 4), batch_size=4))

    assert gpu.num_steps == 1


def test_transformers_checks_before_the_trainer_has_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = Calls()
    monkeypatch.setattr(memest.transformers, "preflight", calls)

    memest.transformers.PreflightCallback(time_limit=30.0)

    assert calls.options == [{"max_steps": 3, "time_limit": 30.0, "margin": None}]
