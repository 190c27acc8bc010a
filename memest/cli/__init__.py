"""The command line: parse, one library call, render.

torch is imported only when a prediction is made. `group` is the command. Each other file adds its
own commands to it when one of them is first used.
"""

from memest.cli.group import main

__all__ = ["main"]
