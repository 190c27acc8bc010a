"""Predictions and measurements in one schema, and their files."""

from __future__ import annotations

from memest.report.records import (
    ClosedForm,
    Ending,
    Guess,
    HeldRow,
    Interval,
    Measurement,
    Outcome,
    Peak,
    Phase,
    PhaseRow,
    Prediction,
    RankRow,
    Report,
    RunPeak,
    RunPhase,
    RunReport,
    RunStep,
    StepTime,
    Term,
    Verdict,
    read_measurements,
)

__all__ = [
    "ClosedForm", "Ending", "Guess", "HeldRow", "Interval", "Measurement", "Outcome", "Peak",
    "Phase", "PhaseRow", "Prediction", "RankRow", "Report", "RunPeak", "RunPhase", "RunReport",
    "RunStep", "StepTime", "Term", "Verdict", "read_measurements",
]  # fmt: skip
