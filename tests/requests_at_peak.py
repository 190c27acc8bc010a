"""Temporaries of a kernel at its peak."""

from __future__ import annotations

from memest.estimator.ops.temporaries import OLDEST, TRIED, Events, Scratch


def scratch_of(events: Events) -> Scratch:
    """The temporaries that live when most bytes are asked for, split at the first output.

    A coarser view of the same events: what was freed before that moment is left out, and what is
    `TRIED`.
    """
    live: list[tuple[int, bool]] = []
    largest: list[tuple[int, bool]] = []
    most = total = 0
    before = True
    for event in events:
        if event.output == TRIED:
            continue
        if event.output is not None and event.output != OLDEST:
            before = False
            total += event.num_bytes
        elif event.num_bytes > 0:
            live.append((event.num_bytes, before))
            total += event.num_bytes
        else:
            last = max(i for i, (n, _) in enumerate(live) if n == -event.num_bytes)
            del live[last]
            total += event.num_bytes
        if total > most:
            most, largest = total, list(live)
    return Scratch(
        before=tuple(n for n, early in largest if early),
        after=tuple(n for n, early in largest if not early),
    )
