"""Whether a script fits the cards on which it did not run: its requests, replayed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from memest.estimator.device.mode import CudaSimMode
from memest.estimator.device.storages import Returns, Site
from memest.estimator.device.virtual_gpu import VirtualGpu
from memest.estimator.hardware.gpus import DEFAULT_GPUS, Gpu, find_gpu
from memest.estimator.readings import held_later, interval
from memest.report import Interval, Outcome, Verdict
from memest.run.replays import LogReplay, replay_log


def verdicts_of(
    virtual: VirtualGpu, outcome: Outcome, share: float | None
) -> tuple[dict[str, Verdict], list[str]]:
    """The verdicts on the card of the run and on the default set, and what to say of them.

    Args:
        virtual: the run.
        outcome: of the run itself.
        share: of a card's memory, where the script has set one.
    """
    own = virtual.gpu
    on_cards = _Verdicts(virtual, share)
    verdicts = {own.name: _own_verdict(virtual, outcome)}
    if outcome is Outcome.FITS:
        verdicts[own.name] = on_cards.over_moments(verdicts[own.name])
    unknown = []
    for gpu in map(find_gpu, DEFAULT_GPUS):
        if gpu.name == own.name:
            continue
        limit = _usable_bytes(virtual, gpu, share)
        verdict = on_cards.verdict(limit)
        if verdict is not None and outcome is Outcome.FITS:
            verdict = on_cards.over_moments(verdict)
        if verdict is not None and (outcome is not Outcome.OOM or verdict.verdict is Outcome.OOM):
            verdicts[gpu.name] = verdict
        elif outcome is Outcome.OOM and limit <= verdicts[own.name].limit_bytes:
            verdicts[gpu.name] = _refused_too(verdicts[own.name], limit)
        else:
            unknown.append(gpu.name)
    notes = []
    if unknown:
        notes.append(
            f"whether it fits {', '.join(unknown)} is not known from this run, which did not get"
            f" that far on {own.name}: `--gpu {unknown[-1]}` tells"
        )
    num_ooms = virtual.mode.memory.num_ooms
    if num_ooms and outcome is not Outcome.OOM:
        notes.append(
            f"the script caught {num_ooms} out-of-memory errors; on another card"
            " it may have chosen otherwise"
        )
    order = {name: place for place, name in enumerate(DEFAULT_GPUS)}
    return dict(sorted(verdicts.items(), key=lambda item: order.get(item[0], -1))), notes


def intervals_of(virtual: VirtualGpu, *, beside: int) -> dict[str, Interval]:
    """What the run has allocated, reserved and, with `beside` more, taken as a process.

    With shared blocks that return at the latest moment, as the script ran, and at the earlier ones,
    at which its requests are replayed, if all of them were kept.
    """
    mode, history = virtual.mode, virtual.mode.memory.history
    allocated, reserved = [history.peak_allocated_bytes], [history.peak_reserved_bytes]
    limit, settings = virtual.allocator.limit_bytes, virtual.allocator.settings
    for returns in _earlier(mode):
        again = replay_log(mode.memory.log, mode.memory.storages, limit, settings, returns=returns)
        allocated.append(again.peak_allocated_bytes)
        reserved.append(again.peak_reserved_bytes)
    return {
        "allocated": interval(allocated),
        "reserved": interval(reserved),
        "process": interval(reserved, beside=beside),
    }


def _earlier(mode: CudaSimMode) -> tuple[Returns, ...]:
    """The moments beside the latest at which shared blocks may return, if that can be told."""
    if (
        mode.timeline.is_slow
        and mode.memory.storages.depends_on_time
        and not mode.memory.log.is_full
    ):
        return Returns.AT_ONCE, Returns.AT_ONCE_AT_FIRST
    return ()


def _own_verdict(virtual: VirtualGpu, outcome: Outcome) -> Verdict:
    history, allocator = virtual.mode.memory.history, virtual.allocator
    limit = virtual.gpu.limit_bytes if allocator.limit_bytes is None else allocator.limit_bytes
    margin, at = limit - history.peak_reserved_bytes, ""
    if outcome is Outcome.OOM and virtual.mode.memory.refused is not None:
        num_bytes, site, reserved = virtual.mode.memory.refused
        margin = limit - reserved - num_bytes
        at = _where(virtual.num_steps, site)
    return Verdict(
        verdict=outcome,
        margin_bytes=margin,
        limit_bytes=limit,
        reserved_bytes=history.peak_reserved_bytes,
        at=at,
    )


def _refused_too(own: Verdict, limit_bytes: int) -> Verdict:
    """Of a card with no more memory, to which the last request came as well."""
    return replace(
        own,
        margin_bytes=own.margin_bytes - (own.limit_bytes - limit_bytes),
        limit_bytes=limit_bytes,
    )


def _usable_bytes(virtual: VirtualGpu, gpu: Gpu, share: float | None) -> int:
    usable = gpu.limit_bytes - virtual.ranks.communicator_bytes
    usable = min(usable, virtual.limit_bytes or usable)
    return usable if share is None else min(usable, int(share * gpu.memory_bytes))


class _Verdicts:
    """Verdicts on cards by what they can reserve.

    Args:
        virtual: the run.
        share: of a card's memory, where the script or a setting allows no more.
    """

    def __init__(self, virtual: VirtualGpu, share: float | None) -> None:
        self._mode = virtual.mode
        self._settings = virtual.allocator.settings
        self._free_runs: dict[Returns, LogReplay] = {}
        history = virtual.mode.memory.history
        self._allocated = history.peak_allocated_bytes
        self._unlimited = history.peak_reserved_bytes
        """Reserved on a card without end."""

        settings = virtual.allocator.settings
        self._collects = settings.garbage_collection_threshold > 0 and share is not None
        self._is_share = share is not None
        gives_back = self._collects or settings.max_split_bytes is not None
        self._was_free = not virtual.allocator.num_retries and not gives_back
        if not self._was_free and not self._mode.memory.log.is_full:
            self._unlimited = self._replay(None).peak_reserved_bytes
            self._was_free = True

    def verdict(self, limit_bytes: int) -> Verdict | None:
        """Whether all of it fits in `limit_bytes`; None where the log does not reach that far."""
        if self._was_free and self._unlimited <= limit_bytes and not self._collects:
            return self._fits(limit_bytes, self._unlimited)
        found = self._replay(limit_bytes)
        if found.refusal is not None:
            return Verdict(
                verdict=Outcome.OOM,
                margin_bytes=min(-1, limit_bytes - self._unlimited),
                limit_bytes=limit_bytes,
                reserved_bytes=found.peak_reserved_bytes,
                at=self._at(found.refusal.position, found.refusal.storage),
            )
        if not self._mode.memory.log.is_full:
            return self._fits(limit_bytes, found.peak_reserved_bytes)
        if self._allocated > limit_bytes:
            return Verdict(
                verdict=Outcome.OOM,
                margin_bytes=limit_bytes - max(self._unlimited, self._allocated),
                limit_bytes=limit_bytes,
                reserved_bytes=limit_bytes,
                at=f"after step {self._mode.memory.log.num_steps - 1}",
            )
        return None

    def over_moments(self, latest: Verdict) -> Verdict:
        """What `latest`, a verdict with blocks that return at the latest moment, is over all."""
        moments = _earlier(self._mode)
        if not moments:
            return latest
        limit = latest.limit_bytes
        highest, is_refused = self._unlimited, []
        for returns in moments:
            free = self._free(returns)
            highest = max(highest, free.peak_reserved_bytes)
            fits = free.peak_reserved_bytes <= limit and not self._collects
            is_refused.append(not fits and self._replay(limit, returns).refusal is not None)
        if latest.verdict is Outcome.FITS and not any(is_refused):
            return replace(latest, margin_bytes=limit - max(highest, latest.reserved_bytes))
        if latest.verdict is Outcome.OOM and all(is_refused):
            return latest
        decides = held_later(self._mode.memory.storages)
        return replace(
            latest, verdict=Outcome.MAY, margin_bytes=min(-1, limit - highest), decides=decides
        )

    def _fits(self, limit_bytes: int, reserved_bytes: int) -> Verdict:
        return Verdict(
            verdict=Outcome.FITS,
            margin_bytes=limit_bytes - reserved_bytes,
            limit_bytes=limit_bytes,
            reserved_bytes=reserved_bytes,
        )

    def _free(self, returns: Returns) -> LogReplay:
        """On a card without end; the same for all cards."""
        if returns not in self._free_runs:
            self._free_runs[returns] = self._replay(None, returns)
        return self._free_runs[returns]

    def _replay(self, limit_bytes: int | None, returns: Returns = Returns.LATEST) -> LogReplay:
        mode, settings = self._mode, self._settings
        return replay_log(
            mode.memory.log,
            mode.memory.storages,
            limit_bytes,
            settings,
            is_share=self._is_share,
            returns=returns,
        )

    def _at(self, position: int, storage: int) -> str:
        return _where(
            _steps_before(self._mode.memory.log.marks, position),
            self._mode.memory.storages.sites[storage],
        )


def _where(step: int, site: Site) -> str:
    return ", ".join(filter(None, (f"step {step}", site.phase, site.module, site.op, site.where)))


def _steps_before(marks: Iterable[tuple[int, str]], position: int) -> int:
    return sum(name == "after_optimizer_step" and at <= position for at, name in marks)
