"""The charts: reports in, a matplotlib figure out, `save` to write it.

    from memest.plots import plot_phases, save

    save(plot_phases(prediction, None, gpu_limit_bytes=limit), "phases")

matplotlib is imported by the first use of a function, not by the import of this package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memest.plots.ladder import plot_ladder
    from memest.plots.phases import plot_phases
    from memest.plots.saving import save
    from memest.plots.scatter import plot_scatter

__all__ = ["plot_ladder", "plot_phases", "plot_scatter", "save"]

_HOMES = {
    "plot_ladder": "memest.plots.ladder",
    "plot_phases": "memest.plots.phases",
    "plot_scatter": "memest.plots.scatter",
    "save": "memest.plots.saving",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module `memest.plots` has no attribute `{name}`")
    return getattr(import_module(_HOMES[name]), name)
