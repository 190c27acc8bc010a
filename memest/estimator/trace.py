"""Recording: every storage that the traced code makes, as events in the order of birth and death."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from memest.errors import TraceError
from memest.estimator.attention_kernels import ATTENTION_EVENTS, Events
from memest.estimator.cublas import CublasWorkspaces
from memest.estimator.gpus import Gpu
from memest.estimator.kernels import OUTPUT_BYTES, SCRATCH, has_no_scratch
from memest.estimator.scratch import Scratch
from memest.estimator.shadow import (
    READS_VALUE,
    ShadowValues,
    ValueUnknown,
    known_without_values,
    materialise,
)


class MemKind(StrEnum):
    """What a byte is held for."""

    PARAMS = "params"
    BUFFERS = "buffers"
    GRADS = "grads"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    BATCH = "batch"
    WORKSPACE = "workspace"


@dataclass(frozen=True, slots=True)
class Site:
    """Where a storage was born."""

    op: str
    module: str
    phase: str


@dataclass(slots=True)
class StorageTable:
    """All storages of a trace; an id is an index into the three lists."""

    num_bytes: list[int] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)
    kinds: list[MemKind] = field(default_factory=list)

    def add(self, num_bytes: int, site: Site, kind: MemKind) -> int:
        """A new storage; returns its id."""
        self.num_bytes.append(num_bytes)
        self.sites.append(site)
        self.kinds.append(kind)
        return len(self.num_bytes) - 1


@dataclass(slots=True)
class Coverage:
    """How much of what ran is modelled."""

    num_ops: int = 0
    unmodelled: Counter[str] = field(default_factory=Counter)


class ModuleTracker:
    """Which module runs: in the forward by hooks, in the backward by the sequence numbers of autograd's nodes."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(m): name for name, m in model.named_modules()}
        self._stack: list[str] = []
        self._starts: list[int] = []
        self._owners: list[str] = []
        self._parameters = {id(p): name.rpartition(".")[0] for name, p in model.named_parameters()}

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Follow every module's forward."""
        handles = [
            nn.modules.module.register_module_forward_pre_hook(self._enter),
            nn.modules.module.register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def owner_of(self, parameter: Tensor) -> str:
        """The path of the module that holds `parameter`."""
        return self._parameters.get(id(parameter), "")

    def current(self) -> str:
        """The path of the running module, or the one whose backward runs; "" outside of all."""
        node = torch._C._current_autograd_node()  # type: ignore[attr-defined]
        if node is None or self._stack:
            return self._stack[-1] if self._stack else ""
        variable = getattr(node, "variable", None)
        if variable is not None:
            return self._parameters.get(id(variable), "")
        index = bisect_right(self._starts, node._sequence_nr()) - 1
        return self._owners[index] if index >= 0 else ""

    def _note(self, owner: str) -> None:
        start = torch._C._autograd._get_sequence_nr()  # type: ignore[attr-defined]
        self._starts.append(start)
        self._owners.append(owner)

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._stack.append(self._names.get(id(module), self._stack[-1] if self._stack else ""))
        self._note(self._stack[-1])

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        if self._stack:
            self._stack.pop()
        self._note(self._stack[-1] if self._stack else "")


class Recorder(TorchDispatchMode):
    """Turns what runs under it into events: `id` is the birth of a storage, `~id` its death.

    Besides the storages of meta tensors it records what CUDA's kernels allocate on their own (the kernel tables), and
    counts the operators of which it does not know whether they do.
    """

    def __init__(self, gpu: Gpu, storages: StorageTable) -> None:
        super().__init__()
        self.gpu = gpu
        self.storages = storages
        self.events: list[int] = []
        self.coverage = Coverage()
        self.values = ShadowValues()
        self.phase = ""
        self.kind = MemKind.ACTIVATIONS
        self.tracker: ModuleTracker | None = None
        self._cublas = CublasWorkspaces(gpu.capability)
        self._live: dict[int, int] = {}
        self._references: dict[int, Any] = {}
        self._plans: dict[Any, Callable[..., Scratch] | None | bool] = {}

    def take_events(self) -> list[int]:
        """The events since the last call."""
        events, self.events = self.events, []
        return events

    def id_of(self, tensor: Tensor) -> int | None:
        """The id of a tensor's storage, or None if it is not recorded."""
        return self._live.get(tensor.untyped_storage()._cdata)

    def adopt(self, tensor: Tensor, kind: MemKind, op: str = "") -> None:
        """Record a storage that exists already; a second tensor of the same storage adds nothing."""
        self._born(tensor, None, Site(op, "", self.phase), kind)

    def label(self, tensor: Tensor, kind: MemKind, module: str = "") -> None:
        """Say what a recorded tensor is held for."""
        index = self.id_of(tensor)
        if index is not None:
            self.storages.kinds[index] = kind
            if module:
                site = self.storages.sites[index]
                self.storages.sites[index] = Site(site.op, module, site.phase)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in READS_VALUE:
            return self._read(func, args, kwargs)
        out = self._run(func, args, kwargs)
        self._record(func, args, kwargs, out)
        if not func.is_view:
            self.values.follow(func, args, kwargs, out)
            finite = known_without_values(func, args)
            if finite is not None and self.values.value_of(out) is None:
                self.values.adopt(out, finite(out))
        return out

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            try:
                return materialise(self.values.compute(func, args, kwargs))
            except ValueUnknown:
                raise self._failure(func, error) from error

    def _read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return self.values.compute(func, args, kwargs)
        except ValueUnknown as error:
            raise self._failure(func, error) from error

    def _failure(self, func: Any, error: Exception) -> TraceError:
        where = (self.tracker.current() if self.tracker else "") or "the model"
        name = str(func).removesuffix(".default")
        if func in READS_VALUE or isinstance(error, ValueUnknown):
            reason = "reads a value that is computed from weights or activations"
        else:
            reason = str(error).splitlines()[0]
        return TraceError(
            f"`{where}` cannot be traced without a GPU: `{name}` {reason}",
            hint="the shapes of its tensors depend on values; memest cannot predict this model yet",
        )

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        self.coverage.num_ops += 1
        fresh = [
            t
            for t in (out if isinstance(out, list | tuple) else (out,))
            if isinstance(t, Tensor)
            and t.device.type == "meta"
            and t.untyped_storage()._cdata not in self._live
        ]
        if (attention := ATTENTION_EVENTS.get(func)) is not None:
            self._record_events(attention(args, kwargs, out, self.gpu), fresh, out, self._site(func))
            return
        scratch = self._scratch(func, args, kwargs, out)
        persistent, passing = self._cublas_workspaces(func, args, kwargs)
        if not fresh and scratch is None and not persistent and not passing:
            return
        site = self._site(func)
        scratch = scratch or Scratch()
        temporary = [self._workspace(n, site) for n in scratch.before]
        self._record_outputs(func, args, kwargs, out, fresh, site)
        temporary += [self._workspace(n, site) for n in (*passing, *scratch.after)]
        for num_bytes in persistent:
            self._workspace(num_bytes, site)
        self.events.extend(~index for index in temporary)

    def _record_outputs(
        self, func: Any, args: Any, kwargs: Any, out: Any, fresh: list[Tensor], site: Site
    ) -> None:
        rule = OUTPUT_BYTES.get(func)
        sizes = rule(args, kwargs, out, self.gpu) if rule is not None else None
        if sizes is None:
            for tensor in fresh:
                self._born(tensor, None, site, self.kind)
            return
        for tensor, size in zip(_tensors(out), sizes, strict=True):
            self._born(tensor, size, site, self.kind)

    def _record_events(self, events: Events, fresh: list[Tensor], out: Any, site: Site) -> None:
        results = out if isinstance(out, list | tuple) else (out,)
        temporary: dict[int, list[int]] = {}
        for event in events:
            if event.output is not None:
                self._born(results[event.output], event.num_bytes, site, self.kind)
            elif event.num_bytes > 0:
                index = self._workspace(event.num_bytes, site)
                temporary.setdefault(event.num_bytes, []).append(index)
            else:
                self.events.append(~temporary[-event.num_bytes].pop())
        for tensor in fresh:  # what meta makes and CUDA does not
            self._born(tensor, 0, site, self.kind)

    def _scratch(self, func: Any, args: Any, kwargs: Any, out: Any) -> Scratch | None:
        rule = SCRATCH.get(func)
        if rule is not None:
            return rule(args, kwargs, out, self.gpu)
        if not has_no_scratch(func):
            self.coverage.unmodelled[str(func).removesuffix(".default")] += 1
        return None

    def _cublas_workspaces(
        self, func: Any, args: Any, kwargs: Any
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        in_backward = torch._C._current_autograd_node() is not None  # type: ignore[attr-defined]
        return self._cublas.bytes_for(func, args, kwargs, "backward" if in_backward else "main")

    def _site(self, func: Any) -> Site:
        module = self.tracker.current() if self.tracker is not None else ""
        return Site(str(func).removesuffix(".default"), module, self.phase)

    def _workspace(self, num_bytes: int, site: Site) -> int:
        index = self.storages.add(num_bytes, site, MemKind.WORKSPACE)
        self.events.append(index)
        return index

    def _born(self, tensor: Tensor, num_bytes: int | None, site: Site, kind: MemKind) -> None:
        """A storage that is new to the recorder; with `num_bytes` 0 CUDA does not allocate it."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        size = storage.nbytes() if num_bytes is None else num_bytes
        index = self.storages.add(size, site, kind)
        self._live[key] = index
        self._references[index] = weakref.ref(storage, partial(self._died, index, key))
        self.events.append(index)

    def _died(self, index: int, key: int, reference: Any) -> None:
        self.events.append(~index)
        self._references.pop(index, None)
        if self._live.get(key) == index:
            del self._live[key]
            self.values.drop(key)


def _tensors(out: Any) -> list[Tensor]:
    return [t for t in (out if isinstance(out, list | tuple) else (out,)) if isinstance(t, Tensor)]
