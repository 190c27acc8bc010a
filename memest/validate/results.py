"""The results file: one measured report a line, appended so that a kill loses no line before it."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

from memest.errors import PlanError
from memest.plan import TrainingPlan
from memest.report import Measurement, Outcome, read_measurements

SKIPPED = "skipped: "
"""How the note of an experiment begins that was not tried."""

_OF_THE_DATA = ("seq_len", "image_size", "padded")
"""What a data set decides, whatever the plan says."""


def append(path: Path, measurement: Measurement) -> None:
    """Add one whole line and wait until it is on the disk.

    Raises:
        PlanError: the file cannot be written.
    """
    line = (measurement.to_json() + "\n").encode()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            while line:
                line = line[os.write(descriptor, line) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _unwritable(path, error.strerror or "") from error


def drop_cut_line(path: Path) -> bool:
    """Cut off a last line that a kill left unfinished; True where there was one.

    A line is whole when it ends and is JSON: a crash of the machine can leave an end without the
    text before it.

    Raises:
        PlanError: the file cannot be read or written.
    """
    try:
        content = path.read_bytes()
        start = content.rstrip(b"\n").rfind(b"\n") + 1
        last = content[start:]
        if not last.strip() or (last.endswith(b"\n") and _is_json(last)):
            return False
        with path.open("r+b") as file:
            file.truncate(start)
            os.fsync(file.fileno())
    except OSError as error:
        raise _unwritable(path, error.strerror or "") from error
    return True


def prepare(path: Path, *, resume: bool) -> list[Measurement]:
    """What is measured already; afterwards `path` can be appended to.

    To resume takes failed runs out of the file, since they are tried again; their logs stay.

    Raises:
        PlanError: it cannot be written, holds something else, or holds results and `resume` is off.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(21, "it is a folder")
        os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644))
        if not path.stat().st_size:
            return []
    except OSError as error:
        raise _unwritable(path, error.strerror or "") from error
    if not resume:
        raise PlanError(
            f"`{path}` holds results already",
            hint="add `--resume` to go on with it, or name another file with `--results`",
        )
    drop_cut_line(path)
    measured = read_measurements(path) if path.stat().st_size else []
    done = [m for m in measured if m.verdict is not Outcome.FAILED]
    if len(done) < len(measured):
        _rewrite(path, done)
    return done


def _rewrite(path: Path, measurements: list[Measurement]) -> None:
    """Write beside and rename, so that nothing half-written is ever there."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.writelines(m.to_json() + "\n" for m in measurements)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise _unwritable(path, error.strerror or "") from error


def is_done(plan: TrainingPlan, measured: list[Measurement]) -> bool:
    """Whether a run of this name is there.

    Raises:
        PlanError: it is there, with another plan.
    """
    defaults = {f.name: f.default for f in dataclasses.fields(TrainingPlan)}
    same_name = [m for m in measured if m.name == plan.label]
    for measurement in same_name:
        from_data = measurement.device.get("data", "synthetic") != "synthetic"
        not_asked = {"gpu", "gpu_memory", *(_OF_THE_DATA if from_data else ())}
        for key, asked in plan.to_dict().items():
            ran = measurement.plan.get(key, defaults[key])  # older results lack newer keys
            if asked is not None and key not in not_asked and ran != asked:
                raise PlanError(
                    f"`{plan.label}` is in the results with `{key}` {ran}, not {asked}",
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


def _unwritable(path: Path, why: str) -> PlanError:
    return PlanError(
        f"`{path}` cannot be written: {why}", hint="name another file with `--results`"
    )
