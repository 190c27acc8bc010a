"""Charts: functions that draw reports as matplotlib figures, and `save`, which writes a figure.

    from memest.plots import plot_phases, save

    save(plot_phases(prediction, None, gpu_limit_bytes=limit), "phases")

matplotlib is imported by the first use of a function, not by the import of this package.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from memest.packages import require

if TYPE_CHECKING:
    from memest.plots.heatmap import plot_fits, plot_largest_batch
    from memest.plots.ladder import plot_ladder, plot_trade_off
    from memest.plots.phases import plot_phases
    from memest.plots.scaling import plot_fragmentation, plot_ranks, plot_scaling, plot_scaling_bars
    from memest.plots.scatter import plot_scatter
    from memest.plots.style import Picture, parse_formats, retitle, save, svg_text
    from memest.plots.timeline import plot_timeline
    from memest.plots.words import gpu_label

__all__ = [
    "Picture", "gpu_label", "parse_formats", "plot_fits", "plot_fragmentation", "plot_ladder",
    "plot_largest_batch", "plot_phases", "plot_ranks", "plot_scaling", "plot_scaling_bars",
    "plot_scatter", "plot_timeline", "plot_trade_off", "retitle", "save", "svg_text",
]  # fmt: skip
_MODULES = ("words", "style", "heatmap", "ladder", "phases", "scatter", "timeline", "scaling")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module `memest.plots` has no attribute `{name}`")
    require("matplotlib")
    modules = (import_module(f"memest.plots.{module}") for module in _MODULES)
    return next(getattr(module, name) for module in modules if hasattr(module, name))
