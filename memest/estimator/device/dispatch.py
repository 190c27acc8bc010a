"""Recording: every storage that the traced code makes, as births and deaths in order."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from memest.errors import TraceError
from memest.estimator.device import fused, recurrent, synchronised
from memest.estimator.device.in_place import as_without_a_mode, owners_of_a_sole_gradient
from memest.estimator.device.indices import as_taken
from memest.estimator.device.recurrent import packing_events
from memest.estimator.device.storages import Coverage, MemKind, Site, StorageTable, death_of
from memest.estimator.device.tensors import storage_key
from memest.estimator.device.traits import DEPENDS_ON_VALUES, traits_of
from memest.estimator.device.values import (
    ShadowValues,
    ValueUnknown,
    known_without_values,
    materialise,
)
from memest.estimator.hardware.gpus import Gpu
from memest.estimator.kernels.attention.events import ATTENTION_EVENTS, NOT_MODELLED
from memest.estimator.kernels.attention.flash2 import FLASH_ATTENTION_2_EVENTS
from memest.estimator.kernels.cublas import LT_WORKSPACE_BYTES, MATMULS, CublasWorkspaces
from memest.estimator.kernels.grouped_mm import grouped_mm_output
from memest.estimator.kernels.linalg import LINALG_MADE
from memest.estimator.kernels.output_layouts import CONVOLUTIONS, as_on_cuda
from memest.estimator.kernels.recurrent import RECURRENT_EVENTS
from memest.estimator.kernels.scratch import OLDEST, TRIED, Events, Scratch
from memest.estimator.kernels.staged import (
    SORTED_WRITES,
    STAGED_EVENTS,
    index_put_is_sorted,
    masked_scatter_backward_events,
)
from memest.estimator.kernels.tables import (
    OUTPUT_BYTES,
    SCRATCH,
    has_no_scratch,
    is_partly_modelled,
)

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a call with the same shapes does again: its outputs and its requests of memory."""

    specs: tuple[tuple[torch.Size, tuple[int, ...], torch.dtype] | None, ...]
    """Of each output; None is a gradient that nobody asked for."""

    is_tuple: bool
    events: tuple[tuple[int | None, int | None], ...]
    """(bytes, position of the output, None for a temporary, or `TRIED`); bytes None is the output's
    own size, below 0 a free.
    """

    is_partial: bool
    """Something about the kernel is not modelled."""

    has_empty: bool
    """An output takes nothing: it has no elements, or meta makes it and CUDA does not."""

    def make_outputs(self) -> Any:
        """Fresh meta tensors as the call returns them."""
        made = [
            spec and torch.empty_strided(spec[0], spec[1], dtype=spec[2], device="meta")
            for spec in self.specs
        ]
        return tuple(made) if self.is_tuple else made[0]


