"""`memest.virtual_gpu`: a block of code on a virtual GPU."""

import re
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils.data._utils import fetch

from memest.child import Terminated
from memest.errors import MemestError, PlanError
from memest.estimator.allocator.blocks import SMALL_SEGMENT_BYTES
from memest.estimator.gpu.worlds import ALONE, Rank
from memest.estimator.hardware.gpus import DEFAULT_GPUS, Gpu, custom_gpu, find_gpu
from memest.estimator.predict import PRIMARY_GPU
from memest.estimator.tensors.patches import Patches
from memest.estimator.versions import check_torch, known, simulating
from memest.estimator.virtual_gpu import StepLimit, VirtualGpu
from memest.report import Ending, RunReport
from memest.run.summary import report_of
from memest.units import parse_bytes


def _with_smaller_batches(whole: Callable[..., Any], parts: int) -> Callable[..., Any]:
    """Return a DataLoader's `fetch` that keeps 1/`parts` of a batch, at least one sample."""

    def fetch(self: Any, possibly_batched_index: Any) -> Any:
        index = possibly_batched_index
        if self.auto_collation and len(index) > 1:
            index = index[: max(1, len(index) // parts)]
        return whole(self, index)

    return fetch


_LONGEST_CHAIN = 20  # longest chain of `__cause__` and `__context__` that is searched


class Session:
    """Result of `virtual_gpu`: within its block there is a simulated CUDA GPU.

    Args:
        gpu: the GPU.
        memory_limit: bytes that its allocator may reserve at most; None is all.
        name: name of the code, for the report.
        batch_parts: DataLoaders keep 1/`batch_parts` of each batch.
        others: names of other GPUs with a verdict in the report.
        options: those of `VirtualGpu`: `max_steps`, `is_strict`, `roots`, `is_immediate`.
    """

    def __init__(
        self,
        gpu: Gpu,
        *,
        memory_limit: int | None = None,
        name: str = "a block of code",
        rank: Rank = ALONE,
        batch_parts: int = 1,
        torch_release: str | None = None,
        others: Sequence[str] = DEFAULT_GPUS,
        **options: Any,
    ) -> None:
        self.gpu = gpu
        self._others = others
        self._open = ExitStack()
        self._torch_release = torch_release
        self.name = name
        self.ending = Ending.RUNNING
        self.error = ""
        self.rank = rank
        usable = gpu.limit_bytes - rank.communicator_bytes
        if memory_limit is not None and memory_limit < SMALL_SEGMENT_BYTES:
            raise PlanError(
                f"a cap of {memory_limit} bytes is below the allocator's smallest segment, 2 MiB",
                hint=f"give its unit: `{memory_limit}GiB`" if memory_limit < 1000 else "give more",
            )
        limit = None if memory_limit is None else min(memory_limit, usable)
        with simulating(torch_release):
            self.virtual = VirtualGpu(gpu, limit_bytes=limit, rank=rank, **options)
        self.virtual.mode.memory.logs_driver = rank.world_size == 1
        self._batch_parts = batch_parts
        self._patches = Patches()
        self._started = 0.0
        self._elapsed_s: float | None = None

    def __enter__(self) -> "Session":
        if self._elapsed_s is not None or self._started:
            raise MemestError(
                "this virtual GPU was used before", hint="call `memest.virtual_gpu` again"
            )
        with ExitStack() as stack:
            stack.enter_context(simulating(self._torch_release))
            stack.enter_context(self.virtual)
            stack.callback(self._patches.undo)
            self._open = stack.pop_all()
        if self._batch_parts > 1:
            for fetcher in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
                smaller = _with_smaller_batches(fetcher.fetch, self._batch_parts)
                self._patches.set(fetcher, "fetch", smaller)
            self.virtual.mode.notes.add(
                f"batches of DataLoaders are cut to 1/{self._batch_parts}, as asked"
            )
        self._started = time.perf_counter()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._elapsed_s = time.perf_counter() - self._started
        self.ending, self.error = ending_of(error)
        self._open.__exit__(kind, error, trace)

    @property
    def allocated_bytes(self) -> int:
        """Bytes allocated now, as `torch.cuda.memory_allocated`."""
        self.virtual.mode.memory.settle()
        return self.virtual.allocator.allocated_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes reserved now, as `torch.cuda.memory_reserved`."""
        return self.virtual.allocator.reserved_bytes

    @property
    def peak_allocated_bytes(self) -> int:
        """Highest number of bytes allocated so far; resets by the code have no effect."""
        return self.virtual.peak_allocated_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        """Highest number of bytes reserved so far; resets by the code have no effect."""
        return self.virtual.peak_reserved_bytes

    @property
    def num_steps(self) -> int:
        """Optimizer steps so far."""
        return self.virtual.num_steps

    def report(self) -> RunReport:
        """Return the report so far, within the block or after it."""
        elapsed = self._elapsed_s
        if elapsed is None:
            elapsed = time.perf_counter() - self._started if self._started else 0.0
        with simulating(self._torch_release):
            return report_of(
                self.virtual, name=self.name, ending=self.ending, error=self.error,
                elapsed_s=elapsed, others=self._others,
            )  # fmt: skip


def virtual_gpu(
    gpu: str = PRIMARY_GPU,
    *,
    gpu_memory: int | str | None = None,
    memory_limit: int | str | None = None,
    beside: int | str | None = None,
    max_steps: int | None = None,
    strict: bool = False,
    torch_release: str | None = None,
) -> Session:
    """Simulate a GPU for the code of a `with` block.

        with memest.virtual_gpu("a100-80gb") as gpu:
            train()
        print(gpu.peak_allocated_bytes, gpu.report())

    Within the block `torch.cuda` reports that GPU. Tensors on it have shapes and no values, and
    `torch.OutOfMemoryError` is raised where a GPU would. Only one virtual GPU exists at a time.

    Args:
        gpu: a name of `memest gpus`.
        gpu_memory: memory of a GPU that is not in the catalogue, in bytes or as `24GiB`; its
            kernels are those of `gpu`.
        memory_limit: limit of the allocator's reserved memory.
        beside: memory of the GPU that other processes hold.
        max_steps: optimizer steps after which a `SystemExit` ends the block.
        strict: refuse to guess values that the code reads.
        torch_release: simulated release of torch, such as `2.11`; the installed one by default.

    Raises:
        PlanError: there is no such GPU, a size is invalid, the release has no rules, or the
            installed torch is too old.
        MemestError: when the block is entered while another one is active.
    """
    check_torch()
    found = find_gpu(gpu)
    if gpu_memory is not None:
        found = custom_gpu(parse_bytes(gpu_memory), found)
    limit = None if memory_limit is None else parse_bytes(memory_limit)
    if max_steps is not None and max_steps < 1:
        raise PlanError(f"`max_steps` is {max_steps}", hint="give at least 1, or leave it out")
    return Session(
        found if beside is None else found.beside(parse_bytes(beside)),
        memory_limit=limit,
        max_steps=max_steps,
        is_strict=strict,
        torch_release=None if torch_release is None else known(torch_release).name,
    )


def ending_of(error: BaseException | None) -> tuple[Ending, str]:
    """Return how a script ended with `error`, and the error in a line."""
    if error is None:
        return Ending.FINISHED, ""
    context: BaseException | None = error
    for _ in range(_LONGEST_CHAIN):
        if context is None or isinstance(context, StepLimit):
            break
        context = context.__context__
    if isinstance(context, StepLimit):
        return Ending.STOPPED, ""
    if isinstance(error, Terminated):
        return Ending.INTERRUPTED, "SIGTERM"
    if isinstance(error, SystemExit):
        has_code = error.code not in (None, 0)
        return Ending.FINISHED, f"SystemExit: {error.code}" if has_code else ""
    if isinstance(error, KeyboardInterrupt):
        return Ending.INTERRUPTED, "KeyboardInterrupt"
    ending = Ending.CRASHED
    if isinstance(error, torch.OutOfMemoryError):
        ending = Ending.OOM
    elif refusal_within(error) is not None:
        ending = Ending.UNSUPPORTED
    text = " ".join(str(error).split())
    if ending is Ending.OOM:
        text = re.split(r" GPU \d+ has", text)[0]  # the report has the rest
    return ending, f"{type(error).__name__}: {text[:400]}"


def refusal_within(error: BaseException | None) -> MemestError | None:
    """Return memest's own error that `error` is, or was raised from; else None."""
    seen = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, MemestError):
            return error
        seen.add(id(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None
