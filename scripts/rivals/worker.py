"""`python -m rivals.worker NAME < cases.json > answers.json`: one rival over all cases.

An answer is the fields of an `Estimate`, or `refused` with the reason; `seconds` is the time of the
call. A call before the first timed one pays for the imports.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import sys
import time
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rivals.case import Case, Refused


def main(name: str) -> None:
    """Read the cases, write version, source and answers."""
    cases = [Case(**values) for values in json.load(sys.stdin)]
    with contextlib.redirect_stdout(sys.stderr):
        found = answers(name, cases)
    json.dump(found, sys.stdout)


def answers(name: str, cases: list[Case]) -> dict[str, Any]:
    """What the rival of this module name says of each case, in order."""
    rival = importlib.import_module(f"rivals.{name}")
    next((answer for case in cases if "refused" not in (answer := _answer(rival, case))), None)
    return {
        "version": _version(rival.VERSION_OF),
        "source": rival.SOURCE,
        "predicts": rival.PREDICTS,
        "answers": {case.key: _answer(rival, case) for case in cases},
    }


def _answer(rival: Any, case: Case) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # each prints a warning for each model
            estimate = rival.estimate(case)
    except Refused as refusal:
        return {"refused": str(refusal)}
    return {**asdict(estimate), "seconds": round(time.perf_counter() - start, 6)}


def _version(distribution: str) -> str:
    """Of the installed distribution; the text itself where it names a paper."""
    if ":" in distribution:
        return distribution
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    main(sys.argv[1])
