"""The textbook formula in full: every layer keeps its attention matrix, whatever the kernel."""

from __future__ import annotations

from rivals import textbook
from rivals.case import Case, Estimate

VERSION_OF = textbook.VERSION_OF
SOURCE = textbook.SOURCE
PREDICTS = textbook.PREDICTS


def estimate(case: Case) -> Estimate:
    """As `textbook`'s, with the term 5 a s / h."""
    return textbook.estimate(case, has_matrix=True)
