"""The command line: parse, one library call, render.

torch is imported only when a prediction is made. `group` is the command; each other file adds its
own commands to it when it is imported here.
"""

from __future__ import annotations

from memest.cli import (  # noqa: F401
    chart,
    diff,
    doctor,
    explore,
    lecture,
    mcp,
    predict,
    run,
    sweep,
    validate,
)
from memest.cli.group import main

__all__ = ["main"]
