"""Report of a script's run on the virtual GPU, its verdicts on other GPUs, and its recording."""

import linecache
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

from memest.estimator.allocator.caching import OutOfMemory
from memest.estimator.gpu.guesses import Guesses
from memest.estimator.gpu.history import Held, History
from memest.estimator.hardware.gpus import Gpu, find_gpu
from memest.estimator.hardware.pace import estimate
from memest.estimator.ops.convolution import describe_source
from memest.estimator.replay.recording import Recording
from memest.estimator.replay.replay import MicroBatch, Moment, Part, Program, Replayed, Run
from memest.estimator.replay.scenarios import Scenario, intervals, verdict_over, where_failed
from memest.estimator.summary import (
    LAYER,
    context_assumed,
    coverage_of,
    kernels_assumed,
    other_processes_assumed,
)
from memest.estimator.tensors.lines import ScriptLines
from memest.estimator.tensors.storages import FreeTiming, MemKind
from memest.estimator.versions import library_versions
from memest.estimator.virtual_gpu import VirtualGpu
from memest.report import (
    KINDS,
    Ending,
    Guess,
    HeldRow,
    Interval,
    Outcome,
    Phase,
    RunPeak,
    RunPhase,
    RunReport,
    RunStep,
    Verdict,
)
from memest.units import counted, format_bytes

MAX_SOURCE = 100  # characters of a source line in the report
NO_LINE = "(no line of the script)"
_SCALAR = re.compile(r"^scalar_dense of (\w+)$")


def report_of(
    virtual: VirtualGpu, *, name: str, ending: Ending, error: str, elapsed_s: float,
    others: Sequence[str],
) -> RunReport:  # fmt: skip
    """Return the report of the run on `virtual` so far, with verdicts on the GPUs `others`. `name`
    is the script's. `ending` and `error` state how it ended, after `elapsed_s` seconds."""
    mode, gpu = virtual.mode, virtual.gpu
    outside_bytes = gpu.context_bytes + virtual.communicators_bytes
    if VirtualGpu._active is virtual:
        mode.memory.settle()
        mode.attribution.label_models()
    history = mode.memory.history
    entries = history.held_at_peak()
    outcome = Outcome.OOM if ending is Ending.OOM else Outcome.FITS
    verdicts, notes = verdicts_of(virtual, outcome, _own_share(virtual), others)
    gpus = {gpu_name: gpu if gpu_name == gpu.name else find_gpu(gpu_name) for gpu_name in verdicts}
    times = {gpu_name: estimate(mode.work, device) for gpu_name, device in gpus.items()}
    return RunReport(
        name=name,
        gpu=gpu.name,
        ending=ending,
        error=error,
        verdict=verdicts[gpu.name].verdict,
        limit_bytes=verdicts[gpu.name].limit_bytes,
        num_steps=virtual.num_steps,
        peak_allocated_bytes=history.peak_allocated_bytes,
        peak_reserved_bytes=history.peak_reserved_bytes,
        process_bytes=history.peak_reserved_bytes + outside_bytes,
        host_bytes=mode.host.peak_bytes,
        peak=_peak(history),
        terms=_terms(entries, history.peak_allocated_bytes),
        modules=_rows(entries, _module_group),
        lines=_rows(entries, lambda entry: entry.site.where or NO_LINE, mode.attribution.lines),
        phases=tuple(RunPhase(name=p, peak_allocated_bytes=a, peak_reserved_bytes=r)
                     for p, (a, r) in history.phases.items()),
        steps=_steps(history),
        intervals=intervals_of(virtual, outside_bytes=outside_bytes),
        verdicts=verdicts,
        times={name: step for name, step in times.items() if step is not None},
        guesses=_guesses(mode.guesses),
        coverage=coverage_of(mode.kernels.coverage),
        warnings=tuple(mode.notes.warnings),
        notes=(*mode.notes.texts, *notes),
        assumptions=tuple(_assumptions(virtual, gpu, others)),
        versions=library_versions("transformers", "lightning", "accelerate"),
        elapsed_s=elapsed_s,
        allocator=virtual.allocator.settings.text,
    )  # fmt: skip


def _kind_of(entry: Held) -> str:
    """Return the kind of memory, an item of `KINDS`, under which the report counts `entry`.

    A storage whose owner is unknown has the kind `activations` in `entry`. If it was allocated in
    backward or optimizer, it counts as `temporaries`. If it was allocated before the first call of
    a model, it counts as `other`. Otherwise it stays `activations`.
    """
    if entry.kind is not MemKind.ACTIVATIONS:
        return str(entry.kind)
    if entry.site.phase in ("backward", "optimizer"):
        return "temporaries"
    return "other" if entry.site.phase == "setup" else "activations"


