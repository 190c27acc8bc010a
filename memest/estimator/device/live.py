"""The recorder of the virtual GPU: every event goes to the allocator at once.

Where `Recorder` keeps events for a replay, `LiveRecorder` asks its allocator as the operator runs,
so that a script can be told what is allocated, and is out of memory where the card would be.

It also decides where the result of an operator lies (`Place`). Tensors of the host that are large
and hold floating-point numbers have no data here: what a script builds or loads on the host before
it moves it to the GPU costs nothing, whatever its size.
"""

from __future__ import annotations

import gc
import threading
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from memest.errors import UnsupportedError
from memest.estimator.allocator.blocks import Block
from memest.estimator.allocator.caching import CachingAllocator, OutOfMemory
from memest.estimator.device import collectives
from memest.estimator.device.card_draws import CardDraws
from memest.estimator.device.copies import MAX_SHOWN_NUMEL, as_dtype_layout, copied, with_number
from memest.estimator.device.custom_operators import key_of_other_operators, run_by_others
from memest.estimator.device.dispatch import Recipe, Recorder
from memest.estimator.device.garbage import PER_STORAGE, GarbagePace
from memest.estimator.device.guesses import ASSUMED, Guesses, bincount, guess_booleans
from memest.estimator.device.history import History, LiveStorages
from memest.estimator.device.host import HostRecorder, without_tensors
from memest.estimator.device.labels import Labels
from memest.estimator.device.layouts import dense
from memest.estimator.device.lines import ScriptLines
from memest.estimator.device.messages import out_of_memory, refusal, two_devices
from memest.estimator.device.modules import LiveModules
from memest.estimator.device.processes import refuse_in_child
from memest.estimator.device.ranks import ALONE
from memest.estimator.device.refusals import refuse
from memest.estimator.device.searches import search
from memest.estimator.device.shards import local_foreach
from memest.estimator.device.sparse import SparseTensors
from memest.estimator.device.storages import MemKind, Site, death_of, return_of
from memest.estimator.device.streams import MAIN
from memest.estimator.device.supposed import answer, suppose
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
from memest.estimator.device.traits import DEPENDS_ON_VALUES, MAY_MIX_DEVICES, traits_of
from memest.estimator.device.values import ValueUnknown
from memest.estimator.device.works import Works
from memest.estimator.hardware.gpus import Gpu
from memest.estimator.hardware.speed import segment_us
from memest.estimator.kernels.transfers import to_card_bytes, to_host_scratch

aten = torch.ops.aten

MAX_STATE_NUMEL = 1 << 12
"""Larger results of an optimizer's step have no values: the states of an 8-bit optimizer are
integers, of which nobody reads one.
"""


