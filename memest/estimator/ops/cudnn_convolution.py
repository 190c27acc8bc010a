"""Workspaces of cuDNN's convolutions: by the installed cuDNN, else by a rule of their shapes.

cuDNN chooses its kernels by heuristics that are not public, and the kernel decides the workspace.
The installed library runs the heuristics without a GPU (`cudnn_library`); its answers are stored in
the user's cache folder (`Answers`). Without it, `cudnn_rules` estimates the workspace.
"""

from __future__ import annotations

import atexit
import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

from memest.estimator.hardware.gpus import Gpu
from memest.estimator.ops.cudnn_library import (
    FOLDER,
    CudnnError,
    Kernels,
    Library,
    device_properties,
    library,
)
from memest.estimator.ops.cudnn_rules import (
    ConvolutionShapes,
    is_strided_fourier,
    strided_fourier_bytes,
    workspace_bytes,
)
from memest.estimator.versions import simulated
from memest.writing import cache_folder, write_whole

MEASURED_CAPABILITY = (9, 0)  # of the GPU with which the library's answers were compared
ANY_KERNELS = Kernels()


@dataclass(frozen=True, slots=True)
class Workspace:
    """Bytes that cuDNN requests for one direction of a convolution."""

    num_bytes: int
    is_by_library: bool  # the installed cuDNN returned the size; otherwise it is an estimate


def describe_source(gpu: Gpu) -> str:
    """Describe the source of the workspaces of convolutions on a GPU, for a report."""
    installed = library()
    if installed is None or not installed.supports(gpu):
        is_known = device_properties(gpu.chip) is not None
        more = (
            "cuDNN 9.19 answers for itself after: pip install 'memest-gpu[cudnn]'"
            if is_known
            else f"The properties of {gpu.name} by which cuDNN chooses are not known"
        )
        return (
            "workspaces of convolutions estimated from their shapes: on an H100 69, 73 and 38 % are"
            f" right to 512 B (output, gradients of input and weight). {more}"
        )
    own, release = _version(installed.version), simulated()
    theirs = _version(release.cudnn_version)
    is_same = own.rpartition(".")[0] == theirs.rpartition(".")[0]
    other = "" if is_same else f"; torch {release.name} has {theirs}"
    if not installed.is_measured(gpu):
        other += (
            "; estimates, since answers about Hopper were measured of cuDNN 9.19 only, which"
            f" {FOLDER} can name"
        )
    return (
        f"workspaces of convolutions by the heuristics of cuDNN {own}, which run without a GPU;"
        f" those of 1x1 products by cuBLASLt are estimated{other}"
    )


def _version(number: int) -> str:
    """Return `cudnnGetVersion` as text, such as 9.19.0 for 91900."""
    return f"{number // 10_000}.{number // 100 % 100}.{number % 100}"


@lru_cache(maxsize=4096)
def workspace(
    shapes: ConvolutionShapes, direction: str, gpu: Gpu, kernels: Kernels = ANY_KERNELS
) -> Workspace:
    """Return the workspace of one direction on `gpu`."""
    if (installed := installed_for(gpu)) is not None:
        answers = answers_of(installed, gpu.chip)
        key = answers.key(shapes, direction, kernels.are_deterministic, kernels.are_without_tf32)
        found = answers.get(key)
        if found is None:
            found = answers.put(key, _first_plan(installed, shapes, direction, gpu, kernels))
        if found:
            return Workspace(found[0], not found[1] and installed.is_measured(gpu))
    return Workspace(workspace_bytes(shapes, direction), is_by_library=False)


def installed_for(gpu: Gpu) -> Library | None:
    """Return the installed cuDNN if it answers for `gpu`."""
    installed = library()
    return installed if installed is not None and installed.supports(gpu) else None


@lru_cache(maxsize=8)
def answers_of(installed: Library, gpu: str) -> Answers:
    """Return the stored answers of a library about a GPU."""
    return Answers(installed.fingerprint(gpu))


def _first_plan(
    installed: Library, shapes: ConvolutionShapes, direction: str, gpu: Gpu, kernels: Kernels
) -> tuple[int, ...]:
    """Return workspace and `Plan.is_estimated` of the first plan; empty if cuDNN has none."""
    try:
        plan = installed.first_plan(shapes, direction, gpu.chip, kernels)
    except CudnnError:
        return ()
    return () if plan is None else (plan.workspace_bytes, int(plan.is_estimated))


@lru_cache(maxsize=4096)
def tried_bytes(shapes: ConvolutionShapes, direction: str, gpu: Gpu) -> tuple[int, ...]:
    """Return the workspaces that `cudnn.benchmark` tries at first: at most the two largest.

    `get_plans_from_find` of Conv_v8.cpp (torch 2.11): the largest workspace of all plans that fits
    the GPU is allocated, and the plans are timed in it. Then it is freed, and the cache is emptied.
    From then on the fastest plan runs, which is assumed to be the first one. Fourier transforms of
    convolutions with stride are estimated, since cuDNN lists them on a GPU only.
    """
    installed = installed_for(gpu)
    if installed is None:
        return tuple(n for n in (workspace_bytes(shapes, direction),) if n)
    answers = answers_of(installed, gpu.chip)
    key = answers.key(shapes, direction, "tried")
    found = answers.get(key)
    if found is None:
        try:
            sizes = {p.workspace_bytes for p in installed.all_plans(shapes, direction, gpu.chip)}
            if direction == "input" and is_strided_fourier(shapes):
                sizes.add(strided_fourier_bytes(shapes))
        except CudnnError:  # cuDNN refuses the call
            sizes = set()
        found = answers.put(key, tuple(sorted(sizes - {0}, reverse=True)[:2]))
    return found


# ------------------------------------------------------------------- stored answers
MOST_ANSWERS = 20_000  # about 0.7 MB
WRITE_EVERY = 256  # new answers after which the file is written; also when the process ends
Answer = tuple[int, ...]


class Answers:
    """Answers of the installed cuDNN by key, in a file of the user's cache folder.

    One file for each cuDNN, GPU and version of this code. A file holds at most `MOST_ANSWERS`
    answers; the oldest are dropped. A file that cannot be read is ignored and replaced. Processes
    that write at the same time each replace the whole file, so that a reader never sees half of
    one. Not for several threads at once.
    """

    def __init__(self, fingerprint: str) -> None:
        self.path = cache_folder() / f"cudnn-{fingerprint}.json"
        self._found = self._read()
        self._num_new = 0
        atexit.register(self.write)

    @staticmethod
    def key(shapes: ConvolutionShapes, *settings: object) -> str:
        """Return 16 letters that stand for a call and its settings."""
        text = repr((shapes, settings)).encode()
        return hashlib.blake2b(text, digest_size=8).hexdigest()

    def get(self, key: str) -> Answer | None:
        """Return the stored answer; None if there is none."""
        return self._found.get(key)

    def put(self, key: str, answer: Answer) -> Answer:
        """Store an answer and return it."""
        self._found[key] = answer
        self._num_new += 1
        if self._num_new >= WRITE_EVERY:
            self.write()
        return answer

    def write(self) -> None:
        """Add the new answers to the file; a folder that cannot be written is passed over."""
        if not self._num_new:
            return
        self._num_new = 0
        merged = self._read() | self._found
        kept = dict(list(merged.items())[-MOST_ANSWERS:])
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, json.dumps(kept))

    def _read(self) -> dict[str, Answer]:
        try:
            read = json.loads(self.path.read_text(encoding="utf-8"))
            return {str(key): tuple(map(int, answer)) for key, answer in read.items()}
        except (OSError, ValueError, AttributeError, TypeError):
            return {}
