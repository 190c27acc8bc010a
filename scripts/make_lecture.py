"""Stores the predictions of a lab for `memest lecture`, beside the lab's suite.

    python scripts/make_lecture.py            # lab-a100, some ten minutes

The explorer's grid is stored too, so that the command takes seconds.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("MEMEST_TORCH", "2.11")  # the release that the runs were measured with

from memest.cli.explore import LAB_GPUS
from memest.estimator.search.explore import explore
from memest.plan.files import read_suite
from memest.report.explorer import explorer_data
from memest.report.lecture import predicted_rows, store_rows

SUITES = Path(__file__).resolve().parents[1] / "memest" / "validate" / "suites"


def main(name: str = "lab-a100", jobs: int = 1) -> None:
    """Predict and store one suite."""
    path, gpus = SUITES / f"{name}.yaml", LAB_GPUS["h100" if "h100" in name else ""]
    rows = predicted_rows(path, gpus, jobs)
    presets = read_suite(path, {})
    models = list(dict.fromkeys(plan.model_name for plan in presets))
    length = presets[0].seq_len
    points = explore(models, gpus, seq_len=length, jobs=jobs)
    data = explorer_data(points, dict(rows.limits), tokens=f"{length} tokens", presets=presets)
    store_rows(replace(rows, explorer=data), path)
    print(path.with_suffix(".json.gz").stat().st_size, "bytes")


if __name__ == "__main__":
    main(*sys.argv[1:2])
