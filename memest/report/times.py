"""Estimated time of a step, of a whole training, and its price, as text."""

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any

from memest.errors import PlanError
from memest.estimator.hardware.gpus import find_gpu
from memest.plan.reading import parse_yaml, read_limited
from memest.report import SimulatedReport, StepTime

HOUR_S = 3600.0
MAX_CATALOGUE_BYTES = 256 << 20  # size above any provider's catalogue: 600,000 offers of 400 bytes
SOLD_SHARE = 0.15
"""Largest relative difference between a GPU's memory and the size in a provider's name. An L4 of
24 GB has 23.7e9 bytes, an H100 of 80 GB 85.0e9.
"""


@dataclass(frozen=True, slots=True)
class Training:
    """Training whose time and price are estimated. `num_steps` are its optimizer steps. `prices`
    has the price of one GPU for an hour by GPU name; `""` is any other GPU."""

    num_steps: int
    prices: Mapping[str, float]  # price of one GPU for an hour by name; `""` is any other GPU
    num_gpus: int = 1

    def hours(self, time: StepTime) -> tuple[float, float, float]:
        """Return (estimated, lowest, highest) hours of the training, from the `time` of a step."""
        estimates = (time.seconds, time.low_seconds, time.high_seconds)
        repeated_share = 1 - time.first_seconds / time.seconds
        low, middle, high = sorted(s * repeated_share * self.num_steps / HOUR_S for s in estimates)
        return middle, low, high

    def price_of(self, gpu: str) -> float | None:
        """Return the price per hour of all the training's GPUs, of model `gpu`; None if unknown."""
        price = self.prices.get(gpu, self.prices.get(""))
        return None if price is None else price * self.num_gpus


def steps_of_plan(plan: Mapping[str, Any], epochs: float, samples: int) -> int:
    """Return how many optimizer steps `epochs` passes over `samples` samples take under `plan`."""
    return max(1, ceil(epochs * samples / _samples_per_step(plan)))


def read_prices(given: str | None) -> dict[str, float]:
    """Return the price of one GPU for an hour, by GPU name; `""` stands for every other GPU.

    `given` is a number as text, a path, or None. A number is the price of every GPU. None is no
    prices. The path is that of a YAML or JSON file with lines such as `h100-80gb: 2.10`. It may
    also be a folder with price lists that the package gpuhunt wrote.

    Raises:
        PlanError: a price is not a positive number, a GPU is not known, or there is no such file.
    """
    if given is None:
        return {}
    if re.fullmatch(r"[-+.\d]+(e[-+]?\d+)?", given):
        return {"": _positive_price(given)}
    path = Path(given)
    if path.is_dir():
        return _catalogue_prices(path)
    prices = parse_yaml(read_limited(path, what="prices"), path)
    if not isinstance(prices, dict):
        raise PlanError(
            f"`{path}` has no prices", hint="write one line per GPU, such as `h100-80gb: 2.10`"
        )
    return {find_gpu(str(name)).name: _positive_price(price) for name, price in prices.items()}


def _catalogue_prices(folder: Path) -> dict[str, float]:
    """Return the lowest price of one GPU for an hour, by GPU name, without spot instances.

    `folder` has a file `PROVIDER.csv` for each provider, as `python -m gpuhunt` writes it
    (`CATALOG_V2_FIELDS` of gpuhunt/_internal/storage.py).
    """
    prices: dict[str, float] = {}
    for path in sorted(folder.glob("*.csv")):
        lines = read_limited(path, MAX_CATALOGUE_BYTES, what="prices").splitlines()
        for row in csv.DictReader(lines):
            try:
                count, price = int(row["gpu_count"]), float(row["price"])
                name, memory_gb = row["gpu_name"], float(row["gpu_memory"] or 0)
                is_spot = row["spot"] == "True"
            except (KeyError, TypeError, ValueError) as error:
                raise PlanError(f"`{path}` is no catalogue of gpuhunt: {error!r}") from error
            gpu = _catalogue_name(name, memory_gb) if count and not is_spot else None
            if gpu is not None and price > 0:
                prices[gpu] = min(price / count, prices.get(gpu, float("inf")))
    if not prices:
        raise PlanError(
            f"`{folder}` has no prices of known GPUs",
            hint="write a catalogue with `python -m gpuhunt runpod --output runpod.csv`",
        )
    return prices


