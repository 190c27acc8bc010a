"""Comparisons as text, Markdown and JSON."""

from collections.abc import Sequence
from typing import Any

from memest.report.text import table
from memest.units import MIB, gib, gib_or_mib
from memest.validate.compare import Comparison, Summary

_HEADER = [
    "experiment", "allocated", "predicted", "error", "reserved", "predicted", "error",
    "process", "predicted", "error", "worst phase", "verdict",
]  # fmt: skip


def render_comparison(comparisons: Sequence[Comparison], summary: Summary) -> str:
    """Return the table of totals, the summary, and the phases in which large errors begin."""
    lines = table([_HEADER, *(_cells(c) for c in comparisons)], left=1)
    residuals = [  # runs that are off by more than half a percent, or 256 MiB
        f"residual of {c.name}: {c.residual}"
        for c in comparisons
        if c.residual
        and any(
            abs(d.error_percent) > 0.5 or abs(d.error_bytes) > 256 * MIB for d in c.totals.values()
        )
    ]
    lines += ["", *_summary(summary), *residuals, *_others(comparisons, summary)]
    return "\n".join(lines)


def render_comparison_markdown(comparisons: Sequence[Comparison], summary: Summary) -> str:
    """Return the comparison as Markdown, for a page of the documentation."""
    lines = ["| " + " | ".join(_HEADER) + " |", "|" + "---|" * len(_HEADER)]
    lines += ["| " + " | ".join(_cells(c)) + " |" for c in comparisons]
    lines += ["", *(f"- {line}" for line in [*_summary(summary), *_others(comparisons, summary)])]
    return "\n".join(lines)


def comparison_json(comparisons: Sequence[Comparison], summary: Summary) -> dict[str, Any]:
    """Return the comparison as JSON values."""
    return {
        "experiments": [
            {
                "name": c.name,
                "verdict": {
                    "measured": str(c.measured.verdict),
                    "predicted": str(c.predicted.verdict),
                },
                "totals": {name: _difference(d) for name, d in c.totals.items()},
                "phases": [_difference(d) for d in c.phases],
                "states": [_difference(d) for d in c.states],
                "residual": c.residual,
            }
            for c in comparisons
        ],
        "median_percent": dict(summary.median_percent),
        "worst_percent": dict(summary.worst_percent),
        "verdicts": [
            {"measured": m, "predicted": p, "experiments": n}
            for (m, p), n in sorted(summary.verdicts.items())
        ],
        "broken": list(summary.broken),
    }


def _cells(comparison: Comparison) -> list[str]:
    cells = [comparison.name]
    for d in comparison.totals.values():
        error = f"{d.error_percent:+.3f} %"
        found, high = d.predicted, gib_or_mib(d.predicted_bytes)
        is_range = found.low_bytes < found.high_bytes
        predicted = f"{gib(found.low_bytes)} to {high}" if is_range else high
        cells += [gib_or_mib(d.measured_bytes), predicted, error]
    worst = comparison.worst_phase
    cells.append(f"{worst.error_percent:+.3f} %" if worst else "")
    measured, verdict = comparison.measured.verdict, comparison.predicted.verdict
    cells.append(str(measured) if measured == verdict else f"{measured}, predicted {verdict}")
    return cells


def _summary(summary: Summary) -> list[str]:
    lines = [
        f"{name}: median {median:.3f} %, worst {summary.worst_percent[name]:+.3f} %"
        for name, median in summary.median_percent.items()
    ]
    right = sum(n for (m, p), n in summary.verdicts.items() if m == p)
    may = sum(n for (_, p), n in summary.verdicts.items() if p == "may")
    lines.append(
        f"verdicts: {right} of {sum(summary.verdicts.values())} right"
        + (f", {may} left open" if may else "")
    )
    lines += [f"measured {m}, predicted {p}: {n}" for (m, p), n in sorted(summary.verdicts.items())]
    return lines


def _others(comparisons: Sequence[Comparison], summary: Summary) -> list[str]:
    """Return a line for each library version that differs, and for each broken tolerance."""
    found = dict.fromkeys(f"versions differ: {line}" for c in comparisons for line in c.versions)
    return [*found, *(f"outside its tolerance: {line}" for line in summary.broken)]


def _difference(difference: Any) -> dict[str, Any]:
    return {
        "what": difference.what,
        "predicted_bytes": difference.predicted_bytes,
        "low_bytes": difference.predicted.low_bytes,
        "measured_bytes": difference.measured_bytes,
        "error_percent": difference.error_percent,
    }