class _Reference(weakref.ref[torch.UntypedStorage]):
    """To a storage, with its id and its key: one object a storage, since what lives long here moves
    the moments at which Python collects the garbage of the script.
    """

    __slots__ = ("index", "key")

    index: int
    key: int


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Turns what runs under it into events: an id is the birth of a storage; `death_of`.

    Besides the storages of meta tensors it records what CUDA's kernels allocate on their own (the
    kernel tables), and counts the operators of which it does not know whether they do.
    """

    def __init__(self, gpu: Gpu, storages: StorageTable) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.gpu = gpu
        self.storages = storages
        self.events: list[int] = []
        self.coverage = Coverage()
        self.values = ShadowValues()
        self.phase = ""
        self.stream = 0  # the default one
        self.kind = MemKind.ACTIVATIONS
        owners_of_a_sole_gradient()  # looked at once, before anything is recorded
        self._cublas = CublasWorkspaces(gpu.capability)
        self._workspaces: list[int] = []
        self._live: dict[int, int] = {}
        self._references: dict[int, _Reference] = {}
        self._on_death = self._storage_died
        self._recipes: dict[Any, Recipe] = {}
        self.last_recipe: Recipe | None = None
        """Of the last call, where calls like it have the same one."""

        self._repeatable: set[int] = set()
        self._searched: set[Recipe] = set()
        self._sites: dict[Any, Site] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; torch would otherwise wrap each call, import its compiler."""
        return False

    def take_events(self) -> list[int]:
        """The events since the last call."""
        events, self.events = self.events, []
        return events

    def clear_workspaces(self) -> None:
        """cuBLAS gives its workspaces back, as Lightning asks of it before a fit.

        Those of cuBLASLt come last (`clearCublasWorkspaces`, CublasHandlePool.cpp of torch 2.11).
        Each handle takes another one at its next product.
        """
        sizes = self.storages.num_bytes
        for index in sorted(self._workspaces, key=lambda i: sizes[i] == LT_WORKSPACE_BYTES):
            self._ends(index)
        self._workspaces = []
        self._cublas = CublasWorkspaces(self.gpu.capability)

    def _begins(self, index: int) -> None:
        """Storage `index` is born: the one place at which a birth becomes an event."""
        self.events.append(index)

    def _ends(self, index: int) -> None:
        """Storage `index` dies: the one place at which a death becomes an event."""
        self.events.append(death_of(index))

    def id_of(self, tensor: Tensor) -> int | None:
        """The id of a tensor's storage, or None if it is not recorded."""
        return self._live.get(storage_key(tensor))

    def adopt(self, tensor: Tensor, kind: MemKind, op: str = "") -> None:
        """Record a storage that exists already; a second tensor of it adds nothing."""
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
        self.last_recipe = None
        self.coverage.num_ops += 1
        traits = traits_of(func)
        if traits.may_be_in_place:
            func, args = self._as_without_a_mode(func, args, kwargs)
            traits = traits_of(func)
        if traits.takes_indices:
            func, args = as_taken(self, func, types, args)
        if traits.is_view:
            return self._run(func, args, kwargs)
        if traits.reads_value:
            return self._read(func, args, kwargs)
        recipe = key = None
        if id(func) in self._repeatable:
            key = _key(func, args, kwargs)
            recipe = self._recipes.get(key)
        if recipe is None:
            out = self._run(func, args, kwargs)
            recipe = self._new_recipe(func, args, kwargs, out, key)
        else:
            out = recipe.make_outputs()
        self._record(func, args, kwargs, out, recipe)
        self._follow_values(func, args, kwargs, out)
        if key is not None:
            self.last_recipe = recipe
        return out

    def repeat(self, func: Any, types: Any, *args: Any, **kwargs: Any) -> Any:
        """Run and record what a kernel calls by itself."""
        return Recorder.__torch_dispatch__(self, func, types, args, kwargs)

    def _new_recipe(self, func: Any, args: Any, kwargs: Any, out: Any, key: Any) -> Recipe:
        """The recipe of a call, which is kept where it holds for others."""
        recipe = self._recipe(func, args, kwargs, out)
        if self._can_repeat(func, args, out):
            self._recipes[key or _key(func, args, kwargs)] = recipe
        return recipe

    def _as_without_a_mode(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """What the GPU runs in place of `func`; see `in_place`."""
        return as_without_a_mode(func, args, kwargs)

    def nonzero_on_host(self, mask: Tensor) -> Tensor:
        """The positions of the true entries of a mask on the host."""
        return mask.nonzero()

    def _follow_values(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        self.values.follow(func, args, kwargs, out)
        finite = known_without_values(func, args)
        if finite is not None and self.values.value_of(out) is None:
            self.values.adopt(out, finite(out))

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_foreach_in_place(func) and all(tensor.is_meta for tensor in args[0]):
            return None  # where there are no values, none change
        make = _MADE_HERE.get(func)
        if make is not None:
            return make(args, kwargs)
        try:
            return as_on_cuda(func, args, func(*args, **kwargs))
        except (NotImplementedError, RuntimeError) as error:
            if func is aten._grouped_mm.default:
                return grouped_mm_output(args, kwargs)
            try:
                values = self.values.compute(func, args, kwargs)
            except ValueUnknown:
                raise self._failure(func, error) from error
            goes_to_host = torch.device(kwargs.get("device") or "meta").type == "cpu"
            return values if goes_to_host else materialise(values)

    def _read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return self.values.compute(func, args, kwargs)
        except ValueUnknown as error:
            raise self._failure(func, error) from error

    def _failure(self, func: Any, error: Exception) -> TraceError:
        name = str(func).removesuffix(".default")
        if traits_of(func).reads_value or isinstance(error, ValueUnknown):
            reason = "reads a value that is computed from weights or activations"
        elif "Cannot copy out of meta tensor" in str(error):
            reason = "copies values to the host that are computed from weights or activations"
        elif func in DEPENDS_ON_VALUES:
            reason = "gives a result whose shape depends on weights or activations"
        else:
            reason = str(error).splitlines()[0]
        return TraceError(
            f"the model cannot be traced without a GPU: `{name}` {reason}",
            hint="the shapes of its tensors depend on values; memest cannot predict this model yet",
        )

    def _can_repeat(self, func: Any, args: Any, out: Any) -> bool:
        """Whether a call with the same shapes makes the same outputs, each in a storage of its own.

        `_unsafe_view` is a view that its schema does not admit to.
        """
        if func._schema.is_mutable or any(r.alias_info is not None for r in func._schema.returns):
            return False
        given = out if isinstance(out, list | tuple) else (out,)
        results = [result for result in given if result is not None]
        if not results or not all(map(_is_on_gpu, results)):
            return False
        storages = {t.untyped_storage()._cdata for t in results}
        if any(isinstance(a, Tensor) and a.untyped_storage()._cdata in storages for a in args):
            return False
        is_own = all(
            t.storage_offset() == 0 and t.untyped_storage().nbytes() == _dense_bytes(t)
            for t in results
        )
        if len(storages) == len(results) and is_own and func not in DEPENDS_ON_VALUES:
            self._repeatable.add(id(func))
            return True
        return False

    def _recipe(self, func: Any, args: Any, kwargs: Any, out: Any) -> Recipe:
        """What one call of `func` asks of the allocator, and what it returns."""
        is_tuple = isinstance(out, list | tuple)
        results = _results(out)
        specs = tuple(
            [
                None if t is None else (t.size(), t.stride(), t.dtype)
                for t in results
                if t is None or _is_on_gpu(t)
            ]
        )
        ordered = self._ordered_events(func, args, kwargs, out)
        events: list[tuple[int | None, int | None]]
        if ordered is not None:
            note = NOT_MODELLED[func](self.gpu) if func in NOT_MODELLED else ""
            is_partial = bool(note) or is_partly_modelled(func, args, kwargs, self.gpu)
            events = [(e.num_bytes, e.output) for e in ordered]
            return _recipe_of(specs, is_tuple, events, is_partial, results)
        scratch, is_partial = self._scratch(func, args, kwargs, out)
        rule = OUTPUT_BYTES.get(func)
        known = None if rule is None else rule(args, kwargs, out, self.gpu)
        sizes: list[int | None] = [None] * len(results) if known is None else [*known]
        events = [(n, None) for n in scratch.before]
        events += [(sizes[i], i) for i, t in enumerate(results) if _is_on_gpu(t)]
        events += [(n, None) for n in scratch.after]
        return _recipe_of(specs, is_tuple, events, is_partial, results)

    def _ordered_events(self, func: Any, args: Any, kwargs: Any, out: Any) -> Events | None:
        """The requests of a kernel of which the order is known, outputs among them."""
        if func is aten.masked_scatter_backward.default:
            mask = self.values.value_of(args[1])
            num_selected = None
            if mask is not None:
                num_selected = int(mask.expand(args[0].shape).sum())
            return masked_scatter_backward_events(args, kwargs, out, self.gpu, num_selected)
        if func in SORTED_WRITES and not index_put_is_sorted(args, kwargs):
            return None
        rule = _EVENTS.get(func)
        return None if rule is None else rule(args, kwargs, out, self.gpu)

    def _record(self, func: Any, args: Any, kwargs: Any, out: Any, recipe: Recipe) -> None:
        if recipe.is_partial:
            self.coverage.unmodelled[str(func).removesuffix(".default")] += 1
        temporary: list[int] = []
        try:
            self._record_births(func, args, kwargs, out, recipe, temporary)
        finally:  # also where no memory was left for one of them
            for index in reversed(temporary):
                self._ends(index)
        if recipe.has_empty:
            for t in filter(_is_on_gpu, _results(out)):
                if t.untyped_storage()._cdata not in self._live:
                    self._born(t, 0, self._site(func), self.kind)

    def _record_births(
        self, func: Any, args: Any, kwargs: Any, out: Any, recipe: Recipe, temporary: list[int]
    ) -> None:
        """The requests of one call in order; `temporary` takes what is freed at its end."""
        results = _results(out)
        site: Site | None = None
        events = self._with_search(recipe) if func in CONVOLUTIONS else recipe.events
        for num_bytes, position in events:
            if position is None or position == OLDEST:
                assert num_bytes is not None
                site = site or self._site(func)
                if num_bytes < 0:
                    sizes = self.storages.num_bytes
                    among = temporary if position == OLDEST else reversed(temporary)
                    freed = next(i for i in among if sizes[i] == -num_bytes)
                    temporary.remove(freed)
                    self._ends(freed)
                else:
                    temporary.append(self._workspace(num_bytes, site))
            elif (t := results[position]).untyped_storage()._cdata not in self._live:
                site = site or self._site(func)
                self._born(t, num_bytes, site, self.kind)
        if traits_of(func).is_matmul:
            persistent, passing = self._cublas_workspaces(func, args, kwargs)
            for num_bytes in passing:
                temporary.append(self._workspace(num_bytes, self._site(func)))
            for num_bytes in persistent:
                self._workspaces.append(self._workspace(num_bytes, self._site(func)))

    def _with_search(self, recipe: Recipe) -> Iterator[tuple[int | None, int | None]]:
        """The events of a convolution; what is `TRIED` passes as it comes, the first time."""
        is_new = recipe not in self._searched
        self._searched.add(recipe)
        is_over = False
        for num_bytes, position in recipe.events:
            if position != TRIED:
                is_over = False
                yield num_bytes, position
            elif is_new and not is_over:
                assert num_bytes is not None
                is_over = self._tries(num_bytes)

    def _tries(self, num_bytes: int) -> bool:
        """A library tries for a workspace; returns whether the card could have it."""
        index = self._workspace(num_bytes, self._site("cudnn.benchmark"))
        self.storages.tried.add(index)
        self._ends(index)
        return True

    def _scratch(self, func: Any, args: Any, kwargs: Any, out: Any) -> tuple[Scratch, bool]:
        """The kernel's temporaries, and whether something about it is not modelled."""
        if func in MATMULS:
            return Scratch(), False
        rule = SCRATCH.get(func)
        if rule is not None:
            return rule(args, kwargs, out, self.gpu), is_partly_modelled(
                func, args, kwargs, self.gpu
            )
        return Scratch(), not has_no_scratch(func)

    def _cublas_workspaces(
        self, func: Any, args: Any, kwargs: Any
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        in_backward = torch._C._current_autograd_node() is not None
        thread = "backward" if in_backward else "main"
        return self._cublas.bytes_for(func, args, kwargs, (thread, self.stream))

    def _site(self, func: Any) -> Site:
        key = (func, self.phase)
        site = self._sites.get(key)
        if site is None:
            site = self._sites[key] = Site(str(func).removesuffix(".default"), "", self.phase)
        return site

    def _workspace(self, num_bytes: int, site: Site) -> int:
        index = self.storages.add(num_bytes, site, MemKind.WORKSPACE)
        self._begins(index)
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
        reference = self._references[index] = _Reference(storage, self._on_death)
        reference.index, reference.key = index, key
        self._begins(index)

    def _storage_died(self, reference: _Reference) -> None:
        self._died(reference.index, reference.key)

    def _died(self, index: int, key: int) -> None:
        self._ends(index)
        self._references.pop(index, None)
        if self._live.get(key) == index:
            del self._live[key]
            self.values.forget(key)


_MADE_HERE = recurrent.MADE_HERE | fused.MADE_HERE | synchronised.MADE_HERE | LINALG_MADE
_ATTENTION_EVENTS = {**ATTENTION_EVENTS, **FLASH_ATTENTION_2_EVENTS}
_EVENTS = {
    **STAGED_EVENTS,
    **RECURRENT_EVENTS,
    aten._pack_padded_sequence.default: packing_events,
    **_ATTENTION_EVENTS,
}


@cache
def is_foreach_in_place(func: Any) -> bool:
    """Whether `func` changes the values of a list of tensors and does nothing else."""
    name = func._schema.name.removeprefix("aten::")
    return name.startswith("_foreach_") and name.endswith("_") and not func._schema.returns


def _results(out: Any) -> tuple[Any, ...]:
    """What an operator returns, the items of a list among its results each as one of its own."""
    if not isinstance(out, list | tuple):
        return (out,)
    flat: list[Any] = []
    for item in out:
        flat += item if isinstance(item, list | tuple) else (item,)
    return tuple(flat)


def _recipe_of(
    specs: Any,
    is_tuple: bool,
    events: Sequence[tuple[int | None, int | None]],
    is_partial: bool,
    results: Sequence[Any],
) -> Recipe:
    made = {position for _, position in events}
    has_empty = any(i not in made for i, t in enumerate(results) if _is_on_gpu(t))
    return Recipe(specs, is_tuple, tuple(events), is_partial, has_empty)


def _is_on_gpu(value: Any) -> bool:
    """Whether `value` would be a CUDA tensor; what stays on the CPU takes no GPU memory."""
    return isinstance(value, Tensor) and value.device.type == "meta"


def _key(func: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Calls that are alike have one; a call without a dtype makes what the default is then."""
    default = torch.get_default_dtype()
    return (id(func), default, *map(_signature, args), *map(_signature, kwargs.items()))


_SEQUENCES = (list, tuple)


def _signature(value: Any) -> Any:
    """What of an argument decides the shapes of outputs; 1, 1.0 and True differ."""
    if isinstance(value, Tensor):
        return (
            value.size(),
            value.stride(),
            value.dtype,
            value.device.type,
            value.storage_offset() % 16,
        )
    if isinstance(value, _SEQUENCES):
        return tuple([_signature(item) for item in value])
    return type(value), value


def _dense_bytes(tensor: Tensor) -> int:
    """Bytes of the smallest storage that holds `tensor` from offset 0."""
    if tensor.numel() == 0:
        return 0
    last = sum((n - 1) * stride for n, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
