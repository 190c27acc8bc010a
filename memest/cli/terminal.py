"""What the terminal can show: colours."""

from __future__ import annotations

import os
import sys


def has_colour() -> bool:
    """Whether stdout is a terminal with colours, and nobody asked for none.

    `NO_COLOR` of any value but the empty one turns them off (https://no-color.org).
    """
    if os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb":
        return False
    return sys.stdout.isatty()
