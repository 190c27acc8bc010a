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
    next((found for case in cases if "refused" not in (found := answer_of(name, case))), None)
    return describe(name) | {"answers": {case.key: answer_of(name, case) for case in cases}}


def describe(name: str) -> dict[str, str]:
    """Version, source and what it predicts, of the rival of this module name."""
    rival = importlib.import_module(f"rivals.{name}")
    return {
        "version": _version(rival.VERSION_OF),
        "source": rival.SOURCE,
        "predicts": rival.PREDICTS,
    }


def answer_of(name: str, case: Case) -> dict[str, Any]:
    """One answer, timed; `why` is what stopped a tool that ends in an exception."""
    rival = importlib.import_module(f"rivals.{name}")
    start = time.perf_counter()
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # each prints a warning for each model
            estimate = rival.estimate(case)
    except Refused as refusal:
        why = str(refusal.__cause__).strip().splitlines() if refusal.__cause__ else []
        return {"refused": str(refusal)} | ({"why": why[-1][:300]} if why else {})
    found = {**asdict(estimate), "seconds": round(time.perf_counter() - start, 6)}
    return {name: value for name, value in found.items() if name != "parts" or value}


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
