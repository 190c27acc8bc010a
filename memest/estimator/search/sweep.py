"""Plans that differ in a few keys, predicted from few simulated runs: sweeps, interactive pages.

Plans that differ in the optimizer, and in batch size or sequence length, share traces on one kind
of chip (`RelatedPlans`). Every point equals the prediction of that plan to the byte.
"""

import csv
import gc
import itertools
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memest.child import forked
from memest.engines import find_engine
from memest.errors import MemestError, PlanError, raise_if_all_failed, result_or_error, shown
from memest.estimator.hardware.gpus import Gpu, find_gpu
from memest.estimator.predict import target_gpus, trials
from memest.models_meta.registry import check_name
from memest.packages import PLANS, require
from memest.plan import TrainingPlan
from memest.plan.reading import read_limited, read_table
from memest.plan.training_plan import PLAN_KEYS
from memest.report import Outcome, PhaseRow, Term, Verdict, read_as

if TYPE_CHECKING:
    from memest.estimator.search.related_plans import RelatedPlans

Grid = list[tuple[dict[str, Any], TrainingPlan | MemestError]]  # varied values, plan or error
MAX_POINTS = 1000  # default limit of predictions in one sweep
MAX_VALUES = 1 << 20  # most values of a range
_SIZE_KEYS = ("batch_size", "seq_len")  # keys whose values share traces
_NOT_VARIED = {"name", "gpu", "gpu_memory"}  # keys that `parse_values` refuses
_BOOLEANS = {"true": True, "yes": True, "false": False, "no": False}
_VERDICT_SIZES = ("limit_bytes", "needs_bytes", "margin_bytes", "spread_bytes")  # of a table row


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepPoint:
    """Prediction of one plan on one GPU, or the error of a plan that cannot be predicted."""

    plan: TrainingPlan
    gpu: str
    verdict: Verdict | None  # None if the plan is invalid or not modelled
    peak_allocated_bytes: int = 0
    process_bytes: int = 0
    unlimited_reserved_bytes: int = 0  # bytes that it would reserve on an unlimited GPU
    error: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return all fields except the plan, as JSON values."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "plan"} | {
            "verdict": None if self.verdict is None else asdict(self.verdict)
        }

    @classmethod
    def from_dict(cls, plan: TrainingPlan, values: Mapping[str, Any]) -> "SweepPoint":
        """Make a point from its plan and `values`, the result of an earlier `to_dict`."""
        arguments = dict(values)
        if (verdict := values["verdict"]) is not None:
            arguments["verdict"] = read_as(Verdict, verdict)
        return cls(plan=plan, **arguments)

    def to_row(self, keys: Iterable[str]) -> dict[str, Any]:
        """Return a flat table row: the plan's values of the plan keys `keys`, then the results."""
        verdict = self.verdict
        head = {key: getattr(self.plan, key) for key in keys} | {"gpu": self.gpu}
        return head | {
            "verdict": "" if verdict is None else str(verdict.verdict),
            "peak_allocated_bytes": self.peak_allocated_bytes,
            "peak_reserved_bytes": 0 if verdict is None else verdict.reserved_bytes,
            "unlimited_reserved_bytes": self.unlimited_reserved_bytes,
            "process_bytes": self.process_bytes,
            **{name: getattr(verdict, name, 0) for name in _VERDICT_SIZES},
            "oom_at": "" if verdict is None else verdict.at,
            "error": self.error,
        }


PointsByPlan = Mapping[TrainingPlan, list[SweepPoint]]


def parse_values(key: str, text: str) -> list[Any]:
    """Return the values of the plan key `key` in `text`, such as `1,2,4`, `1:64` or `8:64:8`.

    `8:64:8` is a range with a step of 8. Both ends of a range count. A value that is named twice
    counts once.

    >>> parse_values("batch_size", "1,4:8:2"), parse_values("act_ckpt", "false,true")
    ([1, 4, 6, 8], [False, True])

    Raises:
        PlanError: there is no such key, or the text names no value or a wrong one.
    """
    keys = sorted(set(PLAN_KEYS) - _NOT_VARIED)
    if key not in keys:
        raise PlanError(
            f"{shown(key)} is not a key of a plan that can be varied",
            hint=f"keys: {', '.join(keys)}",
        )
    values: list[Any] = []
    for part in text.split(","):
        item = part.strip()
        if not item:
            raise PlanError(
                f"`{key}` has an empty value in {shown(text)}", hint="write it as `1,2,4` or `1:64`"
            )
        values += _range(key, item) if ":" in item else [_value(key, item)]
    return list(dict.fromkeys(values))


