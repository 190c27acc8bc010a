"""The command line: parse, one library call, render.

torch is imported only when a prediction is made. `group` has the command `memest`. Each other file
adds its subcommands when one of these is first used.
"""

from memest.cli.group import main

__all__ = ["main"]
