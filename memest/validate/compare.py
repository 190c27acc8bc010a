"""Comparison of predictions with measurements: signed errors, verdicts, residuals."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memest.errors import PlanError, UnknownModelError
from memest.estimator.hardware.gpus import find_gpu
from memest.plan import TrainingPlan
from memest.report import Interval, Measurement, Outcome, PhaseRow, Prediction
from memest.units import MIB

TOTALS = {
    "allocated": "peak_allocated_bytes",
    "reserved": "peak_reserved_bytes",
    "process": "process_bytes",
}
TOLERANCES = {"allocated": 0.5, "reserved": 0.5, "process": 2.0, "phase": 1.0}
"""Allowed error of a single run, per cent. `allocated` and `phase` follow from the event stream.
`reserved` also depends on the driver's addresses, which a replay cannot see; `process` on the CUDA
context of another driver.
"""

SLACK = 0.5  # percent by which one of several ranks may be outside the predicted interval
STATES = ("params_bytes", "grads_bytes", "optimizer_bytes")  # must be equal to the byte


@dataclass(frozen=True, kw_only=True, slots=True)
class Deviation:
    """Predicted interval and measured bytes of the figure named `what`, such as `process_bytes`."""

    what: str  # name of the figure, such as `peak_allocated_bytes`, or its phase
    predicted: Interval
    measured_bytes: int

    @property
    def predicted_bytes(self) -> int:
        """The predicted figure, or the upper bound of a predicted interval."""
        return self.predicted.high_bytes

    @property
    def error_bytes(self) -> int:
        """Predicted minus measured bytes; 0 if the measured ones are within the predicted interval.
        Otherwise the predicted bytes are the bound nearest to the measured ones."""
        nearest = max(self.measured_bytes, self.predicted.low_bytes)
        return min(nearest, self.predicted.high_bytes) - self.measured_bytes

    @property
    def error_percent(self) -> float:
        """Error in per cent of the measured figure; infinite if only the measured figure is 0."""
        if not self.measured_bytes:
            return 0.0 if not self.predicted_bytes else float("inf")
        return 100 * self.error_bytes / self.measured_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Differences between one experiment's prediction and its measurement. `totals` has a deviation
    for each key of `TOTALS`, such as `reserved`. `states` has one for each phase and state
    (parameters, gradients, optimizer) whose bytes differ."""

    name: str
    measured: Measurement
    predicted: Prediction
    totals: Mapping[str, Deviation]
    phases: tuple[Deviation, ...]  # allocated at each phase, in order; as many as both sides have
    states: tuple[Deviation, ...]  # params, grads and optimizer bytes that differ
    residual: str  # phase and part in which the largest difference begins; empty if there is none
    versions: tuple[str, ...]  # libraries with different versions on the two sides

    @property
    def is_verdict_right(self) -> bool:
        """True if both verdicts agree; a predicted `may` agrees with either."""
        return self.predicted.verdict in (self.measured.verdict, Outcome.MAY)

    @property
    def worst_phase(self) -> Deviation | None:
        """Phase with the largest error in per cent; None without phases."""
        return max(self.phases, key=lambda d: abs(d.error_percent), default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Errors and verdicts of many experiments in total. The errors are in per cent, by key of
    `TOTALS`, such as `reserved`; the key `phase` is for all phases."""

    median_percent: Mapping[str, float]  # median absolute error by total; `phase` covers all phases
    worst_percent: Mapping[str, float]  # largest error by total, signed
    verdicts: Mapping[tuple[str, str], int]  # (measured, predicted) -> experiments
    broken: tuple[str, ...]  # figures outside their tolerance, one line each


def compare(measured: Sequence[Measurement], predicted: Sequence[Prediction]) -> list[Comparison]:
    """Compare each item of `measured` with the item of `predicted` at the same index."""
    return [_compare(m, p) for m, p in zip(measured, predicted, strict=True)]


def comparable(measured: Sequence[Measurement]) -> tuple[list[Measurement], list[str]]:
    """Return (the runs that did not fail, a line on each failed one); `PlanError` if all failed."""
    ended = [m for m in measured if m.verdict is not Outcome.FAILED]
    failures = [f"{m.name}: {m.note}" for m in measured if m.verdict is Outcome.FAILED]
    if not ended:
        raise PlanError("no run of these results ended by itself", hint="run them again")
    return ended, failures


def plan_of(measurement: Measurement) -> TrainingPlan:
    """Return the plan of a measured run, with the GPU on which it ran."""
    values = {k: v for k, v in measurement.plan.items() if k not in ("gpu", "gpu_memory", "name")}
    try:
        find_gpu(measurement.gpu)
        gpu_keys: dict[str, object] = {"gpu": [measurement.gpu]}
    except (PlanError, UnknownModelError):
        gpu_keys = {"gpu_memory": measurement.device["memory_bytes"]}
    return TrainingPlan.from_dict(values, name=measurement.name, **gpu_keys)


def summarise(
    comparisons: Sequence[Comparison], tolerances: Mapping[str, float] = TOLERANCES
) -> Summary:
    """Return median and worst errors, verdicts, and figures outside `tolerances` (in per cent)."""
    from statistics import median

    errors = {k: [c.totals[k].error_percent for c in comparisons] for k in TOTALS}
    errors["phase"] = [d.error_percent for c in comparisons for d in c.phases]
    verdicts = Counter((str(c.measured.verdict), str(c.predicted.verdict)) for c in comparisons)
    return Summary(
        median_percent={k: median(map(abs, v)) for k, v in errors.items() if v},
        worst_percent={k: max(v, key=abs) for k, v in errors.items() if v},
        verdicts=verdicts,
        broken=tuple(line for c in comparisons for line in _outside_tolerance(c, tolerances)),
    )


def parse_tolerances(given: Sequence[str]) -> dict[str, float]:
    """Return `TOLERANCES`, per cent by name, overridden by the `name=percent` items in `given`."""
    tolerances = dict(TOLERANCES)
    for item in given:
        name, _, percent = item.partition("=")
        try:
            value = float(percent)
        except ValueError:
            value = -1.0  # refused below
        if name not in TOLERANCES or not 0 <= value < float("inf"):
            raise PlanError(
                f"`--tolerance {item}` is not understood",
                hint=f"write `name=percent` with a name of {', '.join(TOLERANCES)}",
            )
        tolerances[name] = value
    return tolerances


def _compare(measured: Measurement, predicted: Prediction) -> Comparison:
    pairs = list(zip(predicted.phases, measured.phases, strict=False))
    intervals = predicted.phase_intervals or [exactly(p.allocated_bytes) for p, _ in pairs]
    phases = tuple(
        Deviation(what=_phase_label(m), predicted=interval, measured_bytes=m.allocated_bytes)
        for interval, (_, m) in zip(intervals, pairs, strict=False)
    )
    states = tuple(
        Deviation(
            what=f"{key} {_phase_label(m)}",
            predicted=exactly(getattr(p, key)),
            measured_bytes=getattr(m, key),
        )
        for p, m in pairs
        for key in STATES
        if getattr(p, key) != getattr(m, key)
    )
    old, new = measured.versions, predicted.versions
    versions = tuple(
        f"{name} {old[name]} measured, {new[name]} predicted with"
        for name in sorted(old.keys() & new.keys())
        if old[name].split("+")[0] != new[name].split("+")[0]
    )
    return Comparison(
        name=measured.name,
        measured=measured,
        predicted=predicted,
        totals={name: _total_deviation(name, predicted, measured) for name in TOTALS},
        phases=phases,
        states=states,
        residual=_residual(pairs),
        versions=versions,
    )


def exactly(num_bytes: int) -> Interval:
    """Return the interval whose bounds are both `num_bytes`."""
    return Interval(low_bytes=num_bytes, high_bytes=num_bytes)


def _total_deviation(name: str, predicted: Prediction, measured: Measurement) -> Deviation:
    """Return the deviation of the total `name`, a key of `TOTALS`. If several ranks were measured,
    return the deviation of the rank whose error in per cent is largest."""
    key = TOTALS[name]
    interval = predicted.intervals.get(name) or exactly(getattr(predicted, key))
    values = [getattr(measured, key), *(rank[key] for rank in measured.ranks)]
    deviations = [Deviation(what=key, predicted=interval, measured_bytes=value) for value in values]
    return max(deviations, key=lambda deviation: abs(deviation.error_percent))


def _phase_label(row: PhaseRow) -> str:
    return f"step {row.step}.{row.micro_batch} {row.phase}"


def _residual(pairs: Sequence[tuple[PhaseRow, PhaseRow]]) -> str:
    """Return text on the largest change of an error from one phase to the next; "" if no error
    changes. `pairs` has a pair of rows (predicted, measured) per phase. An error is predicted minus
    measured bytes. Each phase has three errors: of allocated, peak allocated and reserved bytes.
    Each error is compared with the same error of the phase before (0 before the first phase)."""
    largest, label, part = 0, "", ""
    previous = dict.fromkeys(("allocated_bytes", "peak_allocated_bytes", "reserved_bytes"), 0)
    for predicted, measured in pairs:
        for key in previous:
            error = getattr(predicted, key) - getattr(measured, key)
            change = error - previous[key]
            if abs(change) > abs(largest):
                largest, label, part = change, _phase_label(measured), key.removesuffix("_bytes")
            previous[key] = error
    return f"{largest / MIB:+.1f} MiB in {part} from {label} on" if label else ""


def allowed_percent(comparison: Comparison, tolerances: Mapping[str, float]) -> dict[str, float]:
    """Return the allowed error in per cent, by name, such as `reserved`. It is that of `tolerances`
    in a run on one GPU. In a run on several GPUs, it is `SLACK` for every name."""
    has_ranks = len(comparison.measured.ranks) > 1
    return dict.fromkeys(tolerances, SLACK) if has_ranks else dict(tolerances)


def _outside_tolerance(comparison: Comparison, tolerances: Mapping[str, float]) -> list[str]:
    allowed = allowed_percent(comparison, tolerances)
    lines = [
        f"{name} is off by {d.error_percent:+.2f} % (tolerance {allowed[name]:.3g} %)"
        for name, d in comparison.totals.items()
        if abs(d.error_percent) > allowed[name]
    ]
    worst = comparison.worst_phase
    if worst is not None and abs(worst.error_percent) > allowed["phase"]:
        lines.append(
            f"allocated at {worst.what} is off by {worst.error_percent:+.2f} %"
            f" (tolerance {allowed['phase']:.3g} %)"
        )
    lines += [f"{d.what} differs by {d.error_bytes} bytes" for d in comparison.states]
    if not comparison.is_verdict_right:
        measured, predicted = comparison.measured.verdict, comparison.predicted.verdict
        lines.append(f"measured `{measured}`, predicted `{predicted}`")
    return [f"{comparison.name}: {line}" for line in lines]
