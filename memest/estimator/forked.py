"""Work done in a copy of this process, while this one does other work."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

T = TypeVar("T")


@contextmanager
def forked(work: Callable[[], T]) -> Iterator[Callable[[], T | None]]:
    """Begin `work` in a copy of this process; within the block, ask for its result.

    The result is None where there is no such copy, or the work failed in it: then it is to be done
    here. So it is on systems other than Linux, and where autograd has run before, whose threads are
    not in the copy. Work that nobody asked about is given up at the end of the block.
    """
    if sys.platform != "linux":
        yield lambda: None
        return
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_do, args=(work, sender), daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: they hold no lock
        process.start()
    sender.close()

    def result() -> T | None:
        with suppress(EOFError):
            found: T = receiver.recv()
            return found
        return None

    try:
        yield result
    finally:
        process.kill()
        process.join()
        receiver.close()


def _do(work: Callable[[], Any], sender: Any) -> None:
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent answers it
    torch.set_num_threads(1)  # the threads of the parent are not here
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    with suppress(Exception):  # it goes wrong there, too, and is told
        sender.send(work())