def _own_share(virtual: VirtualGpu) -> float | None:
    """Return the share (0 to 1) of GPU memory to which the script limits itself; else None."""
    limit, gpu = virtual.allocator.limit_bytes, virtual.gpu
    usable = gpu.limit_bytes - virtual.communicators_bytes
    if limit is None or limit >= min(usable, virtual.limit_bytes or usable):
        return None
    return limit / gpu.memory_bytes


def _guesses(guesses: Guesses) -> tuple[Guess, ...]:
    return tuple(
        Guess(line=line, what=_SCALAR.sub(r"the value of a \1 tensor", what), count=count)
        for (line, what), count in guesses.counts.most_common()
    )


def _peak(history: History) -> RunPeak:
    site = history.peak_site
    if site is None:
        return RunPeak(step=0, phase="", module="", op="", line="")
    return RunPeak(
        step=history.peak_step, phase=site.phase, module=site.module, op=site.op, line=site.where
    )


def _terms(entries: Iterable[Held], peak_bytes: int) -> tuple[HeldRow, ...]:
    nonzero = [row for row in _rows(entries, _kind_of) if row.num_bytes]
    rows = [replace(r, kinds={}) for r in sorted(nonzero, key=lambda row: KINDS.index(row.name))]
    rounding_bytes = peak_bytes - sum(row.num_bytes for row in rows)
    return (*rows, HeldRow(name="rounding", num_bytes=rounding_bytes, num_tensors=0, kinds={}))


def _module_group(entry: Held) -> str:
    """Return the row in which the table by module counts `entry`. The row of `model.layers.3.mlp`
    is `model.layers.*`, as for all layers of the list. A name without a number keeps its first
    three parts: `vision.embed.patch.norm` becomes `vision.embed.patch`."""
    module = entry.site.module
    layer = LAYER.match(module)
    if layer:
        return f"{layer['stack']}.*"
    return ".".join(module.split(".")[:3]) or "(outside of modules)"


def _rows(
    entries: Iterable[Held], group_of: Callable[[Held], str], lines: ScriptLines | None = None
) -> tuple[HeldRow, ...]:
    kinds: dict[str, Counter[str]] = defaultdict(Counter)
    counts: Counter[str] = Counter()
    line_of: dict[str, str] = {}
    for entry in entries:
        group = group_of(entry)
        line_of[group] = entry.site.line
        kinds[group][_kind_of(entry)] += entry.num_bytes
        counts[group] += entry.count
    rows = [
        HeldRow(
            name=name,
            num_bytes=sum(sizes.values()),
            num_tensors=counts[name],
            kinds={kind: sizes[kind] for kind in KINDS if sizes[kind]},
            source="" if lines is None else _source(*lines.place_of(line_of[name])),
        )
        for name, sizes in kinds.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.num_bytes, row.name)))


def _source(file: str, number: int) -> str:
    text = linecache.getline(file, number).strip() if file else ""
    return text if len(text) <= MAX_SOURCE else f"{text[: MAX_SOURCE - 3]}..."


def _steps(history: History) -> tuple[RunStep, ...]:
    rows = {row.step: row for row in history.first_steps}
    for row in (history.highest_step, history.last_step):
        if row is not None:
            rows[row.step] = row
    return tuple(rows[step] for step in sorted(rows))


def _assumptions(virtual: VirtualGpu, gpu: Gpu, others: Sequence[str]) -> Iterable[str]:
    log = virtual.mode.memory.log
    settings = virtual.allocator.settings
    yield from other_processes_assumed(gpu)
    yield kernels_assumed(f"{gpu.label}, compute capability", gpu.capability, settings)
    names = [name for name in others if name != gpu.name]
    yield (
        f"verdicts of {', '.join(names)} replay the script's requests on {gpu.name}, with the"
        " kernels of that GPU"
    )
    if virtual.mode.kernels.coverage.has_convolutions:
        yield describe_source(gpu)
    yield context_assumed(gpu)
    if virtual.communicators_bytes:
        machines = "H100s and H200s of one host" if virtual.rank.world_size > 1 else "one H100"
        pairs = [key for key in virtual.mode.works.communicators if key[1] is not None]
        count = max(1, len(virtual.mode.works.communicators) - len(pairs))
        groups = "one group" if count == 1 else f"{count} groups"
        groups += f" and {counted(len(pairs), 'pair')} of ranks" if pairs else ""
        yield (
            f"{format_bytes(virtual.communicators_bytes)} of NCCL for {groups}, as measured on"
            f" {machines}"
        )
    if log.is_full:
        yield (
            f"the first {len(log.events)} of {log.num_events} allocations and frees, which are"
            f" {log.num_steps} of {virtual.num_steps} optimizer steps, were kept for the verdicts"
            " of other GPUs and for recordings; peaks are those of the whole run"
        )


