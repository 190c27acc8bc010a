"""Dispatch mode of the simulated GPU: where an operator runs, and what follows from it.

`__torch_dispatch__` receives every operator. `_dispatch` decides by the places of its tensors
whether it runs on the GPU, on the host, or copies between the two. `run_on_gpu` runs the operator
on the meta device and sends what CUDA would request to memory. It owns the state:
`Memory`, `Timeline`, `KnownValues`, `AssumedValues`, `Attribution`, `HostTensors`, `KernelCalls`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from memest.estimator.allocator.caching import CachingAllocator
from memest.estimator.device import collectives, fused, recurrent, synchronised
from memest.estimator.device.assumed import AssumedValues
from memest.estimator.device.attribution import Attribution
from memest.estimator.device.card_draws import CardDraws
from memest.estimator.device.copies import as_dtype_layout, copied, with_number
from memest.estimator.device.custom_operators import key_of_other_operators, run_by_others
from memest.estimator.device.guesses import ASSUMED, Guesses, bincount, guess_booleans
from memest.estimator.device.host import HostTensors, without_tensors
from memest.estimator.device.in_place import as_without_a_mode, owners_of_a_sole_gradient
from memest.estimator.device.indices import as_taken
from memest.estimator.device.kernel_calls import KernelCalls, Recipe
from memest.estimator.device.layouts import dense
from memest.estimator.device.lines import ScriptLines
from memest.estimator.device.memory import Memory
from memest.estimator.device.messages import two_devices
from memest.estimator.device.processes import refuse_in_child
from memest.estimator.device.ranks import ALONE
from memest.estimator.device.refusals import refuse
from memest.estimator.device.shards import local_foreach
from memest.estimator.device.sparse import SparseTensors
from memest.estimator.device.storages import MemKind, Site
from memest.estimator.device.tensors import (
    CPU,
    INSIDE,
    META,
    Place,
    few_tensors,
    host_storages,
    is_meta,
    storage_key,
    tensors_in,
)
from memest.estimator.device.timeline import Timeline
from memest.estimator.device.traits import DEPENDS_ON_VALUES, MAY_MIX_DEVICES, traits_of
from memest.estimator.device.values import (
    KnownValues,
    ValueUnknown,
    known_without_values,
    materialise,
)
from memest.estimator.device.works import Works
from memest.estimator.hardware.gpus import Gpu
from memest.estimator.kernels.grouped_mm import grouped_mm_output
from memest.estimator.kernels.linalg import LINALG_MADE
from memest.estimator.kernels.output_layouts import as_on_cuda
from memest.estimator.kernels.transfers import to_card_bytes, to_host_scratch

aten = torch.ops.aten

MAX_STATE_NUMEL = 1 << 12
"""Most elements of a result of an optimizer step whose values are followed: the states of an 8-bit
optimizer are integers, and no script reads one.
"""

_MADE_HERE = recurrent.MADE_HERE | fused.MADE_HERE | synchronised.MADE_HERE | LINALG_MADE
_SUMS = (aten.add.Tensor, aten.add_.Tensor)
"""Operators by which the autograd engine sums gradients."""


class CudaSimMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operators as on a CUDA GPU, on tensors without data.

    Args:
        gpu: the simulated GPU.
        allocator: its caching allocator.
        guesses: what a script reads where a value is not known.
        lines: finds the line of the script.
    """

    def __init__(
        self, gpu: Gpu, allocator: CachingAllocator, guesses: Guesses, lines: ScriptLines
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        owners_of_a_sole_gradient()  # measured before anything is recorded
        self.gpu = gpu
        self.guesses = guesses
        self.notes = guesses.notes
        self.timeline = Timeline(gpu)
        self.memory = Memory(gpu, allocator, self.timeline)
        self.attribution = Attribution(self.memory, lines)
        self.values = KnownValues()
        self.assumed = AssumedValues(self.values, guesses)
        self.host = HostTensors(self.memory.live, self.values, self.assumed, self.attribution)
        self.kernels = KernelCalls(
            gpu, self.memory, self.timeline, self.attribution.site, self._num_selected, self.notes
        )
        self.request: Callable[..., None] = self.kernels.request
        """Serves the requests of one call; an observer may wrap it."""

        self.sparse = SparseTensors(self)
        self.rng = CardDraws(gpu)
        self.works = Works(self.timeline, self.memory)
        self.ranks = ALONE
        self.is_off = False
        """Whether operators run as if there was no simulated GPU."""

        self.memory.on_death = self.values.forget
        self.memory.on_fold = self._before_fold
        self._has_own_dispatch: dict[type, bool] = {}
        self._decomposes_under = cache(key_of_other_operators)
        self._last_recipe: Recipe | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled here, and torch would import its compiler."""
        return False

    # --- where an operator runs

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_off:
            refuse_in_child(kwargs)
            return func(*args, **kwargs)
        for kind in types:
            if self._is_subclass(kind):
                return local_foreach(self, func, args, kwargs)
        if func is aten.to.device:  # inference mode passes composite operators on
            func, args, kwargs = as_dtype_layout(args, kwargs)
        INSIDE.depth += 1
        try:
            if self.sparse.concerns(func, args, kwargs):
                return self.sparse.run(func, args, kwargs)
            return self._dispatch(func, types, args, kwargs)
        finally:
            INSIDE.depth -= 1

    def _is_subclass(self, kind: type) -> bool:
        """Whether `kind` is a class of tensors with a `__torch_dispatch__` of its own."""
        known = self._has_own_dispatch.get(kind)
        if known is None:
            disabled = torch._C._disabled_torch_dispatch_impl
            own = getattr(kind, "__torch_dispatch__", disabled)
            known = own is not disabled and kind is not Tensor
            self._has_own_dispatch[kind] = known
        return known

    def _dispatch(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        traits = traits_of(func)
        if traits.is_collective:
            return collectives.run(self, func, args, kwargs)
        if traits.is_view and not self._decomposes_under(func):
            return self._view(func, args, kwargs)
        on_gpu, on_host, is_real, no_place = self._places(args, kwargs)
        target: str = getattr(kwargs.get("device"), "type", "")
        if (on_gpu or on_host or target == "cuda") and self._decomposes_under(func):
            return run_by_others(self, self._decomposes_under(func), func, args, kwargs)
        if target == "cuda":
            if not on_gpu and func is aten._to_copy.default:
                return self._copy_to_gpu(func, types, args, {**kwargs, "device": META}, no_place)
            adopts = no_place and not traits.makes_alike
            return self.run_on_gpu(func, types, args, {**kwargs, "device": META}, adopts)
        if on_gpu:
            is_to_host = func is aten.copy_.default and self.host.place(args[0]) is not Place.CARD
            if target == "cpu" or is_to_host:
                return self._copy_to_host(func, args, kwargs)
            if is_real or on_host:
                if func is aten.copy_.default:
                    return self._copy_to_gpu(func, types, args, kwargs, no_place)
                self._check_devices(func, args, kwargs)
                func, args = with_number(func, args)
            return self.run_on_gpu(func, types, args, kwargs, no_place)
        if target == "meta":
            # C++ passes the device that a GPU tensor reports: a formula of autograd, a composite
            if INSIDE.composite or torch._C._current_graph_task_id() != -1:
                return self.run_on_gpu(func, types, args, kwargs, False)
            return func(*args, **kwargs)
        if on_host:
            if traits.reads_value:
                return self._read(func, args, kwargs)
            return self.host.run_without_data(func, args, kwargs)
        if no_place:
            if func is aten.equal.default:  # C++ checks whether a number that it made is true
                self.guesses.note("False from torch.equal")
                return False
            return func(*args, **kwargs)
        return self.host.run(func, args, kwargs)

    def _places(self, args: tuple[Any, ...], kwargs: Any) -> tuple[bool, bool, bool, bool]:
        """Whether a tensor is on the GPU, on the host without data, real, or has no place."""
        on_gpu = on_host = is_real = no_place = False
        live = self.memory.live
        for tensor in few_tensors(args, kwargs):
            if not is_meta(tensor):
                is_real = True
                continue
            key = storage_key(tensor)
            if key in live:
                on_gpu = True
            elif key in host_storages:
                on_host = True
            else:
                no_place = True
        return on_gpu, on_host, is_real, no_place

    def _view(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run a view, which is where its base is and requests nothing."""
        if isinstance(args[0], Tensor) and is_meta(args[0]):  # C++ passes numbers as numbers
            self.kernels.coverage.num_ops += 1
        return func(*args, **kwargs)

    def _check_devices(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> None:
        """Refuse tensors of the host and of the GPU in one kernel, as torch does."""
        if func in MAY_MIX_DEVICES:
            return
        for tensor in tensors_in((*args, *kwargs.values())):
            if tensor.dim() and self.host.place(tensor) in (Place.REAL, Place.HOST):
                if func._schema.name.startswith(("aten::_foreach", "aten::_fused")):
                    return
                raise RuntimeError(two_devices(func))

    # --- copies

    def _copy_to_gpu(
        self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any, adopts: bool
    ) -> Any:
        """Copy from the host: a parameter, or else a batch until a label says otherwise."""
        is_new = func is not aten.copy_.default
        source: Tensor = args[0] if is_new else args[1]
        non_blocking = kwargs.get("non_blocking") or (not is_new and len(args) > 2 and args[2])
        is_parameter = isinstance(source, torch.nn.Parameter)
        memory, timeline = self.memory, self.timeline
        with memory.lock:
            before, memory.kind = memory.kind, MemKind.PARAMS if is_parameter else MemKind.BATCH
            try:
                made = self.run_on_gpu(func, types, args, kwargs, adopts)
            finally:
                memory.kind = before
            num_bytes = to_card_bytes(made, source, is_waited_for=not non_blocking)
            if num_bytes:
                memory.free(memory.allocate_workspace(num_bytes, self.attribution.site(func)))
            if not (non_blocking and self.host.is_pinned(source)):
                timeline.host_waits(
                    timeline.event(timeline.stream)
                )  # pageable memory is waited for
            return made

    def _copy_to_host(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Copy a tensor of the GPU, whose values are rarely known."""
        source: Tensor = args[1] if func is aten.copy_.default else args[0]
        if not is_meta(source) or func not in (aten.copy_.default, aten._to_copy.default):
            return self.host.run(func, without_tensors(args), {**kwargs, "device": CPU})
        memory, timeline = self.memory, self.timeline
        with memory.lock:
            timeline.host_waits(timeline.event(timeline.stream))
            site, sizes = self.attribution.site(func), to_host_scratch(func, args, kwargs)
            for index in reversed([memory.allocate_workspace(n, site) for n in sizes]):
                memory.free(index)
        return copied(self, func, args, kwargs)

    # --- operators on the GPU

    def run_on_gpu(
        self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any, adopts: bool = False
    ) -> Any:
        """Run an operator on the GPU, on the stream and at the time at which CUDA would.

        Args:
            func: the operator.
            types: classes of its tensors.
            args: its arguments.
            kwargs: its keyword arguments.
            adopts: whether meta tensors without a place, made by C++ inside a composite operator,
                become tensors of the GPU.
        """
        if kwargs.get("pin_memory"):
            kwargs = {k: v for k, v in kwargs.items() if k != "pin_memory"}
        with self.memory.lock:
            if adopts:
                self._adopt(func, args, kwargs)
            if not self.timeline.matters:
                return self.call(func, types, args, kwargs)
            return self._call_on_stream(func, types, args, kwargs)

    def _adopt(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> None:
        is_copy = func is aten._to_copy.default
        for tensor in (args[0],) if is_copy else few_tensors(args, kwargs):
            if is_meta(tensor) and self.host.place(tensor) is Place.META:
                if is_copy:
                    raise NotImplementedError("Cannot copy out of meta tensor; no data!")
                self.memory.allocate(tensor, Site("", "", ""), self.memory.kind)

    def _call_on_stream(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        timeline = self.timeline
        before, stream = timeline.stream, timeline.stream_of_call(args, func in _SUMS)
        timeline.stream = stream
        if stream != before:
            for tensor in tensors_in(args):
                self.memory.record_stream(tensor, stream)
        try:
            out = self.call(func, types, args, kwargs)
            if not func.is_view:
                timeline.launch(func, args, kwargs, out, self._last_recipe)
        finally:
            timeline.stream = before
        return out

    def call(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run an operator on meta, request what its CUDA kernels allocate, and follow values."""
        self._last_recipe = None
        self.kernels.coverage.num_ops += 1
        traits = traits_of(func)
        if traits.may_be_in_place:
            func, args = as_without_a_mode(func, args, kwargs)
            traits = traits_of(func)
        if traits.takes_indices:
            func, args = as_taken(self, func, types, args)
        if traits.is_view:
            return self._result(func, args, kwargs)
        if traits.reads_value:
            return self._read(func, args, kwargs)
        key = self.kernels.key_of(func, args, kwargs)
        recipe = self.kernels.known(key)
        if recipe is None:
            out = self._result(func, args, kwargs)
            recipe = self.kernels.new_recipe(func, args, kwargs, out, key)
        else:
            out = recipe.make_outputs()
        self.request(func, args, kwargs, out, recipe)
        self._follow_values(func, args, kwargs, out)
        self._last_recipe = None if key is None else recipe
        return out

    def _result(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Result of an operator as CUDA returns it, on meta."""
        refuse(func, args, kwargs)
        schema = func._schema
        if schema.is_mutable and not schema.returns:
            return None  # without values nothing changes
        if func in DEPENDS_ON_VALUES:
            made = self.assumed.result(func, args, kwargs)
            if made is not None:
                return made
        if func is aten.bincount.default and self.values.value_of(args[0]) is None:
            bins = bincount(self.guesses, *args, **kwargs)
            if bins is not None:
                return bins
        make = _MADE_HERE.get(func)
        out = self._on_meta(func, args, kwargs) if make is None else make(args, kwargs)
        return dense(out, func, self.attribution.lines.current)

    def _on_meta(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return as_on_cuda(func, args, func(*args, **kwargs))
        except (NotImplementedError, RuntimeError) as error:
            if func is aten._grouped_mm.default:
                return grouped_mm_output(args, kwargs)
            try:
                values = self.values.compute(func, args, kwargs)
            except ValueUnknown:
                raise self.attribution.failure(func, error) from error
            goes_to_host = torch.device(kwargs.get("device") or "meta").type == "cpu"
            return values if goes_to_host else materialise(values)

    # --- values

    def _read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Value that the script reads, known, assumed or guessed; the host waits for it."""
        self.timeline.host_waits(self.timeline.event(self.timeline.stream))
        assumed = self.assumed.read(func, args[0])
        if assumed is not None:
            return assumed
        try:
            value = self.values.compute(func, args, kwargs)
        except ValueUnknown:
            if func is aten.equal.default:  # of tensors that should be equal, such as tied weights
                is_alike: bool = args[0].shape == args[1].shape
                self.guesses.note(f"{is_alike} from torch.equal")
                return is_alike
            name = func._schema.name.removeprefix("aten::").removeprefix("_local_")
            if func in ASSUMED:
                self.guesses.note(name)
                return True
            dtype = torch.bool if func is not aten._local_scalar_dense.default else args[0].dtype
            return self.guesses.scalar(dtype, name)
        if self.values.guessed and self.values.is_guessed(args):
            self.guesses.note(f"{value!r} from a comparison")
        return value

    def _follow_values(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Compute the values of `out`, as far as they are known, assumed or guessed."""
        values = self.values
        if traits_of(func).is_random and self._draw(func, args, kwargs, out):
            return
        in_step = self.attribution.phase_given == "optimizer" and not torch.is_grad_enabled()
        if (
            in_step  # and no closure runs
            and isinstance(out, Tensor)
            and out.numel() > MAX_STATE_NUMEL
            and not values.is_known(out)
        ):
            return
        self.assumed.follow(func, args, kwargs, out)
        values.follow(func, args, kwargs, out)
        finite = known_without_values(func, args)
        if finite is not None and values.value_of(out) is None:
            values.adopt(out, finite(out))
        if isinstance(out, Tensor) and out.dtype is torch.bool:
            guess_booleans(values, func, args, out)

    def _draw(self, func: Any, args: Any, kwargs: Any, out: Any) -> bool:
        """Advance the GPU's generator; returns whether `out` has the numbers that it draws."""
        given = self.values.value_of(args[0]) if func is aten.multinomial.default else None
        numbers = self.rng.draw(func, args, kwargs, out, given)
        return numbers is not None and self.values.overwrite(out, numbers)

    def _num_selected(self, func: Any, args: tuple[Any, ...]) -> int | None:
        """Elements that the mask of `masked_scatter_backward` selects, where it is known."""
        mask = self.values.value_of(args[1])
        return None if mask is None else int(mask.expand(args[0].shape).sum())

    def _before_fold(self) -> None:
        self.attribution.labels.of_models()
        self.timeline.forget_switches()
