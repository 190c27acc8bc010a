"""The charts say what the reports say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from memest.errors import PlanError
from memest.plots import plot_ladder, plot_phases, plot_scatter, save
from memest.plots.ladder import peak_parts, word_on
from memest.plots.phases import shown_step
from memest.plots.style import DARK, FORMATS, KINDS, LIGHT, shortened, text_on, text_width
from memest.plots.words import MINUS
from memest.report import (
    Measurement,
    Outcome,
    Peak,
    Phase,
    PhaseRow,
    Prediction,
    Report,
    Term,
    Verdict,
)
from memest.units import GIB

BEFORE, FORWARD, BACKWARD, STEP, _ = Phase
LIMIT = 60 * GIB
SMALL_GPU, LARGE_GPU = 20 * GIB, 60 * GIB


def row(
    phase: Phase,
    sizes: tuple[int, int, int, int],
    peak: int,
    *,
    step: int = 1,
    micro_batch: int = 0,
) -> PhaseRow:
    """`sizes` and `peak` in GiB: params, grads, optimizer, activations."""
    params, grads, optimizer, activations = (size * GIB for size in sizes)
    return PhaseRow(
        step=step,
        micro_batch=0,
        phase=phase,
        params_bytes=params,
        grads_bytes=grads,
        optimizer_bytes=optimizer,
        activations_bytes=activations,
        allocated_bytes=params + grads + optimizer + activations,
        peak_allocated_bytes=peak * GIB,
        reserved_bytes=40 * GIB,
    )


ROWS = (
    row(BEFORE, (7, 5, 11, 1), 24),
    row(FORWARD, (7, 0, 11, 9), 29),
    row(BACKWARD, (7, 5, 11, 2), 33),
    row(STEP, (7, 5, 11, 3), 31),
)


def common(**changes: Any) -> dict[str, Any]:
    values = {
        "name": "lora-b8",
        "plan": {"model_name": "gpt2", "accumulate_grad_batches": 1},
        "model": {"class": "GPT2LMHeadModel", "num_params": 3, "num_trainable_params": 3},
        "gpu": "a100-80gb",
        "peak_allocated_bytes": 33 * GIB,
        "peak_reserved_bytes": 40 * GIB,
        "process_bytes": 41 * GIB,
        "host_bytes": 0,
        "phases": ROWS,
        "verdict": Outcome.FITS,
        "versions": {},
        "elapsed_s": 1.0,
    }
    return values | changes


def term(kind: str, gib: int) -> Term:
    return Term(kind=kind, num_bytes=gib * GIB, arithmetic="", why="")


def predicted(**changes: Any) -> Prediction:
    own = {
        "unlimited_reserved_bytes": 40 * GIB,
        "peak": Peak(step=1, phase="backward", module="lm_head", op="aten.mm"),
        "verdicts": {},
        "terms": (
            term("params", 7), term("grads", 5), term("optimizer", 11), term("activations", 6),
            term("activations", 1), term("buffers", 1), term("rounding", 2),
        ),
        "coverage": {},
        "assumptions": (),
    }  # fmt: skip
    return Prediction(**common(**(own | changes)))


def measured(**changes: Any) -> Measurement:
    return Measurement(**common(**({"device": {}, "context_bytes": GIB} | changes)))


def out_of_memory(make: Callable[..., Any], **changes: Any) -> Any:
    """A run that fails in the forward of step 1, with 50 GiB allocated."""
    values = {"verdict": Outcome.OOM, "phases": ROWS[:1], "peak_allocated_bytes": 50 * GIB}
    return make(**(values | changes))


def find(figure: Figure, pattern: str) -> dict[str, Any]:
    """The artists whose id matches."""
    artists = figure.findobj(lambda artist: re.fullmatch(pattern, artist.get_gid() or ""))
    return {str(artist.get_gid()): artist for artist in artists}


def words(figure: Figure) -> list[str]:
    return [a.get_text() for a in figure.findobj(Text) if a.get_visible() and a.get_text()]


def drawn_texts(figure: Figure) -> list[Text]:
    """What is written on the slide; matplotlib also keeps ticks beyond the ends of an axis."""
    figure.draw_without_rendering()
    beyond = {
        id(tick.label1)
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        for tick in axis.get_major_ticks()
        if not min(axis.get_view_interval()) <= tick.get_loc() <= max(axis.get_view_interval())
    }
    texts = figure.findobj(Text)
    return [t for t in texts if t.get_visible() and t.get_text() and id(t) not in beyond]


def height_bytes(bar: Rectangle) -> float:
    return bar.get_height() * GIB


def all_charts(*, dark: bool = False) -> dict[str, Figure]:
    pair = (predicted(), measured())
    failed = (out_of_memory(predicted), out_of_memory(measured))
    limits = {"A 20GB": SMALL_GPU, "B 60GB": LARGE_GPU}
    return {
        "phases": plot_phases(*pair, gpu_limit_bytes=LIMIT, dark=dark),
        "phases-oom": plot_phases(*failed, gpu_limit_bytes=LIMIT, dark=dark),
        "scatter": plot_scatter([pair, failed], dark=dark),
        "ladder": plot_ladder([pair[0], failed[0]], limits=limits, dark=dark),
    }


# ------------------------------------------------------------------ phases


def test_bars_add_up_to_what_is_allocated_at_each_phase() -> None:
    """Four kinds stacked without a gap, for the prediction and for the measurement."""
    figure = plot_phases(predicted(), measured(), gpu_limit_bytes=LIMIT)

    for kind in ("predicted", "measured"):
        for phase, r in zip(list(Phase)[:4], ROWS, strict=True):
            bars = find(figure, f"{kind}:{phase}:(params|grads|optimizer|activations)")
            tops = [0.0]
            for name in ("params", "grads", "optimizer", "activations"):
                bar = bars[f"{kind}:{phase}:{name}"]
                assert height_bytes(bar) == getattr(r, f"{name}_bytes")
                assert bar.get_y() == tops[-1]
                tops.append(bar.get_y() + bar.get_height())
            assert tops[-1] * GIB == r.allocated_bytes


def test_the_outline_reaches_the_peak_since_the_phase_before() -> None:
    outlines = find(plot_phases(predicted(), None, gpu_limit_bytes=LIMIT), "predicted:.*:peak")

    tops = {gid: bar.get_y() + bar.get_height() for gid, bar in outlines.items()}
    assert [tops[f"predicted:{p}:peak"] for p in list(Phase)[:4]] == [24, 29, 33, 31]


def test_a_phase_says_what_it_is_in_gib_and_by_how_much_the_peak_is_off() -> None:
    off = replace(ROWS[2], peak_allocated_bytes=30 * GIB)  # 33 predicted
    figure = plot_phases(
        predicted(), measured(phases=(*ROWS[:2], off, ROWS[3])), gpu_limit_bytes=LIMIT
    )

    said = words(figure)
    assert "allocated, GiB" in said
    assert "usable on A100 80GB: 60.0 GiB" in said
    assert {"before forward", "after forward", "after backward", "after optimizer step"} <= {*said}
    assert said.count("11.0") == 8  # optimizer state, in each bar
    assert said.count("peak ±0.00 %") == 3
    assert "peak +10.00 %" in said
    assert "lora-b8: step 2" in said


def test_the_number_of_a_bar_near_the_limit_stays_under_the_line() -> None:
    """33 GiB under a line at 34: a number over the line would name a bar that does not fit."""
    figure = plot_phases(predicted(), None, gpu_limit_bytes=34 * GIB)
    (number,) = [text for text in figure.axes[0].texts if text.get_text() == "33.0"]
    figure.draw_without_rendering()
    top = number.get_window_extent().y1

    assert top < figure.axes[0].transData.transform((0, 34))[1]


def test_the_outermost_tick_of_the_errors_is_beyond_every_marker() -> None:
    pair = (predicted(), measured(peak_reserved_bytes=50 * GIB))
    axes = plot_scatter([pair]).axes[-1]

    assert max(axes.get_xticks()) >= 20
    assert axes.get_xlim()[1] >= 20


def test_text_of_an_svg_is_text(tmp_path: Path) -> None:
    save(all_charts()["phases"], tmp_path / "phases.svg")
    svg = (tmp_path / "phases.svg").read_text(encoding="utf-8")

    assert ">before forward</text>" in svg
    assert "'DejaVu Sans', Verdana, sans-serif" in svg


def test_the_limit_is_a_line_unless_it_would_flatten_the_bars() -> None:
    near = plot_phases(predicted(), None, gpu_limit_bytes=LIMIT)
    far = plot_phases(predicted(), None, gpu_limit_bytes=139 * GIB)

    assert list(find(near, "limit")["limit"].get_ydata()) == [60, 60]
    assert not find(far, "limit")
    assert "usable on A100 80GB: 139.0 GiB, above this chart ↑" in words(far)


def test_the_last_micro_batch_of_step_1_is_shown_or_of_step_0_where_it_is_the_only_one() -> None:
    accumulated = tuple(
        replace(r, micro_batch=m, step=s) for s in (0, 1) for m in (0, 1, 2) for r in ROWS
    )

    assert shown_step([predicted(phases=accumulated)]) == (1, 2)
    assert shown_step([measured(phases=accumulated[:12])]) == (0, 2)
    assert shown_step([measured(phases=())]) == (0, 0)
    assert shown_step([predicted(phases=(*accumulated, replace(ROWS[0], step=2)))]) == (1, 2)


def test_of_a_run_out_of_memory_the_micro_batch_in_which_it_failed_is_shown() -> None:
    """Predicted to fail in step 0; the measurement beside it went on."""
    start = tuple(replace(r, step=0) for r in ROWS)
    failed = out_of_memory(predicted, phases=start[:1])
    assert shown_step([failed, measured(phases=start + ROWS)]) == (0, 0)

    figure = plot_phases(failed, measured(phases=start + ROWS), gpu_limit_bytes=LIMIT)
    assert list(find(figure, ".*:oom")) == ["predicted:after_forward:oom"]
    assert find(figure, "title")["title"].get_text() == "lora-b8: step 1"


def test_the_phase_that_ran_out_of_memory_is_hatched_and_those_after_it_were_not_reached() -> None:
    figure = plot_phases(out_of_memory(predicted), out_of_memory(measured), gpu_limit_bytes=LIMIT)

    hatched = find(figure, ".*:oom")
    assert sorted(hatched) == ["measured:after_forward:oom", "predicted:after_forward:oom"]
    assert {height_bytes(bar) for bar in hatched.values()} == {50 * GIB}
    assert sorted(find(figure, ".*:hatch")) == [
        "measured:after_forward:hatch",
        "predicted:after_forward:hatch",
    ]
    assert words(figure).count("OOM") == 2
    assert words(figure).count("not\nreached") == 4


def test_how_far_a_failed_run_got_is_a_lower_bound_where_its_peak_was_earlier() -> None:
    """Before the forward 24 GiB are allocated; the 50 GiB were the peak of the step before."""
    earlier = replace(ROWS[3], step=0, peak_allocated_bytes=50 * GIB)
    report = out_of_memory(measured, phases=(earlier, ROWS[0]))
    figure = plot_phases(None, report, gpu_limit_bytes=LIMIT)

    assert height_bytes(find(figure, ".*:oom")["measured:after_forward:oom"]) == 24 * GIB
    assert "≥ 24.0" in words(figure)


def test_verdicts_that_differ_are_named() -> None:
    figure = plot_phases(predicted(), out_of_memory(measured), gpu_limit_bytes=LIMIT)

    subtitle = find(figure, "subtitle")["subtitle"].get_text()
    assert "predicted: fits, measured: OOM" in subtitle


# ------------------------------------------------------------------ scatter


def test_errors_are_signed_per_cent_of_what_was_measured() -> None:
    """33 predicted over 32 measured is +3.125 %; 40 over 50 is -20 %."""
    pair = (
        predicted(),
        measured(peak_allocated_bytes=32 * GIB, peak_reserved_bytes=50 * GIB),
    )
    figure = plot_scatter([pair])

    errors = {g: a.get_offsets()[0][0] for g, a in find(figure, "error:.*").items()}
    assert errors == {"error:peak_allocated_bytes": 3.125, "error:peak_reserved_bytes": -20.0}
    summaries = [a.get_text() for a in find(figure, "summary:.*").values()]
    assert summaries == [
        "peak allocated: median 3.125 %, worst +3.12 %",
        f"peak reserved: median 20.000 %, worst {MINUS}20.00 %",
    ]
    points = find(figure, "peak_allocated_bytes")["peak_allocated_bytes"].get_offsets()
    assert points.tolist() == [[32, 33]]
    assert {"measured, GiB", "predicted, GiB"} <= {*words(figure)}


def test_a_run_without_a_measurement_is_left_out_and_counted() -> None:
    crashed = measured(name="crashed", verdict=Outcome.FAILED, phases=(), peak_allocated_bytes=0)
    figure = plot_scatter([(predicted(), measured()), (predicted(), crashed)])

    assert "crashed" not in words(figure)
    assert "1 without a measurement left out" in find(figure, "subtitle")["subtitle"].get_text()
    with pytest.raises(PlanError, match="there is no experiment to draw"):
        plot_scatter([(predicted(), crashed)])


def test_oom_and_verdicts_that_differ_are_said_by_the_name() -> None:
    oom = out_of_memory(measured, name="both")
    figure = plot_scatter([(out_of_memory(predicted), oom), (predicted(), out_of_memory(measured))])

    assert {"both (OOM)", "lora-b8 (verdicts differ)"} <= {*words(figure)}


def test_of_too_many_experiments_the_largest_errors_are_listed() -> None:
    pairs = [
        (predicted(), measured(name=f"run{i}", peak_allocated_bytes=(33 * GIB) - i))
        for i in range(40)
    ]
    said = words(plot_scatter(pairs))

    assert [w for w in said if w.startswith("run")] == [f"run{i}" for i in range(10, 40)]
    assert any(w.startswith("40 experiments, the 30 furthest off listed · A100 80GB") for w in said)


# ------------------------------------------------------------------ ladder


def test_a_prediction_s_terms_add_up_to_the_peak() -> None:
    assert peak_parts(predicted()) == {
        "params": 7 * GIB, "grads": 5 * GIB, "optimizer": 11 * GIB, "activations": 7 * GIB,
        "rest": 3 * GIB,
    }  # fmt: skip


def verdict_on(outcome: Outcome, limit: int, margin: int) -> dict[str, Verdict]:
    return {
        "a100-80gb": Verdict(
            verdict=outcome,
            margin_bytes=margin,
            limit_bytes=limit,
            reserved_bytes=limit,
            spread_bytes=GIB,
        )
    }


def test_a_ladder_s_bars_add_up_to_what_is_needed() -> None:
    """What is allocated by kind, and what is cached beside it; 40 GiB are reserved."""
    oom = out_of_memory(predicted, unlimited_reserved_bytes=71 * GIB, terms=(term("params", 50),))
    figure = plot_ladder([predicted(), oom], limits={"B 60GB": LARGE_GPU})

    for index, needed in enumerate((40, 71)):
        bars = find(figure, f"{index}:({'|'.join([*KINDS, 'cached', 'unknown'])})")
        assert sum(bar.get_width() for bar in bars.values()) == needed
        assert find(figure, f"{index}:total")[f"{index}:total"].get_text() == f"{needed}.0"
    assert "B 60GB: 60.0 GiB" in words(figure)
    assert list(find(figure, "limit:.*")["limit:B 60GB"].get_xdata()) == [60, 60]


def test_what_does_not_fit_is_drawn_whole_with_the_part_beyond_the_gpu_marked() -> None:
    """It stopped with 50 GiB of parameters; on a card that holds it, the kinds are known."""
    oom = out_of_memory(
        predicted,
        unlimited_reserved_bytes=71 * GIB,
        terms=(term("params", 50),),
        verdicts=verdict_on(Outcome.OOM, 60 * GIB, -11 * GIB),
    )
    whole = predicted(terms=(term("params", 50), term("activations", 18)))
    limits = {"A100 80GB": LARGE_GPU}
    figure = plot_ladder([predicted(), oom], limits=limits, unlimited={oom.name: whole})

    widths = {gid: bar.get_width() for gid, bar in find(figure, "1:[a-z]+").items()
              if isinstance(bar, Rectangle)}  # fmt: skip
    assert widths["1:params"] == 50
    assert widths["1:activations"] == 18
    assert widths["1:cached"] == 3
    excess = find(figure, ".*:excess")["1:excess"]
    assert (excess.get_x(), excess.get_x() + excess.get_width()) == (60, 71)
    strokes = find(figure, ".*:excess:strokes")["1:excess:strokes"].get_paths()
    assert all(60 <= x <= 71.0001 for path in strokes for x, _ in path.vertices)
    assert find(figure, "1:on:.*")["1:on:A100 80GB"].get_text() == "OOM"


def test_a_margin_that_drivers_differ_by_is_tight() -> None:
    tight = predicted(verdicts=verdict_on(Outcome.FITS, 60 * GIB, GIB // 2))
    roomy = predicted(verdicts=verdict_on(Outcome.FITS, 60 * GIB, GIB))
    figure = plot_ladder([tight, roomy], limits={"A100 80GB": 60 * GIB})

    assert [find(figure, f"{i}:on:.*")[f"{i}:on:A100 80GB"].get_text() for i in (0, 1)] == [
        "tight", "fits",
    ]  # fmt: skip


def test_a_row_of_the_ladder_says_what_distinguishes_it() -> None:
    plan = {"model_name": "gpt2", "precision": "bf16-true", "batch_size": 4, "optim": "sgd",
            "accumulate_grad_batches": 2, "use_lora": True, "lora_r": 8, "seq_len": 25,
            "devices": 1}  # fmt: skip
    figure = plot_ladder([predicted(name="gpt2 sgd", plan=plan)], limits={}, suite="mine")

    detail = find(figure, "0:detail")["0:detail"].get_text()
    assert detail == "bf16-true · batch 4 x 2 · sgd · LoRA 8"
    subtitle = find(figure, "subtitle")["subtitle"].get_text()
    assert subtitle.startswith("1 experiment of mine, predicted for A100 80GB · 25 tokens · memest")
    assert "NCCL" not in subtitle


def test_the_verdict_for_a_gpu_is_the_replayed_one_where_there_is_one() -> None:
    def verdict(outcome: Outcome) -> Verdict:
        return Verdict(verdict=outcome, margin_bytes=0, limit_bytes=35 * GIB, reserved_bytes=0)

    fits = predicted(verdicts={"card": verdict(Outcome.FITS)})
    oom = predicted(verdicts={"card": verdict(Outcome.OOM)})

    assert word_on(fits, 35 * GIB) == "fits"
    assert word_on(oom, 35 * GIB) == "OOM"


def test_without_a_replay_the_peaks_decide_or_nothing_does() -> None:
    """33 GiB allocated cannot fit 32; 40 GiB reserved fit 40; in between it is not known."""
    assert word_on(predicted(), 32 * GIB) == "OOM"
    assert word_on(predicted(), 40 * GIB) == "fits"
    assert word_on(predicted(), 36 * GIB) == "?"
    needs = out_of_memory(predicted, unlimited_reserved_bytes=71 * GIB)
    assert word_on(needs, 71 * GIB) == "fits"


def test_a_long_ladder_grows_instead_of_its_type_shrinking() -> None:
    def size(count: int) -> float:
        figure = plot_ladder([predicted()] * count, limits={})
        return round(find(figure, "0:name")["0:name"].get_fontsize(), 6)

    assert size(36) == size(18) < size(10)
    assert plot_ladder([predicted()] * 18, limits={}).get_figheight() == 7.5


def test_a_ladder_of_nothing_is_refused() -> None:
    with pytest.raises(PlanError, match="there is no experiment to draw"):
        plot_ladder([], limits={"A": 1})


# ------------------------------------------------------------------ style


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_greyscale_keeps_every_two_kinds_apart(theme: Any) -> None:
    """BT.601 luma, a tenth of the range apart at least, and rising through the states.

    What only strategies have is apart from all that it can lie next to.
    """
    colors = {kind: to_rgb(theme.kinds[kind]) for kind in KINDS}
    greys = {k: 0.299 * r + 0.587 * g + 0.114 * b for k, (r, g, b) in colors.items()}
    states = [greys[kind] for kind in KINDS[:4]]

    assert states == sorted(states)
    ordered = sorted([*states, greys["rest"]])
    assert min(b - a for a, b in pairwise(ordered)) > 0.1
    last = [greys[kind] for kind in ("activations", "buckets", "gathered", "rest")]
    assert min(abs(a - b) for a, b in combinations(last, 2)) > 0.1


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_numbers_on_bars_reach_the_contrast_of_large_type(theme: Any) -> None:
    """WCAG 2: at least 4.5 to 1."""

    def luminance(color: str) -> float:
        linear = [
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for color in theme.kinds.values():
        light, dark = sorted((luminance(color), luminance(text_on(color))), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5


@pytest.mark.parametrize("dark", [False, True])
def test_nothing_is_clipped_or_too_small(dark: bool) -> None:
    """All text lies on the slide, in 14 points at least where the list is short."""
    for figure in all_charts(dark=dark).values():
        width, height = figure.canvas.get_width_height()
        for text in drawn_texts(figure):
            box = text.get_window_extent()
            assert box.x0 >= 0, text.get_text()
            assert box.y0 >= 0, text.get_text()
            assert box.x1 <= width, text.get_text()
            assert box.y1 <= height, text.get_text()
            assert text.get_fontsize() >= 14, text.get_text()


def test_no_two_words_lie_on_each_other() -> None:
    crowded = {"A 14GB": 14 * GIB, "B 16GB": 16 * GIB, "C 18GB": 18 * GIB, "D 40GB": 40 * GIB}
    over = plot_phases(predicted(), measured(), gpu_limit_bytes=25 * GIB)
    near = plot_phases(predicted(), measured(), gpu_limit_bytes=34 * GIB)
    many = plot_ladder([predicted()] * 18, limits=crowded)
    rows = plot_scatter([(predicted(), measured())] * 30)
    for figure in [*all_charts().values(), over, near, many, rows]:
        boxes = [(t.get_text(), Text.get_window_extent(t)) for t in drawn_texts(figure)]
        for i, (one, a) in enumerate(boxes):
            for other, b in boxes[i + 1 :]:
                wide, tall = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
                leading = 0.35 * min(a.height, b.height)  # of lines of a list under each other
                assert wide <= 1 or tall <= leading, f"{one!r} on {other!r}"


def test_a_long_name_loses_its_middle_and_a_dollar_stays_a_dollar(tmp_path: Path) -> None:
    long = "a" * 200 + "z" * 200
    assert text_width(shortened(long, 26, 5), 26) <= 5
    assert re.fullmatch("a+…z+", shortened(long, 26, 5))
    figure = plot_phases(predicted(name="cost $1_000$"), None, gpu_limit_bytes=LIMIT)
    assert "cost $1_000$: step 2" in words(figure)
    save(figure, tmp_path / "dollar")
    save(plot_ladder([predicted(name=long), predicted(name="$x^$")], limits={}), tmp_path / "l")


# ------------------------------------------------------------------ files


@pytest.mark.parametrize("dark", [False, True])
def test_every_chart_saves_in_every_format(tmp_path: Path, dark: bool) -> None:
    for name, figure in all_charts(dark=dark).items():
        files = save(figure, tmp_path / "charts" / name)
        assert [f.name for f in files] == [f"{name}.{suffix}" for suffix in FORMATS]
        png, svg, pdf = (f.read_bytes() for f in files)
        assert png.startswith(b"\x89PNG")
        assert int.from_bytes(png[16:20]) == 1920
        assert ElementTree.fromstring(svg).tag.endswith("svg")
        assert pdf.startswith(b"%PDF")
    assert not [p for p in (tmp_path / "charts").iterdir() if p.name.startswith(".")]


def test_the_same_reports_give_the_same_bytes(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        for name, figure in all_charts().items():
            if name != "phases":  # `phases-oom` has all that it has
                save(figure, tmp_path / folder / name)

    for path in sorted((tmp_path / "a").iterdir()):
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name
        assert b"Date" not in path.read_bytes(), path.name


def test_the_user_s_matplotlib_settings_change_nothing_and_stay(tmp_path: Path) -> None:
    import matplotlib as mpl

    save(all_charts()["scatter"], tmp_path / "a", ("svg",))
    with mpl.rc_context({"font.size": 3, "axes.grid": True, "lines.linewidth": 9, "svg.id": "me"}):
        save(all_charts()["scatter"], tmp_path / "b", ("svg",))
        assert mpl.rcParams["lines.linewidth"] == 9

    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_a_path_with_a_known_suffix_is_that_one_file_and_a_dot_in_a_name_is_no_suffix(
    tmp_path: Path,
) -> None:
    figure = all_charts()["phases"]

    assert save(figure, tmp_path / "one.svg") == [tmp_path / "one.svg"]
    assert save(figure, str(tmp_path / "opt-2.7b"), ("png",)) == [tmp_path / "opt-2.7b.png"]


@pytest.mark.parametrize(
    ("path", "formats", "message"),
    [
        ("chart", ("gif",), "format `gif` does not exist"),
        ("chart", ("png", "docx"), "format `docx` does not exist"),
        ("chart.jpeg", FORMATS, "format `jpeg` does not exist"),
        ("chart", (), "no format"),
    ],
)
def test_a_format_that_does_not_exist_writes_nothing(
    tmp_path: Path, path: str, formats: Sequence[str], message: str
) -> None:
    with pytest.raises(PlanError, match=re.escape(message)) as caught:
        save(Figure(), tmp_path / path, formats)

    assert caught.value.hint == "choose from `png`, `svg`, `pdf`"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(PlanError, match=r"chart\.png` cannot be written: ") as caught:
        save(Figure(), tmp_path / "file" / "chart")

    assert caught.value.hint == "name a folder that you may write to"


def test_a_failure_leaves_the_old_files_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full when the second of two files is written."""
    (tmp_path / "chart.png").write_text("old")
    save_figure = Figure.savefig

    def full(self: Figure, path: Any, **kwargs: Any) -> None:
        save_figure(self, path, **kwargs)
        if kwargs["format"] == "svg":
            raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Figure, "savefig", full)
    with pytest.raises(PlanError, match="No space left on device"):
        save(Figure(), tmp_path / "chart", ("png", "svg"))

    assert [p.name for p in tmp_path.iterdir()] == ["chart.png"]
    assert (tmp_path / "chart.png").read_text() == "old"


def test_pyplot_is_never_imported_and_matplotlib_only_when_something_is_drawn() -> None:
    code = (
        "import sys, memest.plots; assert 'matplotlib' not in sys.modules\n"
        "from memest.plots import plot_ladder, plot_phases, plot_scatter, save, style\n"
        "assert callable(save) and 'matplotlib' in sys.modules\n"
        "assert 'matplotlib.pyplot' not in sys.modules and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_what_the_package_exports_exists() -> None:
    import memest.plots

    assert all(callable(getattr(memest.plots, name)) for name in memest.plots.__all__)
    with pytest.raises(AttributeError, match="has no attribute `plot_pie`"):
        _ = memest.plots.plot_pie


def test_reports_are_drawn_from_their_own_json() -> None:
    """What `memest validate` wrote and `read_measurements` read draws like the original."""
    again: Report = Measurement.from_dict(measured().to_dict())

    assert isinstance(again, Measurement)
    before, after = (plot_scatter([(predicted(), m)]) for m in (measured(), again))
    assert words(after) == words(before)
