"""What predictions and measurements say, in one schema, and the files that hold them."""

from __future__ import annotations

from memest.report.records import (
    ClosedForm,
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

__all__ = [
    "ClosedForm",
    "Measurement",
    "Outcome",
    "Peak",
    "Phase",
    "PhaseRow",
    "Prediction",
    "Report",
    "Term",
    "Verdict",
    "read_measurements",
]