def _value(key: str, item: str) -> Any:
    row = PLAN_KEYS[key]
    if item == "none" and "None" in row.type:
        return None
    if row.is_switch:
        if item.casefold() not in _BOOLEANS:
            raise PlanError(f"`{key}` is {shown(item)}", hint="give `true`, `false` or both")
        return _BOOLEANS[item.casefold()]
    if row.is_size or row.type.startswith("str"):
        return item
    if row.type.startswith("tuple"):
        return tuple(name for name in item.split("+") if name)
    try:
        return float(item) if row.type == "float" else int(item)
    except ValueError:
        raise PlanError(
            f"`{key}` is {shown(item)}", hint="write numbers as `1,2,4` or `1:64`"
        ) from None


def _range(key: str, item: str) -> range:
    hint = "a range is `first:last` or `first:last:step`, such as `1:64:8`"
    try:
        first, last, *steps = (int(number) for number in item.split(":"))
    except ValueError:
        raise PlanError(f"`{key}` is {shown(item)}", hint=hint) from None
    step = steps[0] if steps else 1
    if len(steps) > 1 or step < 1 or not PLAN_KEYS[key].type.startswith("int"):
        raise PlanError(f"`{key}` is {shown(item)}", hint=hint)
    if last < first:
        raise PlanError(f"`{key}` is {shown(item)}, a range that ends before it begins", hint=hint)
    if (last - first) // step >= MAX_VALUES:
        raise PlanError(f"`{key}` is {shown(item)}, more than {MAX_VALUES:,} values", hint=hint)
    return range(first, last + 1, step)


def make_grid(
    base: Mapping[str, Any], varied: Mapping[str, Sequence[Any]], *, max_points: int = MAX_POINTS
) -> Grid:
    """Return (varied values, plan or its error) for every combination of the values in `varied`.
    `varied` has a list of values for each plan key that varies; the last key changes fastest.
    `base` has the values of other plan keys. Raise `PlanError` if there are more than `max_points`
    combinations, or all of them are invalid."""
    count = math.prod(map(len, varied.values()))
    if count > max_points:
        raise PlanError(
            f"the sweep has {count} points, more than {max_points}",
            hint=f"narrow it, or allow it with `--max-points {count}`",
        )
    points: Grid = []
    for combination in itertools.product(*varied.values()):
        changes = dict(zip(varied, combination, strict=True))
        points.append((changes, result_or_error(TrainingPlan.from_dict, {**base, **changes})))
    raise_if_all_failed([plan for _, plan in points])
    return points


