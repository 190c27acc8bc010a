"""The chart of memory against time."""

from __future__ import annotations

import pytest
from matplotlib.text import Text

from memest.errors import PlanError
from memest.plots import plot_trade_off
from memest.report import Outcome, Peak, Prediction, StepTime, Verdict
from memest.units import GIB

GPU = "a100-80gb"


def prediction(name: str, left_gib: int, seconds: float | None) -> Prediction:
    outcome = Outcome.FITS if left_gib >= 0 else Outcome.OOM
    verdict = Verdict(
        verdict=outcome, margin_bytes=left_gib * GIB, limit_bytes=78 * GIB, reserved_bytes=GIB
    )
    times = {}
    if seconds is not None:
        times[GPU] = StepTime(
            seconds=seconds, low_seconds=0.8 * seconds, high_seconds=1.4 * seconds,
            peak_share=0.3, bound_by="memory", origin="", unmeasured_share=0.0,
        )  # fmt: skip
    return Prediction(
        name=name, plan={"seq_len": 25}, model={}, gpu=GPU, peak_allocated_bytes=GIB,
        peak_reserved_bytes=GIB, process_bytes=GIB, host_bytes=0, phases=(), verdict=outcome,
        versions={}, elapsed_s=0.0, unlimited_reserved_bytes=GIB,
        peak=Peak(step=0, phase="", module="", op=""), verdicts={GPU: verdict}, terms=(),
        coverage={}, assumptions=(), times=times,
    )  # fmt: skip


@pytest.mark.parametrize("dark", [False, True])
def test_each_experiment_has_a_bar_of_memory_and_one_of_time(dark: bool) -> None:
    rows = [prediction("a", 10, 2.0), prediction("b", -5, 1.0), prediction("c", 3, None)]

    figure = plot_trade_off(rows, gpu=GPU, dark=dark)

    left, right = figure.axes
    assert [bar.get_width() for bar in left.patches] == [10, -5, 3]
    assert [bar.get_width() for bar in right.patches] == [2.0, 1.0]
    words = [text.get_text().strip() for text in figure.findobj(Text)]
    assert {"10.0", "-5.0", "2", "1 OOM", "no estimate"} <= set(words)


@pytest.mark.parametrize("gib", [(-335, 13), (-335, -2), (5, 900)])
def test_each_number_of_memory_is_inside_its_panel(gib: tuple[int, int]) -> None:
    figure = plot_trade_off([prediction(f"row {n}", n, 1.0) for n in gib], gpu=GPU)
    figure.draw_without_rendering()

    left, _right = figure.axes
    panel = left.get_window_extent()
    for number in left.texts:
        if not (number.get_gid() or "").startswith("name"):
            box = number.get_window_extent()
            assert panel.x0 <= box.x0 < box.x1 <= panel.x1


def test_a_chart_needs_a_report() -> None:
    with pytest.raises(PlanError):
        plot_trade_off([], gpu=GPU)
