"""What a run needs: the least limit that it fits, which cached blocks do not raise."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import memest
from memest import TrainingPlan, predict
from memest.estimator.hardware.gpus import custom_gpu, find_gpu, list_gpus
from memest.estimator.replay.scenarios import (
    MAX_SEARCH_EVENTS,
    UNIT_BYTES,
    LeastLimit,
    highest_need,
)
from memest.estimator.virtual_gpu import VirtualGpu
from memest.report import Outcome, Verdict
from memest.units import GIB, MIB

LAB = TrainingPlan(model_name="blip2-opt-2.7b", batch_size=16, precision="32-true", gpu=("a100",))
SMALL = TrainingPlan(model_name="gpt2", batch_size=4, seq_len=128, gpu=("h100",))


class Run:
    """A run that fits under the limits in `fitting`, in units, and reserves all of them.

    `lacking` is what a replay that fails reports to lack.
    """

    def __init__(self, *fitting: range, num_events: int = 1000, lacking: int = 0) -> None:
        self.fitting, self.lacking, self.tried = fitting, lacking, []
        top = fitting[-1].stop - 1
        self.least = LeastLimit(
            self.replay, 100 * UNIT_BYTES, top * UNIT_BYTES, num_events=num_events
        )

    def replay(self, limit_bytes: int) -> tuple[bool, int]:
        self.tried.append(limit_bytes // UNIT_BYTES)
        if any(self.tried[-1] in limits for limits in self.fitting):
            return True, limit_bytes
        return False, self.lacking * UNIT_BYTES

    def needs(self, limit: int) -> int:
        return self.least.bytes_for(limit * UNIT_BYTES) // UNIT_BYTES


@pytest.mark.parametrize("least", [101, 102, 450, 899, 900])
@pytest.mark.parametrize("limit", [50, 300, 1000])
@pytest.mark.parametrize("lacking", [0, 101, 440, 450, 460, 2000])
def test_the_least_limit_fits_and_one_unit_less_does_not(
    least: int, limit: int, lacking: int
) -> None:
    run = Run(range(least, 901), lacking=lacking)

    assert run.needs(limit) == least
    assert len(run.tried) == len(set(run.tried)) < 22


def test_what_a_failed_replay_lacked_is_tried_first() -> None:
    run = Run(range(450, 901), lacking=450)

    assert run.needs(1000) == 450
    assert run.tried[-2:] == [450, 449]
    assert len(run.tried) == 7  # four probes that fit, one that fails, and these two


def test_a_limit_that_fits_below_one_that_fails_is_not_what_a_run_needs() -> None:
    """As LoRA on TinyLlama: 10.41 GiB are enough, 10.43 to 10.62 are not, and 10.63 are."""
    run = Run(range(300, 400), range(700, 901))

    assert run.needs(1000) == 700
    assert run.needs(390) == 300  # under which it fits
    assert run.needs(500) == 700


def test_a_smaller_limit_that_holds_the_allocated_bytes_is_found() -> None:
    assert Run(range(60, 901)).needs(1000) == 60


def test_a_long_run_is_replayed_few_times_and_its_need_fits() -> None:
    run = Run(range(150, 901), num_events=MAX_SEARCH_EVENTS)

    needs = run.needs(1000)
    assert 150 <= needs < 250
    assert run.needs(950) == needs
    assert len(run.tried) == 3


def test_the_need_of_several_ranks_is_the_highest() -> None:
    runs = [Run(range(200, 901)), Run(range(400, 801)), Run(range(300, 701))]

    assert highest_need([run.least for run in runs], 1000 * UNIT_BYTES) == 400 * UNIT_BYTES
    assert runs[2].tried == [400]  # it fits there, so its own need is not searched


@pytest.mark.parametrize("margin", [99, 100])
def test_a_margin_below_what_drivers_differ_by_is_tight(margin: int) -> None:
    verdict = Verdict(
        verdict=Outcome.FITS, margin_bytes=margin, limit_bytes=1000, reserved_bytes=1000,
        spread_bytes=100,
    )  # fmt: skip

    assert verdict.needs_bytes == 1000 - margin
    assert (verdict.word, verdict.is_tight) == (
        ("tight", True) if margin < 100 else ("fits", False)
    )


def test_drivers_of_one_gpu_differ_by_at_most_what_the_t4_s_do() -> None:
    shares = {gpu.name: gpu.spread_bytes / gpu.memory_bytes for gpu in list_gpus()}

    assert max(shares[gpu.name] for gpu in list_gpus() if gpu.memory_range_bytes) == shares["t4"]
    assert 0.13 < find_gpu("h100").spread_bytes / GIB < 0.14
    assert custom_gpu(24 * GIB).spread_bytes > 0.3 * GIB


def test_a_limit_of_the_user_is_there_with_every_driver() -> None:
    gpu = find_gpu("h100")

    assert gpu.spread_under(gpu.limit_bytes) == gpu.spread_bytes
    assert gpu.spread_under(gpu.limit_bytes - 2 * gpu.spread_bytes) == 0
    assert not predict(replace(SMALL, memory_limit=60 * GIB)).verdicts["h100-80gb"].spread_bytes


def test_the_lab_s_blip2_is_not_tight_on_an_a100() -> None:
    """It reserves 78.62 of 78.66 GiB, and fits under 77 and 74 GiB all the same."""
    verdict = predict(LAB).verdicts["a100-80gb"]

    assert verdict.reserved_bytes > 78.5 * GIB
    assert verdict.word == "fits"
    assert verdict.needs_bytes < 74 * GIB
    assert verdict.margin_bytes == verdict.limit_bytes - verdict.needs_bytes > 4 * GIB
    for limit in (77 * GIB, 74 * GIB, verdict.needs_bytes):
        assert predict(replace(LAB, memory_limit=limit)).verdict is Outcome.FITS
    less = predict(replace(LAB, memory_limit=verdict.needs_bytes - 2 * MIB))
    assert less.verdict is Outcome.OOM
    assert less.verdicts["a100-80gb"].needs_bytes == verdict.needs_bytes


@pytest.mark.parametrize("conf", ["", "expandable_segments:True", "max_split_size_mb:64"])
def test_what_fits_and_what_does_not_is_held_under_settings_of_the_allocator(conf: str) -> None:
    plan = replace(SMALL, alloc_conf=conf)
    needs = predict(plan).verdicts["h100-80gb"].needs_bytes

    assert predict(replace(plan, memory_limit=needs)).verdict is Outcome.FITS
    assert predict(replace(plan, memory_limit=needs - 2 * MIB)).verdict is Outcome.OOM


def train(memory_limit: int | None = None) -> VirtualGpu:
    """A block of code whose cache is of no use: what it frees fits nothing that follows."""
    with memest.virtual_gpu("a100-40gb", memory_limit=memory_limit) as gpu:
        model = nn.Linear(4096, 4096, device="cuda")
        for rows in (1024, 2048, 4096, 8192):
            model(torch.zeros(rows, 4096, device="cuda")).sum().backward()
    return gpu


def test_a_script_needs_less_than_it_reserves() -> None:
    report = train().report()
    verdict = report.verdicts["a100-40gb"]

    assert verdict.reserved_bytes == report.peak_reserved_bytes
    assert report.peak_allocated_bytes <= verdict.needs_bytes < report.peak_reserved_bytes
    assert len({each.needs_bytes for each in report.verdicts.values()}) == 1
    assert train(verdict.needs_bytes).report().fits
    with pytest.raises(torch.OutOfMemoryError):
        train(verdict.needs_bytes - 2 * MIB)
