"""Memory over the number of GPUs: which terms shrink, what is left out, how it is drawn."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from math import isnan
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from memest.cli import main
from memest.errors import PlanError
from memest.estimator.search.many_plans import ScalingLine, constant_terms, scale
from memest.plots import plot_scaling, plot_scaling_bars, save
from memest.plots.scaling import spread, stack_of
from memest.plots.style import VERDICTS
from memest.report import Outcome, Peak, Prediction, Term, Verdict
from memest.units import GIB

LIMIT = 20 * GIB


def predicted(strategy: str, devices: int, **gib: float) -> Prediction:
    """A prediction whose terms are given in GiB; over 20 it is out of memory."""
    peak = int(sum(gib.values()) * GIB)
    verdict = Outcome.OOM if peak > LIMIT else Outcome.FITS
    terms = tuple(
        Term(kind=kind, num_bytes=int(size * GIB), arithmetic="", why="")
        for kind, size in gib.items()
    )
    plan = {
        "model_name": "gpt2", "precision": "bf16-true", "optim": "adamw", "batch_size": 1,
        "seq_len": 8, "accumulate_grad_batches": 1, "devices": devices, "strategy": strategy,
    }  # fmt: skip
    reached = min(peak, LIMIT)
    return Prediction(
        name="gpt2", plan=plan, model={}, gpu="rtx-4090", peak_allocated_bytes=reached,
        peak_reserved_bytes=reached, process_bytes=reached, host_bytes=0, phases=(),
        verdict=verdict, versions={}, elapsed_s=0.0, unlimited_reserved_bytes=peak,
        peak=Peak(step=0, phase="forward", module="", op=""), terms=terms, coverage={},
        verdicts={
            "rtx-4090": Verdict(
                verdict=verdict, margin_bytes=LIMIT - peak, limit_bytes=LIMIT,
                reserved_bytes=reached,
            )
        },
        assumptions=(),
    )  # fmt: skip


def line(strategy: str = "fsdp", **notes: Any) -> ScalingLine:
    """The params are divided, the activations are not, the buckets nearly not."""
    reports = {
        n: predicted(strategy, n, params=24 / n, activations=3, buckets=1 + 1 / n)
        for n in (1, 2, 4, 64)
    }
    return ScalingLine(strategy=strategy, reports=reports, **notes)


def test_what_is_divided_among_the_gpus_is_no_constant() -> None:
    """From 4 to 64 GPUs: params 6 to 0.375, activations 3 to 3, buckets 1.25 to 1 + 1/64."""
    assert constant_terms(line()) == {
        "activations": 3 * GIB,
        "buckets": GIB + GIB // 64,
    }


def test_of_one_number_of_gpus_no_term_is_called_constant() -> None:
    alone = ScalingLine(strategy="ddp", reports={4: predicted("ddp", 4, params=1)})

    assert constant_terms(alone) == {}


def test_a_strategy_that_does_not_go_with_the_plan_is_left_out_with_its_reason(
    shallow: Callable[..., str],
) -> None:
    """FSDP cannot shard a quantised base, DDP need not."""
    name = shallow("gpt2")
    values = {"model_name": name, "use_qlora": True, "seq_len": 16, "gpu": ["rtx-4090"]}

    ddp, fsdp = scale(values, strategies=["ddp", "fsdp"], devices=[2], jobs=1)

    assert list(ddp.reports) == [2]
    assert ddp.notes == ()
    assert not fsdp.reports
    assert fsdp.notes[0].startswith("not predicted on 2 GPUs: `fsdp` cannot shard a quantised base")


def test_offload_takes_its_own_optimizer_and_keys_of_others_are_not_read(
    shallow: Callable[..., str],
) -> None:
    values = {"model_name": shallow("gpt2"), "seq_len": 16, "wrap_classes": ["GPT2Block"]}

    (offload,) = scale(values, strategies=["deepspeed_stage_2_offload"], devices=[1, 2], jobs=1)

    assert [r.plan["optim"] for r in offload.reports.values()] == ["deepspeed_cpu"] * 2
    assert offload.notes == (
        "`wrap_classes` is not read",
        "`optim` is `deepspeed_cpu`, the one that offload takes",
    )


def test_nothing_that_can_be_predicted_is_the_first_plans_error() -> None:
    with pytest.raises(PlanError, match=re.escape("`fsdp` cannot shard a quantised base")):
        scale({"model_name": "gpt2", "use_qlora": True}, strategies=["fsdp"], devices=[1, 2])
    with pytest.raises(PlanError, match="there is no strategy `fsdp3`"):
        scale({"model_name": "gpt2"}, strategies=["fsdp3"], devices=[1])
    with pytest.raises(PlanError, match="`devices` is `0`"):
        scale({"model_name": "gpt2"}, strategies=["fsdp"], devices=[0])


def texts(figure: Any) -> dict[str, str]:
    found = [*figure.texts, *(text for axes in figure.axes for text in axes.texts)]
    return {text.get_gid(): text.get_text() for text in found if text.get_gid()}


@pytest.mark.parametrize("dark", [False, True])
def test_the_lines_name_their_ends_and_what_stays(dark: bool, tmp_path: Path) -> None:
    """On 64 GPUs 24/64 + 3 + 1 + 1/64 GiB; on one, 29 GiB are out of memory."""
    figure = plot_scaling([line("fsdp"), line("deepspeed_stage_3_offload")], dark=dark)

    words = texts(figure)
    assert words["end:fsdp"] == "FSDP  4.4"
    assert words["end:deepspeed_stage_3_offload"] == "ZeRO-3 offload  4.4"
    assert words["stays:fsdp"] == "activations 3.0, buckets 1.0"
    assert words["limit:name"] == "RTX 4090: 20.0 GiB usable"
    crosses = {
        drawn.get_gid(): (list(drawn.get_xdata()), list(drawn.get_ydata()))
        for drawn in figure.axes[0].lines
    }
    assert crosses["oom:fsdp"] == ([1], [29.0])
    assert [p.name for p in save(figure, tmp_path / "s", ["png", "svg"])] == ["s.png", "s.svg"]


def test_every_strategy_looks_different_without_colour() -> None:
    from memest.plan.keys import STRATEGIES
    from memest.plots.scaling import look_of
    from memest.plots.style import LIGHT

    looks = [look_of(name, LIGHT) for name in STRATEGIES if name != "auto"]

    assert len({(look["marker"], look["linestyle"]) for look in looks}) == len(looks)


def names_of_bars(figure: Any) -> list[str]:
    return [" ".join(label.get_text().split()) for label in figure.axes[0].get_xticklabels()]


def test_bars_add_up_and_their_needs_are_under_them() -> None:
    figure = plot_scaling_bars(line())

    assert sum(stack_of(line().reports[4]).values()) == 6 * GIB + 3 * GIB + GIB + GIB // 4
    assert names_of_bars(figure) == [
        "1 GPU 29.0 GiB, OOM", "2 GPUs 16.5 GiB, fits", "4 GPUs 10.2 GiB, fits",
        "64 GPUs 4.4 GiB, fits",
    ]  # fmt: skip
    words = texts(figure)
    assert words["remark"] == "Does not shrink, on 64 GPUs: activations 3.0, buckets 1.0 GiB"


def test_a_bar_is_as_high_as_the_need_and_a_far_gpu_has_no_line() -> None:
    """On 2 GPUs 12 + 3 + 1.5 GiB are allocated and 19.5 of 20 needed."""
    found = Verdict(
        verdict=Outcome.FITS, margin_bytes=GIB // 2, limit_bytes=LIMIT, reserved_bytes=LIMIT
    )
    near = replace(line().reports[2], verdicts={"rtx-4090": found})
    figure = plot_scaling_bars(replace(line(), reports={2: near}))

    assert max(bar.get_y() + bar.get_height() for bar in figure.axes[0].patches) == 19.5
    assert any(drawn.get_ydata()[0] == 20 for drawn in figure.axes[0].lines)
    alone = plot_scaling_bars(replace(line(), reports={64: line().reports[64]}))
    assert not alone.axes[0].lines


def test_a_tight_plan_is_called_so_in_both_charts() -> None:
    found = Verdict(
        verdict=Outcome.FITS, margin_bytes=GIB // 2, limit_bytes=LIMIT, reserved_bytes=LIMIT,
        spread_bytes=GIB,
    )  # fmt: skip
    tight = replace(line().reports[2], verdicts={"rtx-4090": found})
    lines = plot_scaling([replace(line(), reports={2: tight})])
    bars = plot_scaling_bars(replace(line(), reports={2: tight}))

    assert texts(lines)["end:fsdp"] == "FSDP  19.5  tight"
    (mark,) = [drawn for drawn in lines.axes[0].lines if drawn.get_gid() == "tight:fsdp"]
    assert (list(mark.get_xdata()), mark.get_color()) == ([2], VERDICTS["tight"])
    assert names_of_bars(bars) == ["2 GPUs 19.5 GiB, tight"]


def test_a_line_is_broken_where_a_figure_is_missing() -> None:
    broken = replace(line(), missing=(16,))
    figure = plot_scaling([broken])
    (drawn,) = [one for one in figure.axes[0].lines if one.get_gid() == "line:fsdp"]
    heights = dict(zip(drawn.get_xdata(), drawn.get_ydata(), strict=True))

    assert isnan(heights[16])
    assert heights[64] > 0
    assert texts(figure)["missing"] == "not predicted: FSDP on 16"


def test_a_strategy_without_predictions_is_not_drawn() -> None:
    empty = ScalingLine(strategy="fsdp", reports={})

    for draw in (plot_scaling_bars, lambda one: plot_scaling([one])):
        with pytest.raises(PlanError, match="no prediction"):
            draw(empty)
    assert "end:ddp" in texts(plot_scaling([empty, line("ddp")]))


@pytest.mark.parametrize("count", [1, 5, 10])
def test_labels_keep_their_distance_inside_the_chart(count: int) -> None:
    places = spread([4.4] * count, 0.44, 4.5)

    assert all(b - a >= 0.44 - 1e-9 for a, b in pairwise(places))
    assert places[0] >= 0
    assert places[-1] <= 4.5


def test_the_command_writes_pictures_and_their_data(
    tmp_path: Path, shallow: Callable[..., str]
) -> None:
    options = "--seq-len 16 --strategies ddp,fsdp --devices 1,2 --jobs 1".split()
    command = ["chart", "scaling", "--model", shallow("gpt2"), *options, "--out", str(tmp_path)]

    result = CliRunner().invoke(main, command)

    assert result.exit_code == 0, result.output
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["scaling-fsdp.jsonl", "scaling-fsdp.png", "scaling.jsonl", "scaling.png"]
    rows = [json.loads(row) for row in (tmp_path / "scaling.jsonl").read_text().splitlines()]
    assert [(r["strategy"], r["devices"], r["gpu"]) for r in rows] == [
        (strategy, devices, "h100-80gb") for strategy in ("ddp", "fsdp") for devices in (1, 2)
    ]
    gathered = [t for t in rows[-1]["terms"] if t["kind"] == "gathered"]
    assert gathered, "FSDP's weights at the peak are named"


def test_bars_of_a_strategy_that_is_not_asked_for_are_refused(tmp_path: Path) -> None:
    arguments = ["chart", "scaling", "--model", "gpt2", "--bars", "ddp", "--strategies", "fsdp"]

    result = CliRunner().invoke(main, [*arguments, "--out", str(tmp_path)])

    assert result.exit_code == 2
    assert "`--bars ddp` is not among the strategies" in result.output
