"""The training request: its keys, its checks, and the files that hold one."""

from memest.plan.training_plan import TrainingPlan

__all__ = ["TrainingPlan"]
