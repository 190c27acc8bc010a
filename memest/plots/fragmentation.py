"""Chart of allocator settings: memory over the steps of one run."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from memest.estimator.search.scaling import Growth
from memest.plots import style
from memest.plots.scaling import spread
from memest.plots.style import Panel, require, shortened, slide
from memest.plots.words import plan_line
from memest.report import Prediction
from memest.units import GIB

_LEFT, _TOP, _BOTTOM = 1.0, 1.75, 0.95  # inches
_COLUMN = 5.1  # inches at the right: each setting, its reserved memory, and the unused part of it
_BLOCK = 0.9  # height of one setting in the column, inches

_LOOKS = (("#D55E00", "-"), ("#0072B2", "--"), ("#CC79A7", "-."), ("#009E73", ":"))
"""Line colours and dashes; the dashes suffice without colour."""


def plot_fragmentation(
    report: Prediction, runs: Sequence[Growth], *, gpu_limit_bytes: int, dark: bool = False
) -> Figure:
    """Draw reserved memory over the steps in GiB, a line for each setting of the allocator.

    Thick lines are on the GPU, thin ones without a limit. A cross is a step that runs out of
    memory. The area under the lines is the memory in use under the first setting.

    Raises:
        PlanError: there is no run.
    """
    require(list(runs))
    with slide(dark=dark) as canvas:
        width, height = style.WIDTH - _LEFT - _COLUMN, style.HEIGHT - _TOP - _BOTTOM
        panel = canvas.panel(_LEFT, _BOTTOM, width, height, grid="y")
        _set_axes(panel.axes, runs, gpu_limit_bytes)
        steps = range(1, len(runs[0].allocated) + 1)
        values = [value / GIB for value in runs[0].allocated]
        panel.axes.fill_between(
            steps, values, step="mid", color=panel.theme.muted, alpha=0.45, linewidth=0, zorder=2,
            gid="allocated",
        )  # fmt: skip
        panel.axes.annotate(
            "in use at the peak of each step", (0.5, 0.02), xycoords="axes fraction", ha="center",
            va="bottom", size=style.VALUE, weight="bold", zorder=6, gid="allocated:name",
        )  # fmt: skip
        for run, look in zip(runs, _LOOKS, strict=False):
            _draw_run(panel, run, look, gpu_limit_bytes / GIB)
        _draw_limit(panel, report, runs, gpu_limit_bytes)
        _draw_column(panel, runs)
        title = "what is reserved, and what is in use"
        if runs[0].failed_step is not None:
            title = f"out of memory in step {runs[0].failed_step + 1}"
        lengths = report.plan.get("lengths")
        span = f"{min(lengths)} to {max(lengths)} tokens" if lengths else ""
        canvas.write_title(f"{report.name}: {title}", plan_line(report, span))
        canvas.write(0.4, 1.2, _reason(runs[0], gpu_limit_bytes), size=style.VALUE, gid="reason")
    return canvas.figure


def _reason(run: Growth, limit_bytes: int) -> str:
    """Return two lines of text: how the first run stays under the limit, and why it ends."""
    over = next((i for i, size in enumerate(run.reserved) if size > limit_bytes), None)
    if over is None:
        return ""
    freeing = "the allocator frees cached blocks to stay under the limit"
    text = f"From step {over + 1}, {freeing}"
    if run.failed_step is not None and run.failed_step <= over:
        text = f"In step {run.failed_step + 1}, {freeing}, which is not enough"
    elif run.failed_step is not None:
        text += f"; in step {run.failed_step + 1} that is not enough"
    return f"{text}.\nThe thin line is what it would reserve without a limit."


def _set_axes(axes: Axes, runs: Sequence[Growth], limit_bytes: int) -> None:
    highest = max(max(run.reserved) for run in runs)
    is_near = limit_bytes < 1.6 * highest
    axes.set(xlim=(1, max(2, len(runs[0].allocated))))
    axes.set(ylim=(0, 1.12 * max(highest, limit_bytes if is_near else 0) / GIB))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
    axes.set_xlabel("optimizer step", size=style.LABEL, labelpad=4)
    axes.set_ylabel("GiB", size=style.LABEL)
    axes.tick_params(labelsize=style.TICK)


def _draw_run(panel: Panel, run: Growth, look: tuple[str, str], limit: float) -> None:
    axes, (color, dashes) = panel.axes, look
    values = [value / GIB for value in run.on_gpu]
    axes.plot(
        range(1, len(values) + 1), values, color=color, linestyle=dashes, linewidth=3.4, zorder=4,
        gid=f"reserved:{run.alloc_conf}", clip_on=False,
    )  # fmt: skip
    if run.on_gpu != run.reserved:
        axes.plot(
            range(1, len(run.reserved) + 1), [value / GIB for value in run.reserved], color=color,
            linewidth=1.4, alpha=0.7, zorder=3, gid=f"unlimited:{run.alloc_conf}", clip_on=False,
        )  # fmt: skip
    if run.failed_step is not None:
        axes.plot(
            [run.failed_step + 1], [limit], color=panel.theme.ink, linestyle="none",
            marker="x", markersize=17, markeredgewidth=3.4, zorder=6, clip_on=False,
            gid=f"oom:{run.alloc_conf}",
        )  # fmt: skip


def _draw_limit(panel: Panel, report: Prediction, runs: Sequence[Growth], limit_bytes: int) -> None:
    """Draw the GPU's limit line, with its label where the fewest lines pass."""
    top = panel.axes.get_ylim()[1]
    if limit_bytes / GIB > top:
        return
    across, up = panel.width / len(runs[0].reserved), panel.height / (GIB * top)
    curves = [*(run.reserved for run in runs), runs[0].allocated]
    points = [(step * across, size * up) for curve in curves for step, size in enumerate(curve)]
    panel.draw_limit_apart(report.gpu, limit_bytes, points)


def _draw_column(panel: Panel, runs: Sequence[Growth]) -> None:
    """Write each setting next to the end of its line, where there is room."""
    width, height = panel.width, panel.height
    top = panel.axes.get_ylim()[1]
    order = sorted(range(len(runs)), key=lambda i: runs[i].reserved[-1])
    ends = [runs[i].reserved[-1] / GIB / top * height for i in order]
    places = spread(ends, min(_BLOCK, height / len(runs)), height)
    for index, end, place in zip(order, ends, places, strict=True):
        run, (color, dashes) = runs[index], _LOOKS[index % len(_LOOKS)]
        panel.lead((width, end), (width + 0.3, place), (width + 0.75, place),
                   color=color, linestyle=dashes, linewidth=2.6)  # fmt: skip
        left, room = width + 0.88, _COLUMN - 0.98
        oom = f"  OOM in step {run.failed_step + 1}" if run.failed_step is not None else ""
        text = f"{max(run.reserved) / GIB:.1f} GiB{oom}"
        panel.write(left, place, text, size=style.LABEL, weight="bold", gid=f"end:{run.alloc_conf}")
        panel.write(
            left, place - 0.36, shortened(run.label, style.VALUE, room), size=style.VALUE,
            color=panel.theme.muted, gid=f"name:{run.alloc_conf}",
        )  # fmt: skip
