"""Stores the predictions of a lab for `memest lecture`, beside the lab's suite.

    python scripts/make_lecture.py            # lab-a100, some ten minutes

The explorer's grid is stored too, so that the command takes seconds.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path

os.environ.setdefault("MEMEST_TORCH", "2.11")  # the release that the runs were measured with

from memest.cli.explore import lab_gpus
from memest.estimator.search.sweep import explore
from memest.plan.training_plan import read_suite
from memest.report.explorer import explorer_data
from memest.report.lecture import Row, Rows, predicted_rows

SUITES = Path(__file__).resolve().parents[1] / "memest" / "validate" / "suites"


def store_rows(rows: Rows, path: Path) -> None:
    """Store rows in the folder of a suite's file."""
    names = ("versions", "limits", "explorer", "failed")
    values = {name: getattr(rows, name) for name in names}
    made = [
        {f.name: getattr(row, f.name) for f in fields(Row)}
        | {
            "plan": row.plan.to_dict(),
            "phases": [asdict(phase) for phase in row.phases],
            "verdicts": {gpu: asdict(verdict) for gpu, verdict in row.verdicts.items()},
        }
        for row in rows.rows
    ]
    text = json.dumps(values | {"rows": made}, separators=(",", ":"))
    path.with_suffix(".json.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def main(name: str = "lab-a100", jobs: int = 1) -> None:
    """Predict and store one suite."""
    path, gpus = SUITES / f"{name}.yaml", lab_gpus(name)
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
