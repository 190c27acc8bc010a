"""A fine-tune ready for any loop: the model, its batches, its optimizer, its memory recorder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memest.loops.probe import PhaseRecorder
from memest.plan import TrainingPlan

Inputs = dict[str, Any]
"""Keyword arguments of a forward, on the host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One fine-tune, ready for a loop."""

    plan: TrainingPlan
    model: nn.Module
    """Module on the device, in training mode."""

    make_optimizer: Callable[[], torch.optim.Optimizer]
    """Called after a strategy has divided the model."""

    batches: Sequence[Inputs]
    """Batches used in turn, over and over."""

    val_batches: Sequence[Inputs]
    recorder: PhaseRecorder
    loss_output: str = "loss"
    """Output to differentiate."""

    def batch(self, number: int) -> Inputs:
        """Return the micro-batch of this number."""
        return self.batches[number % len(self.batches)]

    def val_batch(self, number: int) -> Inputs:
        """Return the validation micro-batch of this number."""
        return self.val_batches[number % len(self.val_batches)]