def run_of(virtual: VirtualGpu, share: float | None = None) -> Run:
    """Return the stored allocations and frees of a script as a `Run`, for replay on any GPU.
    `share` is the share of a GPU's memory to which the script limits itself, or None."""
    log = virtual.mode.memory.log
    ends = (position for position, name in log.marks if name == "after_optimizer_step")
    steps: list[list[MicroBatch]] = [
        [[Part(log.events[a:b])]] for a, b in pairwise((0, *ends, len(log.events)))
    ]
    program = Program(virtual.mode.memory.storages, steps=steps)
    settings = virtual.allocator.settings
    return Run(program, len(steps), settings=settings, is_share=share is not None)


def verdicts_of(
    virtual: VirtualGpu, outcome: Outcome, share: float | None, others: Sequence[str]
) -> tuple[dict[str, Verdict], list[str]]:
    """Return (verdicts by GPU name, notes on them), for the run's own GPU and `others`. `outcome`
    is the result of the run on its own GPU: it fits or is out of memory. `share` is the share of a
    GPU's memory to which the script limits itself, or None."""
    own_gpu = virtual.gpu
    on_gpus = _Verdicts(virtual, outcome, run_of(virtual, share))
    own_verdict = on_gpus.own(_own_verdict(virtual, outcome))
    verdicts = {own_gpu.name: own_verdict}
    unknown = []
    for name in others:
        gpu = replace(find_gpu(name), beside_bytes=own_gpu.beside_bytes)
        if gpu.name == own_gpu.name:
            continue
        usable = gpu.limit_bytes - virtual.communicators_bytes
        usable = min(usable, virtual.limit_bytes or usable)
        limit = usable if share is None else min(usable, int(share * gpu.memory_bytes))
        verdict = on_gpus.verdict(limit, _spread_bytes(virtual, gpu, limit))
        if outcome is Outcome.OOM:
            if verdict is None and limit <= own_verdict.limit_bytes:  # refuses the last request too
                verdict = replace(own_verdict, limit_bytes=limit)
            if verdict is not None:  # the need includes at least the refused request
                verdict = replace(verdict, margin_bytes=limit - own_verdict.needs_bytes)
        if verdict is not None and virtual.mode.memory.storages.shares:
            verdict = _with_own_shares(virtual, gpu, own_verdict, verdict)
        if verdict is None:
            unknown.append(gpu.name)
        else:
            verdicts[gpu.name] = verdict
    notes = []
    if unknown:
        notes.append(
            f"whether it fits {', '.join(unknown)} is not known from this run, which did not get"
            f" that far on {own_gpu.name}: run it with `--gpu {unknown[-1]}`"
        )
    num_ooms = virtual.mode.memory.num_ooms
    if num_ooms and outcome is not Outcome.OOM:
        notes.append(
            f"the script caught {num_ooms} out-of-memory errors; on another GPU"
            " it may have chosen otherwise"
        )
    order = {name: index for index, name in enumerate(others)}
    return dict(sorted(verdicts.items(), key=lambda item: order.get(item[0], -1))), notes


def _with_own_shares(
    virtual: VirtualGpu, gpu: Gpu, base: Verdict, verdict: Verdict
) -> Verdict | None:
    """Return the verdict on `gpu` of a script that sizes storages by the GPU's memory. An example
    is a cache of 90 % of the memory, which has another size on `gpu` than in the run. `verdict` is
    the verdict on `gpu` with the sizes of the run, and `base` that on the run's GPU. Return None if
    the stored events end too early for a verdict."""
    memory, run = virtual.mode.memory, run_of(virtual)
    storages = memory.storages.on(gpu.memory_bytes)
    run = replace(run, program=replace(run.program, storages=storages))
    if base.verdict is not Outcome.OOM:
        if memory.log.is_full:
            return None
        timings = (FreeTiming.LATEST, *_earlier_timings(virtual))
        scenarios = [Scenario(run, timing) for timing in timings]
        results = [scenario.under(verdict.limit_bytes) for scenario in scenarios]
        return verdict_over(scenarios, results, verdict.limit_bytes, verdict.spread_bytes)
    streams = (part.events for part in run.program.all_parts())
    live_ids = run.program.alive_after(streams) | {memory.refused_id}
    own_sizes = memory.storages.num_bytes
    growth = sum(storages.num_bytes[i] - own_sizes[i] for i in storages.shares if i in live_ids)
    margin = verdict.limit_bytes - base.needs_bytes - growth
    failed = run.on(verdict.limit_bytes).failed
    if failed is None and margin >= 0:
        return None
    at = base.at if failed is None else where_failed(failed.step, storages.sites[failed.storage])
    return replace(verdict, verdict=Outcome.OOM, margin_bytes=min(-1, margin), at=at)