def sweep_grid(
    grid: Grid, *, jobs: int | None = None, engine: str = "local",
    known: PointsByPlan | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Predict the plans of `grid`, which `make_grid` returned. Return a table row for each plan and
    GPU, with an `error` for invalid plans. `engine`, such as `local`, runs the predictions with
    `jobs` workers; None is its default. `known` has the points of plans predicted before."""
    plans = [plan for _, plan in grid if isinstance(plan, TrainingPlan)]
    points = sweep(plans, jobs=jobs, engine=engine, known=known)
    varied = itertools.chain.from_iterable(changes for changes, _ in grid)
    keys = list(dict.fromkeys(["model_name", *varied]))
    keys = [key for key in keys if key not in ("gpu", "gpu_memory")]
    rows = iter([point.to_row(keys) for point in points])  # in the order of the grid
    gpus = [gpu.name for gpu in target_gpus(plans[0])]
    empty_row = SweepPoint(plan=plans[0], gpu="", verdict=None).to_row(keys)
    table: list[dict[str, Any]] = []
    for changes, plan in grid:
        if isinstance(plan, TrainingPlan):
            table += itertools.islice(rows, len(gpus))
            continue
        values = {key: changes[key] for key in keys if key in changes}
        table += [empty_row | values | {"gpu": gpu, "error": str(plan)} for gpu in gpus]
    return table


def sweep(
    plans: Sequence[TrainingPlan], *, jobs: int | None = None, engine: str = "local",
    known: PointsByPlan | None = None,
) -> list[SweepPoint]:  # fmt: skip
    """Predict every plan on each of its GPUs; return the points in this order. A plan that cannot
    be predicted gives points with an `error`. Points of plans in `known` are not predicted again.
    `engine` names what runs the predictions, such as `local` or `slurm`. It has `jobs` workers;
    None is the engine's default. Raise `MemestError` if none of the plans can be predicted; the
    error is the first one's."""
    require(*PLANS)
    known = known or {}
    new = [plan for plan in plans if plan not in known]
    key = max(_SIZE_KEYS, key=lambda name: len({getattr(plan, name) for plan in new}))
    alike = partial(_sharing_key, key)
    num_groups = max(1, len(set(map(alike, new))))
    jobs_per_group = 1
    if engine == "local":
        jobs_per_group = max(1, (jobs or os.cpu_count() or 1) // num_groups)
    new_results = iter(find_engine(engine, jobs).map_groups(
        partial(_sweep_group, key=key, jobs=jobs_per_group), new, alike=alike, work=_work,
        label=partial(_group_label, key),
    ))  # fmt: skip
    results = [known[plan] if plan in known else next(new_results) for plan in plans]
    raise_if_all_failed(results)
    points: list[SweepPoint] = []
    for plan, result in zip(plans, results, strict=True):
        if isinstance(result, MemestError):
            for gpu in target_gpus(plan):
                points.append(SweepPoint(plan=plan, gpu=gpu.name, verdict=None, error=str(result)))
        else:
            points += result
    return points


def _group_label(key: str, plans: Sequence[TrainingPlan]) -> str:
    first = plans[0]
    num_optimizers = len({plan.optim for plan in plans})
    optimizers = first.optim if num_optimizers == 1 else f"{num_optimizers} optimizers"
    parts = [first.label, first.precision, optimizers]
    num_values = len(plans) // num_optimizers
    if num_values > 1:
        parts.append(f"{num_values} of {key.replace('_', ' ')}")
    return " ".join(parts)


def _work(plan: TrainingPlan) -> tuple[bool, ...]:
    """Return a sort key, which is higher for plans whose simulation takes longer."""
    return plan.is_distributed, "mixed" in plan.precision, plan.act_ckpt


def _sharing_key(key: str, plan: TrainingPlan) -> Any:
    """Return a value that is equal for plans that can share simulated runs. They differ only in
    name, optimizer and the field `key` (`batch_size` or `seq_len`), which is None in all or in
    none. A plan with a strategy for several GPUs shares no run."""
    if plan.is_distributed:  # it shares no trace
        return id(plan)
    names = {field.name for field in fields(plan)} - {key, "optim", "name"}
    return getattr(plan, key) is None, *(getattr(plan, name) for name in sorted(names))


def _sweep_group(
    plans: Sequence[TrainingPlan], *, key: str, jobs: int
) -> list[list[SweepPoint] | MemestError]:
    """Return the points of each of `plans`, or the plan's error. The plans differ only in `key`
    (`batch_size` or `seq_len`) and optimizer, so they share simulated runs. Replays use `jobs`
    processes."""
    from memest.estimator.search.related_plans import RelatedPlans

    plan_values = [getattr(plan, key) for plan in plans]
    values = sorted({value for value in plan_values if value is not None})
    chips: dict[Any, RelatedPlans] = {}
    with suppress(MemestError):  # each point is predicted below and reports its error there
        for gpu in reversed(target_gpus(plans[0])):  # so that a chip's first GPU stays
            chips[gpu.chip] = RelatedPlans(gpu, values, values, key, accumulates=False)
    # simulate the shared runs of each optimizer now: autograd fails in the forks below
    for plan in {plan.optim: plan for plan in plans}.values():
        with suppress(MemestError):
            for related in chips.values():
                related.at(plan)
    gc.freeze()  # exclude the traces, which are many objects, from collections
    try:
        results: list[list[SweepPoint] | MemestError] = []
        for plan, points in zip(plans, _replay_in_parallel(plans, chips, jobs), strict=True):
            results.append(result_or_error(_predict, plan, chips) if points is None else points)
        return results
    finally:
        gc.unfreeze()


MIN_PARALLEL_POINTS = 16  # number of points below which one process is as fast as several


def _replay_in_parallel(
    plans: Sequence[TrainingPlan], chips: "Mapping[Any, RelatedPlans]", jobs: int
) -> Sequence[list[SweepPoint] | None]:
    """Replay `plans` in `jobs` forked processes, from the runs that `chips` has by kind of GPU.
    Return the points of each plan, or None for a plan left to the caller. A plan without a run is
    left, since autograd fails in a fork; so are all plans if they are few or `jobs` is 1."""
    from memest.estimator.search.related_plans import MAY_TRACE

    results: list[list[SweepPoint] | None] = [None] * len(plans)
    if jobs < 2 or len(plans) < MIN_PARALLEL_POINTS:
        return results

    def replay(part: int) -> list[list[SweepPoint] | None]:
        MAY_TRACE.set(False)
        outcomes = [result_or_error(_predict, plan, chips) for plan in plans[part::jobs]]
        return [None if isinstance(points, MemestError) else points for points in outcomes]

    with ExitStack() as stack:
        forks = [stack.enter_context(forked(partial(replay, part))) for part in range(jobs)]
        for part, wait_for_points in enumerate(forks):
            points_of_part = wait_for_points()
            if points_of_part is not None:  # the fork did not fail
                results[part::jobs] = points_of_part
    return results


def _predict(plan: TrainingPlan, chips: "Mapping[Any, RelatedPlans]") -> list[SweepPoint]:
    points: list[SweepPoint] = []
    traced = {chip: related.at(plan) for chip, related in chips.items()}
    for gpu, trial in trials(plan, target_gpus(plan), lambda gpu: traced[gpu.chip]):
        outside_bytes = gpu.context_bytes + trial.traced.libraries_bytes
        points.append(
            SweepPoint(
                plan=plan,
                gpu=gpu.name,
                verdict=trial.verdict,
                peak_allocated_bytes=trial.results[0].peak_allocated_bytes,
                process_bytes=trial.verdict.reserved_bytes + outside_bytes,
                unlimited_reserved_bytes=trial.scenarios[0].unlimited.peak_reserved_bytes,
            )
        )
    return points


MAX_SWEEP_BYTES = 64 << 20  # size above which a file is refused; a row is some hundred bytes


@dataclass(frozen=True, slots=True)
class FitsTable:
    """Table of a sweep: verdicts by (row label, column label), without entries of invalid plans."""

    verdicts: dict[tuple[str, str], Verdict]
    across: str  # name of the columns, such as `batch size`
    gpus: tuple[str, ...]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of `memest sweep -o`, CSV or JSON Lines, or raise `PlanError`."""
    text = read_limited(path, MAX_SWEEP_BYTES, what="`memest sweep -o`")
    try:
        rows: list[Any]
        if path.suffix == ".csv":
            rows = list(csv.DictReader(text.splitlines()))
        else:
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
        for row in rows:
            _verdict(row)
    except (csv.Error, json.JSONDecodeError, LookupError, TypeError, ValueError) as error:
        raise _no_sweep(path) from error
    if not rows:
        raise _no_sweep(path)
    return rows


def _no_sweep(path: Path) -> PlanError:
    return PlanError(f"`{path}` is no sweep", hint="write one with `memest sweep -o sweep.csv`")


def fits_table(rows: Sequence[Mapping[str, Any]], across: str = "") -> FitsTable:
    """Return the verdicts in `rows`, from `read_rows`, as a table. Its columns are the values of
    the plan key `across`; "" is the key with the most values. Raise `PlanError` if `across` does
    not vary."""
    names = list(rows[0])
    keys = names[: names.index("verdict")]  # the columns before the results: plan and GPU
    values = {key: list(dict.fromkeys(_text(row[key]) for row in rows)) for key in keys}
    varied = [key for key in keys if len(values[key]) > 1]
    if across and across not in varied:
        raise PlanError(
            f"{shown(across)} has one value or none in this sweep",
            hint=f"keys that vary: {', '.join(varied) or 'none'}",
        )
    column = across or max(reversed(varied or keys), key=lambda key: len(values[key]))
    row_keys = [key for key in varied if key != column]
    if not row_keys:  # only the columns vary: label the rows with another key, if there is one
        row_keys = [key for key in keys if key != column][:1]
    verdicts: dict[tuple[str, str], Verdict] = {}
    for row in rows:
        verdict = _verdict(row)
        if verdict is None:
            continue
        labels = [_label(key, _text(row[key])) for key in row_keys]
        set_labels = [label for label in labels if not label.startswith("no ")]
        text = _text(row[column])
        column_label = text if _is_number(text) else _label(column, text)
        verdicts[", ".join(set_labels or labels), column_label] = verdict
    return FitsTable(verdicts, column.replace("_", " "), tuple(values["gpu"]))


def _text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


_SHORT = {
    "accumulate_grad_batches": "acc", "act_ckpt": "ckpt", "batch_size": "batch",
    "use_lora": "LoRA", "use_qlora": "QLoRA",
}  # fmt: skip


def _label(key: str, text: str) -> str:
    """Return the label in tables for `text`, a value of the plan key `key`.

    >>> _label("precision", "32-true"), _label("use_lora", "False"), _label("batch_size", "8")
    ('32-true', 'no LoRA', 'batch 8')
    """
    name = _SHORT.get(key, key.replace("_", " "))
    if text in ("True", "False"):
        return name if text == "True" else f"no {name}"
    if text in ("", "None"):
        return f"no {name}"
    return f"{name} {text}" if _is_number(text) else text


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()


def _verdict(row: Mapping[str, Any]) -> Verdict | None:
    if not row["verdict"]:
        return None
    return Verdict(
        verdict=Outcome(row["verdict"]), margin_bytes=int(row["margin_bytes"]),
        limit_bytes=int(row["limit_bytes"]), reserved_bytes=int(row["peak_reserved_bytes"]),
        spread_bytes=int(row.get("spread_bytes", 0)), at=row["oom_at"],
    )  # fmt: skip


BATCHES = (1, 2, 4, 8, 16, 32, 64)
MICRO_BATCHES = (1, 2, 4)  # numbers of micro-batches in the grid; they need no traces
KINDS = ("params", "grads", "optimizer", "activations", "temporaries", "rest")

SETTINGS: Sequence[Mapping[str, Any]] = read_table(__file__, "grid.json")
"""Plan keys of each setting. Adapters train with AdamW, and 4-bit weights are multiplied in
bf16, as in QLoRA's paper (arXiv:2305.14314). QLoRA checkpoints activations, which is
peft's default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Explored:
    """Entry of a plan in an interactive page: bytes at the peak by kind, with explanations. It also
    has the bytes of each phase, and the verdict on each GPU."""

    plan: TrainingPlan
    kinds: Mapping[str, int]  # at the peak by `KINDS`, without a limit; the sum is the peak
    arithmetic: Mapping[str, str]  # explanation of each kind
    reserved_bytes: int  # peak reserved on a GPU without a limit
    phases: tuple[tuple[int, int, int, int, int], ...]
    """Bytes by kind and their peak at each phase of the second step's last micro-batch."""

    verdicts: Mapping[str, Verdict]  # results on each GPU, as in `predict`


def explore(
    models: Sequence[str], gpus: Sequence[str], *, settings: Sequence[Mapping[str, Any]] = SETTINGS,
    batches: Sequence[int] = BATCHES, micro_batches: Sequence[int] = MICRO_BATCHES,
    seq_len: int | None = None, jobs: int | None = None, engine: str = "local",
) -> list[Explored]:  # fmt: skip
    """Predict every model with every setting, batch size and number of micro-batches, on each GPU.
    Each of `settings` has values by plan key. `seq_len` is in tokens; None is the model's default.
    `engine`, such as `local`, runs the predictions with `jobs` workers; None is its default. Plans
    that cannot be predicted are left out. Raise `MemestError` if there is no such model or GPU, or
    nothing at all can be predicted."""
    targets = [find_gpu(name) for name in dict.fromkeys(gpus)]
    if not models or not targets or not batches:
        raise PlanError("the grid is empty", hint="name a model, a GPU and a batch size")
    for model in models:
        check_name(model)
    from memest.estimator.search.related_plans import SAME_MODEL

    grid = itertools.product(dict.fromkeys(models), settings, micro_batches, batches)
    plans = [
        TrainingPlan.from_dict(
            setting, model_name=model, seq_len=seq_len, accumulate_grad_batches=count,
            batch_size=batch,
        )
        for model, setting, count, batch in grid
    ]  # fmt: skip
    shared_values = {**SAME_MODEL, "accumulate_grad_batches": 1, "batch_size": 1}
    results = find_engine(engine, jobs).map_groups(
        partial(_explore_group, targets=targets), plans, label=_model_label,
        alike=lambda plan: replace(plan, **shared_values),
    )  # fmt: skip
    raise_if_all_failed(results)
    return [point for point in results if isinstance(point, Explored)]


def explored(plan: TrainingPlan, gpus: Sequence[str]) -> Explored:
    """Predict `plan` on the GPUs named in `gpus`. Raise `MemestError` if it cannot be predicted."""
    (entry,) = _explore_group([plan], targets=[find_gpu(name) for name in gpus])
    if isinstance(entry, MemestError):
        raise entry
    return entry


def _model_label(plans: Sequence[TrainingPlan]) -> str:
    plan = plans[0]
    label = f"{plan.model_name} {plan.precision}"
    if plan.uses_adapters:
        label += " QLoRA" if plan.use_qlora else " LoRA"
    return label


def _explore_group(
    plans: Sequence[TrainingPlan], *, targets: Sequence[Gpu]
) -> list[Explored | MemestError]:
    """Return the entry of each of `plans` for the GPUs `targets`, or the plan's error. The plans
    may differ only in optimizer, checkpointing, batch size and number of micro-batches."""
    from memest.estimator.search.related_plans import RelatedPlans

    batches = list(dict.fromkeys(plan.batch_size for plan in plans))
    above = sorted(set(batches) - {1})  # more than four: multiples of their divisor
    sizes = batches if len(above) < 5 else range(step := math.gcd(*above), above[-1] + 1, step)
    chips = {gpu.chip: RelatedPlans(gpu, sizes, batches) for gpu in reversed(targets)}
    return [result_or_error(_explore_plan, plan, chips, targets) for plan in plans]


def _explore_plan(
    plan: TrainingPlan, chips: "Mapping[Any, RelatedPlans]", targets: Sequence[Gpu]
) -> Explored:
    from memest.estimator.summary import peak_terms

    traced = {chip: related.at(plan) for chip, related in chips.items()}
    trial_by_gpu = {
        gpu.name: trial for gpu, trial in trials(plan, targets, lambda g: traced[g.chip])
    }
    verdicts = {name: trial.verdict for name, trial in trial_by_gpu.items()}
    first_trial = trial_by_gpu[targets[0].name]
    unlimited = first_trial.scenarios[0].unlimited
    terms = peak_terms(first_trial.traced, plan.accumulate_grad_batches, unlimited)
    return point_of(plan, terms, unlimited.peak_reserved_bytes, unlimited.rows, verdicts)


def point_of(
    plan: TrainingPlan, terms: Iterable[Term], reserved_bytes: int, rows: Iterable[PhaseRow],
    verdicts: Mapping[str, Verdict],
) -> Explored:  # fmt: skip
    """Return a plan's entry in an interactive page, from its report. `terms` are the report rows of
    the peak. `rows` are the report rows of the phases' ends. `reserved_bytes` is the peak reserved
    without a limit. `verdicts` maps the name of a GPU to the verdict on it."""
    kinds, arithmetic = by_kind(terms)
    last = plan.accumulate_grad_batches - 1
    return Explored(
        plan=plan,
        kinds=kinds,
        arithmetic=arithmetic,
        reserved_bytes=reserved_bytes,
        phases=tuple(
            (r.params_bytes, r.grads_bytes, r.optimizer_bytes, r.activations_bytes,
             r.peak_allocated_bytes)
            for r in rows if r.step == 1 and r.micro_batch == last
        ),
        verdicts=verdicts,
    )  # fmt: skip


def by_kind(terms: Iterable[Term]) -> tuple[dict[str, int], dict[str, str]]:
    """Sum `terms`, report rows of a peak, by `KINDS`. Return ({kind: bytes}, {kind:
    explanation})."""
    kinds = dict.fromkeys(KINDS, 0)
    texts: dict[str, list[tuple[int, str]]] = {kind: [] for kind in KINDS}  # (bytes, text)
    for term in terms:
        kind = term.kind if term.kind in kinds else "rest"
        kinds[kind] += term.num_bytes
        texts[kind].append((term.num_bytes, term.arithmetic if kind != "rest" else term.kind))
    two_largest = {kind: sorted(rows, reverse=True)[:2] for kind, rows in texts.items()}
    return kinds, {kind: "; ".join(text for _, text in rows) for kind, rows in two_largest.items()}
