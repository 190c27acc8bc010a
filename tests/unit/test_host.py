"""The host's side of a measured run: which figures count, and what is left of the samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memest.validate import experiment

BEFORE = {"moment": experiment.BEFORE_MODEL, "RssAnon": 500, "RssShmem": 8, "pinned_allocated": 0}
SETUP = {"moment": experiment.AFTER_SETUP, "RssAnon": 900, "RssShmem": 72, "pinned_allocated": 64}
STEP = {"moment": "after a micro-batch", "RssAnon": 2100, "RssShmem": 72, "pinned_allocated": 64}
END = {"moment": "the end", "RssAnon": 2000, "RssShmem": 72, "pinned_allocated": 64}
START = {"moment": "the start", "RssAnon": 400, "RssFile": 10**6}


def test_what_is_held_is_the_highest_sample_less_that_before_the_model() -> None:
    assert experiment.held_bytes([START, BEFORE, SETUP, STEP, END]) == (2100 + 72) - (500 + 8)


def test_pages_of_files_do_not_count() -> None:
    with_files = [{**s, "RssFile": 10**9} for s in (BEFORE, SETUP)]

    assert experiment.held_bytes(with_files) == experiment.held_bytes([BEFORE, SETUP])


def test_pinned_memory_counts_once_whether_the_kernel_shows_it_or_not() -> None:
    """As shared pages, or, where it is the driver's alone, by torch's own count."""
    hidden = {**SETUP, "RssShmem": 8}

    assert experiment.held_bytes([BEFORE, SETUP]) == (900 + 72) - 508
    assert experiment.held_bytes([BEFORE, hidden]) == (900 + 64) - 508


def test_nothing_is_held_where_nothing_was_sampled() -> None:
    assert experiment.held_bytes([]) == 0
    assert experiment.explaining([]) == []


def test_what_is_kept_of_the_samples_gives_the_same_figure() -> None:
    samples: list[dict[str, Any]] = [START, BEFORE, SETUP, STEP, STEP, END]

    kept = experiment.explaining(samples)

    assert [s["moment"] for s in kept] == [
        experiment.BEFORE_MODEL, experiment.AFTER_SETUP, "after a micro-batch",
    ]  # fmt: skip
    assert experiment.held_bytes(kept) == experiment.held_bytes(samples)


def test_a_run_that_ends_in_its_setup_keeps_two_samples() -> None:
    kept = experiment.explaining([BEFORE, SETUP])

    assert [s["moment"] for s in kept] == [experiment.BEFORE_MODEL, experiment.AFTER_SETUP]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_a_sample_reads_this_process() -> None:
    sample = experiment.sample_host("now")

    assert sample["moment"] == "now"
    assert sample["RssAnon"] > 0 == sample["RssAnon"] % 1024
    assert sample.keys() == {"moment", "RssAnon", "RssShmem", "MemAvailable"}


def test_a_machine_without_those_files_gives_no_figures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(experiment, "Path", lambda path: tmp_path / "nowhere")

    assert experiment.sample_host("now") == {"moment": "now"}
