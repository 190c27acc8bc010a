"""What is to be trained, and on what: the request, its checks, and the files that hold one."""

from __future__ import annotations

from memest.plan.training_plan import TrainingPlan

__all__ = ["TrainingPlan"]
