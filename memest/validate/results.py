"""Files of measured results, and of suites (lists of plans)."""

import dataclasses
import errno
import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from memest.errors import PlanError
from memest.estimator.hardware.gpus import match_device
from memest.plan import TrainingPlan
from memest.report import Measurement, Outcome, read_measurements
from memest.writing import write_whole, writing

SKIPPED = "skipped: "  # prefix of the note of an experiment that was skipped
_DATA_KEYS = ("seq_len", "image_size", "padded")  # keys set by the data set, not the plan
SUITE_DIR = Path(__file__).with_name("suites")


def append(path: Path, measurement: Measurement) -> None:
    """Append `measurement` to the results file `path` as a JSON line; wait until it is on disk."""
    with _writing(path), path.open("ab") as file:
        file.write((measurement.to_json() + "\n").encode())
        file.flush()
        os.fsync(file.fileno())


def drop_cut_line(path: Path) -> bool:
    """Remove the last line of `path` if it is cut off or no JSON; return True if it was removed.

    Raises:
        PlanError: the file cannot be read or written.
    """
    with _writing(path):
        content = path.read_bytes()
        start = content.rstrip(b"\n").rfind(b"\n") + 1
        last = content[start:]
        if not last.strip() or (last.endswith(b"\n") and _is_json(last)):
            return False
        with path.open("r+b") as file:
            file.truncate(start)
            os.fsync(file.fileno())
    return True


def prepare(path: Path, *, resume: bool) -> list[Measurement]:
    """Return the measurements that did not fail in the file `path`, and prepare it for appending.

    A new or empty file has none. A file with results needs `resume`, which continues it. Then
    failed runs are removed from the file, to be tried again; their logs stay.

    Raises:
        PlanError: `path` cannot be written, is no results file, or has results without `resume`.
    """
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        path.open("ab").close()
        if not path.stat().st_size:
            return []
    if not resume:
        raise PlanError(
            f"`{path}` holds results already",
            hint="add `--resume` to go on with it, or name another file with `--results`",
        )
    drop_cut_line(path)
    measured = read_measurements(path) if path.stat().st_size else []
    completed = [m for m in measured if m.verdict is not Outcome.FAILED]
    if len(completed) < len(measured):
        with _writing(path):
            write_whole(path, "".join(m.to_json() + "\n" for m in completed))
    return completed


def sort(path: Path, labels: Sequence[str]) -> None:
    """Sort the results in `path` in the order of `labels`; results with other labels come first."""
    order = {label: number for number, label in enumerate(labels)}
    with _writing(path):
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        ordered = sorted(lines, key=lambda line: order.get(json.loads(line)["name"], -1))
        if ordered != lines:
            write_whole(path, "".join(ordered))


def is_done(plan: TrainingPlan, measured: list[Measurement]) -> bool:
    """Return whether `measured` has a run named like `plan`; `PlanError` if its plan differs."""
    defaults = {f.name: f.default for f in dataclasses.fields(TrainingPlan)}
    same_name = [m for m in measured if m.name == plan.label]
    for measurement in same_name:
        from_data = measurement.device.get("data", "synthetic") != "synthetic"
        ignored = {"gpu", "gpu_memory", *(_DATA_KEYS if from_data else ())}
        for key, requested in plan.to_dict().items():
            actual = measurement.plan.get(key, defaults[key])  # older results lack newer keys
            if requested is not None and key not in ignored and actual != requested:
                raise PlanError(
                    f"`{plan.label}` is in the results with `{key}` {actual}, not {requested}",
                    hint="name another file with `--results`, or another experiment",
                )
        if plan.memory_limit is None and measurement.plan.get("memory_limit") is not None:
            raise PlanError(
                f"`{plan.label}` is in the results with a memory limit",
                hint="name another file with `--results`",
            )
    return bool(same_name)


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


_writing = partial(writing, hint="name another file with `--results`")


def list_suites() -> list[str]:
    """Return names of the shipped suites."""
    return sorted(path.stem for path in SUITE_DIR.glob("*.yaml"))


def find_suite(name: str) -> Path:
    """Return the file of a shipped suite, or the file `name`; `PlanError` if neither exists."""
    if name in list_suites():
        return SUITE_DIR / f"{name}.yaml"
    if Path(name).is_file():
        return Path(name)
    raise PlanError(
        f"there is no suite and no file `{name[:200]}`",
        hint=f"shipped: {', '.join(f'`{n}`' for n in list_suites())}; or give a YAML file of plans",
    )


def suite_for_device(name: str, total_bytes: int) -> str:
    """Return the name of the shipped suite for a GPU with CUDA's `name` and `total_bytes`.

    >>> suite_for_device("NVIDIA H200", 143155 << 20), suite_for_device("NVIDIA A40", 48 << 30)
    ('lab-h100', 'lab-a100')
    """
    gpu = match_device(name, total_bytes)
    gpu_name = (gpu.name if gpu is not None else name).casefold()
    return "lab-h100" if any(kind in gpu_name for kind in ("h100", "h200")) else "lab-a100"
