"""The predictions of the measured runs, kept beside them in validation/runs/predictions.jsonl.gz.

All of them take many minutes, so pages and tests read what was predicted last; a test predicts
`representative` runs again, and `pytest tests/accuracy --every-run` all of them.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from memest.estimator.search.many_plans import predict_all
from memest.estimator.versions import simulating
from memest.plan import TrainingPlan
from memest.report import Measurement, Prediction, read_measurements
from memest.validate.compare import comparable, plan_of

RESULTS = Path(__file__).resolve().parents[1] / "validation" / "runs"
PREDICTIONS = RESULTS / "predictions.jsonl.gz"

Runs = dict[str, tuple[list[Measurement], list[Prediction]]]
"""By results file: its runs that ended by themselves, and their predictions."""

TELLING = (
    "precision optim strategy loop act_ckpt use_lora use_qlora quant attn_implementation"
    " sharding_strategy freeze use_dora use_rslora lora_bias gradient_clip_val weight_decay"
    " gradient_as_bucket_view activation_checkpointing_policy limit_val_batches padded"
).split()
"""Keys of a plan of which every value that was measured is predicted again by tests, as is every
class of models.
"""


def measured() -> dict[str, list[Measurement]]:
    """By results file: its runs that ended by themselves."""
    paths = sorted(RESULTS.glob("*.jsonl"))
    return {path.stem: comparable(read_measurements(path))[0] for path in paths}


def predicted_now(jobs: int | None = None) -> Runs:
    """Predict every run."""
    runs = measured()
    plans = [plan_of(m) for reports in runs.values() for m in reports]
    with simulating("2.11"):
        return _beside(runs, predict_all(plans, jobs=jobs))


def stored() -> Runs:
    """Every run with what `store` kept of it."""
    with gzip.open(PREDICTIONS, "rt", encoding="utf-8") as lines:
        return _beside(measured(), [Prediction.from_dict(json.loads(line)) for line in lines])


def store(runs: Runs) -> None:
    """Keep the predictions, in the order of the files."""
    lines = [lasting(p).to_json() for _, predictions in runs.values() for p in predictions]
    PREDICTIONS.write_bytes(gzip.compress(("\n".join(lines) + "\n").encode(), mtime=0))


def lasting(prediction: Prediction) -> Prediction:
    """The prediction without times and without needs, which no measured run shows."""
    verdicts = {
        name: replace(verdict, margin_bytes=0, spread_bytes=0)
        for name, verdict in prediction.verdicts.items()
    }
    return replace(prediction, elapsed_s=0.0, times={}, verdicts=verdicts)


def representative(runs: Runs) -> list[tuple[str, int]]:
    """File and position of few runs in which every value of `TELLING` and every class of models
    occur; short ones first.
    """
    values = {
        (name, i): _telling(plan_of(m)) | {("class", m.model["class"])}
        for name, (reports, _) in runs.items()
        for i, m in enumerate(reports)
    }
    num_ops = {(name, i): runs[name][1][i].coverage["num_ops"] for name, i in values}
    missing = set().union(*values.values())
    found: list[tuple[str, int]] = []
    while missing:
        best = max(values, key=lambda key: len(values[key] & missing) / num_ops[key])
        missing -= values[best]
        found.append(best)
    for key in sorted(found, key=num_ops.__getitem__, reverse=True):  # needless by what came later
        if values[key] <= set().union(*(values[other] for other in found if other != key)):
            found.remove(key)
    return found


def _telling(plan: TrainingPlan) -> set[tuple[str, str]]:
    return {(key, str(getattr(plan, key))) for key in TELLING}


def _beside(runs: dict[str, list[Measurement]], predictions: Sequence[Prediction]) -> Runs:
    if sum(map(len, runs.values())) != len(predictions):
        raise ValueError("validation/runs/ has changed: run `python scripts/make_docs.py`")
    rest = iter(predictions)
    return {name: (reports, [*islice(rest, len(reports))]) for name, reports in runs.items()}
