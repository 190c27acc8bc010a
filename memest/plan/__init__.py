"""Training plans, which describe a fine-tune: their keys, their checks and their files."""

from memest.plan.training_plan import TrainingPlan

__all__ = ["TrainingPlan"]
