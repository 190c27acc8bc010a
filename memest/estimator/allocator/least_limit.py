"""Least limit under which a run fits, found by replays under other limits.

Reserved bytes do not measure a run's need: the allocator fills the GPU with cached blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

UNIT_BYTES = 2 << 20  # step of the search: segments are multiples of it (`kSmallBuffer`)
NUM_PROBES = 8  # evenly spaced limits that are tried from the top before the bisection
MAX_EVENTS = 1_500_000  # replayed by a search at most, 2 s of CPU; most runs have 100,000
MIN_REPLAYS = 3  # replays of a search, however long the run is


class LeastLimit:
    """Replays of one run under several limits.

    Fitting is not monotone: a smaller limit frees cached blocks earlier, which can leave larger
    free blocks. The search tries `NUM_PROBES` limits downwards and bisects below the first that
    fails, so the result fits and one unit less does not. If `MAX_EVENTS` allows few replays, the
    bisection ends early, at a limit that fits.

    Args:
        replay: runs under a limit in bytes. Returns whether the run fits, and the peak reserved;
            of a run that does not, the limit to which its requests raised a soft limit, or 0.
        allocated_bytes: peak allocated without a limit.
        reserved_bytes: peak reserved without a limit.
        num_events: events of one replay.
        is_felt_early: whether the limit can have an effect before it is reached, as with
            `garbage_collection_threshold` or expandable segments under a cap.
    """

    def __init__(
        self,
        replay: Callable[[int], tuple[bool, int]],
        allocated_bytes: int,
        reserved_bytes: int,
        *,
        num_events: int,
        is_felt_early: bool = False,
    ) -> None:
        self._replay = replay
        self._num_left = max(MIN_REPLAYS, MAX_EVENTS // max(1, num_events))
        self._num_probes = NUM_PROBES if self._num_left > 2 * NUM_PROBES else 0
        self._allocated = allocated_bytes // UNIT_BYTES
        self._reserved = _units(reserved_bytes)
        self._is_felt_early = is_felt_early
        self._known: dict[int, tuple[bool, int]] = {}

    def add(self, limit_bytes: int, fits: bool, num_bytes: int) -> None:
        """Record the result of a replay that the caller has made."""
        self._known[limit_bytes // UNIT_BYTES] = fits, _units(num_bytes)

    def fits(self, limit_bytes: int) -> bool:
        """Return whether the run fits under `limit_bytes`."""
        return self._try(limit_bytes // UNIT_BYTES)[0]

    def bytes_for(self, limit_bytes: int) -> int:
        """Return the least limit; it is above `limit_bytes` if the run does not fit under that."""
        limit, top = limit_bytes // UNIT_BYTES, self._reserved
        while not self._try(top)[0]:  # only with settings that feel the limit early
            top += -(-top // NUM_PROBES)
        fits, high = self._try(limit)
        low = -1
        if not fits:
            high, low = self._try(top)[1], limit
        start = min(self._allocated, top) - 1
        for step in reversed(range(self._num_probes)):
            probe = start + step * (top - start) // NUM_PROBES
            if low < probe < high and self._may_try(probe):
                fits, units = self._try(probe)
                if not fits:
                    return self._bisect(probe, high, units)
                high = units
        if not self._num_probes:
            low = max(low, min(start, high - 1))
        return self._bisect(low, high, None)

    def _bisect(self, low: int, high: int, guess: int | None) -> int:
        """Narrow `low`, which fails, and `high`, which fits, to one unit; return `high` in bytes.

        `guess` is tried first. A replay under a soft limit, which its requests raise, has found it.
        """
        while high - low > 1:
            is_guess = guess is not None
            probe = max(low + 1, min(guess, high - 1)) if guess is not None else (low + high) // 2
            if not self._may_try(probe):
                break
            fits, units = self._try(probe)
            if fits:
                guess = units - 1 if is_guess and probe < high - 1 else None
                high = units
            else:
                low = probe
                guess = None if is_guess else units
        return high * UNIT_BYTES

    def _may_try(self, limit: int) -> bool:
        return limit in self._known or self._num_left > 0

    def _try(self, limit: int) -> tuple[bool, int]:
        """Return the result of `replay`, in units of `UNIT_BYTES`; each limit is replayed once."""
        if limit not in self._known:
            self._known[limit] = self._found(limit)
        return self._known[limit]

    def _found(self, limit: int) -> tuple[bool, int]:
        if limit < 0:
            return False, 0
        if not self._is_felt_early:
            if limit >= self._reserved:
                return True, self._reserved
            # a run that reserves less than both limits is the same under both: the same requests
            # of the driver succeed and fail
            for known, (fits, peak) in self._known.items():
                if fits and peak <= limit <= known:
                    return True, peak
        self._num_left = max(0, self._num_left - 1)
        fits, num_bytes = self._replay(limit * UNIT_BYTES)
        # expandable segments can grow by more than was compared with a cap
        return fits, min(limit, _units(num_bytes)) if fits else _units(num_bytes)


def _units(num_bytes: int) -> int:
    return -(-num_bytes // UNIT_BYTES)


def highest_need(runs: Sequence[LeastLimit], limit_bytes: int) -> int:
    """Return the highest least limit of `runs`, which are ranks and timings of one plan or script.

    A run that fits under the highest need so far is not searched.
    """
    needs = 0
    for run in runs:
        is_sure = needs > limit_bytes or run.fits(limit_bytes)
        if not (needs and is_sure and run.fits(needs)):
            needs = max(needs, run.bytes_for(limit_bytes))
    return needs
