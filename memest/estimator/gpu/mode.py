"""The dispatch mode: where an operator runs, and what follows from it.

`_dispatch` decides by the places of an operator's tensors whether it runs on the GPU, on the host,
or copies between the two. `run_on_gpu` runs it on the meta device and sends what CUDA would request
to `Memory`.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from memest.errors import UnsupportedError
from memest.estimator.allocator.caching import CachingAllocator
from memest.estimator.gpu.attribution import Attribution
from memest.estimator.gpu.guesses import PASSING_CHECKS, GuessedValues, Guesses, is_check
from memest.estimator.gpu.host import HostTensors, without_tensors
from memest.estimator.gpu.kernel_calls import KernelCalls, Recipe
from memest.estimator.gpu.memory import Memory
from memest.estimator.gpu.messages import INDICES_ELSEWHERE, comparing_methods, two_devices
from memest.estimator.gpu.pending import PendingWorks
from memest.estimator.gpu.processes import refuse_in_child
from memest.estimator.gpu.timeline import Timeline
from memest.estimator.gpu.worlds import ALONE
from memest.estimator.hardware.gpus import Gpu
from memest.estimator.hardware.work import VIEW, WorkLog
from memest.estimator.ops import collectives, copies, strides
from memest.estimator.ops.autograd_ops import decomposition_key, run_decomposed
from memest.estimator.ops.in_place import owners_of_a_sole_gradient
from memest.estimator.ops.random import CudaRng
from memest.estimator.ops.registry import Args, Kwargs, Op, load_families, op_of
from memest.estimator.ops.sparse import SparseTensors
from memest.estimator.tensors import known_values, placement
from memest.estimator.tensors.lines import ScriptLines
from memest.estimator.tensors.placement import CPU, META, Place, is_meta, tensors_in
from memest.estimator.tensors.storages import FIRST_KERNEL, MemKind, Site

aten = torch.ops.aten

MAX_STATE_NUMEL = 1 << 12  # most elements whose values an optimizer step computes
MAX_QUICK_NUMEL = 1 << 10  # most elements of tensors of the host that take no time to measure
_COPIES = placement.operators("copy_ _to_copy clone")
_SUMS = (aten.add.Tensor, aten.add_.Tensor)  # operators by which the autograd engine sums gradients


def _has_own_dispatch(kind: type) -> bool:
    disabled = torch._C._disabled_torch_dispatch_impl
    return kind is not Tensor and getattr(kind, "__torch_dispatch__", disabled) is not disabled


def _make_on_meta(func: Any, args: Args, kwargs: Any) -> Any:
    """Call the tensor factory `func` with device `meta`, and return the new tensor. C++ makes such
    tensors inside composite operators. The tensor is neither on the GPU nor on the host until an
    operator on the GPU uses it. Then `CudaSimMode._adopt` puts the tensor on the GPU. A tensor made
    from a number gets the attribute `number`."""
    result = func(*args, **kwargs)
    if func is aten.scalar_tensor.default:  # from a number in `torch.where`
        result.number = args[0]
    return result


class CudaSimMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that runs operators of a script as on a CUDA GPU, on tensors without data.
    `guesses` is an object that returns a guess where the script reads an unknown value. `lines` is
    an object that returns the running line of the script, such as `train.py:12`."""

    def __init__(
        self, gpu: Gpu, allocator: CachingAllocator, guesses: Guesses, lines: ScriptLines
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        load_families()
        owners_of_a_sole_gradient()  # measured before anything is recorded
        self.gpu = gpu
        self.guesses = guesses
        self.notes = guesses.notes
        self.work = WorkLog()
        self.timeline = Timeline(gpu, self.work)
        self.memory = Memory(gpu, allocator, self.timeline)
        self.attribution = Attribution(self.memory, lines)
        self.values = known_values.KnownValues()
        self.guessed = GuessedValues(self.values, guesses)
        self.host = HostTensors(self.memory.live, self.values, self.guessed, self.attribution)
        self.kernels = KernelCalls(
            gpu, self.memory, self.timeline, self.attribution.site, self.values.value_of, self.notes
        )
        self.request: Callable[..., None] = self.kernels.request  # serves a call; observers wrap it
        self.sparse = SparseTensors(self)
        self.rng = CudaRng(gpu)
        self.works = PendingWorks(self.timeline, self.memory)
        self.rank = ALONE
        self.timed: dict[str, bool] = {}  # kernels and products that Inductor has timed
        self.is_off = False  # flag: operators run as without the simulated GPU
        self.memory.on_free = self.guessed.forget
        self.memory.on_fold = self.attribution.label_models
        self._has_own_dispatch = cache(_has_own_dispatch)
        self._decomposes_under = cache(decomposition_key)
        self._last_recipe: Recipe | None = None  # of the last `call`, if it launched a kernel
        self._has_kernels = False  # flag: a kernel was already launched

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: with True, torch would import Dynamo to disable it within the mode."""
        return False

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that Dynamo compiles frames that run under the mode."""
        return True

    # --- where an operator runs

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_off:
            refuse_in_child(kwargs)
            return func(*args, **kwargs)
        if not types and isinstance(func, HigherOrderOperator):  # its kernel calls operators
            kernels = func.py_kernels
            kernel = kernels.get(DispatchKey.CUDA) or kernels[DispatchKey.CompositeExplicitAutograd]
            with self:
                return kernel(*args, **kwargs)
        for kind in types:
            if self._has_own_dispatch(kind):
                self.work.dispatch(args)
                return placement.local_foreach(self, func, args, kwargs)
        if func is aten.to.device:  # inference mode passes composite operators on
            func, args, kwargs = copies.as_dtype_layout(args, kwargs)
        placement.INSIDE.depth += 1
        try:
            if self.sparse.concerns(func, args, kwargs):
                return self.sparse.run(func, args, kwargs)
            return self._dispatch(func, args, kwargs)
        finally:
            placement.INSIDE.depth -= 1

    def _dispatch(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Run an operator where its tensors are: on the GPU, on the host, or between the two."""
        op = op_of(func)
        if op.is_collective:
            return collectives.run(self, func, args, kwargs)
        if op.is_wait:  # C++ returns its input, the meta kernel a copy
            self.works.wait_for(args[0])
            return func._op_dk(DispatchKey.CompositeExplicitAutograd, *args)
        key = self._decomposes_under(func)
        if op.is_view and not key:
            return self._view(func, args, kwargs)
        on_gpu, on_host, has_data, is_placeless = self._places(func, args, kwargs)
        target: str = getattr(kwargs.get("device"), "type", "")
        if key and (on_gpu or on_host or target == "cuda"):
            return self._decomposed(key, func, args, kwargs)
        if target == "cuda":
            kwargs = {**kwargs, "device": META}
            if func is aten._to_copy.default and not on_gpu:
                return self._copy_to_gpu(func, args, kwargs, is_placeless)
            return self.run_on_gpu(func, args, kwargs, is_placeless and not op.makes_alike)
        if on_gpu:
            is_to_host = func is aten.copy_.default and self.host.place(args[0]) is not Place.GPU
            if target == "cpu" or is_to_host:
                return self._copy_to_host(func, args, kwargs)
            if has_data or on_host:
                if func is aten.copy_.default:
                    return self._copy_to_gpu(func, args, kwargs, is_placeless)
                self._check_devices(func, args, kwargs)
                func, args = copies.with_number(func, args)
            return self.run_on_gpu(func, args, kwargs, is_placeless)
        if target == "meta" and not (on_host and func is aten._to_copy.default):
            # C++ passes the device that a tensor reports: a formula of autograd, a composite
            if not placement.INSIDE.composite and torch._C._current_graph_task_id() == -1:
                return _make_on_meta(func, args, kwargs)
            if not on_host:
                return self.run_on_gpu(func, args, kwargs)
        if on_host:
            run = self._read if op.reads_value else self.host.run_without_data
            return run(*copies.with_number(func, args), kwargs)
        if is_placeless:
            if func is aten.equal.default:  # C++ checks whether a number that it made is true
                self.guesses.note("False from torch.equal")
                return False
            return func(*args, **kwargs)
        tensors = placement.sample_tensors(args, kwargs)
        is_small = tensors and all(tensor.numel() <= MAX_QUICK_NUMEL for tensor in tensors)
        if is_small or op.is_view or func.namespace == "profiler":
            return self.host.run(func, args, kwargs)
        with self.work.host_works():
            return self.host.run(func, args, kwargs)

    def _decomposed(self, key: Any, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Run the operator `func` as the operators into which it is decomposed. `key` is a dispatch
        key or a function. For a dispatch key, run the kernel of `func` for that key. A function is
        called in place of `func`, with the same arguments."""
        result = run_decomposed(self, key, func, args, kwargs)
        if func.namespace == "bitsandbytes":
            self.work.call_library(func, args, kwargs, result)
        if func.namespace == "_c10d_functional":
            self.works.register(result)
        return result

    def _places(self, func: Any, args: Args, kwargs: Any) -> tuple[bool, bool, bool, bool]:
        """Return four flags: whether a tensor is on the GPU, on the host without data, on the host
        with data, or without a place. C++ makes tensors without a place inside an operator."""
        on_gpu = on_host = has_data = is_placeless = False
        live = self.memory.live
        for tensor in placement.sample_tensors(args, kwargs):
            if not is_meta(tensor):
                if placement.is_on_real_gpu(tensor):
                    raise UnsupportedError(
                        f"`{func}` has a tensor of the real GPU, which was made before",
                        hint="make it on the virtual GPU, or move it to the CPU before",
                    )
                has_data = True
                continue
            key = placement.storage_key(tensor)
            if key in live:
                on_gpu = True
                if key in self.memory.overwritten:  # by a CUDA graph that was replayed since
                    raise RuntimeError(self.memory.overwritten[key])
            elif key in placement.host_storages:
                on_host = True
            else:
                is_placeless = True
        return on_gpu, on_host, has_data, is_placeless

    def _view(self, func: Any, args: Args, kwargs: Any) -> Any:
        """Run a view operator; the result has the device of its base and no memory of its own."""
        if isinstance(args[0], Tensor) and is_meta(args[0]):  # C++ passes numbers as numbers
            self.kernels.coverage.num_ops += 1
            self.work.add(VIEW)
        return func(*args, **kwargs)

    def _check_devices(self, func: Any, args: Args, kwargs: Any) -> None:
        """Raise torch's error if the operator cannot mix tensors of the host and of the GPU."""
        if op_of(func).may_mix_devices:
            if func is aten.index.Tensor and self.host.place(args[0]) in (
                Place.REAL,
                Place.HOST,
            ):
                raise RuntimeError(INDICES_ELSEWHERE)
            return
        if func._schema.name.startswith(("aten::_foreach", "aten::_fused")):
            return

        def is_on_gpu(tensor: Tensor) -> bool:
            return self.host.place(tensor) not in (Place.REAL, Place.HOST)

        compares = str(func).removesuffix(".default") in comparing_methods()
        tensors = tensors_in((*args, *kwargs.values()))
        if any((tensor.dim() or compares) and not is_on_gpu(tensor) for tensor in tensors):
            raise RuntimeError(two_devices(func, args, kwargs, is_on_gpu))

    # --- copies

    def _copy_to_gpu(self, func: Any, args: Args, kwargs: Any, adopts: bool) -> Any:
        """Copy a host tensor to the GPU, and return the GPU tensor. New GPU memory is labelled
        PARAMS if the host tensor is an `nn.Parameter`, else BATCH. `adopts` is passed to
        `run_on_gpu`."""
        is_new = func is not aten.copy_.default
        source: Tensor = args[0] if is_new else args[1]
        non_blocking = kwargs.get("non_blocking", False)
        if not is_new and len(args) > 2:
            _, _, non_blocking = args
        memory = self.memory
        with memory.lock:
            outer_kind = memory.kind
            is_parameter = isinstance(source, torch.nn.Parameter)
            memory.kind = MemKind.PARAMS if is_parameter else MemKind.BATCH
            try:
                target = self.run_on_gpu(func, args, kwargs, adopts)
            finally:
                memory.kind = outer_kind
            del self.work.events[-1:]  # a copy is not a kernel launch
            is_pinned = self.host.is_pinned(source)
            waits = not (non_blocking and is_pinned)
            self.work.copy("to_gpu", source.nbytes, is_pinned=is_pinned, waits=waits)
            num_bytes = copies.to_gpu_bytes(target, source, is_blocking=not non_blocking)
            if num_bytes:
                self.allocate_and_free(func, num_bytes)
            if waits:  # for pageable memory
                self.timeline.synchronize()
            return target

    def _copy_to_host(self, func: Any, args: Args, kwargs: Any) -> Any:
        """Copy a GPU tensor to the host, and return the host tensor. The host tensor gets the
        values of the GPU tensor if they are known or guessed. The function `copy_to_host` of
        ops/copies.py makes the host tensor; its docstring has the other cases."""
        source: Tensor = args[1] if func is aten.copy_.default else args[0]
        if not is_meta(source) or func not in (aten.copy_.default, aten._to_copy.default):
            return self.host.run(func, without_tensors(args), {**kwargs, "device": CPU})
        memory = self.memory
        with memory.lock:
            is_pinned = func is aten.copy_.default and self.host.is_pinned(args[0])
            self.work.copy("to_host", source.nbytes, is_pinned=is_pinned, waits=True)
            self.timeline.synchronize()
            site = self.attribution.site(func)
            sizes = copies.to_host_bytes(func, args, kwargs)
            workspaces = [memory.allocate_workspace(num_bytes, site) for num_bytes in sizes]
            for index in reversed(workspaces):
                memory.free(index)
        return copies.copy_to_host(self, func, args, kwargs)

    def allocate_and_free(self, func: Any, *sizes: int) -> None:
        """Allocate and free workspaces of `func`, one after the other; `sizes` are in bytes."""
        for num_bytes in sizes:
            site = self.attribution.site(func)
            self.memory.free(self.memory.allocate_workspace(num_bytes, site))

    # --- operators on the GPU

    def run_on_gpu(self, func: Any, args: Args, kwargs: Any, adopts: bool = False) -> Any:
        """Run an operator on the GPU, on the stream and at the time at which CUDA would.

        With `adopts`, meta tensors that C++ made inside a composite operator become GPU tensors.
        """
        if kwargs.get("pin_memory"):
            kwargs = {k: v for k, v in kwargs.items() if k != "pin_memory"}
        with self.memory.lock:
            if adopts:
                self._adopt(func, args, kwargs)
            if not self.timeline.matters:
                return self.call(func, args, kwargs)
            return self._call_on_stream(func, args, kwargs)

    def _adopt(self, func: Any, args: Args, kwargs: Any) -> None:
        is_copy = func is aten._to_copy.default
        tensors = [args[0]] if is_copy else placement.sample_tensors(args, kwargs)
        for tensor in tensors:
            if is_meta(tensor) and self.host.place(tensor) is Place.META:
                if is_copy:
                    raise NotImplementedError("Cannot copy out of meta tensor; no data!")
                self.memory.allocate(tensor, Site("", "", ""), self.memory.kind)
                if hasattr(tensor, "number"):
                    self.values.adopt_like(tensor, torch.tensor(tensor.number, device=CPU))

    def _call_on_stream(self, func: Any, args: Args, kwargs: Any) -> Any:
        timeline = self.timeline
        outer_stream = timeline.stream
        stream = timeline.stream_of_call(args, func in _SUMS)
        timeline.stream = stream
        if stream != outer_stream:
            for tensor in tensors_in(args):
                self.memory.record_stream(tensor, stream)
        try:
            out = self.call(func, args, kwargs)
            if not func.is_view:
                timeline.launch(func, self._last_recipe)
        finally:
            timeline.stream = outer_stream
        return out

    def call(self, func: Any, args: Args, kwargs: Any) -> Any:
        """Run an operator on `meta`, allocate as its CUDA kernel does, and store known values."""
        self._last_recipe = None
        self.kernels.coverage.num_ops += 1
        op = op_of(func)
        is_in_backward = torch._C._current_graph_task_id() != -1
        if op.in_backward and not kwargs and is_in_backward:
            func, args = op.in_backward(func, args)
            op = op_of(func)
        if op.take_indices:
            func, args = op.take_indices(self, func, args)
            op = op_of(func)
        if op.is_view:
            self.work.add(VIEW)
            return self._result(op, args, kwargs)
        if op.reads_value:
            if op.requests:  # a comparison
                read_recipe = self.kernels.new_recipe(op, args, kwargs, None, None)
                self.request(op, args, kwargs, None, read_recipe)
            return self._read(func, args, kwargs)
        key = self.kernels.key_of(op, args, kwargs)
        recipe = self.kernels.recipes.get(key)
        if recipe is None:
            make = self._result_that_may_grow if op.may_grow else self._result
            out = make(op, args, kwargs)
            recipe = self.kernels.new_recipe(op, args, kwargs, out, key)
        else:
            out = args[0] if op.is_plain_in_place else recipe.make_outputs()
        self.request(op, args, kwargs, out, recipe)
        if op.is_foreach_in_place:
            for tensor in args[0]:
                torch.autograd.graph.increment_version(tensor)
        self._follow_values(op, args, kwargs, out)
        self._last_recipe = recipe
        self.work.launch(func, args, kwargs, out, recipe)
        if not self._has_kernels and recipe.work != -1 and func not in _COPIES:  # -1: no kernel
            self._has_kernels = True
            self.memory.use_driver(FIRST_KERNEL)
        return out

    def _result(self, op: Op, args: Args, kwargs: Kwargs) -> Any:
        """Return an operator's result on `meta`, with the shapes and strides of its CUDA kernel."""
        func = op.func
        op.check(args, kwargs)
        if op.is_mutable and op.returns_nothing:
            return None  # nothing changes if values are unknown
        if op.shaped_by:
            guess = self.guessed.result(func, args, kwargs)
            if guess is not None:
                return guess
        if func is aten.bincount.default and self.values.value_of(args[0]) is None:
            guess = self.guessed.bincount(*args, **kwargs)
            if guess is not None:
                return guess
        out = op.result(op.call(args, kwargs)) if op.result else self._on_meta(op, args, kwargs)
        return placement.dense(out, func, self.attribution.lines.current)

    def _result_that_may_grow(self, op: Op, args: Args, kwargs: Kwargs) -> Any:
        """Return the result of a call with `out=` or of `resize_`; reallocate enlarged tensors."""
        targets = list(tensors_in((*(args[:1] if op.is_resize else ()), *kwargs.values())))
        old_sizes = [tensor.untyped_storage().nbytes() for tensor in targets]
        out = self._result(op, args, kwargs)
        for tensor, num_bytes in zip(targets, old_sizes, strict=True):
            if tensor.untyped_storage().nbytes() > num_bytes:
                self.memory.grow(tensor, self.attribution.site(op.func))
        return out

    def _on_meta(self, op: Op, args: Args, kwargs: Kwargs) -> Any:
        func = op.func
        try:
            out = func(*args, **kwargs)
            if op.layout:
                out = op.layout(op.call(args, kwargs, out))
            return strides.with_pointwise_strides(func, args, out) if op.is_pointwise else out
        except (NotImplementedError, RuntimeError) as error:
            try:
                values = self.values.compute(func, args, kwargs)
            except known_values.ValueUnknown:
                raise self.attribution.failure(func, error) from error
            goes_to_host = torch.device(kwargs.get("device") or "meta").type == "cpu"
            return values if goes_to_host else known_values.materialise(values)

    # --- values

    def _read(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Return the number that the script reads, known or guessed; the host waits for the GPU."""
        self.timeline.synchronize()
        guess = self.guessed.read(func, args[0])
        if guess is not None:
            return guess
        if args[0].dtype is torch.bool and is_check():
            self.guesses.note("is_all_true")
            return True
        try:
            value = self.values.compute(func, args, kwargs)
        except known_values.ValueUnknown:
            return self._guess(func, args)
        if self.values.guessed and self.values.is_guessed(args):
            if isinstance(value, bool):
                value = self.guesses.branch(value)
            self.guesses.note(f"{value!r} from a comparison")
        elif isinstance(value, bool):
            self.guesses.loops.count_round()
        return value

    def _guess(self, func: Any, args: Args) -> Any:
        """Return a guess of the number that `func`, such as `item`, reads from unknown values."""
        if func is aten.equal.default:
            tensor, other = args
            if copies.is_set_to(tensor, other):
                return True
            # outputs of layers differ; tensors that should be equal are tied weights
            is_alike = tensor.shape == other.shape and tensor.grad_fn is other.grad_fn
            self.guesses.note(f"{is_alike} from torch.equal")
            return is_alike
        name = func._schema.name.removeprefix("aten::").removeprefix("_local_")
        if func in PASSING_CHECKS:
            self.guesses.note(name)
            return True
        dtype = args[0].dtype if func is aten._local_scalar_dense.default else torch.bool
        guess = self.guesses.scalar(dtype, name)
        return self.guesses.branch(guess) if dtype is torch.bool else guess

    def _follow_values(self, op: Op, args: Any, kwargs: Any, out: Any) -> None:
        """Store the values of `out`, the result of `op`, if they can be computed or guessed."""
        func, values = op.func, self.values
        if op.is_random:
            weights = values.value_of(args[0]) if func is aten.multinomial.default else None
            numbers = self.rng.draw(op, args, kwargs, out, weights)
            if numbers is not None and values.overwrite(out, numbers):
                return
        in_step = self.attribution.phase_given == "optimizer" and not torch.is_grad_enabled()
        if (
            in_step  # and no closure runs
            and isinstance(out, Tensor)
            and out.numel() > MAX_STATE_NUMEL
            and out.dtype is not torch.bool  # checks of gradients and factors
            and not values.is_known(out)
        ):
            return
        self.guessed.follow(func, args, kwargs, out)
        values.follow(func, args, kwargs, out)
        fill_value = known_values.known_without_values(func, args)
        if fill_value is not None and values.value_of(out) is None:
            values.adopt(out, torch.full(out.shape, fill_value, device=CPU))
        if isinstance(out, Tensor) and out.dtype is torch.bool:
            comparison = known_values.compared_with_infinity(func, args, values, out.shape)
            if comparison is not None:
                values.adopt(out, comparison)
            self.guessed.guess_booleans(func, args, out)
