"""The `memest` of the shell: how it ends."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["--version"], 0), (["gpus"], 0), (["predict", "--model", "nope"], 2), (["--nope"], 2)],
)
def test_the_exit_code_is_that_of_the_command(arguments: list[str], code: int) -> None:
    done = subprocess.run([sys.executable, "-m", "memest", *arguments], capture_output=True)

    assert done.returncode == code
    assert bool(done.stderr) == (code != 0)
    assert bool(done.stdout) == (code == 0)


def test_what_is_registered_for_the_end_still_runs() -> None:
    code = (
        "import atexit, sys; atexit.register(print, 'registered')\n"
        "sys.argv = ['memest', '--version']\n"
        "from memest.__main__ import command; command()"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "registered")


def test_a_script_that_is_not_there_is_an_error() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "memest", "run", "no-such-script.py"], capture_output=True, text=True
    )

    assert done.returncode == 2
    assert "no-such-script.py" in done.stderr