def intervals_of(virtual: VirtualGpu, *, outside_bytes: int) -> dict[str, Interval]:
    """Return the intervals of the run's peaks `allocated`, `reserved` and `process`, by name. The
    bounds differ if the peak depends on when some blocks are freed (`FreeTiming`). They are equal
    if the event log is full. `outside_bytes` is the process's memory outside the allocator."""
    limit = virtual.allocator.limit_bytes
    earlier = [run_of(virtual).on(limit, timing) for timing in _earlier_timings(virtual)]
    return intervals([_own_figures(virtual), *earlier], outside_bytes=outside_bytes)


def _own_figures(virtual: VirtualGpu) -> Replayed:
    memory = virtual.mode.memory
    return Replayed(
        peak_allocated_bytes=memory.history.peak_allocated_bytes,
        peak_reserved_bytes=memory.history.peak_reserved_bytes,
        num_events=len(memory.log.events),
    )


def _earlier_timings(virtual: VirtualGpu) -> tuple[FreeTiming, ...]:
    """Return the free timings to replay in addition to `LATEST`, the default. A free timing is an
    assumption on when a block is freed that another stream or a collective uses. The result is ()
    if no peak depends on that, or if the event log is full."""
    memory = virtual.mode.memory
    if not virtual.depends_on_time or memory.log.is_full:
        return ()
    return FreeTiming.IMMEDIATE, FreeTiming.IMMEDIATE_IN_STEP_1


def _own_verdict(virtual: VirtualGpu, outcome: Outcome) -> Verdict:
    history, allocator = virtual.mode.memory.history, virtual.allocator
    limit = virtual.gpu.limit_bytes if allocator.limit_bytes is None else allocator.limit_bytes
    margin, at = limit - history.peak_reserved_bytes, ""
    if outcome is Outcome.OOM and virtual.mode.memory.refused is not None:
        num_bytes, site, reserved = virtual.mode.memory.refused
        margin = limit - reserved - num_bytes
        at = where_failed(virtual.num_steps, site)
    return Verdict(
        verdict=outcome, margin_bytes=margin, limit_bytes=limit,
        reserved_bytes=history.peak_reserved_bytes,
        spread_bytes=_spread_bytes(virtual, virtual.gpu, limit), at=at,
    )  # fmt: skip


def _spread_bytes(virtual: VirtualGpu, gpu: Gpu, limit_bytes: int) -> int:
    return gpu.spread_under(limit_bytes, virtual.communicators_bytes)


