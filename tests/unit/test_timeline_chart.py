"""The timeline and the heat maps say what they were given."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from memest.errors import PlanError
from memest.estimator.replay.recording import KINDS, PhaseSpan, Timeline
from memest.plots import Picture, plot_fits, plot_largest_batch, plot_timeline, retitle, svg_text
from memest.plots.heatmap import MAX_ROWS
from memest.plots.style import DARK, HEIGHT, LIGHT, VERDICTS
from memest.plots.timeline import MAX_COLUMNS, TEMPORARIES, color_of
from memest.report import Outcome, Verdict
from memest.units import GIB

GRAYS = (0.299, 0.587, 0.114)


def line(num_points: int = 8, *, refused_bytes: int = 0) -> Timeline:
    """7 GiB of params throughout; activations rise to 5 GiB at point 3 and fall."""
    kinds = {kind: [0] * num_points for kind in KINDS}
    kinds["params"] = [7 * GIB] * num_points
    kinds["activations"] = [(5 - min(5, abs(3 - i))) * GIB for i in range(num_points)]
    return Timeline(
        step=1,
        kinds=kinds,
        reserved=[13 * GIB] * num_points,
        spans=(
            PhaseSpan("forward", 0, 3), PhaseSpan("backward", 3, 6),
            PhaseSpan("step", 6, num_points - 1),
        ),
        peak=3,
        where="lm_head, aten.mm",
        refused_bytes=refused_bytes,
    )  # fmt: skip


def drawn(timeline: Timeline | None = None, **kwargs: object) -> Figure:
    return plot_timeline(timeline or line(), name="gpt2", gpu="t4", **kwargs)  # type: ignore[arg-type]


def texts(figure: Figure) -> list[str]:
    return [t.get_text() for t in figure.findobj(Text) if t.get_text()]


def by_gid(figure: Figure, pattern: str) -> dict[str, object]:
    return {
        artist.get_gid(): artist
        for artist in figure.findobj()
        if artist.get_gid() and re.fullmatch(pattern, artist.get_gid())
    }


def test_the_areas_are_stacked_and_end_at_the_peak() -> None:
    areas = by_gid(drawn(), "params|activations")

    tops = {
        name: max(path.vertices[:, 1].max() for path in area.get_paths())
        for name, area in areas.items()
        if isinstance(area, PolyCollection)
    }
    assert tops == {"params": 7.0, "activations": 12.0}


def test_the_peak_is_named_with_its_number_and_place() -> None:
    found = texts(drawn())

    assert "peak 12.00 GiB" in found
    assert "lm_head, aten.mm" in found
    assert {"forward", "backward"} <= set(found)
    assert any(text.strip() == "step" for text in found)


def test_no_peak_is_lost_where_points_share_a_column() -> None:
    """Of 100 times as many points as columns a single one is the peak."""
    many = line(100 * MAX_COLUMNS)
    at = 54_321
    spiky = {**many.kinds, "temporaries": [0] * (100 * MAX_COLUMNS)}
    spiky["temporaries"] = [*spiky["temporaries"]]
    spiky["temporaries"][at] = 30 * GIB
    figure = drawn(replace(many, kinds=spiky, peak=at, reserved=[40 * GIB] * len(many.reserved)))

    area = by_gid(figure, "temporaries")["temporaries"]
    assert isinstance(area, PolyCollection)
    assert max(path.vertices[:, 1].max() for path in area.get_paths()) == 37.0


@pytest.mark.parametrize(
    ("limit_gib", "is_drawn"), [(14, True), (19, True), (20, False), (80, False)]
)
def test_the_gpus_line_is_drawn_where_it_is_near(limit_gib: int, is_drawn: bool) -> None:
    """13 GiB are reserved: a line from 19.5 GiB on would squeeze what is shown."""
    figure = drawn(gpu_limit_bytes=limit_gib * GIB)

    assert bool(by_gid(figure, "limit")) is is_drawn


def test_out_of_memory_is_said_at_the_end() -> None:
    found = texts(drawn(line(refused_bytes=2 * GIB), gpu_limit_bytes=13 * GIB))

    assert "peak 12.00 GiB, then OOM: 2.00 GiB more were requested" in found


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_neighbouring_areas_differ_in_grey(theme: object) -> None:
    from matplotlib.colors import to_rgb

    order = ["params", "grads", "optimizer", "activations", "temporaries", "rest"]
    greys = [
        sum(w * c for w, c in zip(GRAYS, to_rgb(color_of(theme, area)), strict=True))  # type: ignore[arg-type]
        for area in order
    ]
    assert all(abs(a - b) > 0.1 for a, b in pairwise(greys))
    assert color_of(LIGHT, "temporaries") == TEMPORARIES


def test_a_title_of_ones_own_replaces_the_charts() -> None:
    assert "My step" in texts(retitle(drawn(), "My step"))
    assert "Memory over one step: gpt2" in texts(retitle(drawn(), ""))


def test_a_picture_shows_itself_in_a_notebook() -> None:
    figure = drawn()

    assert Picture(figure)._repr_svg_() == svg_text(figure)
    assert svg_text(figure).startswith("<svg")
    assert svg_text(figure) == svg_text(figure)


TABLE = {"gpt2": {"full": 4, "LoRA": 64}, "opt": {"full": 0, "QLoRA": None}}


def test_every_cell_holds_its_largest_batch() -> None:
    figure = plot_largest_batch(TABLE, gpu="t4")

    words = {
        name: artist.get_text()
        for name, artist in by_gid(figure, "text:.*").items()
        if isinstance(artist, Text)
    }
    assert words == {
        "text:0:0": "4", "text:0:1": "64", "text:0:2": "n/a",
        "text:1:0": "OOM", "text:1:1": "n/a", "text:1:2": "n/a",
    }  # fmt: skip
    assert list(by_gid(figure, "oom:.*")) == ["oom:1:0"]


def test_more_that_fits_is_darker_on_light_slides() -> None:
    cells = by_gid(plot_largest_batch(TABLE, gpu="t4"), "cell:0:[01]")
    small, large = (
        sum(artist.get_facecolor()[:3])
        for artist in cells.values()
        if isinstance(artist, Rectangle)
    )

    assert small > large


def verdict(reserved_gib: int) -> Verdict:
    return Verdict(
        verdict=Outcome.OOM if reserved_gib > 16 else Outcome.FITS,
        margin_bytes=(16 - reserved_gib) * GIB,
        limit_bytes=16 * GIB,
        reserved_bytes=min(16, reserved_gib) * GIB,
    )


def test_a_sweep_says_what_fits() -> None:
    table = {(m, str(b)): verdict(3 * b + k) for k, m in enumerate("xy") for b in (1, 3, 5)}
    figure = plot_fits(table, across="batch size", gpu="t4")

    words = {
        name: artist.get_text()
        for name, artist in by_gid(figure, "text:.*").items()
        if isinstance(artist, Text)
    }
    assert list(words.values()) == ["3.0", "9.0", "15.0", "4.0", "10.0", "16.0"]
    assert not by_gid(figure, "oom:.*")
    assert by_gid(plot_fits({("x", "6"): verdict(18)}, across="b", gpu="t4"), "oom:.*")


def test_what_may_fit_and_what_is_tight_have_colours_of_their_own() -> None:
    may = replace(verdict(18), verdict=Outcome.MAY)
    tight = replace(verdict(15), spread_bytes=2 * GIB)
    figure = plot_fits({("x", "1"): may, ("x", "2"): tight}, across="b", gpu="t4")

    cells = by_gid(figure, "cell:.*")
    colors = [to_hex(cells[f"cell:0:{i}"].get_facecolor()) for i in (0, 1)]
    assert colors == [VERDICTS["may"].lower(), VERDICTS["tight"].lower()]
    assert {"may", "tight"} < {text.get_text() for text in figure.legends[0].get_texts()}


def test_of_many_columns_every_nth_has_a_head() -> None:
    table = {("x", str(b)): verdict(b // 4) for b in range(1, 65)}
    heads = by_gid(plot_fits(table, across="batch size", gpu="t4"), "head:.*")

    labels = [artist.get_text() for artist in heads.values() if isinstance(artist, Text)]
    assert labels[0] == "1"
    assert len({int(b) - int(a) for a, b in pairwise(labels[1:])}) == 1
    assert labels[-1] == "64"


def test_many_rows_make_the_slide_taller() -> None:
    table = {f"model {i}": {"full": i} for i in range(2 * MAX_ROWS)}

    assert plot_largest_batch(table, gpu="t4").get_figheight() > 1.4 * HEIGHT


def test_nothing_to_draw_is_an_error() -> None:
    with pytest.raises(PlanError, match="there is no experiment to draw"):
        plot_largest_batch({}, gpu="t4")
    with pytest.raises(PlanError, match="there is no experiment to draw"):
        plot_fits({}, across="batch size", gpu="t4")
