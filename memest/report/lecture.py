"""Slides and exercises of a lecture on a suite of plans; all words and figures are computed."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from memest.errors import MemestError, raise_if_all_failed
from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.search.commands import predict_command
from memest.estimator.search.many_plans import partition, predict_each
from memest.estimator.search.sweep import explored, point_of
from memest.plan import TrainingPlan
from memest.plan.training_plan import read_suite
from memest.plots.words import label_of
from memest.report import Outcome, Phase, PhaseRow, Verdict, read_as
from memest.report.explorer import explorer_data, technique_of
from memest.units import GIB, gib, gib_that_add_up

SAME_BYTES = GIB // 20  # change of a need that a title calls nothing, bytes (0.05 GiB)
_OPTIMIZERS = {
    "adamw": "AdamW", "adam": "Adam", "sgd": "SGD", "adam_8bit": "8-bit Adam",
    "deepspeed_cpu": "Adam on the CPU",
}  # fmt: skip
_NUMBERS = ("batch", "accumulation", "tokens")
_STATES = ("params", "grads", "optimizer")
_NAMES = {"cached": "cached, not usable", "between": "higher in between"}
_FRAMES = (
    "before the forward", "after the forward", "after the backward", "after the step", "the peak",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """Values of one colour in a chart of stacked bars: GiB per bar, such as the gradients of each
    plan. Possible values of the field `color` are the kinds of memory, and these:

        cached      cached memory that is not usable
        between     memory that was freed within a phase, as in `_held_parts`
        need        memory that a plan needs, in a waterfall chart
        more, less  growth and saving, in a waterfall chart
        ""          invisible part, on which a visible part stands
    """

    name: str
    color: str  # a kind of memory, or another value of the table
    values: tuple[float, ...]  # GiB, one per category


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Chart of stacked bars with a line at a GPU's limit in GiB. Each category has a bar, made of
    one value of each series. Bars are vertical if `is_upright`, else horizontal."""

    is_upright: bool
    categories: tuple[str, ...]
    series: tuple[Series, ...]
    limit: float  # limit of the GPU, GiB; 0 draws no line
    limit_name: str
    has_legend: bool = True

    @property
    def top(self) -> float:
        """Upper end of the memory axis, GiB."""
        columns = zip(*(series.values for series in self.series), strict=True)
        return 1.12 * max(self.limit, *map(sum, columns))


