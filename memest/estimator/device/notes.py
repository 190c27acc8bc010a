"""Notes: sentences about a run that its report prints, each once."""

from __future__ import annotations


class Notes:
    """Sentences in the order in which they were first added."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.warnings: list[str] = []
        """Sentences that the report prints above all figures."""

    def add(self, text: str) -> None:
        """Add `text`, unless it is there."""
        if text not in self.texts:
            self.texts.append(text)
