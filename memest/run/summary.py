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
from memest.estimator.gpu.history import EventLog, Held, History
from memest.estimator.gpu.memory import Memory
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
_READ_OF_SCALAR = re.compile(r"^scalar_dense of (\w+)$")  # `aten._local_scalar_dense`
_PHASE_BY_MARK = {  # the end of a phase that a mark of the event log shows
    "forward": Phase.BEFORE_FORWARD,
    "backward": Phase.AFTER_FORWARD,
    "before_optimizer_step": Phase.AFTER_BACKWARD,
    "optimizer": Phase.AFTER_BACKWARD,
    "after_optimizer_step": Phase.AFTER_OPTIMIZER_STEP,
}


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
        name=name, gpu=gpu.name, ending=ending, error=error, elapsed_s=elapsed_s,
        verdict=verdicts[gpu.name].verdict, limit_bytes=verdicts[gpu.name].limit_bytes,
        num_steps=virtual.num_steps,
        peak_allocated_bytes=history.peak_allocated_bytes,
        peak_reserved_bytes=history.peak_reserved_bytes,
        process_bytes=history.peak_reserved_bytes + outside_bytes,
        host_bytes=mode.host.peak_bytes,
        peak=_run_peak(history),
        terms=_term_rows(entries, history.peak_allocated_bytes),
        modules=_rows_by(entries, _module_group),
        lines=_rows_by(entries, lambda entry: entry.site.where or NO_LINE, mode.attribution.lines),
        phases=tuple(RunPhase(name=p, peak_allocated_bytes=a, peak_reserved_bytes=r)
                     for p, (a, r) in history.phases.items()),
        steps=_step_rows(history),
        intervals=intervals_of(virtual, outside_bytes=outside_bytes),
        verdicts=verdicts,
        times={name: step for name, step in times.items() if step is not None},
        guesses=_guess_rows(mode.guesses), coverage=coverage_of(mode.kernels.coverage),
        warnings=tuple(mode.notes.warnings),
        notes=(*mode.notes.texts, *notes, *_notes_on_resets(virtual)),
        assumptions=tuple(_assumptions(virtual, gpu, others)),
        versions=library_versions("transformers", "lightning", "accelerate"),
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
    if limit is None or limit >= _usable_bytes(virtual, gpu):
        return None
    return limit / gpu.memory_bytes


def _usable_bytes(virtual: VirtualGpu, gpu: Gpu) -> int:
    """Return the bytes that the allocator could reserve on `gpu` under the user's limit."""
    usable = gpu.limit_bytes - virtual.communicators_bytes
    return usable if virtual.limit_bytes is None else min(usable, virtual.limit_bytes)


def _guess_rows(guesses: Guesses) -> tuple[Guess, ...]:
    return tuple(
        Guess(line=line, what=_READ_OF_SCALAR.sub(r"the value of a \1 tensor", what), count=count)
        for (line, what), count in guesses.counts.most_common()
    )


def _run_peak(history: History) -> RunPeak:
    site = history.peak_site
    if site is None:
        return RunPeak(step=0, phase="", module="", op="", line="")
    return RunPeak(
        step=history.peak_step, phase=site.phase, module=site.module, op=site.op, line=site.where
    )


def _term_rows(entries: Iterable[Held], peak_bytes: int) -> tuple[HeldRow, ...]:
    nonzero = [row for row in _rows_by(entries, _kind_of) if row.num_bytes]
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


def _rows_by(
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
            source="" if lines is None else _source_text(*lines.place_of(line_of[name])),
        )
        for name, sizes in kinds.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.num_bytes, row.name)))


def _source_text(file: str, number: int) -> str:
    text = linecache.getline(file, number).strip() if file else ""
    return text if len(text) <= MAX_SOURCE else f"{text[: MAX_SOURCE - 3]}..."


def _step_rows(history: History) -> tuple[RunStep, ...]:
    rows = {row.step: row for row in history.first_steps}
    for row in (history.highest_step, history.last_step):
        if row is not None:
            rows[row.step] = row
    return tuple(rows[step] for step in sorted(rows))