@cache
def _catalogue_name(name: str, memory_gb: float) -> str | None:
    """Return memest's name of a provider's GPU `name` of `memory_gb` GB; None if it is unknown."""
    for text in (f"{name} {memory_gb:g}GB", name):
        try:
            gpu = find_gpu(text)
        except PlanError:
            continue
        if abs(gpu.memory_bytes / 1e9 - memory_gb) < SOLD_SHARE * memory_gb:
            return gpu.name
    return None


def _positive_price(value: Any) -> float:
    try:
        price = float(value)
    except (TypeError, ValueError):
        price = 0.0
    if not 0 < price < float("inf"):
        raise PlanError(f"`{value}` is not a price", hint="give a positive number, such as 2.10")
    return price


def time_cells(
    report: SimulatedReport, training: Training | None = None, gpus: Sequence[str] | None = None
) -> list[list[str]]:
    """Return a header and a row per GPU of `gpus` (None: all) with the times of a step. `training`
    adds columns for its hours and price; None adds none."""
    plan = {} if report.plan.get("lengths") else report.plan  # tokens per second need equal lengths
    tokens = int(plan["seq_len"]) * _samples_per_step(plan) if plan.get("seq_len") else 0
    has_price = training is not None and any(training.price_of(g) for g in report.times)
    rows = []
    for gpu in report.times if gpus is None else gpus:
        time = report.times[gpu]
        row = {
            "gpu": gpu,
            "a step": seconds(time.seconds),
            "between": f"{seconds(time.low_seconds)} and {seconds(time.high_seconds)}",
            "of peak": f"{100 * time.peak_share:.0f} %",
            "bound by": time.bound_by,
        }
        if tokens:
            row["tokens/s"] = f"{tokens / time.seconds:,.0f}"
        if training is not None:
            hours, price = training.hours(time), training.price_of(gpu)
            row["hours"] = _with_interval(*hours)
            if has_price:
                row["price"] = "" if price is None else _with_interval(*(price * h for h in hours))
        rows.append(row)
    return [[*rows[0]], *([*row.values()] for row in rows)]


def _with_interval(middle: float, low: float, high: float) -> str:
    return f"{_figure_text(middle)} ({_figure_text(low)} to {_figure_text(high)})"


def _figure_text(number: float) -> str:
    """Return `number`, hours or a price, with two decimals; below 0.1, with two significant digits.

    >>> _figure_text(1234.5), _figure_text(0.3), _figure_text(0.00072)
    ('1,234.50', '0.30', '0.00072')
    """
    return f"{number:,.2f}" if number >= 0.1 or not number else f"{number:.2g}"


def _samples_per_step(plan: Mapping[str, Any]) -> int:
    gpus = plan.get("devices", 1) * plan.get("num_nodes", 1)
    return int(plan["batch_size"] * plan["accumulate_grad_batches"] * gpus)


def time_notes(report: SimulatedReport) -> list[str]:
    """Return lines with the assumptions of the report's time estimates."""
    times = report.times.values()
    notes = ["estimate of the time, not of the memory (docs/time.md); data loading is not known"]
    if origins := ", ".join(sorted({t.origin for t in times if t.origin})):
        notes.append(
            f"GPUs other than {origins}: their peak rates and bandwidth, with the efficiencies of"
            f" {origins}"
        )
    notes += sorted({f"times measured in {t.measured_in}" for t in times if t.measured_in})
    first, step = max(((t.first_seconds, t.seconds) for t in times), default=(0, 1))
    if first >= 0.05 * step:
        notes.append(
            f"{seconds(first)} of a step are first calls: libraries choose kernels for new sizes;"
            " a whole training is estimated without them"
        )
    unmeasured = max((t.unmeasured_share for t in times), default=0.0)
    if unmeasured >= 0.05:
        notes.append(f"{100 * unmeasured:.0f} % of a step are kernels without measured times")
    return notes


def time_words(time: StepTime) -> str:
    """Return the estimated time of a step as text, with its interval."""
    low, high = seconds(time.low_seconds), seconds(time.high_seconds)
    return f"{seconds(time.seconds)} a step, between {low} and {high}"


def seconds(value: float) -> str:
    """Return `value` seconds as text with three digits and a unit.

    >>> seconds(0.07123), seconds(12.34), seconds(123.4)
    ('71.2 ms', '12.3 s', '123 s')
    """
    return f"{1e3 * value:.3g} ms" if value < 1 else f"{value:.3g} s"
