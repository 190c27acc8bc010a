"""`memest.virtual_gpu`: a block of code on a GPU that is not there."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import torch

from memest.errors import MemestError
from memest.estimator.device.patches import Patches
from memest.estimator.device.ranks import ALONE, Ranks
from memest.estimator.device.virtual_gpu import StepLimit, VirtualGpu
from memest.estimator.hardware.gpus import Gpu, custom_gpu, find_gpu
from memest.estimator.predict import PRIMARY_GPU
from memest.report import Ending, RunReport
from memest.run import processes, smaller_batches
from memest.run.summary import report_of
from memest.units import parse_bytes

_LONGEST_CHAIN = 20
"""Of errors that were raised while another was handled."""


class Session:
    """What `virtual_gpu` returns: within its block CUDA is there, simulated.

    Args:
        gpu: the card.
        memory_limit: bytes that its allocator may reserve at most; None is all.
        max_steps: optimizer steps after which `StepLimit` ends the block.
        is_strict: refuse to guess values.
        name: of what runs, for the report.
        roots: folders of libraries whose code is the script's.
        ranks: which rank of how many this is.
        batch_parts: DataLoaders take one of so many parts of each batch.
        is_prompt: blocks that several streams use return as they die.
    """

    def __init__(
        self,
        gpu: Gpu,
        *,
        memory_limit: int | None = None,
        max_steps: int | None = None,
        is_strict: bool = False,
        name: str = "a block of code",
        roots: tuple[Path, ...] = (),
        ranks: Ranks = ALONE,
        batch_parts: int = 1,
        is_prompt: bool = False,
    ) -> None:
        self.gpu = gpu
        self.name = name
        self.ending = Ending.RUNNING
        self.error = ""
        self.ranks = ranks
        usable = gpu.limit_bytes - ranks.communicator_bytes
        self._limit = None if memory_limit is None else min(memory_limit, usable)
        self._virtual = VirtualGpu(
            gpu,
            limit_bytes=self._limit,
            max_steps=max_steps,
            is_strict=is_strict,
            roots=roots,
            ranks=ranks,
            is_prompt=is_prompt,
        )
        self._batch_parts = batch_parts
        self._patches = Patches()
        self._started = 0.0
        self._elapsed_s: float | None = None

    def __enter__(self) -> Session:
        if self._elapsed_s is not None or self._started:
            raise MemestError(
                "this virtual GPU was used before", hint="call `memest.virtual_gpu` again"
            )
        self._virtual.__enter__()
        processes.install(self._patches, self.ranks)
        if self._batch_parts > 1:
            smaller_batches.install(self._patches, self._batch_parts)
            self._virtual.mode.notes.add(
                f"batches of DataLoaders are cut to 1/{self._batch_parts}, as asked"
            )
        self._started = time.perf_counter()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._elapsed_s = time.perf_counter() - self._started
        self.ending, self.error = ending_of(error)
        self._patches.undo()
        self._virtual.__exit__(kind, error, trace)

    @property
    def allocated_bytes(self) -> int:
        """Allocated now, as `torch.cuda.memory_allocated` says."""
        self._virtual.mode.memory.settle()
        return self._virtual.allocator.allocated_bytes

    @property
    def reserved_bytes(self) -> int:
        """Reserved now, as `torch.cuda.memory_reserved` says."""
        return self._virtual.allocator.reserved_bytes

    @property
    def peak_allocated_bytes(self) -> int:
        """The highest number of bytes allocated so far, whatever the code resets."""
        return self._virtual.peak_allocated_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        """The highest number of bytes reserved so far, whatever the code resets."""
        return self._virtual.peak_reserved_bytes

    @property
    def num_steps(self) -> int:
        """Optimizer steps so far."""
        return self._virtual.num_steps

    @property
    def virtual(self) -> VirtualGpu:
        """The card, for what reads its history."""
        return self._virtual

    def report(self) -> RunReport:
        """What has happened so far, within the block or after it."""
        elapsed = self._elapsed_s
        if elapsed is None:
            elapsed = time.perf_counter() - self._started if self._started else 0.0
        return report_of(
            self._virtual,
            name=self.name,
            ending=self.ending,
            error=self.error,
            elapsed_s=elapsed,
        )


def virtual_gpu(
    gpu: str = PRIMARY_GPU,
    *,
    gpu_memory: int | str | None = None,
    memory_limit: int | str | None = None,
    max_steps: int | None = None,
    strict: bool = False,
) -> Session:
    """A GPU that is not there, for the code of a `with` block.

        with memest.virtual_gpu("a100-80gb") as gpu:
            train()
        print(gpu.peak_allocated_bytes, gpu.report())

    Within the block `torch.cuda` answers for that card: tensors on it have shapes and no values,
    and `torch.OutOfMemoryError` comes where the card would give up. One at a time.

    Args:
        gpu: a name of `memest gpus`.
        gpu_memory: memory of a card that is not in the catalogue, in bytes or as `24GiB`; its
            kernels are those of `gpu`.
        memory_limit: what the allocator may reserve at most.
        max_steps: optimizer steps after which a `SystemExit` ends the block.
        strict: refuse to guess values that the code reads.

    Raises:
        PlanError: there is no such card, or a size is none.
        MemestError: when the block is entered while another one is active.
    """
    card = find_gpu(gpu)
    if gpu_memory is not None:
        card = custom_gpu(parse_bytes(gpu_memory), card)
    limit = None if memory_limit is None else parse_bytes(memory_limit)
    return Session(card, memory_limit=limit, max_steps=max_steps, is_strict=strict)


def ending_of(error: BaseException | None) -> tuple[Ending, str]:
    """How a script ended whose last word was `error`, and that in a line."""
    if error is None:
        return Ending.FINISHED, ""
    if _is_stopped(error):
        return Ending.STOPPED, ""
    if isinstance(error, SystemExit):
        is_said = error.code not in (None, 0)
        return Ending.FINISHED, f"SystemExit: {error.code}" if is_said else ""
    if isinstance(error, KeyboardInterrupt):
        return Ending.INTERRUPTED, "KeyboardInterrupt"
    ending = Ending.CRASHED
    if isinstance(error, torch.OutOfMemoryError):
        ending = Ending.OOM
    elif refusal_within(error) is not None:
        ending = Ending.UNSUPPORTED
    text = " ".join(str(error).split())
    if ending is Ending.OOM:
        text = re.split(r" GPU \d+ has", text)[0]  # the rest is in the report
    return ending, f"{type(error).__name__}: {text[:400]}"


def _is_stopped(error: BaseException) -> bool:
    """Whether `error` is a `StepLimit`, or what cleaning up after one led to."""
    context: BaseException | None = error
    for _ in range(_LONGEST_CHAIN):
        if context is None or isinstance(context, StepLimit):
            break
        context = context.__context__
    return isinstance(context, StepLimit)


def refusal_within(error: BaseException | None) -> MemestError | None:
    """The error of memest's own that `error` is, or was raised from."""
    seen = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, MemestError):
            return error
        seen.add(id(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None
