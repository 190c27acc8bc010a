"""The command line in this process, for tests that need no new interpreter."""

from __future__ import annotations

import io
import subprocess
from contextlib import redirect_stderr, redirect_stdout

import pytest

from memest.cli import main


def memest_here(*args: str) -> subprocess.CompletedProcess[str]:
    """Run a command; return its exit code and streams, as `subprocess.run` does.

    A new process imports torch, transformers and Lightning for about 5 s.
    """
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
        main(list(args))
    assert isinstance(ended.value.code, int)
    return subprocess.CompletedProcess(args, ended.value.code, out.getvalue(), err.getvalue())