@dataclass(frozen=True, kw_only=True, slots=True)
class Slide:
    """Slide of a lecture: a title that states a finding, a chart, lines of speaker's notes."""

    title: str
    subtitle: str
    notes: tuple[str, ...]
    chart: Chart


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Change from an experiment of a lecture (`before`) to a later one (`after`). `before` is the
    earlier experiment whose settings differ least. `changes` has (old, new) words by setting."""

    before: Row
    after: Row
    changes: Mapping[str, tuple[str, str]]  # key -> value before and after, as text

    @property
    def added_bytes(self) -> int:
        """Bytes that `after` needs minus those that `before` needs."""
        return self.after.needs_bytes - self.before.needs_bytes

    @property
    def distance(self) -> float:
        """Number that measures how much the settings of the two plans differ. `before` is the
        earlier experiment with the least distance. Another model counts 30. Each doubling or
        halving of the batch or of the accumulation counts 1. Another number of tokens counts 0, and
        any other changed setting 10."""
        old, new = self.before.plan, self.after.plan
        kinds = sum(30 if key == "model" else 10 for key in self.changes if key not in _NUMBERS)
        counts = new.accumulate_grad_batches / old.accumulate_grad_batches
        return kinds + sum(abs(math.log2(r)) for r in (new.batch_size / old.batch_size, counts))

    def added(self, part: str) -> int:
        """Return the growth in bytes of `part` of the needed memory, a key of `Row.parts`."""
        return self.after.parts[part] - self.before.parts[part]

    @property
    def most(self) -> str:
        """Part of the needed memory, a key of `Row.parts`, whose bytes change most."""
        return max(self.after.parts, key=lambda part: abs(self.added(part)))

    @property
    def words(self) -> list[str]:
        """New values of the changed settings; batch and tokens only if no other setting changed."""
        main = [new for key, (_, new) in self.changes.items() if key not in _NUMBERS]
        return main or [new for _, new in self.changes.values()]


class Lecture:
    """Slides and exercises made from the predictions of one suite of experiments."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.gpu = next(iter(rows.limits))
        self.limit_bytes = rows.limits[self.gpu]
        names = {row.plan.model_name for row in rows.rows}
        prefixes = {f"{name.partition('-')[0]}-" for name in names}
        self._prefix = prefixes.pop() if len(prefixes) == 1 and len(names) > 1 else ""
        self.steps = [step for step in map(self._step, range(len(rows.rows))) if step is not None]

    def slides(self) -> list[Slide]:
        """Return all slides: an overview, five slides on one step's memory, then waterfall charts.
        Each model has at most one waterfall chart. Last, each item of the attribute `steps` has a
        slide. An item is the change from an earlier experiment of the suite to a later one."""
        slides = [self._overview(), *self._build_up(), *self._waterfalls()]
        return slides + [self._slide_of(step) for step in self.steps]

    def model(self, plan: TrainingPlan) -> str:
        """Return the name of the plan's model, without the prefix that all models share."""
        return plan.model_name.removeprefix(self._prefix)

    def _step(self, index: int) -> Step | None:
        """Return the change to row `index` from the most similar earlier row; None without one."""
        *earlier, row = self.rows.rows[: index + 1]
        steps = [Step(before=r, after=row, changes=self._changes(r, row)) for r in earlier]
        nearest = min(steps, key=lambda step: step.distance, default=None)
        return nearest if nearest is not None and nearest.changes else None

    def _changes(self, before: Row, after: Row) -> dict[str, tuple[str, str]]:
        old, new = self._words(before.plan), self._words(after.plan)
        return {key: (old[key], new[key]) for key in old if old[key] != new[key]}

    def _words(self, plan: TrainingPlan) -> dict[str, str]:
        count = plan.accumulate_grad_batches
        return {
            "model": self.model(plan),
            "technique": technique_of(plan),
            "optimizer": _optimizer(plan),
            "precision": plan.precision,
            "strategy": label_of(plan.strategy),
            "checkpointing": "checkpointing" if plan.act_ckpt else "no checkpointing",
            "batch": f"batch {plan.batch_size}",
            "accumulation": f"accumulation over {count}" if count > 1 else "no accumulation",
            "tokens": f"{plan.seq_len} tokens",
        }

    def _slide_of(self, step: Step) -> Slide:
        before, after = step.before, step.after
        pairs = ", ".join(f"{old} \N{RIGHTWARDS ARROW} {new}" for old, new in step.changes.values())
        parts = {kind: (before.parts[kind], after.parts[kind]) for kind in before.parts}
        notes = [
            f"Changed: {pairs}.",
            f"Before: {before.plan.label}; after: {after.plan.label}.",
            *(_part_note(kind, pair, before, after) for kind, pair in parts.items() if any(pair)),
            f"Need: {gib(before.needs_bytes)} GiB before, {gib(after.needs_bytes)} GiB after:"
            f" {step.added_bytes / GIB:+.2f} GiB. {self.against_limit(after)}",
            *(
                f"{row.plan.label} ends out of memory; its parts are those of that moment."
                for row in (before, after)
                if row.is_cut
            ),
            f"Try it: {predict_command(replace(after.plan, gpu=(self.gpu,), name=''))}",
        ]
        return Slide(
            title=self.title_of(step), subtitle=f"{pairs}  ({after.plan.label})",
            notes=self._notes(notes), chart=self._bars((before, after)),
        )  # fmt: skip

    def title_of(self, step: Step) -> str:
        """Return the title for a change, such as `8-bit Adam saves 22 GiB: flan-t5-xxl fits`."""
        after, size = step.after, _rounded(abs(step.added_bytes))
        still = "still " if step.before.fits == after.fits else ""
        verdict = f"{still}{'fits' if after.fits else 'does not fit'}"
        verdict += ", barely" if after.verdict.word == "tight" else ""
        name = self.model(after.plan)
        if "model" in step.changes:
            word = "more" if step.added_bytes > 0 else "less"
            return f"{name} needs {size} GiB {word} than {self.model(step.before.plan)}: {verdict}"
        words = " and ".join(step.words)
        subject = words[0].upper() + words[1:]  # other letters keep their case: `LoRA`
        ending = "s" if len(step.words) == 1 else ""
        if abs(step.added_bytes) < SAME_BYTES:
            return f"{subject} change{ending} nothing: {name} {verdict}"
        verb = "add" if step.added_bytes > 0 else "save"
        return f"{subject} {verb}{ending} {size} GiB: {name} {verdict}"

    def against_limit(self, row: Row) -> str:
        """Return a sentence on the GPU's usable memory, and what `row` leaves or lacks of it."""
        margin = row.verdicts[self.gpu].margin_bytes
        balance = f"{gib(abs(margin))} GiB {'to spare' if margin >= 0 else 'too much'}"
        return f"{self.gpu} has {gib(self.limit_bytes)} GiB usable: {balance}, {row.verdict.word}."

    @property
    def origin(self) -> str:
        """Sentence on the origin of the figures and the versions of libraries."""
        versions = ", ".join(f"{name} {number}" for name, number in self.rows.versions.items())
        return f"Predicted, not measured; computed by {versions}."

    def _notes(self, lines: Sequence[str]) -> tuple[str, ...]:
        return (*lines, self.origin)

    def _bars(self, rows: Sequence[Row]) -> Chart:
        labels = tuple(
            f"{row.plan.label}\n{row.needs_bytes / GIB:.1f} GiB, {row.verdict.word}" for row in rows
        )
        return self._chart(labels, [row.parts for row in rows])

    def _chart(
        self, labels: tuple[str, ...], columns: Sequence[Mapping[str, int]], *,
        is_upright: bool = False, has_legend: bool = True,
    ) -> Chart:  # fmt: skip
        kinds = dict.fromkeys(kind for column in columns for kind in column)
        series = tuple(
            Series(name=_NAMES.get(kind, kind), color=kind, values=values)
            for kind in kinds
            if any(values := tuple(column.get(kind, 0) / GIB for column in columns))
        )
        limit = self.limit_bytes / GIB
        return Chart(
            is_upright=is_upright, categories=labels, series=series, limit=limit,
            limit_name=f"{self.gpu}: {limit:.1f} GiB", has_legend=has_legend,
        )  # fmt: skip

    def _overview(self) -> Slide:
        rows = self.rows.rows
        count = sum(row.fits for row in rows)
        notes = [
            f"{row.plan.label}: {gib(row.needs_bytes)} GiB, {row.verdict.word}; {row.num_params:,}"
            f" parameters, {row.num_trained:,} trained."
            for row in rows
        ]
        notes += [f"{name}: not predicted, {why}." for name, why in self.rows.failed.items()]
        return Slide(
            title=f"{count} of {len(rows)} experiments fit {self.gpu}",
            subtitle=f"{self.rows.name}: what each needs, by what holds it",
            notes=self._notes(notes),
            chart=self._bars(rows),
        )

    def _build_up(self) -> list[Slide]:
        """Return five slides with a bar chart of one step's memory; each slide adds a bar. The bars
        are: before the forward, after the forward, after the backward, after the step, the peak.
        The plan is the first that fits and has all of these phases; without one, return []."""
        row = next((row for row in self.rows.rows if row.fits and len(row.phases) > 4), None)
        if row is None:
            return []
        formulas = [
            f"{kind}: {text}" for kind, text in row.arithmetic.items() if text and row.kinds[kind]
        ]
        last_batch = row.plan.accumulate_grad_batches - 1
        probes = {(p.phase, p.micro_batch): p for p in row.phases if p.step == 0}
        moments = [
            probes[Phase.BEFORE_FORWARD, 0],
            probes[Phase.AFTER_FORWARD, 0],
            probes[Phase.AFTER_BACKWARD, last_batch],
            probes[Phase.AFTER_OPTIMIZER_STEP, last_batch],
        ]
        columns = [*map(_held_parts, moments), row.parts]
        labels = [
            f"{name}\n{(sum(column.values()) - column.get('between', 0)) / GIB:.1f} GiB"
            for name, column in zip(_FRAMES, columns, strict=True)
        ]
        slides = []
        for number, title in enumerate(self._frame_titles(row, moments), 1):
            visible = [column if index < number else {} for index, column in enumerate(columns)]
            names = tuple(label if index < number else " " for index, label in enumerate(labels))
            column = columns[number - 1]
            sizes = gib_that_add_up(list(column.values()))
            sums = [f"{k} {size} GiB" for k, size in zip(column, sizes, strict=True) if column[k]]
            total = f"{' + '.join(sums)} = {gib(sum(column.values()))} GiB."
            slides.append(
                Slide(
                    title=title,
                    subtitle=f"One step in five frames, {number}: {row.plan.label}",
                    notes=self._notes([total, *formulas]),
                    chart=self._chart(names, visible, is_upright=True),
                )
            )
        return slides

    def _frame_titles(self, row: Row, moments: Sequence[PhaseRow]) -> list[str]:
        before, forward, backward, step = moments
        name = _optimizer(row.plan)
        growth = f"{name} keeps no state"
        if step.optimizer_bytes:
            growth = f"The first step of {name} adds {_rounded(step.optimizer_bytes)} GiB of state"
        verdict = "barely fits" if row.verdict.word == "tight" else "fits"
        return [
            f"The weights take {_rounded(before.params_bytes)} GiB before anything runs",
            f"The forward saves {_rounded(forward.activations_bytes)} GiB for the backward",
            f"The backward leaves {_rounded(backward.grads_bytes)} GiB of gradients",
            growth,
            f"The peak needs {_rounded(row.needs_bytes)} GiB: {self.model(row.plan)} {verdict}",
        ]

    def _waterfalls(self) -> Iterator[Slide]:
        """Yield a slide per model: a waterfall chart of successive changes that make a plan fit."""
        by_after = {id(step.after): step for step in self.steps if "model" not in step.changes}
        chains: dict[str, list[Step]] = {}
        for row in self.rows.rows:
            chain: list[Step] = []
            start = row
            while id(start) in by_after:
                chain.insert(0, by_after[id(start)])
                start = chain[0].before
            name = row.plan.model_name
            if chain and row.fits and not start.fits and len(chain) >= len(chains.get(name, [])):
                chains[name] = chain
        for chain in chains.values():
            yield self._waterfall(chain)

    def _waterfall(self, chain: Sequence[Step]) -> Slide:
        first, last = chain[0].before, chain[-1].after
        labels = [f"{first.plan.label}\n{gib(first.needs_bytes)} GiB"]
        columns: list[dict[str, int]] = [{"": 0, "need": first.needs_bytes}]
        for step in chain:
            floor = min(step.before.needs_bytes, step.after.needs_bytes)
            kind = "more" if step.added_bytes > 0 else "less"
            columns.append({"": floor, kind: abs(step.added_bytes)})
            values = ", ".join(new for _, new in step.changes.values())
            labels.append(f"{values}\n{step.added_bytes / GIB:+.2f}")
        columns.append({"": 0, "need": last.needs_bytes})
        labels.append(f"{last.plan.label}\n{gib(last.needs_bytes)} GiB")
        saved_bytes = first.needs_bytes - last.needs_bytes
        lead = f"{len(chain)} changes save" if len(chain) > 1 else "One change saves"
        notes = [
            f"{gib(first.needs_bytes)} GiB"
            + "".join(f" {step.added_bytes / GIB:+.2f}" for step in chain)
            + f" = {gib(last.needs_bytes)} GiB.",
            *(f"{step.after.plan.label}: {self.title_of(step)}." for step in chain),
            self.against_limit(last),
        ]
        return Slide(
            title=f"{lead} {_rounded(saved_bytes)} GiB: {self.model(last.plan)} fits",
            subtitle=f"From {first.plan.label}, which does not fit, to {last.plan.label}",
            notes=self._notes(notes),
            chart=self._chart(tuple(labels), columns, is_upright=True, has_legend=False),
        )

    def exercises(self) -> str:
        """Return Markdown with questions on the experiments, followed by their answers."""
        first_rows = {row.plan.model_name: row for row in reversed(self.rows.rows)}
        rows = [row for row in self.rows.rows if first_rows[row.plan.model_name] is row]
        environment = Environment(
            loader=FileSystemLoader(Path(__file__).parent), trim_blocks=True, lstrip_blocks=True,
            undefined=StrictUndefined, keep_trailing_newline=True,
        )  # fmt: skip
        template = environment.get_template("exercises.jinja")
        return template.render(
            lecture=self, rows=rows, states=_STATES, names=_NAMES, optimizer=_optimizer, gib=gib,
            GIB=GIB,
        )  # fmt: skip