class LiveRecorder(HostRecorder):  # type: ignore[no-untyped-call]
    """The dispatch mode of the virtual GPU.

    Args:
        gpu: whose kernels run.
        allocator: of this card.
        guesses: what to do where a value is not known.
        lines: finds the line of the script.
    """

    def __init__(
        self, gpu: Gpu, allocator: CachingAllocator, guesses: Guesses, lines: ScriptLines
    ) -> None:
        storages = LiveStorages()
        super().__init__(gpu, storages)
        self.allocator = allocator
        self.guesses = guesses
        self.lines = lines
        self.modules = LiveModules()
        self.labels = Labels(storages, self._live, self.modules)
        self.blocks: dict[int, Block] = {}
        self.history = History(allocator, storages)
        self.log = self.history.log
        self.notes: list[str] = []
        self.warnings: list[str] = []
        """What the report should say of the run, each once; see `note`."""

        self.sparse = SparseTensors(self)
        self.card_draws = CardDraws(gpu)
        self.num_ooms = 0
        self.refused: tuple[int, Site, int] | None = None
        """Bytes and site of the last request that no memory was left for, and what was reserved."""

        self.phase_given = ""
        """A phase that the driver knows of, such as `optimizer`; "" lets autograd tell."""

        self.has_closure = False
        """Whether the running step of an optimizer calls a closure of the script."""

        self.ranks = ALONE
        self.works = Works(self)
        self.has_started = False
        self.is_off = False
        self.pace = GarbagePace()
        self._dead: list[int] = []
        self._lock = threading.RLock()
        self._skips: dict[type, bool] = {}
        self._how_it_runs = cache(key_of_other_operators)
        """Of an operator that is made of others the dispatch key under which; else None."""

        self._live_sites: dict[Any, Site] = {}

    # --- operators

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_off:
            refuse_in_child(kwargs)
            return func(*args, **kwargs)
        for kind in types:
            if self._has_its_own_dispatch(kind):
                return local_foreach(self, func, args, kwargs)
        if func is aten.to.device:  # inference mode hands composite operators on
            func, args, kwargs = as_dtype_layout(args, kwargs)
        INSIDE.depth += 1
        try:
            if self.sparse.concerns(func, args, kwargs):
                return self.sparse.run(func, args, kwargs)
            return self._dispatch(func, types, args, kwargs)
        finally:
            INSIDE.depth -= 1

    def _has_its_own_dispatch(self, kind: type) -> bool:
        known = self._skips.get(kind)
        if known is None:
            disabled = torch._C._disabled_torch_dispatch_impl
            own = getattr(kind, "__torch_dispatch__", disabled)
            known = self._skips[kind] = own is not disabled and kind is not Tensor
        return known

    def _dispatch(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        traits = traits_of(func)
        if traits.is_collective:
            return collectives.run(self, func, args, kwargs)
        if traits.is_view and not self._how_it_runs(func):
            return self._view(func, args, kwargs)
        on_card = on_host = no_place = False
        real: Tensor | None = None
        live = self._live
        for tensor in few_tensors(args, kwargs):
            if not is_meta(tensor):
                real = tensor
                continue
            key = storage_key(tensor)
            if key in live:
                on_card = True
            elif key in host_storages:
                on_host = True
            else:
                no_place = True
        target: str = getattr(kwargs.get("device"), "type", "")
        if (on_card or on_host or target == "cuda") and self._how_it_runs(func):
            return run_by_others(self, self._how_it_runs(func), func, args, kwargs)
        if target == "cuda":
            if not on_card and func is aten._to_copy.default:
                return self._to_card(func, types, args, {**kwargs, "device": META}, no_place)
            adopts = no_place and not traits.makes_alike
            return self._on_card(func, types, args, {**kwargs, "device": META}, adopts)
        if on_card:
            is_to_host = func is aten.copy_.default and self.place(args[0]) is not Place.CARD
            if target == "cpu" or is_to_host:
                return self._copy_to_host(func, args, kwargs)
            if real is not None or on_host:
                if func is aten.copy_.default:
                    return self._to_card(func, types, args, kwargs, no_place)
                self._check_devices(func, args, kwargs)
                func, args = with_number(func, args)
            return self._on_card(func, types, args, kwargs, no_place)
        if target == "meta":
            # C++ asks for what a tensor of the card says to it: a formula of autograd, a composite
            if INSIDE.composite or torch._C._current_graph_task_id() != -1:
                return self._on_card(func, types, args, kwargs, False)
            return func(*args, **kwargs)
        if on_host:
            return self._on_host(func, args, kwargs)
        if no_place:
            if func is aten.equal.default:  # C++ asks whether a number that it made is true
                self.guesses.note(self.lines.current(), "False from torch.equal")
                return False
            return func(*args, **kwargs)
        return self._in_memory(func, args, kwargs)

    def _view(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """A view lies where its base does, and asks for nothing."""
        if isinstance(args[0], Tensor) and is_meta(args[0]):  # C++ hands on numbers as numbers
            self.coverage.num_ops += 1
        return func(*args, **kwargs)

    def _on_card(
        self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any, adopts: bool
    ) -> Any:
        if kwargs.get("pin_memory"):
            kwargs = {k: v for k, v in kwargs.items() if k != "pin_memory"}
        with self._lock:
            if adopts and func is not aten._to_copy.default:
                for tensor in few_tensors(args, kwargs):  # made by C++ inside a composite operator
                    if is_meta(tensor) and self.place(tensor) is Place.META:
                        self.adopt(tensor, self.kind)
            elif adopts and is_meta(args[0]) and self.place(args[0]) is Place.META:
                raise NotImplementedError("Cannot copy out of meta tensor; no data!")
            if self._num_streams == 1 and not self.is_slow:
                return Recorder.__torch_dispatch__(self, func, types, args, kwargs)
            return super().__torch_dispatch__(func, types, args, kwargs)

    def _to_card(
        self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any, adopts: bool
    ) -> Any:
        """A copy from the host: a parameter, or else a batch until it is known better."""
        is_new = func is not aten.copy_.default
        source: Tensor = args[0] if is_new else args[1]
        non_blocking = kwargs.get("non_blocking") or (not is_new and len(args) > 2 and args[2])
        is_parameter = isinstance(source, torch.nn.Parameter)
        with self._lock:
            before, self.kind = self.kind, MemKind.PARAMS if is_parameter else MemKind.BATCH
            try:
                made = self._on_card(func, types, args, kwargs, adopts)
            finally:
                self.kind = before
            num_bytes = to_card_bytes(made, source, is_waited_for=not non_blocking)
            if num_bytes:
                self.temporary(num_bytes, func)
            if not (non_blocking and self.is_pinned(source)):
                self.host_waits(self.event(self.stream))  # pageable memory is waited for
            return made

    def _copy_to_host(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """A copy of a tensor of the card, whose values are rarely known."""
        source: Tensor = args[1] if func is aten.copy_.default else args[0]
        if not is_meta(source) or func not in (aten.copy_.default, aten._to_copy.default):
            return self._in_memory(func, without_tensors(args), {**kwargs, "device": CPU})
        with self._lock:
            self.host_waits(self.event(self.stream))
            site, sizes = self._site(func), to_host_scratch(func, args, kwargs)
            for index in reversed([self._workspace(n, site) for n in sizes]):
                self._ends(index)
        return copied(self, func, args, kwargs)

    def _check_devices(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> None:
        """Refuse what torch refuses: tensors of the host and of the GPU in one kernel."""
        if func in MAY_MIX_DEVICES:
            return
        for tensor in tensors_in((*args, *kwargs.values())):
            if tensor.dim() and self.place(tensor) in (Place.REAL, Place.HOST):
                if func._schema.name.startswith(("aten::_foreach", "aten::_fused")):
                    return
                raise RuntimeError(two_devices(func))

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        refuse(func, args, kwargs)
        schema = func._schema
        if schema.is_mutable and not schema.returns:
            return None  # where there are no values, none change
        if func in DEPENDS_ON_VALUES:
            made = self.supposed_result(func, args, kwargs)
            if made is not None:
                return made
        if func is aten.bincount.default and self.values.value_of(args[0]) is None:
            bins = bincount(self.guesses, self.lines.current(), *args, **kwargs)
            if bins is not None:
                return bins
        return dense(super()._run(func, args, kwargs), func, self.lines.current)

    def supposed_result(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """As `HostRecorder.supposed_result`."""
        return suppose(self, func, args, kwargs)

    def _read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.host_waits(self.event(self.stream))
        told = answer(self, func, args[0])
        if told is not None:
            return told
        try:
            value = self.values.compute(func, args, kwargs)
        except ValueUnknown:
            if func is aten.equal.default:  # asked of what should be equal, such as tied weights
                is_alike: bool = args[0].shape == args[1].shape
                self.guesses.note(self.lines.current(), f"{is_alike} from torch.equal")
                return is_alike
            name = func._schema.name.removeprefix("aten::").removeprefix("_local_")
            if func in ASSUMED:
                self.guesses.note(self.lines.current(), name)
                return True
            dtype = torch.bool if func is not aten._local_scalar_dense.default else args[0].dtype
            return self.guesses.scalar(dtype, self.lines.current(), name)
        if self.values.guessed and self.values.is_guessed(args):
            self.guesses.note(self.lines.current(), f"{value!r} from a comparison")
        return value

    def _follow_values(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if traits_of(func).is_random and self._draw(func, args, kwargs, out):
            return
        in_step = self.phase_given == "optimizer" and not torch.is_grad_enabled()  # no closure runs
        if (
            in_step
            and isinstance(out, Tensor)
            and out.numel() > MAX_STATE_NUMEL
            and not self.values.is_known(out)
        ):
            return
        self.supposed.follow(func, args, kwargs, out)
        super()._follow_values(func, args, kwargs, out)
        if isinstance(out, Tensor) and out.dtype is torch.bool:
            guess_booleans(self.values, func, args, out)

    def _draw(self, func: Any, args: Any, kwargs: Any, out: Any) -> bool:
        """Move the card's generator on; whether `out` has the numbers that it draws."""
        given = self.values.value_of(args[0]) if func is aten.multinomial.default else None
        numbers = self.card_draws.draw(func, args, kwargs, out, given)
        return numbers is not None and self.values.overwrite(out, numbers)

    def _failure(self, func: Any, error: Exception) -> Exception:  # type: ignore[override]
        """What a script is told; an error of its own stays its own."""
        module = self.modules.current().partition(".")[2]
        where = self.lines.current() or (f"`{module}`" if module else "the script")
        return refusal(func, error, where)

    def resize(self, tensor: Tensor, num_bytes: int, kind: MemKind = MemKind.ACTIVATIONS) -> None:
        """As `StreamRecorder.resize`; what has no bytes left still lies on the card."""
        self.phase = self.current_phase()
        with self._lock:
            super().resize(tensor, num_bytes, kind)
            if not num_bytes:
                self._born(tensor, 0, Site("", "", self.phase), kind)

    # --- events

    def _begins(self, index: int) -> None:
        self.settle()
        num_bytes = self.storages.num_bytes[index]
        if num_bytes:
            before = self.allocator.reserved_bytes
            try:
                self.blocks[index] = self.allocator.malloc(num_bytes, self.home)
                if self.is_slow and self.allocator.reserved_bytes > before:
                    taken = self.allocator.reserved_bytes - before
                    self.host_spends(segment_us(taken), 0.0)
            except OutOfMemory:
                self.num_ooms += 1
                self.history.emptied()  # the allocator gave back its cache before it gave up
                reserved = self.allocator.reserved_bytes
                self.refused = num_bytes, self.storages.sites[index], reserved
                message = out_of_memory(self.gpu, self.allocator, num_bytes)
                raise torch.OutOfMemoryError(message) from None
        self.log.open.append(index)
        storages = self.storages
        if self.home != MAIN:
            storages.streams[index] = self.home
        if num_bytes:
            self.history.born(index, storages.sites[index])

    def _born(self, tensor: Tensor, num_bytes: int | None, site: Site, kind: MemKind) -> None:
        before = len(self.storages.num_bytes)
        super()._born(tensor, num_bytes, site, kind)
        self.pace.made(PER_STORAGE * (len(self.storages.num_bytes) - before))

    def _tries(self, num_bytes: int) -> bool:
        return search(self, num_bytes, super()._tries)

    def _new_recipe(self, func: Any, args: Any, kwargs: Any, out: Any, key: Any) -> Recipe:
        before, num_recipes = gc.get_count()[0], len(self._recipes)
        recipe = super()._new_recipe(func, args, kwargs, out, key)
        if len(self._recipes) > num_recipes:
            self.pace.made(max(0, gc.get_count()[0] - before))
        return recipe

    def _died(self, index: int, key: int) -> None:
        super()._died(index, key)
        self.pace.made(-PER_STORAGE)

    def _ends(self, index: int) -> None:
        self._dead.append(index)  # may be called by the garbage collector, at any moment

    def _returns(self, index: int) -> None:
        self.settle()
        block = self.blocks.pop(index, None)
        if block is not None:
            is_shelved = index in self.storages.shelved
            (self.allocator.free if is_shelved else self.allocator.complete)(block)
        self.log.open.append(return_of(index))

    def settle(self) -> None:
        """Give back the blocks of the storages that have died."""
        if self._dead:
            with self._lock:  # any thread of the script may come here
                self._settle()

    def _settle(self) -> None:
        dead = self._dead
        position = 0
        log, blocks, storages = self.log.open, self.blocks, self.storages
        while position < len(dead):
            index = dead[position]
            position += 1
            log.append(death_of(index))
            if index in storages.shelved:
                continue
            if index in storages.deferred:
                block = blocks.get(index)
                if block is not None:
                    self.allocator.defer(block)
                continue
            block = blocks.pop(index, None)
            if block is not None:
                self.allocator.free(block)
        del dead[:position]
        if self.history.is_due:
            self.labels.of_models()
            self.history.fold()
            self.forget_switches()

    def _site(self, func: Any) -> Site:
        module, phase = self.modules.current(), self.current_phase()
        line, caller = self.lines.current(), ""
        if phase in ("setup", "forward"):
            self.modules.note_line(line)
        elif phase == "backward" and (saved := self.modules.line_of_backward()):
            line, caller = saved, line if line != saved else ""
        key = (func if isinstance(func, str) else id(func), module, phase, line, caller)
        site = self._live_sites.get(key)
        if site is None:
            name = func if isinstance(func, str) else str(func).removesuffix(".default")
            site = self._live_sites[key] = Site(name, module, phase, line, caller)
        return site

    def know(self, tensor: Tensor, value: Tensor) -> None:
        """Keep the value of a small tensor without data: of a temperature or a gate."""
        if value.numel() <= MAX_SHOWN_NUMEL and value.is_contiguous() and value.numel():
            with _disable_current_modes():
                self.values.adopt(tensor, value.detach())

    def temporary(self, num_bytes: int, func: Any) -> None:
        """Allocate and free `num_bytes` for `func`."""
        with self._lock:
            self._ends(self._workspace(num_bytes, self._site(func)))

    def current_phase(self) -> str:
        """What the script is about."""
        if torch._C._current_graph_task_id() != -1:
            self.has_started = True
            return "backward"
        is_running, has_grad = self.modules.is_running, torch.is_grad_enabled()
        if self.phase_given and not (is_running or (has_grad and self.has_closure)):
            return self.phase_given
        if not self.has_started:
            self.has_started = is_running
        if not self.has_started:
            return "setup"
        if not has_grad:
            if not is_running and self.history.phase in ("backward", "optimizer"):
                return "optimizer"  # clipping, a moving average
            if self.modules.is_generating:
                return "generation"
            if self.modules.is_evaluating:
                return "evaluation"
        return "forward"

    def warn(self, text: str) -> None:
        """Report `text` above all figures, once.

        Raises:
            UnsupportedError: guesses are refused.
        """
        if self.guesses.is_strict:
            raise UnsupportedError(text, hint="leave `--strict` out to have a warning instead")
        self.warnings = list(dict.fromkeys((*self.warnings, text)))

    def note(self, text: str) -> None:
        """Let the report say `text`, once."""
        if text not in self.notes:
            self.notes.append(text)
