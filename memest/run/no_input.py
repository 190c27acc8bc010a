"""A standard input that nobody can read from."""

from __future__ import annotations

import io
from typing import Any, NoReturn

from memest.errors import UnsupportedError


class NoInput(io.TextIOBase):
    """Stands for `sys.stdin`: whoever reads from it is refused."""

    def readable(self) -> bool:
        """As of a file that is open."""
        return True

    def _refuse(self, *args: Any) -> NoReturn:
        raise UnsupportedError(
            "the script reads from stdin, where nothing waits for it",
            hint="run it by `memest run` without `--no-input`, or give the answers as arguments",
        )

    read = readline = readlines = __next__ = _refuse
