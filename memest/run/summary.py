"""From a run on the virtual GPU to its report."""

import linecache
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

from memest.estimator.gpu.guesses import Guesses
from memest.estimator.gpu.history import Held, History
from memest.estimator.hardware.gpus import Gpu, find_gpu
from memest.estimator.hardware.pace import estimate
from memest.estimator.ops.convolution import describe_source
from memest.estimator.replay.closed_form import LAYER
from memest.estimator.summary import beside_assumed, context_assumed, coverage_of, kernels_assumed
from memest.estimator.tensors.lines import ScriptLines
from memest.estimator.tensors.storages import MemKind, Site
from memest.estimator.versions import library_versions
from memest.estimator.virtual_gpu import VirtualGpu
from memest.report import (
    KINDS,
    Ending,
    Guess,
    HeldRow,
    Outcome,
    RunPeak,
    RunPhase,
    RunReport,
    RunStep,
)
from memest.run.replays import intervals_of, verdicts_of
from memest.units import counted, format_bytes

MAX_SOURCE = 100  # characters of a source line in the report
NO_LINE = "(no line of the script)"
_SCALAR = re.compile(r"^scalar_dense of (\w+)$")


def report_of(
    virtual: VirtualGpu, *, name: str, ending: Ending, error: str, elapsed_s: float,
    others: Sequence[str],
) -> RunReport:  # fmt: skip
    """Report the run on `virtual` so far, with verdicts on the GPUs `others`."""
    mode, gpu = virtual.mode, virtual.gpu
    outside_bytes = gpu.context_bytes + virtual.communicators_bytes
    if VirtualGpu._active is virtual:
        mode.memory.settle()
        mode.attribution.label_models()
    history = mode.memory.history
    held = history.held_at_peak()
    outcome = Outcome.OOM if ending is Ending.OOM else Outcome.FITS
    verdicts, notes = verdicts_of(virtual, outcome, _own_share(virtual), others)
    gpus = {each: gpu if each == gpu.name else find_gpu(each) for each in verdicts}
    times = {each: estimate(mode.work, kind) for each, kind in gpus.items()}
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
        terms=_terms(held, history.peak_allocated_bytes),
        modules=_rows(held, _module_group),
        lines=_rows(held, lambda site: site.where or NO_LINE, mode.attribution.lines),
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


def held_for(kind: MemKind, site: Site) -> str:
    """Return the kind in `KINDS` of a storage's use.

    Storages of backward and optimizer are temporary; those made before any model ran are `other`.
    """
    if kind is not MemKind.ACTIVATIONS:
        return str(kind)
    if site.phase in ("backward", "optimizer"):
        return "temporaries"
    return "other" if site.phase == "setup" else "activations"


def _own_share(virtual: VirtualGpu) -> float | None:
    """Return the share of a GPU's memory that the script allows itself; None if it set none."""
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


def _terms(held: Iterable[Held], peak_bytes: int) -> tuple[HeldRow, ...]:
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for entry in held:
        kind = held_for(entry.kind, entry.site)
        sizes[kind] += entry.num_bytes
        counts[kind] += entry.count
    rows = [
        HeldRow(name=kind, num_bytes=sizes[kind], num_tensors=counts[kind], kinds={})
        for kind in KINDS
        if sizes[kind]
    ]
    rest = peak_bytes - sum(sizes.values())
    return (*rows, HeldRow(name="rounding", num_bytes=rest, num_tensors=0, kinds={}))


def _module_group(site: Site) -> str:
    """Return the stack of layers that a module belongs to, or its three outermost modules."""
    layer = LAYER.match(site.module)
    if layer:
        return f"{layer[1]}.*"
    return ".".join(site.module.split(".")[:3]) or "(outside of modules)"


def _rows(
    held: Iterable[Held], group_of: Callable[[Site], str], lines: ScriptLines | None = None
) -> tuple[HeldRow, ...]:
    kinds: dict[str, Counter[str]] = defaultdict(Counter)
    counts: Counter[str] = Counter()
    line_of: dict[str, str] = {}
    for entry in held:
        group = group_of(entry.site)
        line_of[group] = entry.site.line
        kinds[group][held_for(entry.kind, entry.site)] += entry.num_bytes
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
    found = {row.step: row for row in history.first_steps}
    for row in (history.highest_step, history.last_step):
        if row is not None:
            found[row.step] = row
    return tuple(found[step] for step in sorted(found))


def _assumptions(virtual: VirtualGpu, gpu: Gpu, others: Sequence[str]) -> Iterable[str]:
    log = virtual.mode.memory.log
    settings = virtual.allocator.settings
    yield from beside_assumed(gpu)
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
        where = "H100s and H200s of one host" if virtual.rank.world_size > 1 else "one H100"
        pairs = [each for each in virtual.mode.works.communicators if each[1] is not None]
        count = max(1, len(virtual.mode.works.communicators) - len(pairs))
        named = "one group" if count == 1 else f"{count} groups"
        named += f" and {counted(len(pairs), 'pair')} of ranks" if pairs else ""
        yield (
            f"{format_bytes(virtual.communicators_bytes)} of NCCL for {named}, as measured on"
            f" {where}"
        )
    if log.is_full:
        yield (
            f"the first {len(log.events)} of {log.num_events} allocations and frees, which are"
            f" {log.num_steps} of {virtual.num_steps} optimizer steps, were kept for the verdicts"
            " of other GPUs and for recordings; peaks are those of the whole run"
        )
