"""What predictions and measurements say, in one schema, and the files that hold them."""

from __future__ import annotations

from memest.report.records import (
    ClosedForm,
    Interval,
    Measurement,
    Outcome,
    Peak,
    Phase,
    PhaseRow,
    Prediction,
    Report,
    Term,
    Verdict,
)
from memest.report.reports import read_measurements
from memest.report.run import (
    Ending,
    Guess,
    HeldRow,
    RankRow,
    RunPeak,
    RunPhase,
    RunReport,
    RunStep,
)

__all__ = [
    "ClosedForm",
    "Ending",
    "Guess",
    "HeldRow",
    "Interval",
    "Measurement",
    "Outcome",
    "Peak",
    "Phase",
    "PhaseRow",
    "Prediction",
    "RankRow",
    "Report",
    "RunPeak",
    "RunPhase",
    "RunReport",
    "RunStep",
    "Term",
    "Verdict",
    "read_measurements",
]