def _notes_on_resets(virtual: VirtualGpu) -> list[str]:
    """Return a note if torch's peak is below the report's, since the script has reset it."""
    peak_bytes = virtual.allocator.memory_stats()["allocated_bytes"]["all"]["peak"]
    if peak_bytes >= virtual.mode.memory.history.peak_allocated_bytes:
        return []
    return [
        "the script resets `torch.cuda.max_memory_allocated()`, which is"
        f" {format_bytes(peak_bytes)} at its end: the peaks here are those of the whole run"
    ]


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
        communicators = virtual.mode.works.communicators
        num_pairs = sum(peer is not None for _, peer in communicators)
        num_groups = max(1, len(communicators) - num_pairs)
        groups = "one group" if num_groups == 1 else f"{num_groups} groups"
        groups += f" and {counted(num_pairs, 'pair')} of ranks" if num_pairs else ""
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
        [[Part(log.events[start:end])]] for start, end in pairwise((0, *ends, len(log.events)))
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
    own_gpu, replays = virtual.gpu, _Verdicts(virtual, outcome, share)
    verdicts = {own_gpu.name: replays.on_own_gpu()}
    unknown = []
    for name in others:
        gpu = replace(find_gpu(name), beside_bytes=own_gpu.beside_bytes)
        if gpu.name == own_gpu.name:
            continue
        verdict = replays.on_other_gpu(gpu, verdicts[own_gpu.name])
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
    names = sorted(verdicts, key=lambda name: order.get(name, -1))  # first a GPU not in `others`
    return {name: verdicts[name] for name in names}, notes


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
    if base.verdict is Outcome.OOM:
        return _oom_with_own_shares(memory, run, base, verdict)
    if memory.log.is_full:
        return None
    timings = (FreeTiming.LATEST, *_earlier_timings(virtual))
    scenarios = [Scenario(run, timing) for timing in timings]
    results = [scenario.under(verdict.limit_bytes) for scenario in scenarios]
    return verdict_over(scenarios, results, verdict.limit_bytes, verdict.spread_bytes)


def _oom_with_own_shares(
    memory: Memory, run: Run, base: Verdict, verdict: Verdict
) -> Verdict | None:
    """Return `_with_own_shares` for a script that was out of memory on its own GPU. `run` has the
    sizes of the other GPU, and `base` is the verdict on the own one. The need is that of `base`,
    plus the growth of the storages that were live when the request was refused."""
    own_sizes, storages = memory.storages.num_bytes, run.program.storages
    streams = (part.events for part in run.program.all_parts())
    live_ids = run.program.alive_after(streams) | {memory.refused_id}
    growth = sum(storages.num_bytes[i] - own_sizes[i] for i in storages.shares if i in live_ids)
    margin = verdict.limit_bytes - base.needs_bytes - growth
    failed = run.on(verdict.limit_bytes).failed
    if failed is None and margin >= 0:
        return None  # the script would continue, to requests that were not simulated
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


