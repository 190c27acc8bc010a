"""Checkpoints of kilobytes: folders that scripts take for a model, without its weights' values."""

from __future__ import annotations

from memest.run.stand_ins.checkpoint import FORMATS, write_checkpoint

__all__ = ["FORMATS", "write_checkpoint"]
