"""What an experiment needs: the bytes of a bar of the ladder, and the verdict of each card."""

from __future__ import annotations

from memest.plots.style import KINDS, OF_STRATEGIES, card_label
from memest.report import Measurement, Outcome, Phase, PhaseRow, Prediction

CACHED = "cached"
"""Reserved at the peak and not allocated."""

UNKNOWN = "unknown"
"""Of the need of an experiment that does not fit: what it is for was not predicted."""


def peak_parts(report: Prediction | Measurement) -> dict[str, int]:
    """Bytes at the peak by the kinds of `KINDS`; they add up to the peak allocated.

    Kinds that only strategies have are left out where there are none.

    A prediction has its terms. A measurement has only what the probe read at the two phases around
    the peak, so what is alive at either counts as alive at the peak: exact but for a peak inside
    the first backward of a step, where some gradients may be yet to come. What is over the
    activations of these phases is the rest. Of a forward that ran out of memory, what was allocated
    since it began is activations.
    """
    if isinstance(report, Prediction):
        parts = dict.fromkeys(KINDS, 0)
        for term in report.terms:
            parts[term.kind if term.kind in parts else "rest"] += term.num_bytes
        return {k: n for k, n in parts.items() if n or k not in OF_STRATEGIES}
    around = _around_peak(report)
    left, parts = report.peak_allocated_bytes, {}
    for kind in KINDS[:4]:
        parts[kind] = min(left, max((getattr(r, f"{kind}_bytes") for r in around), default=0))
        left -= parts[kind]
    if len(around) == 1 and around[0].phase is Phase.BEFORE_FORWARD:
        return parts | {"activations": parts["activations"] + left, "rest": 0}
    return parts | {"rest": left}


def _around_peak(report: Measurement) -> list[PhaseRow]:
    """The phases before and after the peak; the last alone where the run ended in between."""
    rows = report.phases
    highest = max(rows, key=lambda row: row.peak_allocated_bytes, default=None)
    if highest is None or highest.peak_allocated_bytes < report.peak_allocated_bytes:
        return list(rows[-1:])
    index = rows.index(highest)
    return list(rows[max(0, index - 1) : index + 1])


def needed_bytes(report: Prediction | Measurement) -> int:
    """Bytes reserved at the peak; of a prediction that does not fit, what it would reserve.

    Of a measured run out of memory, how far it came: nobody knows what it would have needed.
    """
    if report.verdict is Outcome.OOM and isinstance(report, Prediction):
        return max(report.unlimited_reserved_bytes, report.peak_allocated_bytes)
    return max(report.peak_reserved_bytes, report.peak_allocated_bytes)


def need_parts(
    report: Prediction | Measurement, unlimited: Prediction | None = None
) -> dict[str, int]:
    """`needed_bytes` by kind, with what is cached; they add up.

    `unlimited` is the same plan on a card that holds it, for the kinds of one that does not fit:
    another chip may need a few MiB more or less, which go to what is cached. Without it, what lies
    beyond the failure is `UNKNOWN`.
    """
    needed = needed_bytes(report)
    if report.verdict is Outcome.OOM and isinstance(report, Prediction) and unlimited is not None:
        parts, beyond = peak_parts(unlimited), CACHED
    else:
        parts = peak_parts(report)
        beyond = UNKNOWN if report.verdict is Outcome.OOM else CACHED
    left = needed
    for kind, size in parts.items():
        parts[kind] = min(size, left)
        left -= parts[kind]
    return parts | {beyond: left}


def outcome_on(
    report: Prediction | Measurement, limit_bytes: int, card: str = ""
) -> Outcome | None:
    """Whether the experiment fits a card whose allocator can reserve `limit_bytes`.

    A prediction may have replayed exactly this limit, or on several GPUs that of `card` less what
    the libraries take. Else: a run that was never refused memory
    fits whatever holds its peak reserved, and does not fit what cannot hold its peak allocated.
    None in between, where the allocator's cache decides, and for a run that failed otherwise. A run
    that fitted one card is taken to fit a larger one.
    """
    if report.verdict is Outcome.FAILED:
        return None
    verdicts = report.verdicts if isinstance(report, Prediction) else {}
    for name, verdict in verdicts.items():
        is_card = card_label(name) == card and not report.plan.get("memory_limit")
        if is_card or verdict.limit_bytes == limit_bytes:
            return verdict.verdict
    if report.peak_allocated_bytes > limit_bytes:
        return Outcome.OOM
    reserved = report.peak_reserved_bytes
    if isinstance(report, Prediction):
        reserved = report.unlimited_reserved_bytes
    elif report.verdict is Outcome.OOM:
        return None  # how much it would have needed was not measured
    return Outcome.FITS if reserved <= limit_bytes else None


def is_tight_on(report: Prediction | Measurement, card: str) -> bool:
    """Whether a prediction fits `card` with less to spare than drivers of it differ by."""
    from memest.estimator.search.advise import TIGHT_SHARE

    verdicts = report.verdicts if isinstance(report, Prediction) else {}
    return any(
        card_label(name) == card
        and verdict.verdict is Outcome.FITS
        and verdict.margin_bytes < TIGHT_SHARE * verdict.limit_bytes
        for name, verdict in verdicts.items()
    )