class _Verdicts:
    """Verdicts of one run on several GPUs, by replay of `run` under the GPUs' limits. `outcome` is
    the result of the run on its own GPU: it fits or is out of memory. If the event log is full,
    `run` has only the script's start, and some verdicts are unknown."""

    def __init__(self, virtual: VirtualGpu, outcome: Outcome, run: Run) -> None:
        memory = virtual.mode.memory
        self._log, self._outcome, self._run = memory.log, outcome, run
        self._is_whole = outcome is Outcome.FITS and not memory.log.is_full
        self._allocated = memory.history.peak_allocated_bytes
        self._reserved = memory.history.peak_reserved_bytes
        settings = run.settings
        collects = settings.garbage_collection_threshold > 0 and run.is_share
        gives_back = collects or settings.max_split_bytes is not None
        self._felt_no_limit = not virtual.allocator.num_retries and not gives_back
        self._own = _own_figures(virtual)
        unlimited = self._own if self._felt_no_limit else None
        self._scenarios: list[Scenario] = []
        if self._is_whole:
            earlier = (Scenario(run, timing) for timing in _earlier_timings(virtual))
            self._scenarios = [Scenario(run, unlimited=unlimited), *earlier]

    def own(self, verdict: Verdict) -> Verdict:
        """Return `verdict`, that of the run's own GPU, with the least limit that fits as
        `needs_bytes`. The limit is found by replays. If the script did not fit or the event log is
        full, return `verdict` unchanged."""
        if not self._is_whole:
            return verdict
        limit = verdict.limit_bytes
        self._scenarios[0].least.add(limit, True, verdict.reserved_bytes)
        return self._over_scenarios(self._own, limit, verdict.spread_bytes)

    def _over_scenarios(self, latest: Replayed, limit_bytes: int, spread_bytes: int) -> Verdict:
        earlier = [scenario.under(limit_bytes) for scenario in self._scenarios[1:]]
        return verdict_over(self._scenarios, [latest, *earlier], limit_bytes, spread_bytes)

    def verdict(self, limit_bytes: int, spread_bytes: int) -> Verdict | None:
        """Return the verdict on a GPU whose allocator can reserve `limit_bytes`. Another driver of
        that GPU may leave up to `spread_bytes` less; a margin below that is tight. Return None if
        the verdict is unknown, since the stored events do not reach the run's end."""
        is_enough = self._felt_no_limit and self._reserved <= limit_bytes
        if self._is_whole:
            latest = self._own if is_enough else self._scenarios[0].under(limit_bytes)
            return self._over_scenarios(latest, limit_bytes, spread_bytes)
        fits = Verdict(
            verdict=Outcome.FITS, margin_bytes=limit_bytes - max(self._reserved, self._allocated),
            limit_bytes=limit_bytes, reserved_bytes=self._reserved, spread_bytes=spread_bytes,
        )  # fmt: skip
        if is_enough:
            return fits if self._outcome is Outcome.FITS else None
        oom = replace(fits, verdict=Outcome.OOM, margin_bytes=min(-1, fits.margin_bytes))
        result = self._run.on(limit_bytes)
        if result.failed is not None:
            site = self._run.program.storages.sites[result.failed.storage]
            at = where_failed(result.failed.step, site)
            return replace(oom, reserved_bytes=result.peak_reserved_bytes, at=at)
        if self._allocated > limit_bytes:
            at = f"after step {self._log.num_steps - 1}"
            return replace(oom, reserved_bytes=limit_bytes, at=at)
        return None


_PROBES = {
    "forward": Phase.BEFORE_FORWARD,
    "backward": Phase.AFTER_FORWARD,
    "before_optimizer_step": Phase.AFTER_BACKWARD,
    "optimizer": Phase.AFTER_BACKWARD,
    "after_optimizer_step": Phase.AFTER_OPTIMIZER_STEP,
}


def record_run_of(virtual: VirtualGpu, report: RunReport) -> Recording:
    """Return a recording of the allocator's actions, by replay of a script's stored events under
    the limit in `report`, the report of the run."""
    memory, source = virtual.mode.memory, virtual.allocator
    recording = Recording(memory.storages, report.limit_bytes, report.gpu)
    allocator = recording.allocator
    allocator.use(source.settings)
    allocator.gpu_bytes, allocator.allowed_bytes = source.gpu_bytes, source.allowed_bytes
    result, events = recording.result, memory.log.events
    position, micro_batch = 0, 0
    last_phase: Phase | None = None
    for end, name in (*memory.log.marks, (len(events), "")):
        with suppress(OutOfMemory):  # under a limit that the script set later
            recording.play(events[position:end])
        position, phase = end, _PROBES.get(name)
        if phase is None or phase is last_phase:
            continue
        if phase is Phase.BEFORE_FORWARD and last_phase is Phase.AFTER_OPTIMIZER_STEP:
            recording.step, micro_batch = recording.step + 1, 0
        elif phase is Phase.BEFORE_FORWARD and last_phase is Phase.AFTER_FORWARD:
            micro_batch += 1  # no step since the last backward
        recording.reached(recording.step, micro_batch, phase)
        last_phase = phase
    if memory.refused is not None and not report.fits:
        refused_bytes = memory.refused[0]
        recording.storage = -1
        recording.history.gather()
        free_bytes = max(0, report.limit_bytes - allocator.reserved_bytes)
        recording.history.refused(refused_bytes, 0, free_bytes)
        result.failed, result.failed_bytes = Moment(len(events), recording.step, -1), refused_bytes
    result.peak_allocated_bytes = allocator.peak_allocated_bytes
    result.peak_reserved_bytes = allocator.peak_reserved_bytes
    result.peak = replace(recording.peak, storage=-1)
    return recording
