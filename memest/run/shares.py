"""Verdicts on other GPUs for a script with storages that are a share of the GPU's memory."""

from __future__ import annotations

from dataclasses import replace

from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.replay.replay import Run
from memest.estimator.replay.scenarios import Scenario, verdict_over, where_failed
from memest.estimator.tensors.storages import FreeTiming
from memest.estimator.virtual_gpu import VirtualGpu
from memest.report import Outcome, RunReport, Verdict
from memest.run.replays import run_of


def with_own_shares(virtual: VirtualGpu, report: RunReport) -> RunReport:
    """Return `report` with such storages as large on each GPU as they would be there."""
    storages, log = virtual.mode.memory.storages, virtual.mode.memory.log
    if not storages.shares:
        return report
    own = report.verdicts[virtual.gpu.name]
    verdicts, unknown = {}, []
    for name, verdict in report.verdicts.items():
        found: Verdict | None = own
        if name != virtual.gpu.name:
            run = run_of(virtual)
            program = replace(run.program, storages=storages.on(find_gpu(name).memory_bytes))
            run = replace(run, program=program)
            if own.verdict is Outcome.OOM:
                found = _refused(virtual, run, own, verdict)
            else:
                found = None if log.is_full else _replayed(virtual, run, verdict)
        if found is None:
            unknown.append(name)
        else:
            verdicts[name] = found
    notes = report.notes
    if unknown:
        notes = (*notes, f"whether it fits {', '.join(unknown)} is not known from this run")
    return replace(report, verdicts=verdicts, notes=notes)


def _replayed(virtual: VirtualGpu, run: Run, verdict: Verdict) -> Verdict:
    """Return the verdict of `run`, the whole script's, under the limit of `verdict`."""
    depends = virtual.mode.timeline.is_slow and run.program.storages.depends_on_time
    timings = tuple(FreeTiming) if depends else (FreeTiming.LATEST,)
    scenarios = [Scenario(run, timing) for timing in timings]
    results = [scenario.under(verdict.limit_bytes) for scenario in scenarios]
    return verdict_over(scenarios, results, verdict.limit_bytes, verdict.spread_bytes)


def _refused(virtual: VirtualGpu, run: Run, own: Verdict, verdict: Verdict) -> Verdict | None:
    """Return the verdict where the script was refused memory; None if it gets further here."""
    memory, there = virtual.mode.memory, run.program.storages
    counted = run.program.alive_at_end() | {memory.refused_id}
    own_sizes = memory.storages.num_bytes
    more = sum(there.num_bytes[i] - own_sizes[i] for i in there.shares if i in counted)
    margin = verdict.limit_bytes - own.needs_bytes - more
    failed = run.on(verdict.limit_bytes).failed
    if failed is None and margin >= 0:
        return None
    at = own.at if failed is None else where_failed(failed.step, there.sites[failed.storage])
    return replace(verdict, verdict=Outcome.OOM, margin_bytes=min(-1, margin), at=at)
