"""The training request: its keys, its checks, and the files that hold one."""

from __future__ import annotations

from memest.plan.training_plan import TrainingPlan

__all__ = ["TrainingPlan"]