class _Verdicts:
    """Verdicts of one run on several GPUs, by replay under the GPUs' limits. `outcome` is the
    result of the run on its own GPU: it fits or is out of memory. If the event log is full, the
    replayed run has only the script's start, and some verdicts are unknown."""

    def __init__(self, virtual: VirtualGpu, outcome: Outcome, share: float | None) -> None:
        self._virtual, self._outcome, self._share = virtual, outcome, share
        self._memory = memory = virtual.mode.memory
        self._run = run = run_of(virtual, share)
        self._is_whole = outcome is Outcome.FITS and not memory.log.is_full
        self._allocated = memory.history.peak_allocated_bytes
        self._reserved = memory.history.peak_reserved_bytes
        settings = run.settings
        collects_garbage = settings.garbage_collection_threshold > 0 and run.is_share
        gives_back = collects_garbage or settings.max_split_bytes is not None
        self._ran_as_unlimited = not virtual.allocator.num_retries and not gives_back
        self._own = _own_figures(virtual)
        self._scenarios: list[Scenario] = []
        if self._is_whole:
            unlimited = self._own if self._ran_as_unlimited else None
            earlier = (Scenario(run, timing) for timing in _earlier_timings(virtual))
            self._scenarios = [Scenario(run, unlimited=unlimited), *earlier]

    def on_own_gpu(self) -> Verdict:
        """Return the verdict on the run's own GPU. If the script fits and the whole run is stored,
        replays find `needs_bytes`, the least limit that fits."""
        virtual, refused = self._virtual, self._memory.refused
        limit = virtual.allocator.limit_bytes
        if limit is None:
            limit = virtual.gpu.limit_bytes
        spread_bytes = virtual.gpu.spread_under(limit, virtual.communicators_bytes)
        if self._is_whole:
            self._scenarios[0].least.add(limit, True, self._reserved)
            return self._over_scenarios(self._own, limit, spread_bytes)
        verdict = Verdict(
            verdict=self._outcome, margin_bytes=limit - self._reserved, limit_bytes=limit,
            reserved_bytes=self._reserved, spread_bytes=spread_bytes,
        )  # fmt: skip
        if self._outcome is not Outcome.OOM or refused is None:
            return verdict
        refused_bytes, site, reserved_bytes = refused
        margin = limit - reserved_bytes - refused_bytes
        return replace(verdict, margin_bytes=margin, at=where_failed(virtual.num_steps, site))

    def on_other_gpu(self, gpu: Gpu, own: Verdict) -> Verdict | None:
        """Return the verdict on `gpu`, with `own` that on the run's own GPU. Return None if the
        verdict is unknown, since the stored events do not reach the run's end."""
        limit = _usable_bytes(self._virtual, gpu)
        if self._share is not None:
            limit = min(limit, int(self._share * gpu.memory_bytes))
        spread_bytes = gpu.spread_under(limit, self._virtual.communicators_bytes)
        verdict = self._under(limit, spread_bytes)
        if verdict is None and self._outcome is Outcome.OOM and limit <= own.limit_bytes:
            verdict = replace(own, limit_bytes=limit)  # refuses the own GPU's last request too
        if verdict is None:
            return None
        if self._outcome is Outcome.OOM:  # the need includes at least the refused request
            verdict = replace(verdict, margin_bytes=limit - own.needs_bytes)
        if not self._memory.storages.shares:
            return verdict
        return _with_own_shares(self._virtual, gpu, own, verdict)

    def _over_scenarios(self, latest: Replayed, limit_bytes: int, spread_bytes: int) -> Verdict:
        earlier = [scenario.under(limit_bytes) for scenario in self._scenarios[1:]]
        return verdict_over(self._scenarios, [latest, *earlier], limit_bytes, spread_bytes)

    def _under(self, limit_bytes: int, spread_bytes: int) -> Verdict | None:
        """Return the verdict on a GPU whose allocator can reserve `limit_bytes`. Another driver of
        that GPU may leave up to `spread_bytes` less; a margin below that is tight. Return None if
        the verdict is unknown, since the stored events do not reach the run's end."""
        is_enough = self._ran_as_unlimited and self._reserved <= limit_bytes
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
        if self._allocated > limit_bytes:  # fails after the stored events
            at = f"after step {self._memory.log.num_steps - 1}"
            return replace(oom, reserved_bytes=limit_bytes, at=at)
        return None


def record_run_of(virtual: VirtualGpu, report: RunReport) -> Recording:
    """Return a recording of the allocator's actions, by replay of a script's stored events under
    the limit in `report`, the report of the run."""
    memory, source = virtual.mode.memory, virtual.allocator
    recording = Recording(memory.storages, report.limit_bytes, report.gpu)
    allocator = recording.allocator
    allocator.use(source.settings)
    allocator.gpu_bytes, allocator.allowed_bytes = source.gpu_bytes, source.allowed_bytes
    _play_marked(recording, memory.log)
    if memory.refused is not None and not report.fits:
        refused_bytes, _, _ = memory.refused
        recording.storage = -1
        recording.history.gather()
        free_bytes = max(0, report.limit_bytes - allocator.reserved_bytes)
        recording.history.refused(refused_bytes, 0, free_bytes)
        recording.result.failed = Moment(len(memory.log.events), recording.step, -1)
        recording.result.failed_bytes = refused_bytes
    recording.result.peak_allocated_bytes = allocator.peak_allocated_bytes
    recording.result.peak_reserved_bytes = allocator.peak_reserved_bytes
    recording.result.peak = replace(recording.peak, storage=-1)
    return recording


def _play_marked(recording: Recording, log: EventLog) -> None:
    """Play the events of `log` on `recording`, and store the ends of phases that marks show."""
    start = micro_batch = 0
    last_phase: Phase | None = None
    for end, name in (*log.marks, (len(log.events), "")):
        with suppress(OutOfMemory):  # under a limit that the script set later
            recording.play(log.events[start:end])
        start = end
        phase = _PHASE_BY_MARK.get(name)
        if phase is None or phase is last_phase:
            continue
        if phase is Phase.BEFORE_FORWARD and last_phase is Phase.AFTER_OPTIMIZER_STEP:
            recording.step += 1
            micro_batch = 0
        elif phase is Phase.BEFORE_FORWARD and last_phase is Phase.AFTER_FORWARD:
            micro_batch += 1  # no step since the last backward
        recording.reached(recording.step, micro_batch, phase)
        last_phase = phase
