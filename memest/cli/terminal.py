"""What the terminal can show: colours, and how many columns."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TextIO


def has_colour() -> bool:
    """Whether stdout is a terminal with colours, and nobody asked for none.

    `NO_COLOR` of any value but the empty one turns them off (https://no-color.org).
    """
    if os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb":
        return False
    return sys.stdout.isatty()


def folded(text: str, out: TextIO | None = None) -> str:
    """`text` with lines that fit the terminal `out`; unchanged where `out` is a file or a pipe."""
    from memest.render.text import fold

    out = out or sys.stdout
    return fold(text, shutil.get_terminal_size().columns) if out.isatty() else text
