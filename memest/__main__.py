"""Entry point of `memest` and `python -m memest`, which ends without Python's teardown."""

import atexit
import contextlib
import os
import sys

from memest.cli import main


def command() -> None:
    """Run memest's command line, then end the process. Python's teardown is skipped, since it frees
    each object, which takes a second once torch is imported. After `memest run` it is not skipped,
    since a script expects it."""
    # set before torch is imported; else its waiting threads would take CPU time of other threads
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if sys.stdout is None:  # closed by `>&-`
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    code = 0
    try:
        main()
    except SystemExit as end:
        if sys.argv[1:2] == ["run"] or not isinstance(end.code, int | None):
            raise
        code = end.code or 0
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the pipe's reader has closed it
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    command()
