"""The preflight as a callback: called once, before anything is on the GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

import memest.lightning
import memest.transformers
from memest.run.preflight import Outcome, Preflight, report_measured


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


@pytest.fixture
def predicted(monkeypatch: pytest.MonkeyPatch) -> Preflight:
    """A preflight that fits, on a GPU whose measured peak is 70 MiB."""
    with memest.virtual_gpu("a100-40gb") as gpu:
        torch.nn.Linear(4096, 4096, device="cuda")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 70 << 20)
    return Preflight(outcome=Outcome.FITS, report=gpu.report())


LINE = "memest: predicted 0.06, measured 0.07 of 39.0 GiB (fits) on a100-40gb, peak in setup at "
FIGURES = {"memest/predicted_gib": 66 / 1024, "memest/measured_gib": 70 / 1024}


class Logger(L.pytorch.loggers.Logger):
    """Keeps what is logged."""

    name, version = "kept", 0

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[Any] = []

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.logged.append((metrics, step))


@pytest.mark.filterwarnings("ignore")
def test_lightning_reports_the_measured_peak_beside_the_predicted_one(
    monkeypatch: pytest.MonkeyPatch, predicted: Preflight, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memest.lightning, "preflight", lambda **_: predicted)
    fit = trainer(memest.lightning.PreflightCallback(), "cpu")
    fit.loggers = [logger := Logger()]

    fit.fit(Net(), DataLoader(torch.ones(8, 4), batch_size=4))

    assert LINE in capsys.readouterr().err
    assert (FIGURES, 1) in logger.logged


@pytest.mark.filterwarnings("ignore")
def test_transformers_reports_the_measured_peak_beside_the_predicted_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    predicted: Preflight,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import transformers

    logged: list[dict[str, float]] = []

    class Tracker(transformers.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
            logged.append(logs)

    monkeypatch.setattr(memest.transformers, "preflight", lambda **_: predicted)
    monkeypatch.setattr(
        memest.transformers, "get_reporting_integration_callbacks", lambda names: [Tracker]
    )
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=8)
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=1, use_cpu=True, report_to="none", save_strategy="no"
    )
    samples = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 8
    train = transformers.Trainer(
        transformers.GPT2LMHeadModel(config),
        arguments,
        train_dataset=samples,
        callbacks=[memest.transformers.PreflightCallback()],
    )

    train.train()

    assert LINE in capsys.readouterr().err
    assert logged == [FIGURES]
    assert {**FIGURES, "step": 1} in train.state.log_history


def test_without_a_prediction_nothing_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    off = Preflight(outcome=Outcome.OFF)

    assert list(report_measured(off)) == list(report_measured(None)) == []
    assert capsys.readouterr().err == ""