def _optimizer(plan: TrainingPlan) -> str:
    return _OPTIMIZERS.get(plan.optim, plan.optim)


def _held_parts(moment: PhaseRow) -> dict[str, int]:
    """Return bytes by part of a bar: memory at `moment` by kind, and `between`. The kinds add up to
    the bytes allocated at that moment. `between` is what the peak since the previous row has above
    that sum; it was freed again."""
    between = max(0, moment.peak_allocated_bytes - moment.allocated_bytes)
    return {**moment.kinds, "between": between}


def _part_note(kind: str, pair: tuple[int, int], before: Row, after: Row) -> str:
    texts = []
    for row, size in zip((before, after), pair, strict=True):
        formula = row.arithmetic.get(kind, "")
        texts.append(f"{gib(size)} GiB = {formula}" if formula else f"{gib(size)} GiB")
    old, new = pair
    return f"{_NAMES.get(kind, kind)}: {', then '.join(texts)}: {(new - old) / GIB:+.2f}"


def _rounded(num_bytes: int) -> str:
    """Return `num_bytes` in GiB as text for titles, with one decimal below 10 GiB."""
    size = num_bytes / GIB
    return f"{size:.0f}" if round(size, 1) >= 10 else f"{size:.1f}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Experiment of a lecture: its plan and predicted figures. `kinds` has bytes at the peak by
    kind of memory. `arithmetic` has, by kind of memory, text with the computation of these
    bytes."""

    plan: TrainingPlan
    kinds: Mapping[str, int]  # at the peak by `explore.KINDS`; without a limit, unless `is_cut`
    arithmetic: Mapping[str, str]
    verdicts: Mapping[str, Verdict]
    phases: tuple[PhaseRow, ...]  # of the prediction on the first GPU, up to a failure
    num_params: int
    num_trained: int
    is_cut: bool  # True if the run ends out of memory and `kinds` are those of that moment

    @property
    def verdict(self) -> Verdict:
        """The verdict on the first GPU of the lecture."""
        return next(iter(self.verdicts.values()))

    @property
    def needs_bytes(self) -> int:
        """Bytes that the allocator must be able to reserve for the plan to fit the first GPU."""
        return self.verdict.needs_bytes

    @property
    def fits(self) -> bool:
        """True if the plan fits the first GPU."""
        return self.verdict.verdict is Outcome.FITS

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by part of `needs_bytes`: each kind of memory at the peak, and the rest as
        `cached`. The rest is memory that the allocator reserves beyond the tensors."""
        cached = max(0, self.needs_bytes - sum(self.kinds.values()))
        return {**self.kinds, "cached": cached}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Predicted experiments of a suite. `failed` has the reason by label of a plan."""

    name: str
    rows: tuple[Row, ...]
    versions: Mapping[str, str]
    limits: Mapping[str, int]  # bytes that the allocator can reserve, by GPU
    explorer: Mapping[str, Any]  # data of the explorer's page
    failed: Mapping[str, str]  # plans that could not be predicted, and the reasons


def stored_rows(path: Path) -> Rows | None:
    """Return the stored predictions of the suite file `path`, or None. The predictions of
    `NAME.yaml` are in `NAME.json.gz` in the same folder. Return None if there is no such file, or
    if the suite now has other plans than those in it."""
    stored_path = path.with_suffix(".json.gz")
    if not stored_path.is_file():
        return None
    values = json.loads(gzip.decompress(stored_path.read_bytes()))
    rows = tuple(
        Row(
            **row
            | {
                "plan": TrainingPlan.from_dict(row["plan"]),
                "phases": tuple(read_as(PhaseRow, phase) for phase in row["phases"]),
                "verdicts": {gpu: read_as(Verdict, v) for gpu, v in row["verdicts"].items()},
            }
        )
        for row in values["rows"]
    )
    if [row.plan for row in rows] != read_suite(path, {}):
        return None  # the suite has changed
    names = ("versions", "limits", "explorer", "failed")
    return Rows(name=path.stem, rows=rows, **{n: values[n] for n in names})


def predicted_rows(path: Path, gpus: Sequence[str], jobs: int | None) -> Rows:
    """Predict the plans of suite file `path` on `gpus`, and compute the data of an interactive
    page. `jobs` is the number of processes; None is one for few plans, else one per core."""
    plans = read_suite(path, {})
    results = predict_each([replace(plan, gpu=tuple(gpus)) for plan in plans], jobs=jobs)
    predicted, failed = partition(plans, results)
    raise_if_all_failed(results)
    (_, first_report), *_ = predicted
    rows, points = [], []
    for plan, report in predicted:
        figures = (report.terms, report.unlimited_reserved_bytes, report.phases, report.verdicts)
        point, is_cut = point_of(plan, *figures), report.verdict is Outcome.OOM
        with suppress(MemestError):  # a strategy without a grid has the figures of its prediction
            point, is_cut = explored(plan, gpus), False
        points.append(point)
        row = Row(
            plan=point.plan, kinds=point.kinds, arithmetic=point.arithmetic,
            verdicts=report.verdicts, phases=report.phases, num_params=report.model["num_params"],
            num_trained=report.model["num_trainable_params"], is_cut=is_cut,
        )  # fmt: skip
        rows.append(row)
    limits = {name: find_gpu(name).limit_bytes for name in gpus}
    lengths = {plan.seq_len for plan in plans}
    tokens = f"{lengths.pop()} tokens" if len(lengths) == 1 else "tokens of each row"
    return Rows(
        name=path.stem, rows=tuple(rows), versions=first_report.versions, limits=limits,
        explorer=explorer_data(points, limits, tokens=tokens, presets=plans),
        failed={plan.label: str(error) for plan, error in failed},
    )  # fmt: skip
